"""QAT defaults: accuracy of ``qt.prepare(model, "w2a2")`` and other presets in an ordinary training loop.

::

    python benchmarks/qat_defaults.py [--quick] [--workers N] [--output FILE]

Two networks: the CNN of the accuracy table on Fashion-MNIST, and a small vision transformer on MNIST. For each seed, a
float network is trained. Then each method continues from its weights for the same number of epochs, with the same
batches in the same order, Adam, and a cosine schedule to zero: float, detent's presets without any option and without
calibration, and plain LSQ (``plain_lsq``). Each seed runs in a process with one thread.
"""

import argparse
import copy
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from plain_lsq import lsq
from qat_accuracy import accuracy, batches, train
from qat_data import PACKAGES, Pair, load
from qat_models import VisionTransformer, digits
from qat_tools import silence_warnings
from run import environment
from torch import nn

import detent as dt
import detent.torch as qt

TASKS = {"cnn": ("fashion", digits), "transformer": ("mnist", VisionTransformer)}
BIT_WIDTHS = (2, 4, 3)
FLOAT, DEFAULT, LSQ = "float, same epochs", "detent, default", "plain LSQ"


@dataclass(frozen=True)
class Budget:
    """Epochs, seeds and training images."""

    epochs: int = 3
    more_epochs: int = 3
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    images: int = 20000


QUICK = Budget(epochs=1, more_epochs=1, seeds=(0,), images=2560)


def measure(task: str, seed: int, budget: Budget) -> list[dict]:
    """Train all methods of one task and seed; return their rows."""
    silence_warnings()
    torch.set_num_threads(1)
    dt.set_num_threads(1)
    data_name, make = TASKS[task]
    data, test = load(data_name)
    data = Pair(data.images[: budget.images], data.labels[: budget.images])
    torch.manual_seed(seed)
    checkpoint = train(make(), data, budget.epochs, seed)
    rows = [{"task": task, "seed": seed, "method": "float", "bits": None, "accuracy": accuracy(checkpoint, test)}]
    for method, bits in [(FLOAT, None), *((method, bits) for bits in BIT_WIDTHS for method in (DEFAULT, LSQ))]:
        start = time.process_time()
        model = _prepared(copy.deepcopy(checkpoint), method, bits, data, seed)
        train(model, data, budget.more_epochs, seed + 100)
        if method == DEFAULT:
            qt.freeze(model)
        row = {"task": task, "seed": seed, "method": method, "bits": bits, "accuracy": accuracy(model, test)}
        rows.append(row | {"cpu_seconds": round(time.process_time() - start, 1)})
        print(f"{task} seed {seed}: {method} {bits or 32} bits {row['accuracy']:.2f} %", file=sys.stderr, flush=True)
    return rows


def _prepared(model: nn.Module, method: str, bits: int | None, data: Pair, seed: int) -> nn.Module:
    if method == DEFAULT:
        return qt.prepare(model, f"w{bits}a{bits}")
    if method == LSQ:
        example, _ = next(batches(data, 1000 * (seed + 100)))
        return lsq(model, example, bits)
    return model


def main() -> None:
    """Run the benchmark; the results are written after each seed."""
    parser = argparse.ArgumentParser(description="Accuracy of detent's default settings for QAT.")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, few images")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    budget = QUICK if arguments.quick else Budget()
    for name, _ in TASKS.values():
        load(name)  # download before the processes start
    result = environment() | {
        "quick": arguments.quick,
        "packages": {name: PACKAGES[name] for name, _ in TASKS.values()},
    }
    result |= {"epochs": budget.epochs, "more_epochs": budget.more_epochs, "images": budget.images, "rows": []}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(measure, task, seed, budget) for seed in budget.seeds for task in TASKS]
        for job in as_completed(jobs):
            result["rows"] += job.result()
            result["rows"].sort(key=lambda row: (row["task"], row["seed"]))
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
