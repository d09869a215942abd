"""Measures of how well an output of a quantized model agrees with the same output of the float model.

Each output has one measure. It is chosen by the shape and the values of the float outputs on the first batches: the
first row of this table that fits. SQNR is measured for every float output in addition.

============================ ============ =========================================================================
measure                      shape        condition
============================ ============ =========================================================================
equal share                  any          integers or booleans
top-1 agreement              (N, C)       probabilities or log-probabilities of C classes; or any other numbers with
                                          at most 10,000 columns, unless they are vectors of length 1, boxes, or the
                                          largest number is in the same column in all of 16 or more rows
top-1 agreement per position (N, T, C)    class scores over C
top-1 agreement per pixel    (N, C, H, W) class scores over C
IoU                          (N, ..., H)  a mask: at least 90 % of the values are within 0.1 of 0 or 1, and both
                                          occur. For one channel, also logits of such a mask
cosine                       (N, ..., D)  two or three axes, and vectors of length 1, or D >= 32 with both signs
relative error               any          all other outputs
============================ ============ =========================================================================

For outputs with more than two axes, class scores are probabilities, log-probabilities or logits. Logits are numbers
from -100 to 100. Their largest softmax probability has a mean of at least 0.75 (0.3 from 32 classes on), and is not
always in the same place. Boxes are four numbers that are not negative, and at most 1 or ordered (x1 <= x2, y1 <= y2).

Values alone do not always tell embeddings and regressions from scores. If the choice is wrong, pass ``metric=``.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COSINE",
    "EQUAL_SHARE",
    "IOU",
    "RELATIVE_ERROR",
    "TOP1",
    "Measure",
    "OutputScore",
    "choose_measure",
    "have_probabilities",
    "mask_threshold",
    "predicted_classes",
    "rows_depend_on_data",
]

Array = NDArray[Any]
Sums = tuple[float, float]

MAX_CLASSES = 10_000  # an output of two axes with more columns is not treated as class scores
MAX_ABS_LOGIT = 100.0  # larger numbers are coordinates rather than logits
MIN_CONFIDENCE, MIN_CONFIDENCE_MANY = 0.75, 0.3  # mean largest probability of logits: few classes, many classes
MANY_CLASSES = 32  # standard normal numbers have a mean largest probability of 0.73 at 2 classes, and 0.16 at 32
MIN_ROWS_CONSTANT = 16  # with at least this many rows, a largest column that never changes says nothing
MIN_EMBEDDING = 32  # elements of a vector
MASK_MARGIN, MIN_MASK_SHARE = 0.1, 0.9
MAX_ROWS, MAX_VALUES = 1 << 16, 1 << 20  # rows and numbers on which the choice of a measure is based
TOLERANCE = 1e-3  # of sums of probabilities, and of lengths of vectors
BOX_SIZES = 4


@dataclass(frozen=True)
class OutputScore:
    """Value of the measure that fits one output.

    Attributes:
        measure: name of the measure, such as "top-1 agreement".
        value: value of the measure on all batches.

    >>> str(OutputScore("top-1 agreement", 0.9925)), str(OutputScore("relative error", 0.0123))
    ('99.25 %', '0.0123')
    """

    measure: str
    value: float

    def __str__(self) -> str:
        return f"{100 * self.value:.2f} %" if self.measure in PERCENT else f"{self.value:.4g}"


@dataclass(frozen=True)
class Measure:
    """A measure: ``sums`` of a batch are added over batches, and ``value`` turns them into the result.

    ``sums`` gets the float output, the quantized output, and the threshold of masks. ``fits`` says whether the measure
    suits the float outputs of the first batches.
    """

    name: str
    fits: Callable[[Sequence[Array]], bool]
    sums: Callable[[Array, Array, float], Sums]
    value: Callable[[float, float], float]


def choose_measure(outputs: Sequence[Array]) -> Measure:
    """Choose the measure of an output from its float values on some batches; see the module docstring.

    >>> choose_measure([np.float32([[0.1, 0.9], [0.7, 0.3]])]).name, choose_measure([np.array([3, 1])]).name
    ('top-1 agreement', 'equal share')
    """
    filled = [x for x in outputs if x.size]
    return next((measure for measure in MEASURES if measure.fits(filled)), RELATIVE_ERROR) if filled else RELATIVE_ERROR


def predicted_classes(scores: Array) -> Array:
    """Return the classes with the largest scores: over axis 1 of (N, C) and (N, C, H, W), over the last of (N, T, C).

    >>> predicted_classes(np.float32([[[0, 1, 0], [5, 1, 2]]]))
    array([[1, 0]])
    """
    classes: Array = np.argmax(scores, axis=-1 if scores.ndim == 3 else 1)
    return classes


def mask_threshold(outputs: Sequence[Array]) -> float:
    """Return the threshold of masks: 0.5 if all float values are from 0 to 1, and 0 for logits."""
    return 0.5 if all(x.min() >= 0 and x.max() <= 1 for x in outputs if x.size) else 0.0


def rows_depend_on_data(rows: Collection[tuple[int, int]]) -> bool:
    """Return whether the number of rows of an output depends on the data, as after NonMaxSuppression.

    ``rows`` has the number of rows and the number of samples of each batch. The number of rows does not depend on the
    data if it is constant, or proportional to the number of samples.

    >>> rows_depend_on_data([(3, 1), (5, 1)]), rows_depend_on_data([(12, 4), (6, 2)])
    (True, False)
    """
    return len({count for count, _ in rows}) > 1 and len({count / max(samples, 1) for count, samples in rows}) > 1


def have_probabilities(outputs: Sequence[Array]) -> bool:
    """Return whether outputs are probabilities or log-probabilities of classes.

    If their number of rows depends on the data, each row is then a step or a token. Rows of other numbers are objects
    such as boxes, which may change places.

    >>> have_probabilities([np.float32([[0.1, 0.9], [0.7, 0.3]])]), have_probabilities([np.float32([[3, 4]])])
    (True, False)
    """
    filled = [x for x in outputs if x.size]
    if not filled or filled[0].dtype.kind != "f" or filled[0].ndim not in {2, 3, 4}:
        return False
    rows = _rows(filled, filled[0].ndim, axis=1 if filled[0].ndim == 4 else -1)
    return rows is not None and rows.shape[1] >= 2 and _are_probabilities(rows)


# Conditions


def _are_integers(outputs: Sequence[Array]) -> bool:
    return outputs[0].dtype.kind != "f"


def _are_scores(outputs: Sequence[Array]) -> bool:
    """Whether outputs of shape (N, C) have one score per class in each row."""
    rows = _rows(outputs, 2)
    if rows is None or not 2 <= rows.shape[1] <= MAX_CLASSES:
        return False
    if _are_probabilities(rows):
        return True
    is_constant = len(rows) >= MIN_ROWS_CONSTANT and len(np.unique(rows.argmax(axis=1))) == 1
    return not (is_constant or _are_boxes(rows) or _have_length_one(rows))


def _are_scores_by_position(outputs: Sequence[Array]) -> bool:
    return _are_clear_scores(_rows(outputs, 3))


def _are_scores_by_pixel(outputs: Sequence[Array]) -> bool:
    return _are_clear_scores(_rows(outputs, 4, axis=1))


def _are_clear_scores(rows: Array | None) -> bool:
    """Whether rows are class scores beyond doubt: probabilities, log-probabilities or confident logits."""
    if rows is None or rows.shape[1] < 2:
        return False
    if _are_probabilities(rows):
        return True
    if not np.abs(rows).max() <= MAX_ABS_LOGIT or _are_boxes(rows) or len(np.unique(rows.argmax(axis=1))) == 1:
        return False
    largest = 1 / np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)
    return float(largest.mean()) >= (MIN_CONFIDENCE if rows.shape[1] < MANY_CLASSES else MIN_CONFIDENCE_MANY)


def _are_probabilities(rows: Array) -> bool:
    """Whether rows are probabilities or log-probabilities of classes."""
    if rows.min() >= -TOLERANCE:
        return bool((np.abs(rows.sum(axis=1) - 1) <= TOLERANCE).all())
    return bool(rows.max() <= TOLERANCE and (np.abs(np.exp(rows).sum(axis=1) - 1) <= TOLERANCE).all())


def _are_boxes(rows: Array) -> bool:
    if rows.shape[1] != BOX_SIZES or rows.min() < 0:
        return False
    return bool(rows.max() <= 1 or (rows[:, :2] <= rows[:, 2:]).all())


def _have_length_one(rows: Array) -> bool:
    return bool((np.abs(np.linalg.norm(rows, axis=1) - 1) <= TOLERANCE).all())


def _are_masks(outputs: Sequence[Array]) -> bool:
    if any(x.ndim < 3 for x in outputs):
        return False
    step = -(-sum(x.size for x in outputs) // MAX_VALUES)
    values = np.concatenate([x.ravel()[::step] for x in outputs]).astype(np.float64)
    if not np.isfinite(values).all():
        return False
    if values.min() < 0 or values.max() > 1:
        has_one_channel = all(x.ndim == 3 or 1 in {x.shape[1], x.shape[-1]} for x in outputs)
        if not has_one_channel or np.abs(values).max() > MAX_ABS_LOGIT:
            return False
        values = 1 / (1 + np.exp(-values))
    near_zero, near_one = values <= MASK_MARGIN, values >= 1 - MASK_MARGIN
    return bool((near_zero | near_one).mean() >= MIN_MASK_SHARE and near_zero.any() and near_one.any())


def _are_embeddings(outputs: Sequence[Array]) -> bool:
    rows = _rows(outputs, outputs[0].ndim) if outputs[0].ndim in {2, 3} else None
    if rows is None or rows.shape[1] < 2:
        return False
    has_both_signs = rows.shape[1] >= MIN_EMBEDDING and rows.min() < 0 < rows.max()
    return bool(has_both_signs or _have_length_one(rows))


def _rows(outputs: Sequence[Array], rank: int, axis: int = -1) -> Array | None:
    """Return the vectors along an axis as float64 rows; None for another rank, varying sizes, or NaN."""
    if any(x.ndim != rank or not x.size for x in outputs) or len({x.shape[axis] for x in outputs}) > 1:
        return None
    step = -(-sum(x.size // x.shape[axis] for x in outputs) // MAX_ROWS)
    parts = [np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])[::step] for x in outputs]
    rows = np.concatenate(parts).astype(np.float64)
    return rows if np.isfinite(rows).all() else None


# Sums and values


def _equal_classes(x: Array, y: Array, _threshold: float) -> Sums:
    return _equal(predicted_classes(x), predicted_classes(y), _threshold)


def _equal(x: Array, y: Array, _threshold: float) -> Sums:
    return float(np.count_nonzero(x == y)), float(x.size)


def _overlap(x: Array, y: Array, threshold: float) -> Sums:
    a, b = x > threshold, y > threshold
    return float(np.count_nonzero(a & b)), float(np.count_nonzero(a | b))


def _cosines(x: Array, y: Array, _threshold: float) -> Sums:
    a, b = (each.reshape(-1, each.shape[-1]) for each in (x, y))
    products, first, second = (np.einsum("ij,ij->i", *pair, dtype=np.float64) for pair in ((a, b), (a, a), (b, b)))
    lengths = np.sqrt(first) * np.sqrt(second)
    is_zero = lengths == 0  # as in metrics.cosine: 1 if both vectors are zero, 0 if only one is
    cosines = products / np.where(is_zero, 1, lengths)
    return float(np.where(is_zero, (first == 0) & (second == 0), cosines).sum()), float(len(a))


def _powers(x: Array, y: Array, _threshold: float) -> Sums:
    with np.errstate(over="ignore", invalid="ignore"):  # outputs may be infinite
        difference, signal = (x - y).ravel(), x.ravel()
        noise, power = (np.einsum("i,i->", each, each, dtype=np.float64) for each in (difference, signal))
    return float(noise), float(power)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _root_ratio(noise: float, signal: float) -> float:
    return sqrt(noise / signal) if signal else float(noise > 0)


EQUAL_SHARE = Measure("equal share", _are_integers, _equal, _share)
TOP1 = Measure("top-1 agreement", _are_scores, _equal_classes, _share)
TOP1_BY_POSITION = Measure("top-1 agreement per position", _are_scores_by_position, _equal_classes, _share)
TOP1_BY_PIXEL = Measure("top-1 agreement per pixel", _are_scores_by_pixel, _equal_classes, _share)
IOU = Measure("IoU", _are_masks, _overlap, _share)
COSINE = Measure("cosine", _are_embeddings, _cosines, _share)
RELATIVE_ERROR = Measure("relative error", lambda _: True, _powers, _root_ratio)
MEASURES = (EQUAL_SHARE, TOP1, TOP1_BY_POSITION, TOP1_BY_PIXEL, IOU, COSINE, RELATIVE_ERROR)
PERCENT = {EQUAL_SHARE.name, TOP1.name, TOP1_BY_POSITION.name, TOP1_BY_PIXEL.name}
