"""The search for max_drop compared with an exhaustive search, on three small classifiers.

::

    python benchmarks/max_drop.py [--networks A B] [--output FILE]

Each network is trained for seconds, and has at most ten layers. ``qe.quantize_and_evaluate`` quantizes it at w8a8 and
w4a8 with ``max_drop``. Then all 2^n - 1 sets of layers in float that leave a layer quantized are measured, on the same
search samples and with the same criterion. The best of them has the fewest bytes of weights. Whether the limit is met
is decided on evaluation samples that neither search has seen.

The limits are tight, so that most searches have something to do. Progress goes to stderr.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations, pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import torch
from networks.scenes import scenes
from networks.series import FIELD_VALUES, tables
from numpy.typing import NDArray
from results_file import write_result
from run import environment
from torch import nn

import detent.evaluate as qe
from detent.demo.network import read_digits, repeatable
from detent.onnx import accuracy_passes
from detent.onnx.metric_search import MetricSearch, Trials, search_float_layers

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]
LIMITS = {"w8a8": 0.005, "w4a8": 0.01}
EVALUATION_BATCH, CALIBRATION_BATCH, TRAINING_BATCH = 20, 16, 64
CALIBRATION_SAMPLES = 256
MAX_POWER = 4  # of the factors of channels
FILES = Path(__file__).parent / ".cache" / "max_drop"
NO_CHECKS = qe.Checks(verify=True, time=False, sensitivity=False)


@dataclass(frozen=True)
class Classifier:
    """A classifier: functions that build it, and that return data for training, calibration and evaluation.

    After training, the hidden channels between some linear layers get very different scales. The network computes the
    same, but is harder to quantize. ``outliers`` are the numbers of the linear layers before such channels.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Labelled, Labelled, Labelled]]
    epochs: int
    outliers: tuple[int, ...] = ()


def mlp(*widths: int) -> nn.Module:
    """Build an MLP with Relu between its layers."""
    layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for i, (before, after) in enumerate(pairwise(widths)):
        layers += [(f"fc{i}", nn.Linear(before, after)), (f"relu{i}", nn.ReLU())]
    return nn.Sequential(OrderedDict(layers[:-1]))


def cnn() -> nn.Module:
    """Build a CNN of three convolutions and four linear layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise([3, 24, 32, 48]):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, mlp(48 * 9, 96, 64, 32, 10))


def digits_data() -> tuple[Labelled, Labelled, Labelled]:
    """Return the digits of the demo: 700 for training and calibration, and 1,097 for evaluation."""
    train, test = read_digits()
    images, labels = np.concatenate([train.images, test.images]), np.concatenate([train.labels, test.labels])
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    used = images[:700], labels[:700]
    return used, used, (images[700:], labels[700:])


def scenes_data() -> tuple[Labelled, Labelled, Labelled]:
    """Return generated pictures of 24 x 24 pixels."""
    train, calibration, evaluation = (scenes(count, 24, seed) for count, seed in ((6000, 3), (256, 1), (4000, 2)))
    return tuple((each.pictures, each.labels) for each in (train, calibration, evaluation))  # type: ignore[return-value]


def tables_data() -> tuple[Labelled, Labelled, Labelled]:
    """Return generated rows of tables: numbers of very different ranges, and categories as one-hot vectors."""

    def part(count: int, seed: int) -> Labelled:
        numbers, fields, labels = tables(count, 24, seed)
        one_hot = np.eye(FIELD_VALUES, dtype=np.float32)[fields].reshape(count, -1)
        return np.concatenate([numbers, one_hot], axis=1).astype(np.float32), labels

    return part(6000, 3), part(256, 1), part(4000, 2)


def tables_mlp() -> nn.Module:
    """Build an MLP for the rows of tables."""
    return mlp(tables_data()[1][0].shape[1], 96, 96, 64, 64, 32, 4)


CLASSIFIERS = {
    "digits": Classifier(lambda: mlp(64, 128, 96, 64, 64, 48, 10), digits_data, 30, (1, 3)),
    "scenes": Classifier(cnn, scenes_data, 24),
    "tables": Classifier(tables_mlp, tables_data, 15, (0, 2)),
}


def trained(name: str, data: Labelled) -> onnx.ModelProto:
    """Return the ONNX model of a classifier; train it if its file does not exist yet."""
    path = FILES / f"{name}.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(exported(train(CLASSIFIERS[name], data), data[0]), path)
    return onnx.load(path)


def train(classifier: Classifier, data: Labelled) -> nn.Module:
    """Train a classifier with AdamW and a learning rate that falls to zero."""
    with repeatable(0):
        model = classifier.build()
        x, labels = map(torch.from_numpy, data)
        steps = classifier.epochs * (len(x) // TRAINING_BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        for _ in range(classifier.epochs):
            for chosen in torch.randperm(len(x))[: len(x) // TRAINING_BATCH * TRAINING_BATCH].split(TRAINING_BATCH):
                loss = nn.functional.cross_entropy(model(x[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    rescale(model, classifier.outliers)
    return model.eval()


@torch.no_grad()
def rescale(model: nn.Module, numbers: Sequence[int]) -> None:
    """Multiply the channels after some linear layers by powers of two, and divide the next weights by them."""
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    for number in numbers:
        first, second = linear[number], linear[number + 1]
        powers = np.random.default_rng(number).integers(-MAX_POWER, MAX_POWER + 1, first.out_features)
        factors = torch.from_numpy(np.exp2(powers).astype(np.float32))
        first.weight *= factors[:, None]
        first.bias *= factors
        second.weight /= factors


def exported(model: nn.Module, x: NDArray[np.float32]) -> onnx.ModelProto:
    """Export a model with a dynamic batch axis."""
    file, axes = BytesIO(), {"x": {0: "n"}, "y": {0: "n"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch
        options = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes, "dynamo": False}
        torch.onnx.export(model, (torch.from_numpy(x[:2]),), file, **options)
    return onnx.load_from_string(file.getvalue())


@dataclass
class Exhaustive:
    """Runs the search, then measures all sets of layers on the same trials."""

    best: int = 0
    sets: int = 0
    seconds: float = 0.0

    def __call__(
        self, candidates: Sequence[str], start: Iterable[str], trials: Trials, max_drop: float
    ) -> MetricSearch:
        """Return the result of the search, and keep the bytes of the best set."""
        search = search_float_layers(candidates, start, trials, max_drop)
        begin = time.perf_counter()
        sizes = []
        for count in range(len(candidates)):
            for layers in map(frozenset, combinations(candidates, count)):
                if trials.is_quantized(layers):
                    self.sets += 1
                    if trials.result(layers).largest_drop <= max_drop + 1e-9:
                        sizes.append(trials.nbytes(layers))
        self.best, self.seconds = min(sizes, default=0), time.perf_counter() - begin
        return search


def measure(name: str, recipe: str, model: onnx.ModelProto, calibration: Labelled, evaluation: Labelled) -> dict:
    """Quantize a classifier with max_drop, and compare the result with the exhaustive search."""
    exhaustive = Exhaustive()
    images = calibration[0][:CALIBRATION_SAMPLES]
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(accuracy_passes, "search_float_layers", exhaustive),
    ):
        start = time.perf_counter()
        done = qe.quantize_and_evaluate(
            model,
            Path(directory, "model.onnx"),
            np.array_split(images, len(images) // CALIBRATION_BATCH),
            recipe,
            checks=NO_CHECKS,
            metric="top1",
            max_drop=LIMITS[recipe],
            eval_data=np.array_split(evaluation[0], len(evaluation[0]) // EVALUATION_BATCH),
            labels=evaluation[1],
        )
        seconds = time.perf_counter() - start - exhaustive.seconds
    search, metric = done.result.search, done.accuracy.metric
    if search is None or metric is None or done.verification is None:
        raise RuntimeError("nothing was measured")
    row = {
        "network": name,
        "recipe": recipe,
        "layers": len(done.result.layers),
        "max_drop": search.max_drop,
        "float_layers": list(search.layers),
        "steps": [str(step) for step in search.steps],
        "search": {"before": search.before.to_dict(), "after": search.after.to_dict(), "is_met": search.is_met},
        "evaluation": metric.to_dict(),
        "is_met": metric.drop <= search.max_drop,
        "verified": done.verification.ok,
        "nbytes_float": done.result.plan.nbytes_before,
        "nbytes_before": search.nbytes_before,
        "nbytes_after": search.nbytes_after,
        "nbytes_best": exhaustive.best,
        "trials": search.trials,
        "sets": exhaustive.sets,
        "seconds": round(seconds, 1),
        "exhaustive_seconds": round(exhaustive.seconds, 1),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(CLASSIFIERS), choices=list(CLASSIFIERS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows = []
    for name in arguments.networks:
        training, calibration, evaluation = CLASSIFIERS[name].data()
        model = trained(name, training)
        rows += [measure(name, recipe, model, calibration, evaluation) for recipe in LIMITS]
    write_result({"environment": environment(), "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
