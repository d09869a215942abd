"""QAT defaults: accuracy of ``qt.prepare(model, "w2a2")`` and other presets in an ordinary training loop.

::

    python benchmarks/qat_defaults.py [--quick] [--workers N] [--tasks ...] [--seeds ...] [--bits ...] [--parts DIR]
                                      [--output FILE]

Two networks: the CNN of the accuracy table on Fashion-MNIST, and a small vision transformer on MNIST. For each seed, a
float network is trained. Then each method continues from its weights for the same number of epochs, with the same
batches in the same order, Adam, and a cosine schedule to zero: float, detent's presets without any option and without
calibration, plain LSQ (``plain_lsq``), and brevitas (``make bench-tools``). At 8 bits, detent trains with float
products and with integer products. Each seed runs in a process with one thread.

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
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from case import SkippedError
from plain_lsq import lsq
from qat_accuracy import accuracy, batches, train
from qat_data import PACKAGES, Pair, load
from qat_models import VisionTransformer, digits
from qat_tools import PREPARERS, silence_warnings, versions
from run import environment
from safetensors.torch import load_file, save
from torch import nn

import detent as dt
import detent.torch as qt
from detent.storage import write_atomic

FLOAT, DEFAULT, INTEGER = "float, same epochs", "detent, default", "detent, integer products"
LSQ, BREVITAS = "plain LSQ", "brevitas"
BIT_WIDTHS = (2, 8, 4, 3)  # in the order in which they run


@dataclass(frozen=True)
class Task:
    """A network, its data, and the budget of all methods.

    Attributes:
        data: name of the data set.
        make: creates the float network.
        epochs: epochs of float training.
        more_epochs: epochs of each method, from the float network.
        images: number of training images.
        size: images in a batch.
        rate: first learning rate.
    """

    data: str
    make: Callable[[], nn.Module]
    epochs: int
    more_epochs: int
    images: int
    size: int
    rate: float

    def budget(self, *, quick: bool) -> dict[str, float]:
        """Return everything that determines the result of a run, besides the network and the data."""
        numbers = {key: value for key, value in asdict(self).items() if key not in ("data", "make")}
        return numbers | ({"epochs": 1, "more_epochs": 1, "images": 2560} if quick else {})


TASKS = {
    "cnn": Task("fashion", digits, epochs=3, more_epochs=3, images=20000, size=128, rate=1e-3),
    "transformer": Task("mnist", VisionTransformer, epochs=5, more_epochs=4, images=20000, size=64, rate=2e-3),
}
SEEDS = (0, 1, 2, 3, 4)
Run = tuple[str, int | None]  # method and bits
START: Run = ("float", None)  # the checkpoint from which all methods continue


def runs_of(bits: int) -> list[Run]:
    """Return the runs of one bit width, and those that every bit width is compared with."""
    methods = (DEFAULT, INTEGER) if bits == 8 else (DEFAULT, LSQ, BREVITAS)
    return [START, (FLOAT, None), *((method, bits) for method in methods)]


@dataclass(frozen=True)
class Parts:
    """Files of finished runs in a directory; without a directory, nothing is kept."""

    directory: Path | None
    budget: dict[str, float]

    def row(self, task: str, seed: int, run: Run) -> dict | None:
        """Return the row of a finished run; None if it is not finished, or had another budget."""
        path = self._path(task, seed, run)
        if path is None or not path.exists():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["row"] if stored["budget"] == self.budget else None

    def keep(self, task: str, seed: int, run: Run, row: dict) -> None:
        """Write the row of a finished run."""
        path = self._path(task, seed, run)
        if path is not None:
            write_atomic(path, json.dumps({"budget": self.budget, "row": row}, indent=1).encode())

    def checkpoint(self, task: str, seed: int, train_float: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
        """Return the trained float model, from its file if there is one."""
        if self.directory is None:
            return train_float()
        path = self.directory / f"{task}-{seed}-{'-'.join(map(str, self.budget.values()))}.safetensors"
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


def measure(name: str, seed: int, bits: int, *, quick: bool, directory: Path | None) -> list[dict]:
    """Train all methods of one task, seed and bit width, unless they are finished; return their rows."""
    silence_warnings()
    torch.set_num_threads(1)
    dt.set_num_threads(1)
    task = TASKS[name]
    budget = task.budget(quick=quick)
    parts = Parts(directory, budget)
    finished = {run: parts.row(name, seed, run) for run in runs_of(bits)}
    if all(row is not None for row in finished.values()):
        return [row for row in finished.values() if row is not None]
    data, test = load(task.data)
    images = int(budget["images"])
    data = Pair(data.images[:images], data.labels[:images])
    torch.manual_seed(seed)

    def train_for(model: nn.Module, epochs: float, order: int) -> nn.Module:
        return train(model, data, int(epochs), order, size=task.size, rate=task.rate)

    checkpoint = parts.checkpoint(name, seed, lambda: train_for(task.make(), budget["epochs"], seed), task.make())
    rows = []
    for run, row in finished.items():
        if row is None:
            row = {"task": name, "seed": seed, "method": run[0], "bits": run[1]}  # noqa: PLW2901
            start = time.process_time()
            try:
                model = _prepared(copy.deepcopy(checkpoint), run, next(batches(data, 1000 * (seed + 100)))[0])
                if run != START:
                    train_for(model, budget["more_epochs"], seed + 100)
                if run[0] in (DEFAULT, INTEGER):
                    qt.freeze(model)
                row |= {"accuracy": accuracy(model, test), "cpu_seconds": round(time.process_time() - start, 1)}
            except SkippedError as error:
                print(error, file=sys.stderr)
                continue
            print(
                f"{name} seed {seed}: {run[0]} {run[1] or 32} bits {row['accuracy']:.2f} %", file=sys.stderr, flush=True
            )
            parts.keep(name, seed, run, row)
        rows.append(row)
    return rows


def _prepared(model: nn.Module, run: Run, example: torch.Tensor) -> nn.Module:
    method, bits = run
    if method in (DEFAULT, INTEGER):
        return qt.prepare(model, f"w{bits}a{bits}", arithmetic="float" if method == DEFAULT else "integer")
    if method == LSQ:
        return lsq(model, example, bits)
    return model if bits is None else PREPARERS[method](model.train(), example, bits)


def main() -> None:
    """Run the benchmark; the results are written after each task, seed and bit width."""
    parser = argparse.ArgumentParser(description="Accuracy of detent's default settings for QAT.")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, few images")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all")
    parser.add_argument("--bits", type=int, nargs="+", choices=BIT_WIDTHS, default=BIT_WIDTHS, help="default: all")
    parser.add_argument("--parts", type=Path, help="directory of finished runs, to continue later")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.parts:
        arguments.parts.mkdir(parents=True, exist_ok=True)
    for task in TASKS.values():
        load(task.data)  # download before the processes start
    tasks = {
        name: task.budget(quick=arguments.quick) | {"data": task.data, "package": PACKAGES[task.data]}
        for name, task in TASKS.items()
    }
    result = environment() | {"quick": arguments.quick, "tasks": tasks, "tools": versions(), "rows": []}
    seeds = arguments.seeds or (SEEDS[:1] if arguments.quick else SEEDS)
    settings = {"quick": arguments.quick, "directory": arguments.parts}
    rows: dict[tuple, dict] = {}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(measure, task, seed, bits, **settings)
            for bits in arguments.bits
            for seed in seeds
            for task in arguments.tasks
        ]
        for job in as_completed(jobs):
            rows |= {(row["task"], row["seed"], row["bits"] or 32, row["method"]): row for row in job.result()}
            result["rows"] = [rows[key] for key in sorted(rows)]
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
