"""QAT defaults: accuracy of ``qt.prepare(model, "w2a2")`` and other presets in an ordinary training loop.

::

    python benchmarks/qat_defaults.py [--quick] [--workers N] [--tasks ...] [--seeds ...] [--parts DIR] [--output FILE]

Two networks: the CNN of the accuracy table on Fashion-MNIST, and a small vision transformer on MNIST. For each seed, a
float network is trained. Then each method continues from its weights for the same number of epochs, with the same
batches in the same order, Adam, and a cosine schedule to zero: float, detent's presets without any option and without
calibration, and plain LSQ (``plain_lsq``). Each seed runs in a process with one thread.

With ``--parts``, each finished run (a task, seed, method and bit width) is a JSON file in that directory, and a float
checkpoint is kept beside it. A later call skips finished runs, so that the benchmark can be stopped at any time and
done in pieces. The rows of all finished runs are written to the output file.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
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
from safetensors.torch import load_file, save
from torch import nn

import detent as dt
import detent.torch as qt
from detent.storage import write_atomic

TASKS = {"cnn": ("fashion", digits), "transformer": ("mnist", VisionTransformer)}
BIT_WIDTHS = (2, 4, 3)
FLOAT, DEFAULT, LSQ = "float, same epochs", "detent, default", "plain LSQ"
START = ("float", None)  # the checkpoint from which all methods continue


@dataclass(frozen=True)
class Budget:
    """Epochs, seeds and training images."""

    epochs: int = 3
    more_epochs: int = 3
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    images: int = 20000


QUICK = Budget(epochs=1, more_epochs=1, seeds=(0,), images=2560)


Run = tuple[str, int | None]  # method and bits
RUNS: tuple[Run, ...] = ((FLOAT, None), *((method, bits) for bits in BIT_WIDTHS for method in (DEFAULT, LSQ)))


@dataclass(frozen=True)
class Parts:
    """Files of finished runs in a directory; without a directory, nothing is kept."""

    directory: Path | None
    budget: Budget

    def row(self, task: str, seed: int, run: Run) -> dict | None:
        """Return the row of a finished run; None if it is not finished, or had another budget."""
        path = self._path(task, seed, run)
        if path is None or not path.exists():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["row"] if stored["budget"] == self._key() else None

    def keep(self, task: str, seed: int, run: Run, row: dict) -> None:
        """Write the row of a finished run."""
        path = self._path(task, seed, run)
        if path is not None:
            write_atomic(path, json.dumps({"budget": self._key(), "row": row}, indent=1).encode())

    def checkpoint(self, task: str, seed: int, train_float: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
        """Return the trained float model, from its file if there is one."""
        if self.directory is None:
            return train_float()
        path = self.directory / f"{task}-{seed}-{self._digest()}.safetensors"
        if path.exists():
            model.load_state_dict(load_file(path))
            return model
        trained = train_float()
        write_atomic(path, save(trained.state_dict()))
        return trained

    def _path(self, task: str, seed: int, run: Run) -> Path | None:
        method, bits = run
        name = f"{task}-{seed}-{method.replace(', ', '-').replace(' ', '-')}-{bits or 32}.json"
        return None if self.directory is None else self.directory / name

    def _key(self) -> dict:
        return {"epochs": self.budget.epochs, "more_epochs": self.budget.more_epochs, "images": self.budget.images}

    def _digest(self) -> str:
        return "-".join(str(each) for each in self._key().values())


def measure(task: str, seed: int, budget: Budget, directory: Path | None = None) -> list[dict]:
    """Train all methods of one task and seed, unless they are finished; return their rows."""
    silence_warnings()
    torch.set_num_threads(1)
    dt.set_num_threads(1)
    parts = Parts(directory, budget)
    finished = {run: parts.row(task, seed, run) for run in (START, *RUNS)}
    if all(row is not None for row in finished.values()):
        return [row for row in finished.values() if row is not None]
    data_name, make = TASKS[task]
    data, test = load(data_name)
    data = Pair(data.images[: budget.images], data.labels[: budget.images])
    torch.manual_seed(seed)
    checkpoint = parts.checkpoint(task, seed, lambda: train(make(), data, budget.epochs, seed), make())
    rows = []
    for run in (START, *RUNS):
        row = finished[run]
        if row is None:
            row = _row(task, seed, run, checkpoint, data, test, budget)
            parts.keep(task, seed, run, row)
        rows.append(row)
    return rows


def _row(task: str, seed: int, run: Run, checkpoint: nn.Module, data: Pair, test: Pair, budget: Budget) -> dict:
    """Train one method, and return its row."""
    method, bits = run
    row = {"task": task, "seed": seed, "method": method, "bits": bits}
    if run == START:
        return row | {"accuracy": accuracy(checkpoint, test)}
    start = time.process_time()
    model = _prepared(copy.deepcopy(checkpoint), method, bits, data, seed)
    train(model, data, budget.more_epochs, seed + 100)
    if method == DEFAULT:
        qt.freeze(model)
    row["accuracy"] = accuracy(model, test)
    print(f"{task} seed {seed}: {method} {bits or 32} bits {row['accuracy']:.2f} %", file=sys.stderr, flush=True)
    return row | {"cpu_seconds": round(time.process_time() - start, 1)}


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
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all")
    parser.add_argument("--parts", type=Path, help="directory of finished runs, to continue later")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    budget = QUICK if arguments.quick else Budget()
    if arguments.parts:
        arguments.parts.mkdir(parents=True, exist_ok=True)
    for name, _ in TASKS.values():
        load(name)  # download before the processes start
    result = environment() | {
        "quick": arguments.quick,
        "packages": {name: PACKAGES[name] for name, _ in TASKS.values()},
    }
    result |= {"epochs": budget.epochs, "more_epochs": budget.more_epochs, "images": budget.images, "rows": []}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        seeds = arguments.seeds or budget.seeds
        jobs = [pool.submit(measure, task, seed, budget, arguments.parts) for seed in seeds for task in arguments.tasks]
        for job in as_completed(jobs):
            result["rows"] += job.result()
            result["rows"].sort(key=lambda row: (row["task"], row["seed"]))
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
