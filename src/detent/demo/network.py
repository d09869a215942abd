"""Network and data of the demo: digits, the network, and the training loop that float and quantized networks share.

The network has convolutions with batch norm, two depthwise blocks and a classifier, for images of 8 x 8. With 45,434
parameters it trains in seconds, and is deep and narrow enough for 2-bit weights to cost accuracy. The digits are part
of the package; their source and licence are in ``digits/README.md``. While the demo runs, PyTorch is set up so that a
machine computes the same numbers each time.
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

__all__ = ["Course", "Pictures", "calibrated", "logits_of", "make_network", "read_digits", "repeatable"]

SIDE, CLASSES, BRIGHTEST = 8, 10, 16
FILE = "digits/digits.npz"


@dataclass(frozen=True)
class Pictures:
    """Images and what they show.

    Attributes:
        images: (n, 1, 8, 8), float32 from 0 to 1.
        labels: (n,), int64 from 0 to 9.

    >>> train, test = read_digits()
    >>> train.images.shape, test.images.shape, len(train)
    ((1297, 1, 8, 8), (500, 1, 8, 8), 1297)
    >>> [batch.shape for batch in test.first(150).batches(100)]
    [(100, 1, 8, 8), (50, 1, 8, 8)]
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.images.shape != (len(self.labels), 1, SIDE, SIDE):
            raise ShapeError(
                f"{len(self.labels)} labels go with images (n, 1, {SIDE}, {SIDE}), got {self.images.shape}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> "Pictures":
        """The first few of them."""
        return Pictures(self.images[:count], self.labels[:count])

    def batches(self, size: int) -> list[NDArray[np.float32]]:
        """The images in parts; the last one may be smaller."""
        return [self.images[i : i + size] for i in range(0, len(self), size)]


def read_digits() -> tuple[Pictures, Pictures]:
    """Those to train on and those to test on; the latter have 50 of each class.

    Raises:
        FileFormatError: the package's file is damaged.

    >>> [int(count) for count in np.bincount(read_digits()[1].labels)]
    [50, 50, 50, 50, 50, 50, 50, 50, 50, 50]
    """
    try:
        with np.load(io.BytesIO(files("detent.demo").joinpath(FILE).read_bytes()), allow_pickle=False) as stored:
            images, labels, test = (np.asarray(stored[name]) for name in ("images", "labels", "test"))
        return _part(images, labels, ~test), _part(images, labels, test)
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise FileFormatError(f"detent/demo/{FILE} is damaged, install detent again: {error}") from error


def _part(images: NDArray[Any], labels: NDArray[Any], chosen: NDArray[Any]) -> Pictures:
    bright = images[chosen].astype(np.float32) / np.float32(BRIGHTEST)
    return Pictures(bright[:, None], labels[chosen].astype(np.int64))


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """One thread, deterministic algorithms, float32 on the CPU, gradients, and random numbers from the seed.

    One thread is no sacrifice for a small network, and the number of cores then has no part in the numbers.

    >>> before = torch.get_rng_state()
    >>> draws = []
    >>> for _ in range(2):
    ...     with repeatable(7):
    ...         draws.append((torch.rand(1).item(), torch.get_num_threads()))
    >>> draws[0] == draws[1], draws[0][1], torch.equal(before, torch.get_rng_state())
    (True, 1, True)
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.use_deterministic_algorithms, strict, warn_only=warns)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_num_threads, threads)
        stack.callback(set_num_threads, get_num_threads())
        if torch.get_default_device().type != "cpu":  # such a context slows every operation down
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        torch.set_num_threads(1)
        set_num_threads(1)  # for speed alone: two would wait for each other
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices, which are not given back
        yield


WIDTHS = (16, 32, 64, 32)
AREA = 4 * 4  # of what the classifier sees


def make_network() -> nn.Sequential:
    """A new network with random weights; it takes (n, 1, 8, 8) and gives logits (n, 10).

    >>> import torch
    >>> make_network()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> sum(parameter.numel() for parameter in make_network().parameters())
    45434
    """
    first, second, third, hidden = WIDTHS
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
CONTRAST, NOISE = 0.5, 0.2  # how much a training image is varied
DECAY, SMOOTHING = 0.05, 0.1  # of weights and of labels: 1,297 images are few


@dataclass(frozen=True)
class Course:
    """How long to train, on what; AdamW with a cosine to zero.

    Attributes:
        pictures: to train on.
        epochs: how often each of them is seen.
        rate: of AdamW.
        seed: of their order and of how they are varied.

    >>> from detent.demo.network import read_digits
    >>> course = Course(read_digits()[0].first(128), 2, 1e-3, 0)
    >>> steps = []
    >>> _ = course.train(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), lambda: steps.append(1))
    >>> len(steps) == course.steps == 4
    True
    """

    pictures: Pictures
    epochs: int
    rate: float
    seed: int

    @property
    def steps(self) -> int:
        """How many there are in all; the incomplete batch of an epoch is left out."""
        return self.epochs * (len(self.pictures) // BATCH)

    def train(self, model: nn.Sequential, after_step: Callable[[], object]) -> nn.Sequential:
        """The model, trained in place and left in evaluation mode."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.steps, 1))
        model.train()
        for images, labels in self._batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
            schedule.step()
            after_step()
        return model.eval()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images of another contrast each time, with noise: the same ones for everybody."""
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
    """The model prepared in place, with ranges from all pictures.

    >>> from detent.demo.network import read_digits
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> ready = calibrated(model, Recipe.preset("w8a8"), read_digits()[0].first(64))
    >>> bool(ready[1].input_quantizer.is_initialized)
    True
    """
    qt.prepare(model, recipe)
    with qt.calibrating(model):
        for images in pictures.batches(BATCH):
            model(torch.from_numpy(images))
    return model.eval()


def logits_of(model: nn.Sequential, pictures: Pictures) -> Tensor:
    """What the model says of the pictures.

    >>> from detent.demo.network import read_digits
    >>> logits_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), read_digits()[1]).shape
    torch.Size([500, 10])
    """
    model.eval()
    with torch.no_grad():
        said: Tensor = model(torch.from_numpy(pictures.images))
    return said
