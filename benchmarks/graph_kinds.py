"""Kinds of graphs beyond plain layers: detent compared with ONNX Runtime's own quantizers on the same data.

::

    python benchmarks/graph_kinds.py [--cases A B] [--rounds N] [--output FILE]

``CASES`` is the registry: each case is a model with one kind of graph, such as recurrent layers or subgraphs. Static
quantization gets calibration data. Dynamic and weight-only quantization get none, except in rows named "data". SQNR
compares the worst float output with the float model, on held-out samples; decisions are compared as in the benchmark of
unseen models. Every file of detent is verified on held-out samples. Time is CPU time on one thread (``cpu_time``); all
files of a case take turns in one process.

With ragged groups, activations of all files stay in float (``FLOAT_ACTIVATIONS``), as they do in the files of ONNX
Runtime's tool. For files of detent, the SQNR of a session with default options, which quantizes activations to 8 bits,
is measured, too.

Progress goes to stderr. Cases in FILE that are not measured again keep their results.
"""

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
from cpu_time import cpu_times_in_turns
from float16_networks import Float16Network
from networks import FRESH_NETWORKS, NETWORKS
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process
from results_file import stored_models, write_result
from run import environment
from unseen_models import UNSEEN

import detent as dt
import detent.onnx as qo
from detent.onnx_model import Graph, load, make_session
from detent.onnx_model.sessions import ACCURACY_LEVEL
from zoo import ZOO, ZooModel, agreement

Array = NDArray[Any]
Feed = dict[str, Array]
FILES = Path(__file__).resolve().parent / ".cache" / "graph_kinds"
ROUNDS = 40  # timed runs of each file
TIMED_SAMPLES, VERIFIED_SAMPLES = 4, 2
ZOO_CALIBRATION, ZOO_HELD_OUT = 16, 64  # batches
THREADS = 1
PER_CHANNEL_OPSET = 13  # in older models, ONNX Runtime's static quantizer writes per-channel files that it cannot load


class Subject(Protocol):
    """A float model with data and a task."""

    decide: Callable[[Sequence[Array]], Array] | None

    def write(self, path: Path) -> Path:
        """Write the float model, unless the file exists; return its path."""

    def calibration_feeds(self) -> list[Feed]:
        """Return the calibration samples."""

    def held_out_feeds(self) -> list[Feed]:
        """Return samples that calibration does not use."""


class ZooSubject(NamedTuple):
    """A model of the zoo."""

    model: ZooModel

    @property
    def decide(self) -> Callable[[Sequence[Array]], Array]:
        """Function that turns the outputs of a run into decisions."""
        return self.model.task

    def write(self, path: Path) -> Path:
        """Write the model, and return its path."""
        return self.model.write(path.parent)

    def calibration_feeds(self) -> list[Feed]:
        """Return the first batches."""
        return list(self.model.feeds(ZOO_CALIBRATION))

    def held_out_feeds(self) -> list[Feed]:
        """Return batches after the first ones."""
        return list(islice(self.model.feeds(ZOO_CALIBRATION + ZOO_HELD_OUT), ZOO_CALIBRATION, None))


class Case(NamedTuple):
    """A kind of graph, the function that returns its model, and the names of the tools that quantize it."""

    kind: str
    subject: Callable[[], Subject]
    tools: Sequence[str] = ("w8a8", "ORT static", "w8a8-dynamic", "ORT dynamic")
    config: Mapping[str, str] = MappingProxyType({})  # session options of ONNX Runtime


FLOAT_ACTIVATIONS = MappingProxyType({ACCURACY_LEVEL: "0"})
GRU_TOOLS = ("w8a8", "ORT static", "w8a8-dynamic", "w8a8-dynamic float GRU", "ORT dynamic")
FLOAT16_TOOLS = ("w8a8", "w8a8 float16", "ORT static", "w8a8-dynamic", "ORT dynamic")
GROUP_TOOLS = ("w4a16", "w4a16 MatMul", "w4a16 MatMul data", "int4 MatMul", "ORT affine", "ORT symmetric")
AFFINE = dt.Recipe([dt.Rule(types="MatMul", weight="uint4/group128/affine")])
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "lstm": Case("LSTM, 2 directions", lambda: UNSEEN["lstm"]),
        "gru": Case("GRU", lambda: UNSEEN["gru"], GRU_TOOLS),
        "captcha": Case("LSTM after convolutions", lambda: UNSEEN["captcha"]),
        "arabic": Case("GRUs in a transformer", lambda: UNSEEN["arabic"]),
        "silero-vad": Case("LSTM in an If", lambda: ZooSubject(ZOO["silero-vad"])),
        "hebrew": Case("LSTMs as Loops", lambda: UNSEEN["hebrew"]),
        "bert-float16": Case("float16", lambda: Float16Network(NETWORKS["bert"]), FLOAT16_TOOLS),
        "vit-float16": Case("float16", lambda: Float16Network(NETWORKS["vit"]), FLOAT16_TOOLS),
        "squeezenet-float16": Case("float16", lambda: Float16Network(NETWORKS["squeezenet"]), FLOAT16_TOOLS[:3]),
        "bert-192": Case("ragged groups", lambda: NETWORKS["bert"], GROUP_TOOLS, FLOAT_ACTIVATIONS),
        "deit-144": Case("ragged groups", lambda: FRESH_NETWORKS["deit"], GROUP_TOOLS, FLOAT_ACTIVATIONS),
        "swin-96": Case("ragged groups", lambda: NETWORKS["swin"], GROUP_TOOLS, FLOAT_ACTIVATIONS),
    }
)


class _Reader(CalibrationDataReader):
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._feeds, None)


def _ort_static(source: Path, target: Path, feeds: Sequence[Feed]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        prepared = Path(directory, "prepared.onnx")
        try:
            quant_pre_process(source, prepared)
        except Exception:  # noqa: BLE001 - symbolic shape inference fails on some models; ONNX Runtime recommends to skip it
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
        is_per_channel = Graph(load(prepared)).opset >= PER_CHANNEL_OPSET
        options = {"quant_format": QuantFormat.QDQ, "per_channel": is_per_channel, "reduce_range": True}
        quantize_static(prepared, target, _Reader(feeds), **options)


def _ort_dynamic(source: Path, target: Path, _feeds: Sequence[Feed]) -> None:
    quantize_dynamic(source, target, per_channel=True, reduce_range=True, extra_options={"EnableSubgraph": True})


def _ort_4_bits(*, is_symmetric: bool) -> Callable[[Path, Path, Sequence[Feed]], None]:
    def write(source: Path, target: Path, _feeds: Sequence[Feed]) -> None:
        quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=4, block_size=128, is_symmetric=is_symmetric)
        quantizer.process()
        onnx.save(quantizer.model.model, target)

    return write


def _detent(
    recipe: str | dt.Recipe, *, has_data: bool = False, **options: Any
) -> Callable[[Path, Path, Sequence[Feed]], dict[str, Any]]:
    def write(source: Path, target: Path, feeds: Sequence[Feed]) -> dict[str, Any]:
        data = feeds if has_data or recipe == "w8a8" else None
        report = qo.quantize(source, target, data, recipe, progress=False, **options)
        reasons = Counter(layer.reason for layer in report.layers if layer.reason)
        return {"layers": len(report.layers), "quantized": len(report.plan.quantized), "in_float": dict(reasons)}

    return write


ORT = "ORT "  # prefix of the names of ONNX Runtime's tools; all other names are recipes of detent
TOOLS: Mapping[str, Callable[[Path, Path, Sequence[Feed]], dict[str, Any] | None]] = MappingProxyType(
    {
        **{recipe: _detent(recipe) for recipe in ("w8a8", "w8a8-dynamic", "w8a16", "w4a16")},
        "w8a8 float16": _detent("w8a8", float16=True),
        "w8a8-dynamic float GRU": _detent(
            dt.Recipe([*dt.Recipe.preset("w8a8-dynamic").rules, dt.Rule(types="GRU", skip=True)])
        ),
        "w4a16 MatMul": _detent(AFFINE),
        "w4a16 MatMul data": _detent(AFFINE, has_data=True, keep_float="none"),
        "int4 MatMul": _detent(dt.Recipe([dt.Rule(types="MatMul", weight="int4/group128")])),
        f"{ORT}static": _ort_static,
        f"{ORT}dynamic": _ort_dynamic,
        f"{ORT}affine": _ort_4_bits(is_symmetric=False),
        f"{ORT}symmetric": _ort_4_bits(is_symmetric=True),
    }
)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Write the files of all tools for one case, and measure them; a tool that fails gets a row with its error."""
    FILES.mkdir(parents=True, exist_ok=True)
    case = CASES[name]
    subject = case.subject()
    source, calibration, held_out = (
        subject.write(FILES / f"{name}.onnx"),
        subject.calibration_feeds(),
        subject.held_out_feeds(),
    )
    files: dict[str, Path] = {}
    rows: dict[str, Any] = {}
    for tool in case.tools:
        path = FILES / f"{name}.{tool.replace(' ', '-')}.onnx"
        try:
            facts = TOOLS[tool](source, path, calibration)
            make_session(path, threads=THREADS).run(None, held_out[0])
        except Exception as error:  # noqa: BLE001 - the error of a tool is its result
            text = str(error).splitlines()[0].replace(f"{FILES}/", "")
            rows[tool] = {"failed": f"{type(error).__name__}: {text:.200}"}
        else:
            files[tool], rows[tool] = path, facts or {}
    expected = _outputs(source, held_out)
    times = cpu_times_in_turns(source, files, held_out[:TIMED_SAMPLES], rounds, THREADS, case.config)
    for tool, path in files.items():
        rows[tool] |= {
            **_accuracy(expected, _outputs(path, held_out, case.config), subject.decide),
            "size_ratio": path.stat().st_size / source.stat().st_size,
            "time": times[tool],
        }
        if case.config and not tool.startswith(ORT):
            default = _accuracy(expected, _outputs(path, held_out), None)
            rows[tool]["default_sqnr_db"] = default["sqnr_db"]
        if not tool.startswith(ORT):
            rows[tool]["verified"] = dt.verify(source, path, held_out[:VERIFIED_SAMPLES]).ok
    for tool, row in rows.items():
        print(f"{name}: {tool}: {row}", file=sys.stderr)
    return {"kind": case.kind, "samples": len(held_out), "rows": rows}


def _outputs(path: Path, feeds: Sequence[Feed], config: Mapping[str, str] = MappingProxyType({})) -> list[list[Array]]:
    session = make_session(path, threads=THREADS, config=config)
    return [session.run(None, feed) for feed in feeds]


def _accuracy(
    expected: Sequence[Sequence[Array]],
    got: Sequence[Sequence[Array]],
    decide: Callable[[Sequence[Array]], Array] | None,
) -> dict[str, float | None]:
    """Compare all float outputs of all runs, and the decisions; the SQNR is that of the worst output."""
    places = [i for i, output in enumerate(expected[0]) if output.dtype.kind == "f"]
    values = [[np.concatenate([np.ravel(run[i]) for run in runs]) for runs in (expected, got)] for i in places]
    decisions = None
    if decide is not None:
        decisions = float(agreement(*(np.concatenate([np.ravel(decide(run)) for run in r]) for r in (expected, got))))
    return {"sqnr_db": min(float(dt.metrics.sqnr_db(x, y)) for x, y in values), "decisions": decisions}


def main() -> None:
    """Measure the cases, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # ONNX Runtime's tools recommend pre-processing
    models = {name: measure(name, arguments.rounds) for name in arguments.cases}
    models = stored_models(arguments.output) | models  # keep the results of other cases
    ordered = {name: models[name] for name in CASES if name in models}
    write_result({"environment": environment(), "rounds": arguments.rounds, "models": ordered}, arguments.output)


if __name__ == "__main__":
    main()
