"""Who quantizes ONNX files after training: detent, ONNX Runtime's own tool and NNCF, each with its users' defaults.

A contestant is a list of ways, best first: where the first one fails on a model, the next is tried, and the table says
which one it was. So a peer takes part wherever a patient user would get it to work. Weights are int8 per channel and
activations uint8, as ONNX Runtime recommends for CPUs; NNCF chooses for itself.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]
Quantizer = Callable[[Path, Path, Sequence[Feed]], None]
OLDEST, USUAL = 13, 17


@dataclass(frozen=True)
class Way:
    """One way to quantize a file.

    Attributes:
        run: from a model's path to another, with batches.
        note: what differs from the first way.
    """

    run: Quantizer
    note: str = ""


@dataclass(frozen=True)
class FileQuantizer:
    """A contestant.

    Attributes:
        ways: to be tried one after the other.
        load: imports what it needs, so that this is no part of its time and memory.
        is_ours: whether it takes models of old operator sets as they are.
        kinds: of models that it is for; all if empty.
    """

    ways: tuple[Way, ...]
    load: Callable[[], object]
    is_ours: bool = False
    kinds: tuple[str, ...] = ()


def _load_detent() -> object:
    import detent.onnx  # noqa: PLC0415 - each contestant has a process of its own

    return detent.onnx


def _detent(target: str, source: Path, output: Path, feeds: Sequence[Feed]) -> None:
    import detent.onnx as qo  # noqa: PLC0415

    qo.quantize(source, output, data=feeds, recipe="w8a8", target=target, progress=False)


def _load_static() -> object:
    import onnxruntime.quantization  # noqa: PLC0415
    import onnxruntime.quantization.shape_inference  # noqa: PLC0415

    return onnxruntime.quantization


def _static(
    method: str,
    source: Path,
    output: Path,
    feeds: Sequence[Feed],
    *,
    reduce_range: bool = False,
    per_channel: bool = True,
    extra: Mapping[str, Any] | None = None,
    renames: bool = False,
) -> None:
    from onnxruntime import quantization as oq  # noqa: PLC0415

    class Reader(oq.CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self.left, None)

    prepared = _pre_processed(source, output.with_suffix(".pre.onnx"))
    oq.quantize_static(
        _renamed(prepared, output.with_suffix(".renamed.onnx")) if renames else prepared,
        output,
        Reader(),
        quant_format=oq.QuantFormat.QDQ,
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=oq.QuantType.QUInt8,
        weight_type=oq.QuantType.QInt8,
        calibrate_method=oq.CalibrationMethod[method],
        extra_options=dict(extra or {}),
    )


def _pre_processed(source: Path, target: Path) -> Path:
    """The model as ONNX Runtime's tool wants it: optimised, with shapes; as it is where that fails."""
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    for options in ({}, {"skip_symbolic_shape": True}):
        try:
            quant_pre_process(source, target, **options)
        except Exception:  # noqa: BLE001 - it raises whatever its parts do, and the plain model is still there
            continue
        return target
    return source


def _renamed(source: Path, target: Path) -> Path:
    """The model with short names inside: some names collide with those that ONNX Runtime's tool makes of others."""
    model = onnx.load(source)
    graph = model.graph
    names = {value.name: value.name for value in (*graph.input, *graph.output)} | {"": ""}
    for tensor in graph.initializer:
        tensor.name = names.setdefault(tensor.name, f"t{len(names)}")
    for i, node in enumerate(graph.node):
        node.name = f"n{i}"
        node.input[:] = [names.setdefault(name, f"t{len(names)}") for name in node.input]
        node.output[:] = [names.setdefault(name, f"t{len(names)}") for name in node.output]
    del graph.value_info[:]
    onnx.save(model, target)
    return target


def _static_ways(method: str, **options: Any) -> tuple[Way, ...]:
    unchecked = {"QDQDisableWeightAdjustForInt32Bias": True}
    return (
        Way(partial(_static, method, **options)),
        Way(partial(_static, method, **options, extra=unchecked), "QDQDisableWeightAdjustForInt32Bias"),
        Way(partial(_static, method, **options, renames=True), "tensors renamed"),
        Way(partial(_static, method, **options, per_channel=False), "per tensor"),
    )


def _load_nncf() -> object:
    os.environ.setdefault("NNCF_CI", "1")  # else it reports its use over the network
    import nncf  # noqa: PLC0415

    return nncf


def _nncf(source: Path, output: Path, feeds: Sequence[Feed], *, model_type: str | None = None) -> None:
    import nncf  # noqa: PLC0415

    kind = None if model_type is None else nncf.ModelType[model_type]
    data = nncf.Dataset(feeds)
    made = nncf.quantize(onnx.load(source), data, subset_size=len(feeds), model_type=kind)
    onnx.save(made, output)


def modern(source: Path, target: Path) -> Path:
    """The model in an operator set with quantizers per channel, which peers need; the same file if it has them."""
    model = onnx.load(source)
    if next(each.version for each in model.opset_import if each.domain in {"", "ai.onnx"}) >= OLDEST:
        return source
    onnx.save(onnx.version_converter.convert_version(model, USUAL), target)
    return target


CONTESTANTS: Mapping[str, FileQuantizer] = MappingProxyType(
    {
        "detent": FileQuantizer((Way(partial(_detent, "onnxruntime")),), _load_detent, is_ours=True),
        "detent, avx2": FileQuantizer((Way(partial(_detent, "onnxruntime-avx2")),), _load_detent, is_ours=True),
        "ORT MinMax": FileQuantizer(_static_ways("MinMax"), _load_static),
        "ORT MinMax, reduced": FileQuantizer(_static_ways("MinMax", reduce_range=True), _load_static),
        "ORT Percentile": FileQuantizer(_static_ways("Percentile"), _load_static),
        "ORT Entropy": FileQuantizer(_static_ways("Entropy"), _load_static),
        "NNCF": FileQuantizer((Way(_nncf),), _load_nncf),
        "NNCF, transformer": FileQuantizer(
            (Way(partial(_nncf, model_type="TRANSFORMER")),), _load_nncf, kinds=("transformer",)
        ),
    }
)
