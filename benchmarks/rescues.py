"""Alternatives to float fallback: 16-bit activations, and outlier channels that are split.

::

    python benchmarks/rescues.py [--models A B] [--rounds N] [--output FILE]

``qo.quantize`` keeps a few layers in float if each of them causes much of the noise at the outputs. This benchmark
quantizes the same layers in other ways, and compares the SQNR on held-out samples, the size and the CPU time on one
thread of all files of a model. They take turns in one process. The files are:

- quantized: no float fallback
- float: float fallback, as by default
- 16-bit: these layers read 16-bit activations
- split 12 %, split 50 %: in the input of these layers, channels with large values are split (Zhao et al. 2019): a
  channel is stored twice, each time halved, as often as the number of channels may grow by 12 or 50 %. The sum of both
  halves is the same in float, and the range of the tensor is smaller. Depthwise convolutions cannot be split.

The models are those on which float fallback keeps layers. Progress goes to stderr. Models in FILE that are not measured
again keep their results.
"""

import argparse
import glob
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cpu_time import cpu_times_in_turns
from numpy.typing import NDArray
from onnx_evaluation import noise, outputs
from results_file import stored_models, write_result
from run import environment
from unseen_files import CALIBRATION, HELD_OUT, feeds, float_file, write_files

import detent as dt
import detent.onnx as qo
from detent.onnx_model.graph import Graph, is_depthwise
from detent.onnx_model.sessions import make_session

Array = NDArray[Any]
Feed = Mapping[str, Array]
FILES = Path(__file__).resolve().parent / ".cache" / "rescues"
MODELS = ("ocr5-detector", "ocr5-recognizer", "ocr2-recognizer", "table-structure-english")
W8A8 = dt.Recipe.preset("w8a8")
FALLBACK = "float fallback"  # begins the reason of layers that float fallback keeps in float
GROWTH = {"split 12 %": 0.125, "split 50 %": 0.5}
ROWS = ("quantized", "float", "16-bit", *GROWTH)
TIMED, ROUNDS = 4, 15


def quantize(source: object, path: Path, data: Sequence[Feed], **options: object) -> qo.QuantizeReport:
    """Quantize a model without progress."""
    return qo.quantize(source, path, data=data, progress=False, compare=False, **options)


def with_16_bits(layers: Sequence[str]) -> dt.Recipe:
    """Return the recipe w8a8 with 16-bit inputs of some layers."""
    wide = [dt.Rule(glob.escape(name), input="uint16/tensor/affine") for name in layers]
    return dt.Recipe([*W8A8.rules, *wide], "w8a8, 16-bit inputs")


def split_channels(peaks: Array, growth: float) -> tuple[Array, Array]:
    """Split the channels with the largest peaks; return the old channel of each new channel, and its factor.

    >>> split_channels(np.array([8.0, 1.0, 3.0, 1.0]), 0.5)
    (array([0, 1, 2, 3, 0, 2]), array([0.5, 1. , 0.5, 1. , 0.5, 0.5], dtype=float32))
    """
    channels, factors = list(range(len(peaks))), [1.0] * len(peaks)
    for _ in range(int(growth * len(peaks))):
        worst = int(np.argmax(peaks[channels] * np.array(factors)))
        factors[worst] /= 2
        channels.append(channels[worst])
        factors.append(factors[worst])
    return np.array(channels), np.array(factors, np.float32)


def with_split_inputs(source: Path, layers: Sequence[str], data: Sequence[Feed], growth: float) -> onnx.ModelProto:
    """Return a float model in which the inputs of some convolutions have split channels."""
    model = qo.prepare(source)
    graph = Graph(model)
    nodes = [node for node in model.graph.node if node.name in layers and _is_splittable(graph, node)]
    peaks = _channel_peaks(model, [node.input[0] for node in nodes], data)
    for node in nodes:
        channels, factors = split_channels(peaks[node.input[0]], growth)
        weight = graph.array(node.input[1])[:, channels]
        indices = graph.add_constant(f"{node.name}_channels", channels)
        scale = graph.add_constant(f"{node.name}_factors", factors.reshape(-1, *[1] * (weight.ndim - 2)))
        names = [graph.fresh(f"{node.name}_{part}") for part in ("split", "halved")]
        graph.insert(
            [
                onnx.helper.make_node("Gather", [node.input[0], indices], [names[0]], names[0], axis=1),
                onnx.helper.make_node("Mul", [names[0], scale], [names[1]], names[1]),
            ]
        )
        graph.set_input(node, 0, names[1])
        graph.set_input(node, 1, graph.add_constant(f"{node.name}_weight", weight))
    return graph.finish()


def _is_splittable(graph: Graph, node: onnx.NodeProto) -> bool:
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    return node.op_type == "Conv" and not is_depthwise(groups, graph.shape(node.input[1]) or ())


def _channel_peaks(model: onnx.ModelProto, tensors: Sequence[str], data: Sequence[Feed]) -> dict[str, Array]:
    """Return the largest magnitude of each channel of some tensors."""
    names = list(dict.fromkeys(tensors))
    if not names:
        return {}
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = make_session(watched)
    runs = [session.run(names, feed) for feed in data]
    return {
        name: np.max([np.abs(run[i]).max(axis=tuple(a for a in range(run[i].ndim) if a != 1)) for run in runs], axis=0)
        for i, name in enumerate(names)
    }


def measure(name: str, rounds: int) -> dict:
    """Quantize a model in all ways, and measure the files."""
    write_files(name)
    source, data, held_out = float_file(name), feeds(name, CALIBRATION), feeds(name, HELD_OUT)
    FILES.mkdir(parents=True, exist_ok=True)
    files = {row: FILES / f"{name}.{row.replace(' ', '').replace('%', '')}.onnx" for row in ROWS}
    report = quantize(source, files["float"], data)
    layers = [layer.name for layer in report.layers if (layer.reason or "").startswith(FALLBACK)]
    log(f"{name}: {', '.join(layers) or 'no layers'} in float")
    if not layers:
        return {"layers": []}
    quantize(source, files["quantized"], data, keep_float="none")
    quantize(source, files["16-bit"], data, keep_float="none", recipe=with_16_bits(layers))
    for row, growth in GROWTH.items():
        quantize(with_split_inputs(source, layers, data, growth), files[row], data, keep_float="none")
    plain, size = outputs(source, held_out), source.stat().st_size
    times = cpu_times_in_turns(source, files, held_out[:TIMED], rounds, 1)
    rows = {
        row: {
            "sqnr_db": min(noise(plain, outputs(path, held_out))),
            "size_ratio": round(path.stat().st_size / size, 4),
            "time": times[row],
        }
        for row, path in files.items()
    }
    log(f"{name}: " + "; ".join(f"{row} {each['sqnr_db']} dB, {each['time']['ratio']}" for row, each in rows.items()))
    return {"layers": layers, "rows": rows}


def log(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Compare float fallback with 16-bit activations and split channels.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    models = stored_models(arguments.output)
    for name in arguments.models:
        models[name] = measure(name, arguments.rounds)
    write_result(environment() | {"models": models}, arguments.output)


if __name__ == "__main__":
    main()
