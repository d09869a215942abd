"""Values of `dequantize` and `fake_quantize` compared with the exact oracle, bit for bit.

`test_oracle_codes.py` compares the values of every cell. Checked here: dequantized codes in other dtypes, and all
codes of a format; zero is never negative, not even where a narrow output type underflows.
"""

from __future__ import annotations

import numpy as np
import pytest

import detent as dt

from . import oracle
from .exact import FLOAT32
from .grid import FORMATS, STORAGE, assert_same, cells


@pytest.mark.parametrize("fmt", ["int4", "uint8", "int16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dequantize_to_other_dtypes(dtype: str, fmt: str) -> None:
    for cell in cells("onnx", "half_even", "group_ragged", fmt, dtype=dtype):
        codes = cell.codes.astype(STORAGE[fmt])
        tensor = dt.QuantizedTensor.from_codes(codes, cell.params, dtype=dtype)
        assert_same(tensor.dequantize(), cell.values, cell)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_integer_formats_never_give_a_negative_zero(dtype: str) -> None:
    """-1 step of 1e-30 is below float16's smallest subnormal: a plain cast would give -0.0."""
    x = np.array([-0.0, 0.0, -1e-30, -1e-4], dtype=dtype)
    for scale in (1e-30, 2.0**-126, 0.0123):
        for zero in (-128, 0, 3, 127):
            params = dt.QuantParams(dt.QuantSpec("int8", symmetric=False), scale=np.float32(scale), zero_point=zero)
            for y in (dt.fake_quantize(x, params), dt.quantize(x, params).dequantize()):
                assert not np.any((y == 0) & np.signbit(y))


@pytest.mark.parametrize("nan", ["zero_point", "qmin"])
@pytest.mark.parametrize("fmt", ["int4", "uint8"])
def test_nan_policies_give_the_named_code_and_its_value(fmt: str, nan: str) -> None:
    zero = 3
    params = dt.QuantParams(dt.QuantSpec(fmt, symmetric=False), scale=np.float32(0.3), zero_point=zero)
    x = np.array([0.0, np.nan, 0.45], dtype=np.float32)
    code = zero if nan == "zero_point" else dt.formats.FORMATS[fmt].qmin
    tensor = dt.quantize(x, params, nan=nan)
    assert tensor.codes.tolist() == [zero, code, _oracle_code(0.45, 0.3, zero, fmt)]
    assert dt.fake_quantize(x, params, nan=nan).tobytes() == tensor.dequantize().tobytes()


def _oracle_code(x: float, s: float, zero: int, fmt: str) -> int:
    """The code of one float32 number under the default convention."""
    low, high = dt.formats.FORMATS[fmt].qmin, dt.formats.FORMATS[fmt].qmax
    x, s = FLOAT32.round(x), FLOAT32.round(s)
    return oracle.quantize(x, s, zero, int(low), int(high), oracle.ROWS["onnx"], "half_even", FLOAT32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_fake_quantize_propagates_nan_by_default(dtype: str) -> None:
    params = dt.QuantParams(dt.QuantSpec("int8"), scale=np.float32(0.1))
    x = np.array([np.nan, 1.0], dtype=dtype)
    assert np.isnan(dt.fake_quantize(x, params).astype(np.float64)).tolist() == [True, False]


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_of_a_format_dequantizes_exactly(fmt: str) -> None:
    bits, signed = FORMATS[fmt]
    low = -(2 ** (bits - 1)) if signed else 0
    codes, zero = np.arange(low, low + 2**bits), low + 1
    for scale in np.array([0.0123, 1 / 3, 2.0**-126, 3e37], dtype=np.float32):
        params = dt.QuantParams(dt.QuantSpec(fmt, symmetric=False), scale=scale, zero_point=zero)
        expected = [oracle.dequantize(q - zero, float(scale), FLOAT32, FLOAT32) for q in codes.tolist()]
        got = dt.dequantize(codes.astype(STORAGE[fmt]), params)
        assert got.tobytes() == np.array(expected, dtype=np.float32).tobytes()
