"""Generated pictures of shapes with labels, masks, boxes and measures, for all networks on pictures.

A picture has a background of slowly varying color, soft blobs that belong to no class, one shape in front, and noise.
The shape is a disc, a square, a triangle, a ring or a cross, plain or striped: ten classes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
SHAPES, CLASSES = 5, 10
BLOBS = 2
MAX_TILT = 0.35  # radians
MEAN, DEVIATION = 0.5, 0.25


@dataclass(frozen=True)
class Scenes:
    """Pictures and their annotations.

    Attributes:
        pictures: (count, 3, side, side), with a mean near 0 and a deviation near 1.
        labels: (count,), shape and texture as one number below CLASSES.
        masks: (count, 1, side, side), the opacity of the shape from 0 to 1.
        boxes: (count, 4), center x and y, width and height, in pixels.
        measures: (count, 4), radius in pixels, angle in degrees, brightness from 0 to 1, contrast from -1 to 1.
    """

    pictures: Array
    labels: NDArray[np.int64]
    masks: Array
    boxes: Array
    measures: Array


@lru_cache(maxsize=8)
def scenes(count: int, side: int, seed: int) -> Scenes:
    """Draw pictures; the same arguments give the same pictures."""
    rng = np.random.default_rng([seed, side])
    rows, columns = (axis.astype(np.float32) for axis in np.mgrid[:side, :side])
    pictures = np.empty((count, 3, side, side), np.float32)
    masks = np.empty((count, 1, side, side), np.float32)
    labels, boxes, measures = np.empty(count, np.int64), np.empty((count, 4), np.float32), np.empty((count, 4), "f4")
    for i in range(count):
        pictures[i], masks[i, 0], labels[i], boxes[i], measures[i] = _draw(rng, rows, columns)
    return Scenes(pictures, labels, masks, boxes, measures)


def _draw(rng: np.random.Generator, rows: Array, columns: Array) -> tuple[Array, Array, int, Array, Array]:
    side = rows.shape[0]
    corner, slope = rng.uniform(0.2, 0.8, (3, 1, 1)), rng.normal(0, 0.2, (3, 2, 1, 1))
    picture = corner + slope[:, 0] * (rows / side - 0.5) + slope[:, 1] * (columns / side - 0.5)
    for x, y, radius in rng.uniform((0, 0, 0.05), (1, 1, 0.15), (BLOBS, 3)) * side:
        blob = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * radius**2))
        picture = picture + blob * (rng.random((3, 1, 1)) - picture) * rng.uniform(0.3, 0.8)
    radius, angle = rng.uniform(0.18, 0.36) * side, rng.uniform(-MAX_TILT, MAX_TILT)
    x, y = rng.uniform(radius, side - radius, 2)
    u = (np.cos(angle) * (columns - x) + np.sin(angle) * (rows - y)) / radius
    v = (np.cos(angle) * (rows - y) - np.sin(angle) * (columns - x)) / radius
    shape, is_striped = int(rng.integers(SHAPES)), int(rng.integers(2))
    opacity = np.clip(0.5 - _distance(shape, u, v) * radius / 1.5, 0, 1)
    contrast = rng.uniform(0.35, 0.7) * rng.choice([-1, 1])
    color = corner + contrast + rng.normal(0, 0.1, (3, 1, 1))
    texture = 0.5 + 0.5 * np.tanh(3 * np.sin(9 * u)) if is_striped else np.ones_like(u)
    picture = picture + opacity * texture * (color - picture)
    picture = picture + rng.normal(0, rng.uniform(0.01, 0.06), picture.shape)
    inside_rows, inside_columns = np.nonzero(opacity > 0.5)
    edges = inside_columns.min(), inside_rows.min(), inside_columns.max(), inside_rows.max()
    box = np.array([(edges[0] + edges[2]) / 2, (edges[1] + edges[3]) / 2, edges[2] - edges[0], edges[3] - edges[1]])
    measure = np.array([radius, np.degrees(angle), picture.mean(), contrast])
    normalized = (np.clip(picture, 0, 1) - MEAN) / DEVIATION
    return normalized.astype("f4"), opacity.astype("f4"), 2 * shape + is_striped, box.astype("f4"), measure.astype("f4")


def _distance(shape: int, u: Array, v: Array) -> Array:
    """Return the distance from the outline of a shape of radius 1; it is negative inside."""
    across, along = np.abs(u), np.abs(v)
    if shape == 0:
        return np.hypot(u, v) - 1
    if shape == 1:
        return np.maximum(across, along) - 0.85
    if shape == 2:
        return np.maximum(-v - 0.5, 0.866 * across + 0.5 * v - 0.5)
    if shape == 3:
        return np.abs(np.hypot(u, v) - 0.75) - 0.22
    return np.minimum(np.maximum(across - 0.3, along - 1), np.maximum(along - 0.3, across - 1))
