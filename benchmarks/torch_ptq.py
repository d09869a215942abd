"""PTQ of PyTorch modules: SQNR of files from ``qt.quantize``, compared with plain calibration and with ``qo.quantize``.

::

    python benchmarks/torch_ptq.py [--networks A B] [--recipes R S] [--output FILE]

Each network is trained for seconds, and calibrated with 32 samples. Then three files are written:

plain   ``qt.prepare`` with Fixed scales and ``qt.calibrating``, then ``qt.export_onnx``
torch   ``qt.quantize``, then ``qt.export_onnx``
onnx    ``qo.quantize`` of the float ONNX export, for target onnxruntime, with default settings

ONNX Runtime runs each file on held-out samples. ``dt.verify`` compares the first two files with their modules. The exit
code is 1 if a file of ``qt.quantize`` fails verification, or is more than 1 dB below that of ``qo.quantize`` at w8a8.
``qo.quantize`` also quantizes operators between layers and prefers 7-bit weights, so its files are faster.

Results are written after each row; rows in FILE that are not measured again are kept.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from networks import NETWORKS
from results_file import write_result
from run import environment
from torch import Tensor, nn

import detent as dt
import detent.onnx as qo
import detent.torch as qt
from detent.demo.network import TrainingRun, make_network, read_digits, repeatable
from detent.metrics import SignalNoise
from detent.onnx_model import make_session

DEMO = "demo"
DEFAULT = (DEMO, "tcn", "separable-outliers", "squeezenet", "tables")
RECIPES = ("w8a8", "w4a8")
SAMPLES, MAX_HELD_OUT = 32, 128
MAX_BELOW_ONNX_DB = 1.0
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """A trained model, with calibration batches and held-out batches."""

    model: nn.Module
    calibration: Sequence[Batch]
    held_out: Sequence[Batch]

    @property
    def example(self) -> Batch:
        """Two calibration batches as one."""
        return tuple(torch.cat(parts) for parts in zip(*self.calibration[:2], strict=True))


@dataclass(frozen=True)
class Row:
    """SQNR of the worst output of each file in dB, on held-out samples."""

    network: str
    recipe: str
    plain_db: float
    torch_db: float
    onnx_db: float
    verified: bool

    @property
    def is_good(self) -> bool:
        """Whether the file of ``qt.quantize`` meets the goals."""
        return self.verified and (self.recipe != "w8a8" or self.torch_db >= self.onnx_db - MAX_BELOW_ONNX_DB)


def subject(name: str) -> Subject:
    """Train a network, and generate its data."""
    if name != DEMO:
        network = NETWORKS[name]
        parts = network.calibration_feeds(), network.held_out_feeds()[:MAX_HELD_OUT]
        batches = [[tuple(map(torch.from_numpy, feed.values())) for feed in part] for part in parts]
        return Subject(network.make(), *batches)
    train, test = read_digits()
    with repeatable(0):
        model = make_network()
        TrainingRun(train, epochs=8, rate=3e-3, seed=0).train(model, lambda: None)
    images = torch.from_numpy(train.images[:SAMPLES]), torch.from_numpy(test.images[:MAX_HELD_OUT])
    return Subject(model, *([(each[i : i + 1],) for i in range(len(each))] for each in images))


def calibrated(model: nn.Module, batches: Sequence[Batch], recipe: str) -> nn.Module:
    """Prepare and calibrate a copy of a model."""
    prepared = qt.prepare(copy.deepcopy(model), dt.Recipe.preset(recipe, mode=dt.Fixed()))
    with qt.calibrating(prepared):
        for batch in batches:
            prepared(*batch)
    return prepared


def float_onnx(model: nn.Module, example: Batch) -> onnx.ModelProto:
    """Convert a float model to ONNX, with a dynamic batch axis."""
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
    return qt.program_to_onnx(torch.export.export(model, example, dynamic_shapes=shapes))


def sqnr_db(path: Path, model: nn.Module, batches: Sequence[Batch]) -> float:
    """Run a file in ONNX Runtime, and return the SQNR of its worst output."""
    session = make_session(path)
    names = [each.name for each in session.get_inputs()]
    powers: list[SignalNoise] = []
    for batch in batches:
        with torch.no_grad():
            result = model(*batch)
        expected = list(result) if isinstance(result, tuple | list) else [result]
        got = session.run(None, {name: each.numpy() for name, each in zip(names, batch, strict=True)})
        powers = powers or [SignalNoise() for _ in expected]
        for power, x, y in zip(powers, expected, got, strict=True):
            power.add(np.ascontiguousarray(x.numpy()), np.ascontiguousarray(y))
    return min(power.sqnr_db for power in powers)


def measure(name: str, given: Subject, recipe: str, directory: Path) -> Row:
    """Write the three files of a network and a recipe, and evaluate them."""
    quantized = qt.quantize(copy.deepcopy(given.model), given.calibration, recipe)
    modules = {"plain": calibrated(given.model, given.calibration, recipe), "torch": quantized}
    paths = {
        label: qt.export_onnx(module, given.example, directory / f"{name}-{recipe}-{label}.onnx")
        for label, module in modules.items()
    }
    data = [tuple(each.numpy() for each in batch) for batch in given.calibration]
    paths["onnx"] = directory / f"{name}-{recipe}-onnx.onnx"
    qo.quantize(float_onnx(given.model, given.example), paths["onnx"], data, recipe, progress=False)
    values = {f"{label}_db": round(sqnr_db(path, given.model, given.held_out), 2) for label, path in paths.items()}
    is_ok = all(dt.verify(modules[label], paths[label], given.calibration[:1]).ok for label in modules)
    return Row(name, recipe, **values, verified=is_ok)


def _write(rows: Sequence[Row], output: Path) -> None:
    """Write the rows, and keep the other rows of the file."""
    stored = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.is_file() else []
    merged = {(row["network"], row["recipe"]): row for row in [*stored, *map(asdict, rows)]}
    ordered = sorted(merged.values(), key=lambda row: ((DEMO, *NETWORKS).index(row["network"]), -ord(row["recipe"][1])))
    write_result({"environment": environment(), "samples": SAMPLES, "rows": ordered}, output)


def main() -> int:
    """Measure all networks, print a row for each, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=DEFAULT, choices=(DEMO, *NETWORKS))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for name in options.networks:
            given = subject(name)
            for recipe in options.recipes:
                rows.append(measure(name, given, recipe, Path(directory)))
                print(rows[-1], file=sys.stderr)
                if options.output is not None:
                    _write(rows, options.output)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
