"""Inputs of a model: which types are converted, and which tables they index."""

import re

import numpy as np
import pytest
from onnx import parser

import detent as dt
from detent.onnx_model.model_inputs import InputInfo, can_convert, inputs_of


def info(dtype):
    return InputInfo("x", np.dtype(dtype), None)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.array([0.1, -2.5]), "float32"),
        (np.array([0, 255], np.uint8), "float32"),
        (np.array([-(2**24), 2**24], np.int64), "float32"),
        (np.array([2**60, -(2**63)], np.int64), "float32"),
        (np.array([2048], np.int32), "float16"),
        (np.array([2**53], np.int64), "float64"),
        (np.array([-(2**31), 2**31 - 1], np.int64), "int32"),
        (np.array([2**63 - 1], np.uint64), "int64"),
        (np.array([0, 127], np.int8), "uint8"),
        (np.zeros((0, 3), np.int32), "int64"),
    ],
    ids=lambda value: f"{value.dtype}{value.tolist()}" if isinstance(value, np.ndarray) else value,
)
def test_conversions(given, dtype):
    info(dtype).check(given.dtype, given.shape or (1,), "data") if given.size else None
    converted = info(dtype).convert(given, "data")
    assert converted.dtype == dtype
    assert np.array_equal(converted, given.astype(dtype))


@pytest.mark.parametrize(
    ("given", "dtype", "value", "index"),
    [
        (np.array([1, 2**24 + 1], np.int64), "float32", 2**24 + 1, (1,)),
        (np.array([[2**60, 2**60 + 1]], np.int64), "float32", 2**60 + 1, (0, 1)),
        (np.array([-(2**24) - 1], np.int32), "float32", -(2**24) - 1, (0,)),
        (np.array([2**64 - 1], np.uint64), "float32", 2**64 - 1, (0,)),
        (np.array([100_000], np.int32), "float16", 100_000, (0,)),
        (np.array([2**31], np.int64), "int32", 2**31, (0,)),
        (np.array([2**63], np.uint64), "int64", 2**63, (0,)),
        (np.array([3, -1], np.int8), "uint64", -1, (1,)),
    ],
    ids=lambda value: f"{value.dtype}" if isinstance(value, np.ndarray) else str(value),
)
def test_integers_that_are_not_exact(given, dtype, value, index):
    with pytest.raises(dt.DtypeError, match=re.escape(f"value {value} at index {index} is not exact in {dtype}")):
        info(dtype).convert(given, "data batch 3")


def test_floats_that_are_too_large():
    with pytest.raises(dt.RangeError, match=re.escape("1e+300 at index (1,), too large for float32")):
        info("float32").convert(np.array([0, 1e300]), "data")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("float32", "float64"), ("float16", "float32"), ("float64", "float16"), ("bool", "int64"), ("float32", "int32")],
)
def test_other_types_are_errors(given, expected):
    assert not can_convert(np.dtype(given), np.dtype(expected))
    with pytest.raises(dt.DtypeError, match=f"astype\\('{expected}'\\)"):
        info(expected).check(np.dtype(given), (2,), "data")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Div(x, c)", {255.0: "0..255", 127.5: "0..255", 0.25: "", 2.0: ""}),
        ("y = Mul(x, c)", {1 / 255: "0..255", 1.0: "", 0.0: ""}),
        ("y = Sub(x, c)", {123.68: "0..255", 0.485: "0..1", 1.0: "", 0.0: ""}),
        ("y = Add(x, c)", {-104.0: "0..255", -0.5: "0..1"}),
        ("t = Transpose(x) y = Div(t, c)", {255.0: "0..255"}),
        ("t = Constant<value = float[3] {255.0, 255.0, 255.0}>() y = Div(x, t)", {0.0: "0..255"}),
        ("t = Relu(x) y = Div(t, c)", {255.0: ""}),
        ("t = Sub(x, c) y = Div(t, c)", {0.5: "0..1"}),
        ("y = Div(c, x)", {255.0: ""}),
    ],
)
def test_ranges_of_pixels(nodes, expected):
    for value, pixels in expected.items():
        model = parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[N, 3] x) => (float[N, 3] y) <float c = {{{value:f}}}> {{ {nodes} }}"""
        )
        assert inputs_of(model)[0].pixels == pixels, value
    wide = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 5] x) => (float[N, 5] y) <float[5] c = {255.0, 255.0, 255.0, 255.0, 255.0}> { y = Div(x, c) }"""
    )
    assert inputs_of(wide)[0].pixels == ""


def test_tables_that_inputs_index():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (int32[N, T] ids, int64[N, T] types, int64[N] axis, float[N] x) => (float[N, T, 2] y, float[N] z)
        <float[5, 2] words, int8[3, 2] codes, float scale = {0.5}, float[2, 7] wide, float[4, 2] small> {
            long = Cast<to = 7>(ids)
            a = Gather(words, long)
            b = Gather(small, long)
            table = DequantizeLinear(codes, scale)
            c = Gather(table, types)
            d = Gather<axis = 1>(wide, axis)
            y = Add(a, c)
            z = Abs(x)
        }"""
    )
    for name, dims in (("words", [5, 2]), ("codes", [3, 2]), ("wide", [2, 7]), ("small", [4, 2])):
        tensor = next((each for each in model.graph.initializer if each.name == name), None)
        tensor = model.graph.initializer.add() if tensor is None else tensor
        tensor.name, tensor.data_type = name, 3 if name == "codes" else 1
        tensor.dims[:] = dims
    assert {each.name: each.rows for each in inputs_of(model)} == {"ids": 4, "types": 3, "axis": 7, "x": None}
