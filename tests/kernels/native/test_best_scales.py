"""The native scale search equals the reference's bit for bit, at every CPU level and on any number of threads."""

from itertools import product

import numpy as np
import pytest

import detent as dt
from detent.kernels import best_scales
from detent.rounding import floor, half_away
from detent.scale_rule import least_scale

from .layouts import LAYOUTS
from .twins import DTYPES, LEVELS, at, difference, dtype_of

# Sets in place, copied sets, tiles of columns, and ragged ones, mostly of lengths that are no multiple of the lanes.
GRANULARITIES = {
    "tensor": (dt.PerTensor(), (5, 401)),
    "axis 0": (dt.PerAxis(0), (9, 3, 21)),
    "axis 1": (dt.PerAxis(1), (3, 5, 40)),
    "axis last": (dt.PerAxis(-1), (23, 37)),
    "group 32, ragged": (dt.PerGroup(32), (6, 71)),
    "group 1": (dt.PerGroup(1), (4, 19)),
    "group 5 of axis 0": (dt.PerGroup(5, axis=0), (13, 37)),
    "block, ragged": (dt.PerBlock(3, 10), (2, 7, 33)),
}
FORMATS = ("int4", "int3", "int2", "uint4", "uint2", "uint1", "int8", "uint8", "float4_e2m1fn", "float8_e5m2", "nf4")
KINDS = ("plain", "wide", "hostile")
HOSTILE = (0.0, -0.0, 1e-45, -3e-39, 1.2e-38, 5e-324, -1e-310, 6e-8, -65504.0, 3e38, -3.4e38, 1.0, -1.0)


def data(dtype, shape, kind="plain", seed=0):
    """Normal numbers; numbers of many magnitudes; or zeros, equal, subnormal and huge numbers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if kind == "wide":
        x *= 2.0 ** rng.integers(-20, 6, size=shape)
    if kind == "hostile":
        x = np.where(rng.random(shape) < 0.5, rng.choice(HOSTILE), rng.choice(HOSTILE, size=shape))
    limit = 6e4 if dtype == "float16" else 1.6e38  # the range of uint1 overflows above
    return np.clip(x, -limit, limit).astype(dtype_of(dtype))


def searched(kernels, x, spec):
    """Scales, zero points and errors."""
    minmax = dt.QuantParams.from_data(spec, x)
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    bounds = minmax.min_val.astype(dtype), minmax.max_val.astype(dtype)
    start = minmax.scale.astype(dtype), minmax.zero_point.astype(dtype)
    with dt.use_kernels(kernels):
        least = least_scale(spec, minmax.scale.dtype)
        return best_scales(x, spec.granularity.tiling(x.shape), spec, bounds, start, least)


def check(x, spec, **levels):
    expected = searched("reference", x, spec)
    for level, threads in product(levels.get("levels", LEVELS), (1, 2)):
        with at(level, threads):
            assert difference(searched("native", x, spec), expected) is None, (level, threads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMATS)
def test_of_formats(form, kind):
    for dtype in DTYPES:
        check(data(dtype, (5, 67), kind), dt.QuantSpec(form, granularity="axis0"))


@pytest.mark.parametrize("form", ["int4", "uint4"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_of_granularities(granularity, form):
    which, shape = GRANULARITIES[granularity]
    for dtype in DTYPES:
        check(data(dtype, shape, "wide"), dt.QuantSpec(form, granularity=which))


@pytest.mark.parametrize("convention", dt.convention.PRESETS)
def test_of_conventions(convention):
    for form, kind in product(("int4", "uint4", "int3/affine"), KINDS):
        check(data("float32", (4, 50), kind), dt.QuantSpec.parse(f"{form}/{convention}"), levels=LEVELS[-1:])


@pytest.mark.parametrize("rounding", [half_away, floor])
def test_of_roundings(rounding):
    for form, zero_point in product(("int4", "uint4"), ("onnx", "compressed_tensors")):
        spec = dt.QuantSpec(form, granularity="axis0", rounding=rounding, convention=zero_point)
        check(data("float32", (4, 50)), spec)


def test_of_powers_of_two():
    for dtype, kind in product(("float32", "float64"), KINDS):
        check(data(dtype, (4, 96), kind), dt.mxfp4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_layouts(layout):
    x = LAYOUTS[layout](data("float32", (6, 10, 8)))
    for form in ("int4", "uint4"):
        check(x, dt.QuantSpec(form, granularity="group4"), levels=LEVELS[-1:])


@pytest.mark.parametrize("granularity", ["group32", "axis1", "axis0", "tensor"])
def test_on_several_threads(granularity):
    spec = dt.QuantSpec("uint4", granularity=granularity)
    x = data("float32", (96, 1100))
    with at(threads=1):
        expected = searched("native", x, spec)
    for threads in (2, 3, 5):
        with at(threads=threads):
            assert difference(searched("native", x, spec), expected) is None, threads


def test_a_search_has_positions():
    spec, x = dt.QuantSpec("int4"), data("float32", (8,))
    from detent.kernels import native
    from detent.kernels.problem import Problem

    problem = Problem("fake_quantize", spec.granularity.tiling(x.shape), "float32", spec, None, "propagate")
    runner = native._runner(0, problem.tiling, native.observe_rules, problem)
    one = np.ones(1, np.float32)
    with pytest.raises(ValueError, match="at least one position"):
        runner.best_scales(x, one, one, one, one, np.empty(0), 16, True, 1e-30, one.copy(), one.copy(), np.empty(1))
    with pytest.raises(ValueError, match="errors has"):
        runner.best_scales(x, one, one, one, one, np.ones(4), 16, True, 1e-30, one.copy(), one.copy(), np.empty(2))
