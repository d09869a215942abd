"""The table of formats."""

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.formats import FORMATS, get_format

SMALL_FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


@pytest.mark.parametrize("bits", range(1, 17))
def test_integers(bits):
    signed, unsigned = FORMATS[f"int{bits}"], FORMATS[f"uint{bits}"]
    assert (signed.qmin, signed.qmax) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert (unsigned.qmin, unsigned.qmax) == (0, 2**bits - 1)
    assert (signed.storage, unsigned.storage) == (("int8", "uint8") if bits <= 8 else ("int16", "uint16"))
    assert (signed.signed, unsigned.signed, signed.bits, unsigned.bits) == (True, False, bits, bits)
    assert signed.is_integer


def test_onnx_names():
    assert {name: f.onnx for name, f in FORMATS.items() if f.onnx} == {
        **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for bits in (2, 4, 8, 16) for sign in ("", "u")},
        "float8_e4m3fn": "FLOAT8E4M3FN",
        "float8_e5m2": "FLOAT8E5M2",
        "float4_e2m1fn": "FLOAT4E2M1",
    }


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_levels_are_those_of_ml_dtypes(name):
    codes = np.arange(2 ** FORMATS[name].bits, dtype=np.uint8)
    expected = codes.view(getattr(ml_dtypes, name)).astype(np.float64)
    levels = np.array(FORMATS[name].levels)
    assert np.array_equal(levels, expected, equal_nan=True)
    assert np.array_equal(np.signbit(levels)[~np.isnan(levels)], np.signbit(expected)[~np.isnan(expected)])


@pytest.mark.parametrize(
    ("name", "top", "gap"),
    [("float8_e4m3fn", 448.0, 32.0), ("float8_e5m2", 57344.0, 8192.0), ("float4_e2m1fn", 6.0, 2.0), ("int5", 15, 1.0)],
)
def test_top_and_largest_gap(name, top, gap):
    assert (FORMATS[name].qmax, FORMATS[name].largest_gap) == (top, gap)


def test_nf4_levels():
    levels = np.array(dt.nf4.levels)
    assert levels.size == 16
    assert (levels[0], levels[7], levels[15]) == (-1.0, 0.0, 1.0)
    assert (np.diff(levels) > 0).all()
    assert np.array_equal(levels, levels.astype(np.float32))
    assert dt.nf4.largest_gap == np.diff(levels).max()


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        FORMATS["int8"] = dt.int4


@pytest.mark.parametrize("name", FORMATS)
def test_get_format_and_repr(name):
    assert get_format(name) is FORMATS[name] is getattr(dt, name)
    assert get_format(FORMATS[name]) is FORMATS[name]
    assert repr(FORMATS[name]) == f"dt.{name}"
