"""Matmuls of two activations in attention, quantized or in float: SQNR and CPU time of the same model.

::

    python benchmarks/attention_matmuls.py [--models A B] [--rounds N] [--output FILE]

``qo.quantize`` writes two files of each transformer with the recipe ``w8a8``: one as usual, and one with a rule for
``ActivationMatMul``. SQNR and decisions compare a file with the float model, on held-out samples. Time is CPU time on
one thread (``cpu_time``); the files of a model take turns in one process. ``long`` is the time on a longer text, for
models that accept one. The models with large heads have random weights.

Progress goes to stderr. Models in FILE that are not measured again keep their results.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from cpu_time import cpu_times_in_turns
from dynamic import HELD_OUT, MINILM_BATCHES, THREADS, TIMED_SAMPLES, accuracy, outputs_of
from networks import FRESH_NETWORKS, LARGE_NETWORKS, NETWORKS, Network
from networks.attention import Encoder
from numpy.typing import NDArray
from results_file import stored_models, write_result
from run import environment

import detent as dt
import detent.onnx as qo
from zoo import ZOO

Array = NDArray[Any]
Feed = dict[str, Array]
FILES = Path(__file__).resolve().parent / ".cache" / "attention"
ROUNDS = 40  # timed runs of each file
LONG_TOKENS = 256
MINILM_CALIBRATION = 8
RULE = dt.Rule(types="ActivationMatMul", input="uint8")
W8A8 = dt.Recipe.preset("w8a8")
RECIPES: Mapping[str, dt.Recipe] = MappingProxyType(
    {"float": W8A8, "quantized": dt.Recipe([*W8A8.rules, RULE], "w8a8-attention")}
)


class Subject(NamedTuple):
    """A model: its float file, data, decisions, the size of its heads, and a longer input if it accepts one."""

    write: Callable[[], Path]
    calibration: Callable[[], Sequence[Feed]]
    held_out: Callable[[], Sequence[Feed]]
    decide: Callable[[Sequence[Array]], Array]
    head: int
    long_input: Callable[[Feed], Feed] | None = None
    effort: str = "balanced"


def _network(name: str, network: Network, head: int, **options: Any) -> Subject:
    held_out = replace(network, held_out=min(HELD_OUT, network.held_out))
    write = partial(network.write, FILES / f"{name}.onnx")
    return Subject(write, network.calibration_feeds, held_out.held_out_feeds, network.decide, head, **options)


def _untrained(heads: int, head: int) -> Subject:
    """Return a transformer with larger heads; it is not trained, because only its time matters."""
    network = replace(NETWORKS["bert"], build=partial(Encoder, heads=heads), steps=0)
    return _network(f"bert-{head}", network, head, effort="fast")


def _minilm() -> Subject:
    batches = lambda: list(ZOO["minilm"].feeds(MINILM_BATCHES))  # noqa: E731 - read when needed
    return Subject(
        lambda: ZOO["minilm"].write(FILES),
        lambda: batches()[:MINILM_CALIBRATION],
        lambda: batches()[MINILM_CALIBRATION:],
        ZOO["minilm"].task,
        head=32,
        long_input=_longer,
    )


def _longer(feed: Feed) -> Feed:
    """Repeat the first text of a batch up to a number of tokens."""
    return {
        name: np.tile(array[:1], (1, -(-LONG_TOKENS // array.shape[1])))[:, :LONG_TOKENS]
        for name, array in feed.items()
    }


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "minilm": _minilm(),
        "bert": _network("bert", NETWORKS["bert"], 32),
        "gpt": _network("gpt", NETWORKS["gpt"], 32),
        "vit": _network("vit", NETWORKS["vit"], 32),
        "deit": _network("deit", FRESH_NETWORKS["deit"], 48),
        "bert, heads of 64": _untrained(3, 64),
        "bert, heads of 96": _untrained(2, 96),
        "bert-large": _network("bert-large", LARGE_NETWORKS["bert-large"], 64, effort="fast"),
    }
)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Write both files of a model, and measure them."""
    FILES.mkdir(parents=True, exist_ok=True)
    subject = SUBJECTS[name]
    source, feeds = subject.write(), subject.held_out()
    stem = name.replace(", ", "-").replace(" ", "-")
    files = {label: FILES / f"{stem}.{label}.onnx" for label in RECIPES}
    counts, verified = {}, {}
    for label, recipe in RECIPES.items():
        data = subject.calibration()
        report = qo.quantize(source, files[label], data, recipe, effort=subject.effort, progress=False)
        counts[label] = sum(line.weight is None for line in report.plan.quantized)
        verified[label] = dt.verify(source, files[label], feeds[:1]).ok
    expected = outputs_of(source, feeds)
    times = cpu_times_in_turns(source, files, feeds[:TIMED_SAMPLES], rounds, THREADS)
    inputs = None if subject.long_input is None else [subject.long_input(feeds[0])]
    long = None if inputs is None else cpu_times_in_turns(source, files, inputs, rounds, THREADS)
    rows = {}
    for label, path in files.items():
        rows[label] = {
            **accuracy(expected, outputs_of(path, feeds), subject.decide),
            "matmuls": counts[label],
            "verified": verified[label],
            "time": times[label],
            "long": None if long is None else long[label],
        }
        print(f"{name}: {label}: {rows[label]}", file=sys.stderr)
    return {"head": subject.head, "rows": rows}


def main() -> None:
    """Measure the models, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    models = {name: measure(name, arguments.rounds) for name in arguments.models}
    models = stored_models(arguments.output) | models  # keep the results of other models
    ordered = {name: models[name] for name in SUBJECTS if name in models}
    result = {"environment": environment(), "rounds": arguments.rounds, "models": ordered}
    write_result(result, arguments.output, indent=2)


if __name__ == "__main__":
    main()
