"""Nasty arrays have the properties that their names say and are equal in every call; detent accepts all of them."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent import observers
from detent.checks import FLOATS
from detent.testing import nasty_arrays

DTYPES = pytest.mark.parametrize("dtype", list(FLOATS))
NAMES = list(nasty_arrays())


def exact(array):
    """The bits of an array, in C order and the machine's byte order."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).tobytes()


@DTYPES
def test_arrays_are_the_same_each_time_and_not_shared(dtype):
    first, second = nasty_arrays(dtype), nasty_arrays(dtype)
    assert list(first) == list(second)
    for name, array in first.items():
        assert exact(array) == exact(second[name]), name
        assert not np.shares_memory(array, second[name])


@DTYPES
def test_dtype_is_the_one_asked_for(dtype):
    assert {array.dtype.newbyteorder("=") for array in nasty_arrays(dtype).values()} == {FLOATS[dtype]}


@DTYPES
def test_finite_only_leaves_out_all_that_is_not(dtype):
    finite, everything = nasty_arrays(dtype, finite_only=True), nasty_arrays(dtype)
    assert all(np.isfinite(array.astype(np.float64)).all() for array in finite.values())
    left_out = {name: everything[name].astype(np.float64) for name in everything if name not in finite}
    assert left_out
    assert not any(np.isfinite(array).all() for array in left_out.values())
    assert any(np.isnan(array).any() for array in left_out.values())


def test_layouts_are_what_their_names_say():
    arrays = nasty_arrays()
    assert not arrays["misaligned"].flags.aligned
    assert not arrays["read-only"].flags.writeable
    assert arrays["Fortran order"].flags.f_contiguous
    assert not arrays["Fortran order"].flags.c_contiguous
    assert all(step < 0 for step in arrays["reversed"].strides)
    assert arrays["one element repeated"].strides == (0, 0)
    assert not arrays["other byte order"].dtype.isnative
    for name in ("every other", "transposed", "inner part"):
        assert not arrays[name].flags.contiguous, name


@DTYPES
def test_values_are_what_their_names_say(dtype):
    arrays = nasty_arrays(dtype)
    info = ml_dtypes.finfo(FLOATS[dtype])
    subnormal = np.abs(arrays["subnormal"].astype(np.float64))
    assert ((subnormal > 0) & (subnormal < float(info.smallest_normal))).all()
    assert np.abs(arrays["huge"].astype(np.float64)).max() == float(info.max)
    negative = arrays["negative zero"].astype(np.float64)
    assert np.signbit(negative).all()
    assert not negative.any()
    outlier = np.sort(np.abs(arrays["one outlier"].astype(np.float64)), axis=None)
    assert outlier[-1] > 1000 * outlier[-2]


def test_ties_tell_half_even_from_half_away_and_their_neighbours_do_not():
    arrays = nasty_arrays(scale=0.125)  # a power of two: ties are exact
    even, away = (dt.QuantParams(dt.QuantSpec("int16", rounding=rule), 0.125) for rule in ("half_even", "half_away"))

    def differing(name):
        return int((dt.quantize(arrays[name], even).codes != dt.quantize(arrays[name], away).codes).sum())

    assert differing("ties") > 250
    assert differing("just below ties") == differing("just above ties") == 0


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 7e-3])
def test_ties_tell_division_from_multiplication_by_the_reciprocal(scale):
    divisor = np.float32(scale)
    arrays = nasty_arrays(scale=float(divisor))
    x = np.concatenate([arrays[name] for name in ("ties", "just below ties", "just above ties")])
    assert (np.rint(x / divisor) != np.rint(x * (np.float32(1) / divisor))).any()


@pytest.mark.parametrize("name", NAMES)
@DTYPES
def test_native_kernels_equal_the_reference_on_every_array(name, dtype):
    x = nasty_arrays(dtype, scale=0.1).get(name)
    if x is None:
        assert (name, dtype) == ("other byte order", "bfloat16")
        return
    for text in ("int8", "uint4/tensor/affine", "int16", "float8_e4m3fn"):
        params = dt.QuantParams(dt.QuantSpec.parse(text), 0.1)
        results = []
        for kernels in ("native", "reference"):
            with dt.use_kernels(kernels):
                codes = dt.quantize(x, params, nan="zero_point").codes
                results.append((exact(codes), exact(dt.fake_quantize(x, params))))
        assert results[0] == results[1], text


@pytest.mark.parametrize("name", list(nasty_arrays(finite_only=True)))
def test_finite_arrays_have_a_range_unless_they_are_empty(name):
    x = nasty_arrays(finite_only=True)[name]
    if x.size == 0:
        with pytest.raises(dt.RangeError):
            dt.QuantParams.from_data("int8", x)
        return
    params = dt.QuantParams.from_data("int8", x)
    assert np.isfinite(params.scale).all()
    assert observers.MinMax().observe(x).range().hi == x.max()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "0.1", None], ids=repr)
def test_a_scale_that_cannot_be_is_refused(scale):
    with pytest.raises(dt.ParamsError, match="expected a positive finite number"):
        nasty_arrays(scale=scale)


@pytest.mark.parametrize(("dtype", "scale"), list(itertools.product(FLOATS, [1e-30, 1e30])))
def test_extreme_scales_give_finite_ties(dtype, scale):
    arrays = nasty_arrays(dtype, scale=scale, finite_only=True)
    assert all(np.isfinite(array.astype(np.float64)).all() for array in arrays.values())


def test_another_dtype_is_refused():
    with pytest.raises(dt.DtypeError, match="float16, bfloat16, float32 or float64"):
        nasty_arrays("int32")
