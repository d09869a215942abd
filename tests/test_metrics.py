"""Metrics compared with float64 NumPy; their sums compared with a simple implementation of the accumulation order."""

import math

import numpy as np
import pytest

import detent as dt
from detent import metrics

SIZES = [0, 1, 2, 1023, 1024, 1025, 3000, 5 * 1024]


def slow_sum(terms):
    """Sum blocks of 1024 by halves, then the block sums, padded to a power of two, by halves, too."""

    def fold(values):
        while len(values) > 1:
            half = len(values) // 2
            values = [values[i] + values[half + i] for i in range(half)]
        return values[0]

    terms = [float(t) for t in terms]
    terms += [0.0] * (-len(terms) % 1024)
    sums = [fold(terms[i : i + 1024]) for i in range(0, len(terms), 1024)] or [0.0]
    while len(sums) & (len(sums) - 1):
        sums.append(0.0)
    return fold(sums)


def data(size):
    """Numbers of very different magnitudes, so that a different accumulation order gives a different sum."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=size) * 10.0 ** rng.integers(-8, 8, size=size)
    return x, x + rng.normal(size=size) * 10.0 ** rng.integers(-8, 4, size=size)


@pytest.mark.parametrize("size", SIZES)
def test_sums_have_the_documented_order(size):
    x, y = data(size)
    count = max(size, 1)
    assert metrics.mse(x, y) == slow_sum((x - y) ** 2) / count
    assert metrics.mae(x, y) == slow_sum(abs(x - y)) / count
    if size:
        signal, noise = slow_sum(x * x), slow_sum((x - y) ** 2)
        assert metrics.sqnr_db(x, y) == 10 * math.log10(signal / noise)
        assert metrics.cosine(x, y) == slow_sum(x * y) / (math.sqrt(signal) * math.sqrt(slow_sum(y * y)))


def test_the_order_matters_on_this_data():
    x, _ = data(3000)
    assert slow_sum(x) != sum(x.tolist())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_against_numpy(dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 50)).astype(dtype)
    y = (x + rng.normal(size=x.shape) * 0.01).astype(dtype)
    a, b = x.astype(np.float64), y.astype(np.float64)
    assert metrics.mse(x, y) == pytest.approx(np.mean((a - b) ** 2), rel=1e-13)
    assert metrics.mae(x, y) == pytest.approx(np.mean(abs(a - b)), rel=1e-13)
    assert metrics.max_error(x, y) == np.max(abs(a - b))
    assert metrics.sqnr_db(x, y) == pytest.approx(10 * np.log10(np.sum(a * a) / np.sum((a - b) ** 2)), rel=1e-13)
    assert metrics.cosine(x, y) == pytest.approx(np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)), rel=1e-13)


def test_errors_are_taken_in_float64():
    x = np.array([65504.0, 1.0], np.float16)
    y = np.array([-65504.0, 1.0], np.float16)
    assert metrics.max_error(x, y) == 131008.0
    assert metrics.mse(x, y) == 131008.0**2 / 2


@pytest.mark.parametrize(
    ("x", "y", "sqnr", "cosine"),
    [
        ([], [], math.inf, 1.0),
        ([0.0], [0.0], math.inf, 1.0),
        ([1.0], [1.0], math.inf, 1.0),
        ([0.0], [1.0], -math.inf, 0.0),
        ([1.0], [0.0], 0.0, 0.0),
        ([1.0], [-1.0], 10 * math.log10(0.25), -1.0),
    ],
)
def test_limits(x, y, sqnr, cosine):
    a, b = np.array(x, np.float64), np.array(y, np.float64)
    assert metrics.sqnr_db(a, b) == sqnr
    assert metrics.cosine(a, b) == cosine


def test_a_ratio_too_small_for_a_float_is_minus_infinity():
    assert metrics.sqnr_db(np.array([1e-160]), np.array([1e150])) == -math.inf


def test_nothing_has_no_error():
    nothing = np.zeros((0, 3), np.float32)
    assert (metrics.mse(nothing, nothing), metrics.mae(nothing, nothing), metrics.max_error(nothing, nothing)) == (
        0,
        0,
        0,
    )
    q = dt.quantize(nothing, dt.QuantParams.int8_symmetric())
    assert metrics.clip_fraction(nothing, q.params) == 0
    assert (metrics.code_usage(q), metrics.entropy_bits(q)) == (0, 0)


@pytest.mark.parametrize("metric", [metrics.mse, metrics.mae, metrics.max_error, metrics.sqnr_db, metrics.cosine])
def test_nan_shows(metric):
    assert math.isnan(metric(np.array([1.0, math.nan]), np.array([1.0, 2.0])))


def test_clip_fraction_counts_what_was_clamped():
    params = dt.QuantParams("int8", 1.0)
    x = np.array([0.0, 127.4, 127.6, -127.5, -128.0, np.inf, np.nan, 5.0], np.float32)
    # -127.5 ties to -128, which is outside the narrow range
    assert metrics.clip_fraction(x, params) == 5 / 8
    assert metrics.clip_fraction(x, dt.QuantParams("int8/torch", 1.0)) == 3 / 8


def test_clip_fraction_does_not_depend_on_the_conventions_mask():
    x = np.array([0.0, 500.0], np.float32)
    assert metrics.clip_fraction(x, dt.QuantParams("int8/rlx", 1.0)) == 0.5


@pytest.mark.parametrize("name", ["int4", "uint4/affine", "float4_e2m1fn", "nf4"])
def test_code_usage_and_entropy(name):
    params = dt.QuantParams(name, 1.0)
    levels = params.spec.num_levels
    bits = np.arange(16, dtype=np.uint8)
    codes = np.arange(-7, 8) if name == "int4" else bits
    if name == "float4_e2m1fn":
        codes = bits.view(dt.quantize(np.zeros(1), params).codes.dtype)
    every = dt.QuantizedTensor.from_codes(codes, params)
    assert metrics.code_usage(every) == 1.0
    assert metrics.entropy_bits(every) == pytest.approx(math.log2(levels))
    half = dt.QuantizedTensor.from_codes(codes[:2].repeat([3, 1]), params)
    assert metrics.code_usage(half) == 2 / levels
    assert metrics.entropy_bits(half) == pytest.approx(2 - 0.75 * math.log2(3))


@pytest.mark.parametrize("count", [1, 3])
def test_powers_of_batches_give_the_ratio_of_all_data(count):
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    y = x + np.float32(0.01)
    powers = metrics.SignalNoise()
    for before, after in zip(np.split(x, count), np.split(y, count), strict=True):
        powers.add(before, after)
    assert powers.sqnr_db == pytest.approx(metrics.sqnr_db(x, y))


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [([], [], math.inf), ([1.0], [1.0], math.inf), ([0.0], [1.0], -math.inf), ([1.0], [math.inf], -math.inf)],
)
def test_powers_without_signal_or_noise(x, y, expected):
    powers = metrics.SignalNoise()
    powers.add(np.float32(x), np.float32(y))
    assert powers.sqnr_db == metrics.sqnr_db(np.float32(x), np.float32(y)) == expected


def test_outputs_that_cannot_be_compared_are_left_out():
    both = metrics.OutputComparison(["y", "z", "none", "texts", "list", "kind"])
    y, none, texts = np.ones((2, 3), np.float32), np.ones((0, 4), np.float32), np.array(["a"], object)
    both.add([y, y, none, texts, [y], y], [y, y[:1], none, texts, [y], y.astype(np.int64)])
    assert both.sqnr_db == {"y": math.inf}
    assert both.agreement == 1.0
    assert both.agreement_counts == (2, 2)
    assert both.not_compared == {
        "z": "shape (2, 3) in float, (1, 3) quantized",
        "none": "no elements",
        "texts": "type object is not supported",
        "list": "not an array",
        "kind": "type float32 in float, int64 quantized",
    }
    assert next(iter(both.notes)) == "output 'z' not compared: shape (2, 3) in float, (1, 3) quantized"


def test_outputs_that_differ_in_shape_on_some_batches_are_compared_on_the_others():
    both, boxes = metrics.OutputComparison(["boxes"], ("in a", "in b")), np.ones((2, 4), np.float32)
    for changed in (boxes, boxes[:1], np.float32(0.9) * boxes):
        both.add([boxes], [changed])
    assert both.sqnr_db["boxes"] == pytest.approx(10 * math.log10(2 / 0.01), rel=1e-5)
    assert both.not_compared == {"boxes": "shape (2, 4) in a, (1, 4) in b, on 1 of 3 batches"}
    assert both.agreement is None, "rows are boxes, not samples"


def test_integers_are_compared_by_the_share_of_equal_elements():
    both = metrics.OutputComparison(["labels", "mask", "pairs"])
    labels, mask, pairs = np.array([1, 2, 3, 4]), np.array([[True, False]]), np.array([[0, 1], [2, 3]], np.uint8)
    both.add([labels, mask, pairs], [np.array([1, 2, 3, 5]), ~mask, pairs])
    assert both.equal_shares == {"labels": 0.75, "mask": 0.0, "pairs": 1.0}
    assert both.agreement == 0.75
    assert both.sqnr_db == both.not_compared == {}


def test_integers_that_are_not_one_label_per_sample_have_no_agreement():
    both, mask = metrics.OutputComparison(["mask"]), np.zeros((2, 4, 4), np.int64)
    both.add([mask], [mask])
    assert both.agreement is None
    assert both.equal_shares == {"mask": 1.0}


@pytest.mark.parametrize(("is_softmax", "batches"), [(True, 3), (True, 12), (False, 3), (False, 12)])
def test_rows_that_depend_on_the_data_have_an_agreement_if_they_are_probabilities(is_softmax, batches):
    rng, comparison = np.random.default_rng(0), metrics.OutputComparison(["y"])
    total = 0
    for number in range(batches):
        y = rng.normal(size=(10 + number % 4, 5)).astype(np.float32)
        if is_softmax:
            y = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
        comparison.add([y], [y])
        total += len(y)
    assert comparison.agreement_counts == ((total, total) if is_softmax else (0, 0))
    assert comparison.has_varying_rows("y") == (not is_softmax)
    assert comparison.scores["y"].measure == ("top-1 agreement" if is_softmax else "relative error")
