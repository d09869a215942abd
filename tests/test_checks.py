"""The NumPy dtypes that data and codes may have."""

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.checks import FLOATS, float_array, float_dtype
from detent.spec import code_dtype


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float16", "float16"),
        ("bfloat16", ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.float32, "float32"),
        (float, "float64"),
        (np.dtype("float64"), "float64"),
    ],
)
def test_float_dtype(given, expected):
    assert float_dtype(given) == np.dtype(expected)


@pytest.mark.parametrize(
    "bad", ["int8", "float128", np.longdouble, complex, None, "f4,(", [], {"names": [1]}, 3, "x"], ids=repr
)
def test_no_float_dtype(bad):
    with pytest.raises(dt.DtypeError, match="float16"):
        float_dtype(bad)


@pytest.mark.parametrize("name", FLOATS)
def test_float_array_keeps_native_arrays_and_turns_swapped_ones(name):
    x = np.arange(3).astype(FLOATS[name])
    assert float_array(x) is x
    swapped = x.astype(x.dtype.newbyteorder(">"))
    assert float_array(swapped).dtype == FLOATS[name]
    assert float_array(swapped).tobytes() == x.tobytes()


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), [0.5], (0.5, 1.0)], ids=repr)
def test_float_array_takes_scalars_and_sequences(value):
    assert np.array_equal(float_array(value), np.asarray(value))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int8", "int8"), ("uint9", "uint16"), ("nf4", "uint8"), ("float4_e2m1fn", ml_dtypes.float4_e2m1fn)],
)
def test_code_dtype(name, dtype):
    assert code_dtype(dt.QuantSpec(name)) == np.dtype(dtype)
