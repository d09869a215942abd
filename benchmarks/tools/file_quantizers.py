"""Tools for post-training quantization of ONNX files: detent, ONNX Runtime and NNCF, each with its default settings.

A tool is a list of attempts, best first. If an attempt fails on a model, the next is tried, and the table names the
attempt that worked. So a tool has a result for every model on which a patient user would get one. Weights are int8 per
channel and activations uint8, as ONNX Runtime recommends for CPUs; NNCF chooses its own formats.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]
Quantizer = Callable[[Path, Path, Sequence[Feed]], dict[str, Any] | None]
MIN_OPSET = 13  # the first opset with per-channel QuantizeLinear
NEW_OPSET = 17  # models with older opsets are converted to this opset
TRANSFORMER = "for transformers"  # note of attempts that are tried first on transformers
DETENT, NNCF = ("detent.onnx",), ("nncf", "nncf.onnx")
STATIC = ("onnxruntime.quantization.shape_inference", "onnxruntime.tools.symbolic_shape_infer")
os.environ.setdefault("NNCF_CI", "1")  # no telemetry


@dataclass(frozen=True)
class Attempt:
    """One set of options for quantizing a file.

    Attributes:
        run: function of the source path, the output path and the calibration batches; it may return further columns.
        note: difference from the first attempt.
    """

    run: Quantizer
    note: str = ""


@dataclass(frozen=True)
class FileQuantizer:
    """A tool that quantizes ONNX files.

    Attributes:
        attempts: sets of options, tried in order.
        modules: all modules that the tool imports, also those that it imports while it runs.
        is_ours: whether this is detent, which supports models with old opsets.
        kinds: kinds of models that the tool is for; all if empty.
    """

    attempts: tuple[Attempt, ...]
    modules: tuple[str, ...]
    is_ours: bool = False
    kinds: tuple[str, ...] = ()

    def load(self) -> None:
        """Import the tool, before time and memory are measured."""
        for module in self.modules:
            import_module(module)


def _detent(target: str, source: Path, output: Path, feeds: Sequence[Feed], **options: Any) -> dict[str, Any]:
    import detent.onnx as qo  # noqa: PLC0415

    report = qo.quantize(source, output, data=feeds, recipe="w8a8", target=target, progress=False, **options)
    layers = [layer for layer in report.layers if not layer.reason]
    return {
        "warnings": [str(warning) for warning in getattr(report, "warnings", ())],
        "hints": list(report.hints),
        "steps": list(report.steps),
        "layers": len(report.layers),
        "quantized_layers": len(layers),
        "integer_kernel_layers": sum(layer.runs_on_integer_kernel for layer in layers),
        "float_layers": {layer.name: layer.reason for layer in report.layers if layer.reason},
        "float_kernels": {layer.name: layer.kernel for layer in layers if not layer.runs_on_integer_kernel},
    }


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
    """Prepare a model as ONNX Runtime recommends (optimized, with shapes), and return its path.

    If that fails, return the path of the source.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    for options in ({}, {"skip_symbolic_shape": True}):
        try:
            quant_pre_process(source, target, **options)
        except Exception:  # noqa: BLE001 - it raises all kinds of errors; the source can be quantized without it
            continue
        return target
    return source


def _renamed(source: Path, target: Path) -> Path:
    """Shorten tensor names, because in some models ONNX Runtime's tool derives two equal names from them."""
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


def _static_attempts(method: str, **options: Any) -> tuple[Attempt, ...]:
    unchecked = {"QDQDisableWeightAdjustForInt32Bias": True}
    return (
        Attempt(partial(_static, method, **options)),
        Attempt(partial(_static, method, **options, extra=unchecked), "QDQDisableWeightAdjustForInt32Bias"),
        Attempt(partial(_static, method, **options, renames=True), "tensors renamed"),
        Attempt(partial(_static, method, **options, per_channel=False), "per tensor"),
    )


def _nncf(
    source: Path, output: Path, feeds: Sequence[Feed], *, model_type: str | None = None, reduce_range: bool = False
) -> None:
    import nncf  # noqa: PLC0415

    kind = None if model_type is None else nncf.ModelType[model_type]
    data = nncf.Dataset(feeds)
    halved = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
    options = {"advanced_parameters": halved} if reduce_range else {}
    quantized = nncf.quantize(onnx.load(source), data, subset_size=len(feeds), model_type=kind, **options)
    onnx.save(quantized, output)


def _nncf_attempts(**options: Any) -> tuple[Attempt, ...]:
    return (
        Attempt(partial(_nncf, **options)),
        Attempt(partial(_nncf, model_type="TRANSFORMER", **options), TRANSFORMER),
    )


def with_new_opset(source: Path, target: Path) -> Path:
    """Convert a model to an opset with per-channel QuantizeLinear, which other tools need; return the path."""
    model = onnx.load(source)
    if next(each.version for each in model.opset_import if each.domain in {"", "ai.onnx"}) >= MIN_OPSET:
        return source
    onnx.save(onnx.version_converter.convert_version(model, NEW_OPSET), target)
    return target


TOOLS: Mapping[str, FileQuantizer] = MappingProxyType(
    {
        "detent": FileQuantizer((Attempt(partial(_detent, "onnxruntime")),), DETENT, is_ours=True),
        "detent, avx2": FileQuantizer((Attempt(partial(_detent, "onnxruntime-avx2")),), DETENT, is_ours=True),
        "detent, vnni": FileQuantizer((Attempt(partial(_detent, "onnxruntime-vnni")),), DETENT, is_ours=True),
        "ORT MinMax": FileQuantizer(_static_attempts("MinMax"), STATIC),
        "ORT MinMax, reduced": FileQuantizer(_static_attempts("MinMax", reduce_range=True), STATIC),
        "ORT Percentile": FileQuantizer(_static_attempts("Percentile"), STATIC),
        "ORT Entropy": FileQuantizer(_static_attempts("Entropy"), STATIC),
        "NNCF": FileQuantizer((Attempt(_nncf),), NNCF),
        "NNCF, transformer": FileQuantizer(
            (Attempt(partial(_nncf, model_type="TRANSFORMER")),), NNCF, kinds=("transformer",)
        ),
        "NNCF, reduced": FileQuantizer(_nncf_attempts(reduce_range=True), NNCF),
        "NNCF, transformer, reduced": FileQuantizer(
            (Attempt(partial(_nncf, model_type="TRANSFORMER", reduce_range=True)),),
            NNCF,
            kinds=("transformer",),
        ),
    }
)

# The tools of ``onnx_unseen``. Weights of reduced range run on every CPU without saturation, like those of detent's
# default target. Tools with weights of full range are compared with the target for CPUs with VNNI.
UNSEEN_TOOLS: Mapping[str, FileQuantizer] = MappingProxyType(
    {
        "detent": TOOLS["detent"],
        "detent, vnni": TOOLS["detent, vnni"],
        "detent, fast": FileQuantizer((Attempt(partial(_detent, "onnxruntime", effort="fast")),), DETENT, is_ours=True),
        "ORT MinMax": TOOLS["ORT MinMax"],
        "ORT MinMax, reduced": TOOLS["ORT MinMax, reduced"],
        "ORT Percentile": TOOLS["ORT Percentile"],
        "ORT Percentile, reduced": FileQuantizer(_static_attempts("Percentile", reduce_range=True), STATIC),
        "NNCF": FileQuantizer(_nncf_attempts(), NNCF),
        "NNCF, reduced": TOOLS["NNCF, reduced"],
    }
)
