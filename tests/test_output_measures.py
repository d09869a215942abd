"""The measure of an output fits its shape and values."""

import numpy as np
import pytest

from detent.metrics import OutputComparison
from detent.output_measures import MEASURES, RELATIVE_ERROR, choose_measure, mask_threshold, predicted_classes

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (scale * RNG.normal(size=shape)).astype(np.float32)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def ordered_boxes(count):
    corner = RNG.uniform(0, 500, size=(count, 2))
    return np.concatenate([corner, corner + RNG.uniform(1, 99, size=(count, 2))], axis=1).astype(np.float32)


def constant_top(*shape):
    x = normal(*shape)
    x[..., 2] += 50
    return x


MASK = (RNG.random((2, 1, 16, 16)) > 0.5).astype(np.float32)


@pytest.mark.parametrize(
    ("output", "measure"),
    [
        (normal(20, 10), "top-1 agreement"),
        (softmax(normal(20, 10)), "top-1 agreement"),
        (np.log(softmax(normal(20, 10))), "top-1 agreement"),
        (softmax(constant_top(20, 10)), "top-1 agreement"),
        (constant_top(15, 10), "top-1 agreement"),
        (constant_top(16, 10), "relative error"),
        (constant_top(16, 64), "cosine"),
        (unit(normal(20, 8)), "cosine"),
        (np.eye(4, dtype=np.float32), "top-1 agreement"),
        (normal(20, 4), "top-1 agreement"),
        (RNG.random((20, 4)).astype(np.float32), "relative error"),
        (ordered_boxes(20), "relative error"),
        (normal(20, 1), "relative error"),
        (normal(8, 10_001), "cosine"),
        (softmax(normal(2, 7, 5)), "top-1 agreement per position"),
        (normal(2, 7, 50, scale=9), "top-1 agreement per position"),
        (normal(2, 7, 384), "cosine"),
        (constant_top(2, 7, 384), "cosine"),
        (normal(2, 7, 3, scale=500), "relative error"),
        (ordered_boxes(20)[None], "relative error"),
        (normal(2, 9, 8, 8, scale=9), "top-1 agreement per pixel"),
        (softmax(normal(2, 3, 8, 8), axis=1), "top-1 agreement per pixel"),
        (RNG.random((2, 3, 8, 8)).astype(np.float32), "relative error"),
        (normal(2, 3, 8, 8), "relative error"),
        (MASK, "IoU"),
        (12 * MASK - 6, "IoU"),
        (12 * MASK[:, 0] - 6, "IoU"),
        (np.zeros((2, 1, 8, 8), np.float32), "relative error"),
        (normal(2, 1, 8, 8), "relative error"),
        (np.full((20, 10), np.nan, np.float32), "relative error"),
        (np.array([3, 4]), "equal share"),
        (np.array([[True]]), "equal share"),
        (np.float32(3.0).reshape(()), "relative error"),
    ],
    ids=lambda each: each if isinstance(each, str) else str(each.shape),
)
def test_the_measure_fits_shape_and_values(output, measure):
    assert choose_measure([output]).name == measure


def test_rows_of_different_sizes_are_no_scores():
    assert choose_measure([normal(3, 10), normal(3, 11)]).name == "relative error"


@pytest.mark.parametrize(
    ("measure", "x", "y", "value"),
    [
        ("top-1 agreement", [[1, 2], [3, 0]], [[1, 0], [3, 0]], 0.5),
        ("top-1 agreement per position", [[[1, 2], [3, 0]]], [[[1, 0], [3, 0]]], 0.5),
        ("top-1 agreement per pixel", [[[[0.0, 5]], [[1, 1]]]], [[[[0.0, 0]], [[1, 1]]]], 0.5),
        ("IoU", [1.0, 1, 0, 0], [1.0, 0, 1, 0], 1 / 3),
        ("IoU", [0.0, 0], [0.0, 0], 1.0),
        ("cosine", [[3.0, 4], [1, 0]], [[6.0, 8], [0, 1]], 0.5),
        ("cosine", [[0.0, 0], [0, 0]], [[0.0, 0], [0, 1]], 0.5),
        ("equal share", [1, 2, 3, 4], [1, 2, 3, 5], 0.75),
        ("relative error", [3.0, 4.0], [3.0, 3.5], 0.1),
        ("relative error", [0.0], [0.0], 0.0),
        ("relative error", [0.0], [1.0], 1.0),
    ],
)
def test_values(measure, x, y, value):
    row = next(each for each in MEASURES if each.name == measure)
    assert row.value(*row.sums(np.array(x), np.array(y), 0.5)) == pytest.approx(value)


def test_threshold_of_masks():
    assert mask_threshold([MASK]) == 0.5
    assert mask_threshold([MASK, 12 * MASK - 6]) == 0.0


def test_classes_of_pixels_are_on_axis_one():
    assert predicted_classes(normal(2, 5, 4, 3)).shape == (2, 4, 3)
    assert predicted_classes(normal(2, 4, 3)).shape == (2, 4)


def test_the_first_batches_choose_the_measure():
    """One box looks like class scores; eight boxes do not."""
    comparison, boxes = OutputComparison(["boxes"]), ordered_boxes(9)[:, [2, 3, 0, 1]]
    for box in boxes:
        comparison.add([box[None]], [box[None]])
    assert comparison.scores["boxes"].measure == "top-1 agreement"
    comparison, boxes = OutputComparison(["boxes"]), ordered_boxes(9)
    for box in boxes:
        comparison.add([box[None]], [2 * box[None]])
    assert (comparison.scores["boxes"].measure, comparison.scores["boxes"].value) == ("relative error", 1.0)
    assert comparison.agreement is None


def test_every_output_has_a_score():
    comparison, scores, labels = OutputComparison(["mask", "scores", "labels"]), normal(2, 3), np.array([1, 2])
    comparison.add([MASK, scores, labels], [MASK, scores, labels])
    texts = {name: f"{score.measure} {score}" for name, score in comparison.scores.items()}
    assert texts == {"mask": "IoU 1", "scores": "top-1 agreement 100.00 %", "labels": "equal share 100.00 %"}
    assert comparison.agreement is None, "only the first output has an agreement"


def test_empty_outputs_do_not_matter():
    empty = np.zeros((0, 4), np.float32)
    assert choose_measure([empty]) is RELATIVE_ERROR
    assert choose_measure([empty, np.float32([[0.1, 0.2, 0.3, 0.4]] * 3)]) is choose_measure(
        [np.float32([[0.1, 0.2, 0.3, 0.4]] * 3)]
    )
    assert mask_threshold([empty]) == 0.5
