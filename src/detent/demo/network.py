"""Network and data of the demo: digits, the network, and the training loop for float and quantized networks.

The network has convolutions with batch norm, two depthwise blocks and a classifier, for images of 8 x 8 pixels. It has
45,434 parameters and trains in seconds. It is so deep and narrow that 2-bit weights reduce its accuracy. The images of
digits are part of the package; their source and license are in ``digits/README.md``.
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import detent.torch as qt
from detent.errors import FileFormatError, ShapeError
from detent.kernels import get_num_threads, set_num_threads
from detent.recipe import Recipe

__all__ = ["Pictures", "TrainingRun", "calibrated", "logits_of", "make_network", "read_digits", "repeatable"]

SIDE, CLASSES, BRIGHTEST = 8, 10, 16
FILE = "digits/digits.npz"


@dataclass(frozen=True)
class Pictures:
    """Images and their labels."""

    images: NDArray[np.float32]  # (n, 1, 8, 8), from 0 to 1
    labels: NDArray[np.int64]  # (n,), from 0 to 9

    def __post_init__(self) -> None:
        if self.images.shape != (len(self.labels), 1, SIDE, SIDE):
            raise ShapeError(
                f"got images of shape {self.images.shape} for {len(self.labels)} labels, expected images of shape "
                f"({len(self.labels)}, 1, {SIDE}, {SIDE})"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> "Pictures":
        """Return the first ``count`` images and labels."""
        return Pictures(self.images[:count], self.labels[:count])

    def batches(self, size: int) -> list[NDArray[np.float32]]:
        """Return the images in batches; the last batch may be smaller."""
        return [self.images[i : i + size] for i in range(0, len(self), size)]


def read_digits() -> tuple[Pictures, Pictures]:
    """Return the training images and the test images; each class has 50 test images."""
    try:
        with np.load(io.BytesIO(files("detent.demo").joinpath(FILE).read_bytes()), allow_pickle=False) as stored:
            images, labels, test = (np.asarray(stored[name]) for name in ("images", "labels", "test"))
        return _part(images, labels, ~test), _part(images, labels, test)
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise FileFormatError(f"cannot read detent/demo/{FILE} ({error}): reinstall detent") from error


def _part(images: NDArray[Any], labels: NDArray[Any], chosen: NDArray[Any]) -> Pictures:
    bright = images[chosen].astype(np.float32) / np.float32(BRIGHTEST)
    return Pictures(bright[:, None], labels[chosen].astype(np.int64))


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Make PyTorch reproducible: one thread, deterministic algorithms, float32 on the CPU, and a fixed seed."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.use_deterministic_algorithms, strict, warn_only=warns)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_num_threads, threads)
        stack.callback(set_num_threads, get_num_threads())
        if torch.get_default_device().type != "cpu":  # a device context slows every operation down
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        torch.set_num_threads(1)
        set_num_threads(1)  # only for speed: detent's kernels return the same results with any number of threads
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        # torch.manual_seed would seed all devices, but this fork_rng restores only the CPU
        torch.default_generator.manual_seed(seed)
        yield


CHANNELS = (16, 32, 64, 32)
AREA = 4 * 4  # pixels per channel after the last convolution


def make_network() -> nn.Sequential:
    """Create the network with random weights; it maps images of shape (n, 1, 8, 8) to logits of shape (n, 10)."""
    first, second, third, hidden = CHANNELS
    layers: list[tuple[str, nn.Module]] = [
        *_norm_and_relu("conv1", nn.Conv2d(1, first, 3, padding=1, bias=False)),
        *_norm_and_relu("conv2", nn.Conv2d(first, second, 3, padding=1, bias=False)),
        *_norm_and_relu("depthwise3", nn.Conv2d(second, second, 3, stride=2, padding=1, groups=second, bias=False)),
        *_norm_and_relu("pointwise3", nn.Conv2d(second, third, 1, bias=False)),
        *_norm_and_relu("depthwise4", nn.Conv2d(third, third, 3, padding=1, groups=third, bias=False)),
        *_norm_and_relu("pointwise4", nn.Conv2d(third, third, 1, bias=False)),
        ("flatten", nn.Flatten()),
        ("hidden", nn.Linear(third * AREA, hidden)),
        ("hidden_relu", nn.ReLU()),
        ("classifier", nn.Linear(hidden, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _norm_and_relu(name: str, layer: nn.Conv2d) -> list[tuple[str, nn.Module]]:
    return [(name, layer), (f"{name}_norm", nn.BatchNorm2d(layer.out_channels)), (f"{name}_relu", nn.ReLU())]


BATCH = 64
CONTRAST, NOISE = 0.5, 0.2  # augmentation: range of the contrast, standard deviation of the noise
WEIGHT_DECAY, LABEL_SMOOTHING = 0.05, 0.1  # strong regularization, since there are only 1,297 training images


@dataclass(frozen=True)
class TrainingRun:
    """A training run with AdamW and a learning rate that falls to zero on a cosine schedule."""

    pictures: Pictures
    epochs: int
    rate: float
    seed: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps; the incomplete last batch of an epoch is skipped."""
        return self.epochs * (len(self.pictures) // BATCH)

    def train(self, model: nn.Sequential, after_step: Callable[[], object]) -> nn.Sequential:
        """Train the model in place and return it in evaluation mode."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.steps, 1))
        model.train()
        for images, labels in self._batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            optimizer.step()
            schedule.step()
            after_step()
        return model.eval()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of augmented images (random contrast and noise) and labels, the same for all networks."""
        numbers = torch.Generator().manual_seed(self.seed)
        images, labels = torch.from_numpy(self.pictures.images), torch.from_numpy(self.pictures.labels)
        for _ in range(self.epochs):
            order = torch.randperm(len(labels), generator=numbers)
            for i in range(len(labels) // BATCH):
                chosen = order[i * BATCH : (i + 1) * BATCH]
                contrast = 1 + CONTRAST * (torch.rand(len(chosen), 1, 1, 1, generator=numbers) - 0.5)
                noise = NOISE * torch.randn(images[chosen].shape, generator=numbers)
                yield contrast * images[chosen] + noise, labels[chosen]


def calibrated(model: nn.Sequential, recipe: Recipe, pictures: Pictures) -> nn.Sequential:
    """Prepare the model in place, calibrate it on all images, and return it in evaluation mode."""
    qt.prepare(model, recipe)
    with qt.calibrating(model):
        for images in pictures.batches(BATCH):
            model(torch.from_numpy(images))
    return model.eval()


def logits_of(model: nn.Sequential, pictures: Pictures) -> Tensor:
    """Return the outputs of the model in evaluation mode."""
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(torch.from_numpy(pictures.images))
    return logits
