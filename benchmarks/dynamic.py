"""Dynamic quantization of transformers: detent compared with ``quantize_dynamic`` of ONNX Runtime.

::

    python benchmarks/dynamic.py [--models A B] [--rounds N] [--output FILE]

Neither tool gets calibration data. Two kinds of file are compared: for every CPU (7-bit weights, ``reduce_range=True``)
and for CPUs with VNNI (8-bit weights). SQNR, cosine and decisions compare a file with the float model, on held-out
samples. Time is CPU time on one thread (``cpu_time``); all files of a model take turns in one process.

Progress goes to stderr. Models in FILE that are not measured again keep their results.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from cpu_time import cpu_times_in_turns
from networks import NETWORKS
from numpy.typing import NDArray
from onnxruntime.quantization import quantize_dynamic
from results_file import stored_models, write_result
from run import environment

import detent as dt
import detent.onnx as qo
from detent.onnx_model import make_session
from zoo import ZOO, agreement

Array = NDArray[Any]
Feed = dict[str, Array]
FILES = Path(__file__).resolve().parent / ".cache" / "dynamic"
RECIPE = "w8a8-dynamic"
ROUNDS = 60  # timed runs of each file
TIMED_SAMPLES = 4
HELD_OUT = 256  # samples of the networks
MINILM_BATCHES = 48
THREADS = 1


class Subject(NamedTuple):
    """A model: its float file, held-out inputs, and the function that turns outputs into decisions."""

    write: Callable[[], Path]
    feeds: Callable[[], Sequence[Feed]]
    decide: Callable[[Sequence[Array]], Array]


def _network(name: str) -> Subject:
    network = replace(NETWORKS[name], held_out=HELD_OUT)
    return Subject(lambda: network.write(FILES / f"{name}.onnx"), network.held_out_feeds, network.decide)


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "minilm": Subject(
            lambda: ZOO["minilm"].write(FILES), lambda: list(ZOO["minilm"].feeds(MINILM_BATCHES)), ZOO["minilm"].task
        ),
        "bert": _network("bert"),
        "gpt": _network("gpt"),
    }
)


class Tool(NamedTuple):
    """A tool with its settings: function that writes a file, and the kind of CPU that the file is for."""

    write: Callable[[Path, Path], object]
    cpu: str


def _onnxruntime(*, per_channel: bool, reduce_range: bool) -> Tool:
    def write(source: Path, target: Path) -> None:
        quantize_dynamic(source, target, per_channel=per_channel, reduce_range=reduce_range)

    return Tool(write, "every CPU" if reduce_range else "VNNI")


def _detent(target: str) -> Tool:
    def write(source: Path, path: Path) -> None:
        qo.quantize(source, path, recipe=RECIPE, target=target, progress=False)

    return Tool(write, "VNNI" if target.endswith("-vnni") else "every CPU")


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "detent": _detent("onnxruntime"),
        "onnxruntime per channel": _onnxruntime(per_channel=True, reduce_range=True),
        "onnxruntime per tensor": _onnxruntime(per_channel=False, reduce_range=True),
        "detent vnni": _detent("onnxruntime-vnni"),
        "onnxruntime per channel vnni": _onnxruntime(per_channel=True, reduce_range=False),
        "onnxruntime per tensor vnni": _onnxruntime(per_channel=False, reduce_range=False),
    }
)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Write the files of all tools for one model, and measure them."""
    FILES.mkdir(parents=True, exist_ok=True)
    subject = SUBJECTS[name]
    source, feeds = subject.write(), subject.feeds()
    files = {}
    for tool, (write, _) in TOOLS.items():
        files[tool] = FILES / f"{name}.{tool.replace(' ', '-')}.onnx"
        write(source, files[tool])
    expected = outputs_of(source, feeds)
    times = cpu_times_in_turns(source, files, feeds[:TIMED_SAMPLES], rounds, THREADS)
    rows = {}
    for tool, path in files.items():
        rows[tool] = {
            "cpu": TOOLS[tool].cpu,
            **accuracy(expected, outputs_of(path, feeds), subject.decide),
            "size_ratio": path.stat().st_size / source.stat().st_size,
            "time": times[tool],
        }
        print(f"{name}: {tool}: {rows[tool]}", file=sys.stderr)
    return {"samples": sum(len(next(iter(feed.values()))) for feed in feeds), "rows": rows}


def outputs_of(path: Path, feeds: Sequence[Feed]) -> list[list[Array]]:
    """Run a model on all samples, and return its outputs."""
    session = make_session(path, threads=THREADS)
    return [session.run(None, feed) for feed in feeds]


def accuracy(
    expected: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]], decide: Callable[[Sequence[Array]], Array]
) -> dict[str, float]:
    """Compare the first output of all runs, and the decisions."""
    x, y = (np.concatenate([np.ravel(run[0]) for run in runs]) for runs in (expected, got))
    decisions = [np.concatenate([np.ravel(decide(run)) for run in runs]) for runs in (expected, got)]
    return {
        "sqnr_db": float(dt.metrics.sqnr_db(x, y)),
        "cosine": float(dt.metrics.cosine(x, y)),
        "decisions": float(agreement(*decisions)),
    }


def main() -> None:
    """Measure the models, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # quantize_dynamic recommends pre-processing
    models = {name: measure(name, arguments.rounds) for name in arguments.models}
    models = stored_models(arguments.output) | models  # keep the results of other models
    ordered = {name: models[name] for name in SUBJECTS if name in models}
    result = {"environment": environment(), "rounds": arguments.rounds, "models": ordered}
    write_result(result, arguments.output, indent=2)


if __name__ == "__main__":
    main()
