"""fake_quantize_dynamic equals its three steps bit for bit: minmax, QuantParams.from_range, fake_quantize."""

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.checks import compute_dtype
from detent.convention import PRESETS, Convention, ZeroRange
from detent.errors import DetentError, OutError, RangeError, UnsupportedError
from detent.kernels import Problem, minmax, observe

from .layouts import LAYOUTS
from .pairwise import pairwise
from .twins import DTYPES, GRANULARITIES, LEVELS, at, difference, dtype_of

FORMATS = ("int8", "uint8", "int4", "uint4", "uint1", "int2", "int16", "uint16", "float8_e4m3fn", "float8_e5m2", "nf4")
FIELDS = ("scale", "zero_point", "min_val", "max_val", "block_scale", "tensor_scale")
ZERO_RANGES = (
    *(ZeroRange(kind) for kind in ("unit", "unit_at_qmin", "error")),
    *(ZeroRange("eps", 2.0**-7), ZeroRange("eps", 1e-30), ZeroRange("width", 0.5), ZeroRange("width", 1e-8)),
)


def custom_conventions():
    """All combinations of zero range, symmetric scale and include_zero; the other rules vary in turn."""
    rows = product(ZERO_RANGES, ("qmax", "half_span", "tight"), (True, False))
    for number, (zero_range, symmetric_scale, include_zero) in enumerate(rows):
        yield Convention(
            name=f"custom_{number}",
            division=("divide", "reciprocal")[number // 3 % 2],
            rounding=(dt.rounding.half_even, dt.rounding.half_away, dt.rounding.floor)[number % 3],
            zero_point=("after_round", "before_round")[number // 2 % 2],
            symmetric_scale=symmetric_scale,
            narrow=bool(number // 4 % 2),
            include_zero=include_zero,
            zero_range=zero_range,
            mask="code_inclusive",
        )


CONVENTIONS = dict(PRESETS) | {row.name: row for row in custom_conventions()}
SOME = (*PRESETS, *list(CONVENTIONS)[len(PRESETS) :: 5])  # every zero range is among them


def normal(rng, tiling, info):
    return rng.normal(size=tiling.shape) * tiling.spread(rng.choice([1e-3, 1.0, 50.0], size=tiling.scale_shape))


def not_finite(rng, tiling, info):
    x = normal(rng, tiling, info)
    odd = rng.choice([np.nan, np.inf, -np.inf], size=tiling.shape)
    return np.where((rng.random(tiling.shape) < 0.1) & (np.arange(x.size).reshape(x.shape) % 5 > 0), odd, x)


# Functions that make float64 data of a shape, by name; the data are rounded to the dtype afterwards.
DATA = {
    "normal": normal,
    "not finite here and there": not_finite,
    "some sets zero": lambda rng, tiling, info: (
        normal(rng, tiling, info) * tiling.spread(rng.integers(0, 2, size=tiling.scale_shape))
    ),
    "zeros of both signs": lambda rng, tiling, info: rng.choice([0.0, -0.0], size=tiling.shape),
    "constant sets": lambda rng, tiling, info: np.broadcast_to(
        tiling.spread(rng.normal(size=tiling.scale_shape)), tiling.shape
    ),
    "tiny": lambda rng, tiling, info: rng.integers(-40, 41, size=tiling.shape) * float(info.smallest_subnormal),
    "small": lambda rng, tiling, info: rng.normal(size=tiling.shape) * float(info.smallest_normal),
    "huge": lambda rng, tiling, info: rng.uniform(-1, 1, size=tiling.shape) * float(info.max),
    "positive": lambda rng, tiling, info: 0.25 + np.abs(normal(rng, tiling, info)),
    "negative": lambda rng, tiling, info: -0.25 - np.abs(normal(rng, tiling, info)),
}


def data(kind, dtype, granularity, shape, seed=0):
    float_type = dtype_of(dtype)
    with np.errstate(all="ignore"):
        x = DATA[kind](np.random.default_rng(seed), granularity.tiling(shape), ml_dtypes.finfo(float_type))
        return np.asarray(x).astype(float_type)


def spec_of(form, granularity=dt.PerTensor(), symmetric=None, convention="onnx"):
    format_ = dt.formats.FORMATS[form]
    if not format_.is_integer or form == "uint1":
        symmetric = not format_.is_integer  # uint1 must be affine, and formats other than integers symmetric
    return dt.QuantSpec(form, granularity, symmetric=symmetric, convention=CONVENTIONS[convention])


def outcome(function, *args, **options):
    """The values and the parameters' arrays, or the kind of error and its message."""
    try:
        y, params = function(*args, **options)
    except DetentError as error:
        return type(error), str(error)
    return y, *(getattr(params, name) for name in FIELDS)


def dynamic(kernels, x, spec, **options):
    with dt.use_kernels(kernels):
        return outcome(dt.fake_quantize_dynamic, x, spec, **options)


def three_steps(x, spec):
    with dt.use_kernels("reference"):
        low, high, _ = minmax(x, spec.granularity.tiling(x.shape))
        params = dt.QuantParams.from_range(spec, low, high, dtype=compute_dtype(x.dtype))
        return dt.fake_quantize(x, params), params


def complaints(actual, expected):
    """Return the mismatches between two outcomes, by field."""
    if isinstance(actual[0], type) or isinstance(expected[0], type):
        return [] if actual == expected else [actual, expected]
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if a is not None or b is not None]
    return [each for each in (difference(*pair) for pair in pairs) if each is not None]


def assert_equal(x, spec, **options):
    actual, expected = dynamic("native", x, spec, **options), outcome(three_steps, x, spec)
    assert complaints(actual, dynamic("reference", x, spec)) == []
    assert isinstance(actual[0], type) or complaints(actual, expected) == []
    assert isinstance(actual[0], type) == isinstance(expected[0], type), (actual, expected)


SAMPLE = pairwise(
    {
        "convention": SOME,
        "format": FORMATS,
        "symmetric": (True, False),
        "dtype": DTYPES,
        "granularity": tuple(GRANULARITIES),
        "data": tuple(DATA),
        "level": LEVELS,
        "threads": (1, 2, 3),
    }
)


@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_sample(number):
    row = SAMPLE[number]
    granularity, shape = GRANULARITIES[row["granularity"]]
    spec = spec_of(row["format"], granularity, row["symmetric"], row["convention"])
    with at(row["level"], row["threads"]):
        assert_equal(data(row["data"], row["dtype"], granularity, shape, number), spec)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rules(convention, form, symmetric):
    spec = spec_of(form, dt.PerGroup(7), symmetric, convention)
    for (kind, dtype), level in product(product(DATA, DTYPES), LEVELS):
        with at(level):
            assert_equal(data(kind, dtype, spec.granularity, (12, 100)), spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_places(granularity, dtype, kind):
    granularity, shape = GRANULARITIES[granularity]
    x = data(kind, dtype, granularity, shape)
    for number, (level, threads) in enumerate(product(LEVELS, (1, 2, 3))):
        names = (FORMATS[number % len(FORMATS)], list(CONVENTIONS)[5 * number % len(CONVENTIONS)])
        with at(level, threads):
            assert_equal(x, spec_of(names[0], granularity, bool(number % 2), names[1]))


def ranges(dtype):
    """Arrays of low and high bounds; in most conventions, all ranges of an array are valid or all are invalid."""
    rng, info = np.random.default_rng(0), np.finfo(dtype)
    ends = np.sort(rng.normal(size=(2, 999)) * 10.0 ** rng.uniform(-30, 30, size=(2, 999)), axis=0)
    tiny = np.sort(rng.integers(-3000, 3000, size=(2, 30)), axis=0) * float(info.smallest_subnormal)
    huge = rng.uniform(0, 1, size=(2, 30)) * [[-float(info.max)], [float(info.max)]]
    yield ends
    yield np.stack([ends[0], ends[0]])
    yield np.stack([np.minimum(ends[0], 0.0), np.zeros(999)])
    yield np.zeros((2, 3))
    yield from (tiny, huge, huge[:, ::-1] * [[1.0], [0.0]])
    yield from (bounds[:, i : i + 1] for bounds in (tiny, huge) for i in range(4))


def from_range(kernels, spec, low, high, dtype):
    """The outcome of ``QuantParams.from_range``, which has no values."""
    with dt.use_kernels(kernels):
        return outcome(lambda: (None, dt.QuantParams.from_range(spec, low, high, dtype=dtype)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "convention", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in CONVENTIONS]
)
def test_ranges_of_every_magnitude(convention, dtype):
    """Test the scale rule with bounds, and with data that consist only of the bounds."""
    for form, symmetric in product(("int8", "uint4", "uint1", "uint16", "nf4"), (True, False)):
        spec = spec_of(form, dt.PerToken(), symmetric, convention)
        for low, high in ranges(dtype):
            for stored in ("float32", "float64"):
                actual, expected = (from_range(kernels, spec, low, high, stored) for kernels in ("native", "reference"))
                assert complaints(actual, expected) == [], (spec, low, high, stored)
            assert_equal(np.stack([low, high], axis=1).astype(dtype), spec)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype, level):
    with at(level):
        for size in range(1, 131):
            spec = spec_of(FORMATS[size % 11], (dt.PerTensor(), dt.PerToken(), dt.PerAxis(1))[size % 3], bool(size % 2))
            assert_equal(
                data(("normal", "not finite here and there")[size // 2 % 2], dtype, spec.granularity, (5, size)), spec
            )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 24, 32, 40, 64, 128, 256, 264, 512, 520, 1024])
def test_groups_of_every_size(size, level):
    with at(level):
        for number, (shape, kind) in enumerate(
            product([(3, 4 * size + 5), (17, size), (2, 9 * size)], ["normal", "not finite here and there"])
        ):
            x = data(kind, DTYPES[number % 4], dt.PerGroup(size), shape, seed=size)
            assert_equal(x, spec_of(FORMATS[(size + number) % len(FORMATS)], dt.PerGroup(size), False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (dt.PerToken(), (40, 5001)),  # two sets per stage
        (dt.PerToken(), (13, 8192)),
        (dt.PerGroup(8193), (5, 20000)),
        (dt.PerToken(), (14, 32769)),  # sets that are too large for the cache
        (dt.PerAxis(-1), (5, 9001)),
        (dt.PerAxis(-1), (301, 7)),
        (dt.PerGroup(5, axis=0), (23, 100)),
        (dt.PerAxis(1), (3, 5, 4097)),
        (dt.PerBlock(2, 2, 2), (5, 7, 33)),
    ],
    ids=str,
)
def test_sets_of_every_size(granularity, shape, dtype):
    x = data("not finite here and there", dtype, granularity, shape)
    for threads in (1, 2, 3):
        with at(threads=threads):
            assert_equal(x, spec_of("uint8", granularity, False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_input(layout, dtype):
    for granularity in (dt.PerTensor(), dt.PerToken(), dt.PerAxis(1)):
        assert_equal(LAYOUTS[layout](data("normal", dtype, granularity, (7, 37))), spec_of("int8", granularity))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["offset by one", "backwards", "transposed", "not aligned", "every second"])
def test_layout_of_the_output(layout, dtype):
    x, spec = data("normal", dtype, dt.PerToken(), (7, 37)), spec_of("int8", dt.PerToken())
    for kernels in ("native", "reference"):
        out = LAYOUTS[layout](np.zeros_like(x))
        actual = dynamic(kernels, x, spec, out=out)
        assert actual[0] is out
        assert complaints(actual, outcome(three_steps, x, spec)) == []


def test_outputs_that_do_not_fit():
    x = np.ones(4, np.float32)
    for out in (np.ones(3, np.float32), np.ones(4), x, x[::-1], np.broadcast_to(x[:1], (4,)), [0.0] * 4):
        with pytest.raises(OutError):
            dt.fake_quantize_dynamic(x, "int8", out=out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_zero_dimensions(form, dtype):
    for value in (0.0, -0.0, 1.5, -300.0, 1e-42):
        assert_equal(np.asarray(value).astype(dtype_of(dtype)), spec_of(form, symmetric=False))


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_nothing_to_take_a_range_of(kernels):
    for granularity, shape in product((dt.PerTensor(), dt.PerToken(), dt.PerGroup(2)), ((3, 0), (0, 3))):
        kind, message = dynamic(kernels, np.zeros(shape, np.float32), spec_of("int8", granularity))
        assert kind is RangeError
        assert "is empty" in message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("granularity", "shape"), [(dt.PerToken(), (6, 9)), (dt.PerAxis(1), (9, 6)), (dt.PerTensor(), (1, 9))]
)
def test_sets_without_a_finite_element(granularity, shape, dtype):
    x = data("normal", dtype, granularity, shape)
    bad = x[:, -1] if granularity == dt.PerAxis(1) else x[-1]
    bad[:] = np.nan
    bad[::2] = np.inf
    for kernels in ("native", "reference"):
        kind, message = dynamic(kernels, x, spec_of("int8", granularity))
        assert kind is RangeError
        pattern = r"x is not finite in 9 of \d+ elements, which leaves 1 of \d parameter sets without a finite element"
        assert re.search(pattern, message)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_beyond_the_dtype(dtype):
    """Two codes for the whole range of a dtype need a scale that overflows; float16 and bfloat16 compute in float32."""
    limit = float(ml_dtypes.finfo(dtype_of(dtype)).max)
    x = np.array([[limit, 1.0], [limit, -limit]] * 4).astype(dtype_of(dtype))
    for granularity in (dt.PerTensor(), dt.PerToken()):
        spec = spec_of("uint1", granularity)
        assert_equal(x, spec)
        assert (dynamic("native", x, spec)[0] is RangeError) == (dtype != "float16")


def test_nan_stays_and_infinities_saturate():
    x = np.array([1.0, np.nan, np.inf, -np.inf, -0.5], np.float32)
    for kernels in ("native", "reference"):
        y, scale, *_ = dynamic(kernels, x, dt.QuantSpec("int8"))
        assert scale * 127 == 1.0
        assert np.isnan(y).tolist() == [False, True, False, False, False]
        assert y[[0, 2, 3]].tolist() == [1.0, 1.0, -1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4"])
def test_scales_of_special_formats_go_step_by_step(name, dtype):
    spec = dt.QuantSpec.parse(name)
    for kind in DATA:
        assert_equal(data(kind, dtype, spec.granularity, (40, 1001)), spec)


def test_stochastic_rounding_goes_step_by_step():
    x = data("normal", "float32", dt.PerToken(), (7, 333))
    spec = dt.QuantSpec("int8", dt.PerToken(), rounding="stochastic(3)")
    assert complaints(dynamic("auto", x, spec), outcome(three_steps, x, spec)) == []
    assert dynamic("native", x, spec)[0] is UnsupportedError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerToken(), dt.PerAxis(1)], ids=str)
def test_the_kernel_is_used(granularity, form, dtype):
    """Check that the comparisons above run the native kernel, not the fallback."""
    x, spec = data("normal", dtype, granularity, (9, 33)), spec_of(form, granularity)
    problem = Problem("fake_quantize", granularity.tiling(x.shape), dtype, spec, None, "propagate")
    with dt.use_kernels("native"):
        assert observe(problem, x, np.empty_like(x)) is not None
    with dt.use_kernels("reference"):
        assert observe(problem, x, np.empty_like(x)) is None
