"""QAT accuracy: test accuracy at 8, 4, 3 and 2 bits, starting from the same float checkpoint.

::

    python benchmarks/qat_accuracy.py [--quick] [--data mnist|fashion] [--other-tools] [--output FILE]

For each seed, a float network is trained. Four methods start from its weights: more float training, post-training
quantization, QAT with EMA ranges, and QAT with learned scales. Methods that train use the same number of epochs, the
same batches in the same order, Adam, and a cosine schedule from 1e-3 to zero. With ``--other-tools``, tools that
support convolutions train in the same way at 4 and 2 bits. In the trained network, the distinct values that enter every
convolution and matmul are counted, to check that no tool uses more bits than it claims.

Each seed runs in a separate process with one thread. This is reproducible, and for a small network faster than two
threads.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from case import SkippedError
from qat_data import PACKAGES, Pair, load
from qat_models import digits
from qat_tools import PREPARERS, silence_warnings, versions
from qat_values import count_values
from run import environment
from torch import Tensor, nn

import detent as dt
import detent.torch as qt

BATCH_SIZE, LEARNING_RATE = 128, 1e-3
CALIBRATION_BATCHES = 16
COUNTED_IMAGES = 1000  # for the distinct values
OTHER_TOOLS, OTHER_TOOLS_BITS = ("torch.ao FX", "brevitas"), (4, 2)
MODES = {"EMA": dt.EMA(0.99), "learned": dt.Learned()}


@dataclass(frozen=True)
class Budget:
    """Epochs, seeds, training images and bit widths."""

    epochs: int = 3
    more_epochs: int = 2
    seeds: tuple[int, ...] = (0, 1)
    images: int = 60000
    bit_widths: tuple[int, ...] = (8, 4, 3, 2)


QUICK = Budget(epochs=1, more_epochs=1, seeds=(0,), images=6400, bit_widths=(8, 2))


def batches(data: Pair, seed: int, size: int = BATCH_SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch, in an order that depends only on the seed. An incomplete batch is dropped."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    for chosen in order[: len(data) - len(data) % size].split(size):
        yield data.images[chosen], data.labels[chosen]


def train(
    model: nn.Module, data: Pair, epochs: int, seed: int, *, size: int = BATCH_SIZE, rate: float = LEARNING_RATE
) -> nn.Module:
    """Train with Adam, batches of ``size`` images, and a cosine schedule from ``rate`` to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(data) // size))
    model.train()
    for epoch in range(epochs):
        for images, labels in batches(data, 1000 * seed + epoch, size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    return model


def accuracy(model: nn.Module, data: Pair) -> float:
    """Return the percentage of images that are classified correctly."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(images).argmax(1) == labels).sum())
            for images, labels in zip(data.images.split(1000), data.labels.split(1000), strict=True)
        )
    return 100 * right / len(data)


def calibrate(model: nn.Module, recipe: dt.Recipe, data: Pair, seed: int) -> nn.Module:
    """Prepare the model, and calibrate it on the first batches of the seed's first epoch."""
    qt.prepare(model, recipe)
    model.eval()
    with torch.no_grad(), qt.calibrating(model):
        for _, (images, _) in zip(range(CALIBRATION_BATCHES), batches(data, 1000 * seed), strict=False):
            model(images)
    return model


@dataclass(frozen=True)
class Methods:
    """All methods, starting from one float checkpoint."""

    checkpoint: nn.Module
    data: Pair
    test: Pair
    seed: int
    epochs: int

    def runs(
        self, bit_widths: tuple[int, ...], other_tools: bool
    ) -> Iterator[tuple[str, int | None, Callable[[], nn.Module]]]:
        """Yield each method, its bits, and a function that returns the network to test."""
        yield "float", None, self.start
        yield "float, same epochs", None, lambda: self.trained(self.start())
        for bits in bit_widths:
            yield "PTQ", bits, lambda bits=bits: self.quantized(bits)
            for mode in MODES:
                yield f"QAT, {mode}", bits, lambda bits=bits, mode=mode: self.aware(bits, mode)
        for tool in OTHER_TOOLS if other_tools else ():
            for bits in OTHER_TOOLS_BITS:
                yield tool, bits, lambda bits=bits, tool=tool: self.by_tool(bits, tool)

    def start(self) -> nn.Module:
        """Return a copy of the float checkpoint."""
        return copy.deepcopy(self.checkpoint)

    def trained(self, model: nn.Module) -> nn.Module:
        """Train a model for the number of epochs that all methods use."""
        return train(model, self.data, self.epochs, self.seed + 100)

    def quantized(self, bits: int) -> nn.Module:
        """Quantize the checkpoint after training, with detent."""
        recipe = dt.Recipe.preset(f"w{bits}a{bits}")
        return _frozen(calibrate(self.start(), recipe, self.data, self.seed))

    def aware(self, bits: int, mode: str) -> nn.Module:
        """Train with detent's QAT."""
        recipe = dt.Recipe.preset(f"w{bits}a{bits}", mode=MODES[mode])
        return _frozen(self.trained(calibrate(self.start(), recipe, self.data, self.seed)))

    def by_tool(self, bits: int, tool: str) -> nn.Module:
        """Train with the QAT of another tool."""
        example, _ = next(batches(self.data, 1000 * self.seed))
        model = self.trained(PREPARERS[tool](self.start().train(), example, bits))
        if tool == "torch.ao FX":
            model.apply(torch.ao.quantization.disable_observer)  # they would update ranges in evaluation
        return model


def _frozen(model: nn.Module) -> nn.Module:
    qt.freeze(model)
    return model


def measure(name: str, seed: int, budget: Budget, other_tools: bool) -> tuple[list[dict], list[str]]:
    """Measure one seed; return its rows, and the reasons why methods were skipped."""
    silence_warnings()
    torch.set_num_threads(1)
    dt.set_num_threads(1)
    data, test = load(name)
    data = Pair(data.images[: budget.images], data.labels[: budget.images])
    torch.manual_seed(seed)
    start = time.monotonic()
    checkpoint = train(digits(), data, budget.epochs, seed)
    print(f"seed {seed}: float trained in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    rows, skipped = [], []
    for method, bits, make in Methods(checkpoint, data, test, seed, budget.more_epochs).runs(
        budget.bit_widths, other_tools
    ):
        start = time.monotonic()
        try:
            model = make()
        except SkippedError as reason:
            skipped.append(str(reason))
            continue
        row = {"seed": seed, "method": method, "bits": bits, "accuracy": round(accuracy(model, test), 3)}
        row |= {
            "seconds": round(time.monotonic() - start, 1),
            "distinct_values": count_values(model, test.images[:COUNTED_IMAGES]),
        }
        rows.append(row)
        values = [f"{layer['inputs']}/{layer['weights']}" for layer in row["distinct_values"]]
        label = f"seed {seed}: {method} {bits or 32} bits"
        print(f"{label:<36}{row['accuracy']:>8.2f} %{row['seconds']:>8.0f} s  {' '.join(values)}", flush=True)
    return rows, skipped


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Accuracy of quantization-aware training.")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one epoch, a tenth of the images, two bit widths"
    )
    parser.add_argument("--data", default="fashion", choices=list(PACKAGES), help="data set")
    parser.add_argument("--other-tools", action="store_true", help="train with other tools too, if installed")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    budget = QUICK if arguments.quick else Budget()
    load(arguments.data)  # download before the processes start
    result = environment() | {"quick": arguments.quick, "data": arguments.data, "package": PACKAGES[arguments.data]}
    result["versions"] |= versions()
    result |= {"epochs": budget.epochs, "more_epochs": budget.more_epochs, "images": budget.images}
    result |= {"seeds": list(budget.seeds), "skipped": [], "rows": []}
    with ProcessPoolExecutor(len(budget.seeds), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(measure, arguments.data, seed, budget, arguments.other_tools) for seed in budget.seeds]
        for rows, skipped in (job.result() for job in jobs):
            result["rows"] += rows
            result["skipped"] += skipped
    for reason in dict.fromkeys(result["skipped"]):
        print(f"skipped: {reason}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
