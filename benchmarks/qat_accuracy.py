"""What quantization-aware training is worth: test accuracy at 8, 4, 3 and 2 bits, from the same float checkpoint.

::

    python benchmarks/qat_accuracy.py [--quick] [--data mnist|fashion] [--peers] [--output FILE]

For each seed a float network is trained, and everything else starts from its weights: the float network trained on,
post-training quantization, and quantization-aware training with moving averages and with learned scales, all with the
same number of epochs, the same batches in the same order, and Adam at 1e-3 with a cosine to zero. With ``--peers``,
those that take convolutions train by the same rules, at 4 and 2 bits. The distinct values that enter every convolution
and matrix product are counted on the trained network, so that the bits claimed are the bits used.

Each seed has a process with one thread of its own: faster than two threads for one small network, and repeatable.
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
from qat_peers import PREPARERS, quieten, versions
from qat_values import products
from run import surroundings
from torch import Tensor, nn

import detent as dt
import detent.torch as qt

BATCH, RATE = 128, 1e-3
CALIBRATED = 16
COUNTED = 1000
PEERS, PEER_WIDTHS = ("torch.ao FX", "brevitas"), (4, 2)
MODES = {"EMA": dt.EMA(0.99), "learned": dt.Learned()}


@dataclass(frozen=True)
class Budget:
    """How long to train, on how much, how often, and at which widths."""

    epochs: int = 3
    more_epochs: int = 2
    seeds: tuple[int, ...] = (0, 1)
    pictures: int = 60000
    widths: tuple[int, ...] = (8, 4, 3, 2)


QUICK = Budget(epochs=1, more_epochs=1, seeds=(0,), pictures=6400, widths=(8, 2))


def batches(data: Pair, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch, in an order that depends on the seed alone; the incomplete batch is left out."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    for chosen in order[: len(data) - len(data) % BATCH].split(BATCH):
        yield data.pictures[chosen], data.labels[chosen]


def train(model: nn.Module, data: Pair, epochs: int, seed: int) -> nn.Module:
    """Adam with a cosine to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(data) // BATCH))
    model.train()
    for epoch in range(epochs):
        for pictures, labels in batches(data, 1000 * seed + epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
            schedule.step()
    return model


def accuracy(model: nn.Module, data: Pair) -> float:
    """The percentage of pictures that are told right."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(pictures).argmax(1) == labels).sum())
            for pictures, labels in zip(data.pictures.split(1000), data.labels.split(1000), strict=True)
        )
    return 100 * right / len(data)


def calibrated(model: nn.Module, recipe: dt.Recipe, data: Pair, seed: int) -> nn.Module:
    """The model prepared, with ranges from the first batches of the seed's first epoch."""
    qt.prepare(model, recipe)
    model.eval()
    with torch.no_grad(), qt.calibrating(model):
        for _, (pictures, _) in zip(range(CALIBRATED), batches(data, 1000 * seed), strict=False):
            model(pictures)
    return model


@dataclass(frozen=True)
class Race:
    """Everything that starts from one float checkpoint."""

    checkpoint: nn.Module
    data: Pair
    test: Pair
    seed: int
    epochs: int

    def runs(self, widths: tuple[int, ...], peers: bool) -> Iterator[tuple[str, int | None, Callable[[], nn.Module]]]:
        """The method, the width, and what gives the network to test."""
        yield "float", None, self.start
        yield "float, trained on", None, lambda: self.trained(self.start())
        for bits in widths:
            yield "PTQ", bits, lambda bits=bits: self.quantized(bits)
            for mode in MODES:
                yield f"QAT, {mode}", bits, lambda bits=bits, mode=mode: self.aware(bits, mode)
        for peer in PEERS if peers else ():
            for bits in PEER_WIDTHS:
                yield peer, bits, lambda bits=bits, peer=peer: self.by_peer(bits, peer)

    def start(self) -> nn.Module:
        """The float checkpoint."""
        return copy.deepcopy(self.checkpoint)

    def trained(self, model: nn.Module) -> nn.Module:
        """The model after the epochs that everybody gets."""
        return train(model, self.data, self.epochs, self.seed + 100)

    def quantized(self, bits: int) -> nn.Module:
        """Quantized after training."""
        recipe = dt.Recipe.preset(f"w{bits}a{bits}")
        return _frozen(calibrated(self.start(), recipe, self.data, self.seed))

    def aware(self, bits: int, mode: str) -> nn.Module:
        """Trained with quantization."""
        recipe = dt.Recipe.preset(f"w{bits}a{bits}", mode=MODES[mode])
        return _frozen(self.trained(calibrated(self.start(), recipe, self.data, self.seed)))

    def by_peer(self, bits: int, peer: str) -> nn.Module:
        """Trained with quantization by somebody else."""
        example, _ = next(batches(self.data, 1000 * self.seed))
        model = self.trained(PREPARERS[peer](self.start().train(), example, bits))
        if peer == "torch.ao FX":
            model.apply(torch.ao.quantization.disable_observer)  # they would go on in evaluation
        return model


def _frozen(model: nn.Module) -> nn.Module:
    qt.freeze(model)
    return model


def measure(name: str, seed: int, budget: Budget, peers: bool) -> tuple[list[dict], list[str]]:
    """The rows of one seed, and what was skipped."""
    quieten()
    torch.set_num_threads(1)
    dt.set_num_threads(1)
    data, test = load(name)
    data = Pair(data.pictures[: budget.pictures], data.labels[: budget.pictures])
    torch.manual_seed(seed)
    start = time.monotonic()
    checkpoint = train(digits(), data, budget.epochs, seed)
    print(f"seed {seed}: float trained in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    rows, skipped = [], []
    for method, bits, make in Race(checkpoint, data, test, seed, budget.more_epochs).runs(budget.widths, peers):
        start = time.monotonic()
        try:
            model = make()
        except SkippedError as why:
            skipped.append(str(why))
            continue
        row = {"seed": seed, "method": method, "bits": bits, "accuracy": round(accuracy(model, test), 3)}
        row |= {"seconds": round(time.monotonic() - start, 1), "products": products(model, test.pictures[:COUNTED])}
        rows.append(row)
        values = [f"{product['inputs']}/{product['weights']}" for product in row["products"]]
        label = f"seed {seed}: {method} {bits or 32} bits"
        print(f"{label:<36}{row['accuracy']:>8.2f} %{row['seconds']:>8.0f} s  {' '.join(values)}", flush=True)
    return rows, skipped


def main() -> None:
    """Run everything and write the file."""
    parser = argparse.ArgumentParser(description="The accuracy of quantization-aware training.")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, a tenth of the pictures, two widths")
    parser.add_argument("--data", default="fashion", choices=list(PACKAGES), help="what to learn")
    parser.add_argument("--peers", action="store_true", help="train those too that are installed")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    budget = QUICK if given.quick else Budget()
    load(given.data)  # fetched before two processes want it
    result = surroundings() | {"quick": given.quick, "data": given.data, "package": PACKAGES[given.data]}
    result["versions"] |= versions()
    result |= {"epochs": budget.epochs, "more_epochs": budget.more_epochs, "pictures": budget.pictures}
    result |= {"seeds": list(budget.seeds), "skipped": [], "rows": []}
    with ProcessPoolExecutor(len(budget.seeds), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(measure, given.data, seed, budget, given.peers) for seed in budget.seeds]
        for rows, skipped in (job.result() for job in jobs):
            result["rows"] += rows
            result["skipped"] += skipped
    for why in dict.fromkeys(result["skipped"]):
        print(f"skipped: {why}")
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
