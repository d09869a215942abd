"""Generated pictures of textures, with labels and masks: a textured region in front of a smooth background.

The textures are stripes, checks, dots, rings, bricks, zigzags, clouds and crossed lines: eight classes. Their periods
are measured in pixels, so a network that learns from small pictures works on large ones.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
TEXTURES = 8
MIN_PERIOD, MAX_PERIOD = 5.0, 11.0  # pixels
MAX_TILT = 0.4  # radians
MEAN, DEVIATION = 0.5, 0.25


@dataclass(frozen=True)
class Textures:
    """Pictures and their annotations.

    Attributes:
        pictures: (count, 3, side, side), with a mean near 0 and a deviation near 1.
        labels: (count,), the texture of the region.
        masks: (count, 1, side, side), 1 inside the region and 0 outside, with soft edges.
    """

    pictures: Array
    labels: NDArray[np.int64]
    masks: Array


@lru_cache(maxsize=8)
def textures(count: int, side: int, seed: int) -> Textures:
    """Draw pictures; the same arguments give the same pictures."""
    rng = np.random.default_rng([seed, side, 31])
    rows, columns = (axis.astype(np.float32) for axis in np.mgrid[:side, :side])
    labels = rng.integers(TEXTURES, size=count)
    drawn = [_draw(rng, int(label), rows, columns) for label in labels]
    pictures, masks = (np.stack(part).astype(np.float32) for part in zip(*drawn, strict=True))
    return Textures((np.clip(pictures, 0, 1) - MEAN) / np.float32(DEVIATION), labels, masks[:, None])


def _draw(rng: np.random.Generator, label: int, rows: Array, columns: Array) -> tuple[Array, Array]:
    side = rows.shape[0]
    slope = rng.normal(0, 0.25, (3, 2, 1, 1))
    background = rng.uniform(0.2, 0.8, (3, 1, 1)) + slope[:, 0] * rows / side + slope[:, 1] * columns / side
    y, x = rng.uniform(0.35, 0.65, 2) * side
    height, width = rng.uniform(0.3, 0.55, 2) * side
    far = np.hypot((rows - y) / height, (columns - x) / width)
    mask = np.clip((1.1 - far) * side / 4, 0, 1)
    dark, bright = rng.uniform(0, 0.4, (3, 1, 1)), rng.uniform(0.55, 1, (3, 1, 1))
    surface = dark + _texture(rng, label, rows, columns) * (bright - dark)
    picture = background + mask * (surface - background)
    return picture + rng.normal(0, rng.uniform(0.01, 0.05), picture.shape), mask


def _texture(rng: np.random.Generator, label: int, rows: Array, columns: Array) -> Array:
    """Return the brightness of a texture from 0 to 1."""
    angle, shift = rng.uniform(-MAX_TILT, MAX_TILT), rng.uniform(0, 50, 2)
    scale = 2 * np.pi / rng.uniform(MIN_PERIOD, MAX_PERIOD)
    u = scale * (np.cos(angle) * columns + np.sin(angle) * rows + shift[0])
    v = scale * (np.cos(angle) * rows - np.sin(angle) * columns + shift[1])
    waves = (
        lambda: np.sin(u),
        lambda: 2 * np.sin(u / 1.5) * np.sin(v / 1.5),
        lambda: np.cos(u) + np.cos(v) - 0.8,
        lambda: np.sin(scale * np.hypot(rows - rows.mean(), columns - columns.mean()) + shift[0]),
        lambda: 0.9 - np.maximum(np.cos(v), np.cos(u / 2 + np.pi * (np.floor(v / (2 * np.pi)) % 2)) - 0.05),
        lambda: np.sin(v + 2 * np.abs((u / np.pi) % 2 - 1)),
        lambda: 2 * _clouds(rng, rows.shape[0]),
        lambda: np.maximum(np.sin(u), np.sin(v)) - 0.4,
    )
    return np.asarray(0.5 + 0.5 * np.tanh(2.5 * waves[label]()))


def _clouds(rng: np.random.Generator, side: int) -> Array:
    """Return smooth noise: random values whose high frequencies are removed."""
    frequencies = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    spectrum = np.fft.rfft2(rng.normal(size=(side, side))) * np.exp(-((frequencies * 7) ** 2))
    noise = np.fft.irfft2(spectrum, (side, side))
    return np.asarray(noise / noise.std())
