"""Pictures: the digits that are part of the package, in two parts. Source and licence are in ``digits/README.md``."""

import io
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import FileFormatError, ShapeError

__all__ = ["Pictures", "read_digits"]

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
