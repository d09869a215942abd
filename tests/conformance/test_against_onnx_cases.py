"""Node test cases of the `onnx` package: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear.

Checked here: for every case of the specification's test suite whose formats detent has, codes and zero
points are equal, dequantized values are equal, and a scale that detent computes is within one unit in the
last place. Cases left out are listed with the reason, and the lists are complete: a new case in a later
onnx must be put into one of them.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

onnx = pytest.importorskip("onnx")

LEFT_OUT: dict[str, str] = {}
"""Cases that need something detent does not have, with the reason; empty for onnx 1.23."""

QUANTIZE = (
    "test_quantizelinear",
    "test_quantizelinear_axis",
    "test_quantizelinear_blocked_asymmetric",
    "test_quantizelinear_blocked_symmetric",
    "test_quantizelinear_e4m3fn",
    "test_quantizelinear_e5m2",
    "test_quantizelinear_float4e2m1",
    "test_quantizelinear_int16",
    "test_quantizelinear_int2",
    "test_quantizelinear_int4",
    "test_quantizelinear_uint16",
    "test_quantizelinear_uint2",
    "test_quantizelinear_uint4",
)
BY_VALUE = {
    "test_quantizelinear_float4e2m1": "expects +0.0 for -0.0: written as numbers, compared by value",
}
"""Cases whose small floats are compared as numbers; all others are compared bit for bit."""
DEQUANTIZE = (
    "test_dequantizelinear",
    "test_dequantizelinear_axis",
    "test_dequantizelinear_blocked",
    "test_dequantizelinear_e4m3fn",
    "test_dequantizelinear_e4m3fn_float16",
    "test_dequantizelinear_e4m3fn_zero_point",
    "test_dequantizelinear_e5m2",
    "test_dequantizelinear_float4e2m1",
    "test_dequantizelinear_int16",
    "test_dequantizelinear_int2",
    "test_dequantizelinear_int4",
    "test_dequantizelinear_uint16",
    "test_dequantizelinear_uint2",
    "test_dequantizelinear_uint4",
)
DYNAMIC = (
    "test_dynamicquantizelinear",
    "test_dynamicquantizelinear_expanded",
    "test_dynamicquantizelinear_max_adjusted",
    "test_dynamicquantizelinear_max_adjusted_expanded",
    "test_dynamicquantizelinear_min_adjusted",
    "test_dynamicquantizelinear_min_adjusted_expanded",
)


@functools.cache
def _cases() -> dict[str, object]:
    """All Q/DQ cases by name. The collector may run only once per process: a second call adds to it."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_cases = collect_testcases(None)
    prefixes = ("test_quantizelinear", "test_dequantizelinear", "test_dynamicquantizelinear")
    return {case.name: case for case in all_cases if case.name.startswith(prefixes)}


def _array(value: object) -> NDArray:
    """A test case's array; formats that NumPy lacks come as TensorProto and become ml_dtypes arrays."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


@dataclass(frozen=True)
class Data:
    """The numbers of one case."""

    inputs: list[NDArray]
    outputs: list[NDArray]
    attributes: dict[str, int]


def _data(name: str) -> Data:
    case = _cases()[name]
    (inputs, outputs), *_ = case.data_sets
    attributes = {a.name: a.i for a in case.model.graph.node[0].attribute}
    return Data([_array(v) for v in inputs], [_array(v) for v in outputs], attributes)


def _params(codes: NDArray, scale: NDArray, zero: NDArray | None, attributes: dict[str, int]) -> dt.QuantParams:
    """detent's spelling of a node: full range, so affine for integers; small floats have no zero point."""
    fmt = dt.formats.FORMATS[codes.dtype.name]
    axis = attributes.get("axis", 1)
    granularity: dt.granularity.Granularity = dt.PerTensor()
    if attributes.get("block_size"):
        granularity = dt.PerGroup(attributes["block_size"], axis=axis)
    elif scale.ndim:
        granularity = dt.PerAxis(axis)
    stored = scale.astype(np.float32)
    if fmt.kind == "integer":
        points = np.zeros(scale.shape, np.int32) if zero is None else zero.astype(np.int32)
        return dt.QuantParams(dt.QuantSpec(fmt, granularity, symmetric=False), scale=stored, zero_point=points)
    assert zero is None or not np.any(zero.astype(np.float32))
    return dt.QuantParams(dt.QuantSpec(fmt, granularity), scale=stored)


def _plain(codes: NDArray) -> NDArray:
    """Codes as numbers that compare by value, small floats as their bytes."""
    return codes.view(np.uint8) if codes.dtype.name.startswith("float") else codes.astype(np.int64)


def _storage(codes: NDArray) -> NDArray:
    """Codes in the array type detent keeps them in: sub-byte integers in a byte."""
    widths = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8}
    return codes.astype(widths.get(codes.dtype.name, codes.dtype))


def test_every_case_is_either_tested_or_left_out_by_name() -> None:
    assert sorted(_cases()) == sorted([*QUANTIZE, *DEQUANTIZE, *DYNAMIC, *LEFT_OUT])


@pytest.mark.parametrize("name", QUANTIZE)
def test_quantizelinear(name: str) -> None:
    data = _data(name)
    x, scale, *rest = data.inputs
    (expected,) = data.outputs
    params = _params(expected, scale, rest[0] if rest else None, data.attributes)
    codes = dt.quantize(x, params).codes
    if name in BY_VALUE:
        assert np.array_equal(codes.astype(np.float32), expected.astype(np.float32))
    else:
        assert np.array_equal(_plain(codes), _plain(expected))


@pytest.mark.parametrize("name", DEQUANTIZE)
def test_dequantizelinear(name: str) -> None:
    data = _data(name)
    codes, scale, *rest = data.inputs
    (expected,) = data.outputs
    params = _params(codes, scale, rest[0] if rest else None, data.attributes)
    got = dt.dequantize(_storage(codes), params, dtype=expected.dtype.name)
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamicquantizelinear(name: str) -> None:
    data = _data(name)
    codes, scale, zero = data.outputs
    params = dt.QuantParams.from_data(dt.QuantSpec(dt.uint8, symmetric=False), data.inputs[0])
    assert int(params.zero_point) == int(zero)
    assert abs(float(params.scale) - float(scale)) <= float(np.spacing(np.float32(scale)))
    assert np.array_equal(dt.quantize(data.inputs[0], params).codes, codes)


def test_the_formats_without_a_numpy_type_come_as_ml_dtypes() -> None:
    """Guards the reading of the cases: 4-bit codes must not arrive packed."""
    assert _data("test_quantizelinear_int4").outputs[0].dtype == ml_dtypes.int4
