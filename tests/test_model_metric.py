"""Metrics of models: built-in ones, functions of users, and what bad input gets."""

import sys

import numpy as np
import pytest

from detent.errors import DtypeError, RangeError, ShapeError, SpecError
from detent.model_metric import MetricComparison, MetricResult, get_metric, parse_drop, split_labels

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(40, 5)).astype(np.float32)
LABELS = SCORES.argmax(axis=1)


def batches(scores, size=4, name="y"):
    return [{name: scores[i : i + size]} for i in range(0, len(scores), size)]


def compared(metric, floats, outputs, labels=None):
    sizes = [len(next(iter(each.values()))) for each in floats]
    return MetricComparison(metric, floats, sizes, labels).measure(outputs)


def changed(scores, count):
    """Change the class of the first rows."""
    scores = scores.copy()
    scores[:count] = -scores[:count]
    return scores


@pytest.mark.parametrize(("labels", "name"), [(None, "top-1 agreement"), (LABELS, "top1")])
def test_auto_is_top1_of_class_scores(labels, name):
    result = compared(None, batches(SCORES), batches(changed(SCORES, 4)), labels)
    assert (result.name, result.float_value, result.samples) == (name, 1.0, 40)
    assert result.drop == pytest.approx(0.1)
    assert result == compared("auto", batches(SCORES), batches(changed(SCORES, 4)), labels)


@pytest.mark.parametrize("labels", [None, LABELS[:3]])
def test_auto_is_not_for_rows_that_depend_on_the_data(labels):
    boxes = [{"boxes": SCORES[:count, :4], "scores": SCORES[:1]} for count in (3, 5, 2)]
    for metric in (None, "auto"):
        with pytest.raises(SpecError, match=r"output 'boxes' depends on the data.*--metric module:function"):
            MetricComparison(metric, boxes, [1, 1, 1], labels)
    assert MetricComparison("top1", boxes, [1, 1, 1]).measure(boxes).drop == 0
    assert MetricComparison(lambda outputs: len(outputs["boxes"]), boxes, [1, 1, 1]).float_value == 10


@pytest.mark.parametrize("logarithm", [False, True])
def test_auto_is_for_probabilities_of_each_step(logarithm):
    shares = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)
    steps = [{"y": np.log(each) if logarithm else each} for each in (shares[:3], shares[3:10], shares[10:12])]
    for metric in (None, "auto"):
        comparison = MetricComparison(metric, steps, [1, 1, 1])
        assert comparison.metric.name == "top-1 agreement"
        assert comparison.measure([{"y": -each["y"]} for each in steps]).value == 0


@pytest.mark.parametrize("sizes", [(4, 4, 2), (1, 1, 1)])
def test_auto_is_for_rows_that_do_not_depend_on_the_data(sizes):
    """The number of rows is proportional to the number of samples, or constant."""
    scores = [{"y": SCORES[: 2 * size]} for size in sizes]
    assert MetricComparison(None, scores, sizes).metric.name == "top-1 agreement"


def test_the_drop_is_relative_to_the_float_model():
    wrong = (LABELS + 1) % 5
    labels = np.where(np.arange(40) < 10, wrong, LABELS)
    result = compared("top1", batches(SCORES), batches(SCORES), labels)
    assert (result.value, result.float_value, result.drop, result.standard_error) == (0.75, 0.75, 0.0, 0.0)


def test_auto_of_a_regression_is_one_minus_the_relative_error():
    y = np.arange(1, 41, dtype=np.float32).reshape(40, 1)
    result = compared(None, batches(y), batches(np.float32(0.9) * y))
    assert result.name == "1 - relative error"
    assert result.drop == pytest.approx(0.1)


def test_standard_error_is_that_of_the_mean():
    """For equal parts, it estimates the standard error of the mean over samples."""
    rng = np.random.default_rng(1)
    correct = rng.random(8000) < 0.95
    floats, outputs = (
        np.eye(2, dtype=np.float32)[np.zeros(8000, int)],
        np.eye(2, dtype=np.float32)[(~correct).astype(int)],
    )
    result = compared("top1", batches(floats, 10), batches(outputs, 10), np.zeros(8000, int))
    assert result.standard_error == pytest.approx((0.05 * 0.95 / 8000) ** 0.5, rel=0.6)
    assert result.parts == 10
    assert result.largest_drop == pytest.approx(result.drop + 1.833 * result.standard_error)


@pytest.mark.parametrize(("parts", "quantile"), [(2, 6.314), (3, 2.920), (10, 1.833), (0, 1.645)])
def test_few_parts_widen_the_confidence_interval(parts, quantile):
    result = MetricResult("top1", 0.9, 0.95, 0.01, 100, parts)
    assert result.largest_drop == pytest.approx(0.05 + 0.01 * quantile)
    assert result.to_dict()["parts"] == parts


def test_intervals_of_few_parts_hold_in_95_percent_of_all_cases():
    """Two parts with normal drops: the true drop is below the upper end in 95 % of the cases."""
    rng = np.random.default_rng(0)
    drops = 1.0 + 0.1 * rng.normal(size=(20_000, 2))
    errors = drops.std(axis=1, ddof=1) / np.sqrt(2)
    results = [
        MetricResult("m", -mean, 0.0, error, 16, 2) for mean, error in zip(drops.mean(axis=1), errors, strict=True)
    ]
    assert np.mean([result.largest_drop >= 1.0 for result in results]) == pytest.approx(0.95, abs=0.006)


@pytest.mark.parametrize("samples", [8, 15])
def test_few_samples_have_no_standard_error(samples):
    result = compared("top1", batches(SCORES[:samples], 1), batches(SCORES[:samples], 1))
    assert result.standard_error is None
    assert result.largest_drop == result.drop == 0


def test_a_metric_that_is_not_defined_on_parts_has_no_standard_error():
    def share_of_class_zero(outputs, labels):
        if len(labels) < 40:
            raise ValueError("too few")
        return np.float64((labels == 0).mean())

    result = compared(share_of_class_zero, batches(SCORES), batches(SCORES), LABELS)
    assert result.name == "share_of_class_zero"
    assert result.standard_error is None


def test_functions_get_joined_outputs_and_labels():
    calls = []
    compared(lambda outputs: calls.append(outputs) or 1.0, batches(SCORES), batches(SCORES))
    assert np.array_equal(calls[0]["y"], SCORES)
    calls.clear()
    compared(lambda *both: calls.append(both) or 1.0, batches(SCORES), batches(SCORES), LABELS)
    assert np.array_equal(calls[0][1], LABELS)
    assert compared(lambda outputs, labels: float(labels is None), batches(SCORES), batches(SCORES)).value == 1.0


def test_outputs_of_varying_shape_are_lists():
    outputs = [{"y": np.zeros((1, count), np.float32)} for count in (3, 4)]
    assert compared(lambda each: float(len(each["y"])), outputs, outputs).value == 2.0
    with pytest.raises(SpecError, match="raised AttributeError"):
        compared(lambda each: each["y"].mean(), outputs, outputs)


@pytest.mark.parametrize("shape", [(6, 7, 5), (6, 5, 4, 3)])
def test_top1_of_positions_and_pixels(shape):
    scores = RNG.normal(size=shape).astype(np.float32)
    labels = scores.argmax(axis=-1 if len(shape) == 3 else 1)
    assert compared("top1", batches(scores, 2), batches(scores, 2), labels).value == 1.0
    with pytest.raises(ShapeError, match="do not fit an output of shape"):
        compared("top1", batches(scores, 2), batches(scores, 2), labels[:, :2])


def test_cosine_and_iou_with_and_without_labels():
    x = RNG.normal(size=(6, 8)).astype(np.float32)
    assert compared("cosine", batches(x), batches(2 * x)).value == pytest.approx(1.0)
    assert compared("cosine", batches(x), batches(x), -x).value == pytest.approx(-1.0)
    mask = RNG.random((6, 1, 4, 4)) > 0.5
    logits = np.where(mask, 3, -3).astype(np.float32)
    assert compared("iou", batches(logits), batches(logits)).value == 1.0
    assert compared("iou", batches(logits), batches(logits), mask[:, 0]).value == 1.0
    assert compared("iou", batches(logits), batches(logits), ~mask).value == 0.0


@pytest.mark.parametrize(
    ("metric", "labels", "error", "message"),
    [
        ("top1", LABELS[:39], ShapeError, "got 39 labels for 40 samples: pass one label per sample"),
        ("top1", np.array(3), ShapeError, "got a single value for 40 samples"),
        ("top1", LABELS + 1, RangeError, "labels are from . to 5, but classes are from 0 to 4"),
        ("top1", LABELS - 1, RangeError, "labels are from -1"),
        ("top1", LABELS / 2, DtypeError, "top1 needs integer labels, got float64"),
        ("cosine", LABELS, ShapeError, "cosine needs labels like the output"),
        ("nothing", None, SpecError, "there is no metric 'nothing'"),
        (3, None, SpecError, "metric must be a function, a name or 'module:function', got 3"),
        (lambda outputs: 1 / 0, None, SpecError, "raised ZeroDivisionError: division by zero"),
        (lambda outputs: float("inf"), None, SpecError, "returned inf, expected a finite number"),
        (lambda outputs: outputs["y"], None, SpecError, "expected a finite number"),
        (lambda outputs: None, None, SpecError, "returned None"),
        (lambda outputs: True, None, SpecError, "returned True"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_bad_metrics_and_labels(metric, labels, error, message):
    with pytest.raises(error, match=message):
        compared(metric, batches(SCORES), batches(SCORES), labels)


def test_top1_needs_class_scores():
    with pytest.raises(ShapeError, match=r"got a first output of float32 and shape \(4, 1\): pass a function"):
        compared("top1", batches(SCORES[:4, :1]), batches(SCORES[:4, :1]))


def test_a_function_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_metric_module.py").write_text("def half(outputs):\n    return 0.5\n\nnumber = 3\n")
    (tmp_path / "broken_metric_module.py").write_text("import nowhere_to_be_found\n")
    path = list(sys.path)
    assert compared("my_metric_module:half", batches(SCORES), batches(SCORES)).value == 0.5
    assert sys.path == path
    for text, message in (
        ("my_metric_module:full", "'full' in module 'my_metric_module' does not exist"),
        ("my_metric_module:number", "is not a function"),
        ("broken_metric_module:f", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        (":f", "there is no metric ':f'"),
    ):
        with pytest.raises(SpecError, match=message):
            get_metric(text)


@pytest.mark.parametrize("value", ["", "%", "x", "nan", "inf", True, None, [1]])
def test_drops_that_are_no_numbers(value):
    with pytest.raises(SpecError, match=r"max_drop must be a number such as 0\.005 or '0\.5%'"):
        parse_drop(value)


def test_drops():
    assert [parse_drop(each) for each in ("0.5%", " 1% ", 0.25, "0")] == [0.005, 0.01, 0.25, 0.0]
    with pytest.raises(SpecError, match="must not be negative"):
        parse_drop("-1%")


def test_labels_are_split_by_batch():
    assert [each.tolist() for each in split_labels(np.arange(5), [2, 3])] == [[0, 1], [2, 3, 4]]


def test_outputs_of_another_shape_count_as_wrong():
    rng = np.random.default_rng(0)
    floats = [{"boxes": 100 * rng.normal(size=(3, 5)).astype(np.float32)} for _ in range(4)]
    shorter = [{"boxes": each["boxes"][:2]} for each in floats]
    comparison = MetricComparison(None, floats, [1] * 4, None)
    assert comparison.measure(floats).value == 1
    assert comparison.measure(shorter).value == pytest.approx(0, abs=1e-6)


def test_shapes_may_vary_in_one_model_only():
    floats = [{"y": np.eye(4, dtype=np.float32)} for _ in range(3)]
    quantized = [{"y": np.eye(4, 4 + i, dtype=np.float32)} for i in range(3)]
    value = MetricComparison(lambda outputs: float(isinstance(outputs["y"], list)), floats, [4] * 3, None)
    assert value.measure(quantized).value == 1, "lists for the quantized model"


def test_a_metric_that_works_in_place_changes_no_stored_output():
    floats = [{"y": np.ones((2, 2 + i), np.float32)} for i in range(2)]

    def emptied(outputs):
        total = float(sum(each.sum() for each in outputs["y"]))
        for each in outputs["y"]:
            each[:] = 0
        return total

    comparison = MetricComparison(emptied, floats, [2, 2], None)
    assert comparison.measure(floats).value == comparison.measure(floats).value == 10
