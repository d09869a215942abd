"""Invalid scales, zero points and ranges."""

import json

import ml_dtypes
import numpy as np

import detent as dt

from .refusal import check, row, table

INF, NAN = float("inf"), float("nan")
E4M3_ONE = np.ones((), ml_dtypes.float8_e4m3fn)


def make(scale, zero_point=None, spec="int8", **more):
    return lambda: dt.QuantParams(spec, scale, zero_point, **more)


@table(
    row("zero", make(0.0), dt.ParamsError, "scale", "positive", "got 0.0"),
    row("negative", make(-0.5), dt.ParamsError, "scale", "positive", "got -0.5"),
    row("NaN", make(NAN), dt.ParamsError, "scale", "a number", "got nan"),
    row("infinite", make(INF), dt.ParamsError, "scale", "finite", "got inf"),
    row("subnormal", make(1e-40), dt.ParamsError, "scale", "normal number", "1.17549", "got "),
    row("subnormal float64", make(np.float64(1e-310)), dt.ParamsError, "normal number", "2.225", "1e-310"),
    row("one of many", make([1.0, -2.0, 0.0], spec="int8/axis0"), dt.ParamsError, "got -2.0", "index (1,)", "2 of 3"),
    row("text", make("wide"), dt.DtypeError, "scale", "numbers", "'wide'"),
    row("none", make(None), dt.DtypeError, "scale", "numbers", "None"),
    row("complex", make(1j), dt.DtypeError, "scale", "numbers", "1j"),
    row("ragged", make([[1.0, 2.0], [3.0]], spec="int8/token"), dt.DtypeError, "scale", "numbers"),
    row("many for a tensor", make([1.0, 2.0]), dt.ShapeError, "tensor", "()", "(2,)"),
    row("one for an axis", make(1.0, spec="int8/axis0"), dt.ShapeError, "axis0", "(n,)", "shape ()", "shape=x.shape"),
    row("flat for blocks", make([1.0], spec="int8/block2x2"), dt.ShapeError, "at least 2", "(1,)"),
    row("no power of two", make(np.ones((1, 1)) * 3, spec="mxfp4"), dt.ParamsError, "powers of two", "from_data"),
    row("nvfp4 levels", make([[1.0]], spec="nvfp4"), dt.ParamsError, "block_scale", "tensor_scale", "from_data"),
    row("levels of int8", make(1.0, block_scale=E4M3_ONE, tensor_scale=1.0), dt.ParamsError, "not support", "'float'"),
)
def test_scale(call, error, words):
    check(call, error, words)


@table(
    row("too high", make(1.0, 256, "uint8"), dt.ParamsError, "[0, 255]", "got 256"),
    row("too low", make(1.0, -1, "uint8"), dt.ParamsError, "[0, 255]", "got -1"),
    row("beyond a custom range", make(1.0, 0, dt.QuantSpec("uint8", qmin=5)), dt.ParamsError, "[5, 255]", "got 0"),
    row("one of many", make([1, 1, 1], [0, 300, 1], "uint8/axis0"), dt.ParamsError, "got 300", "1 of 3"),
    row("symmetric", make(1.0, 3), dt.ParamsError, "must be 0", "symmetric", "got 3"),
    row("symmetric unsigned", make(1.0, 0, "uint8/symmetric"), dt.ParamsError, "must be 128", "got 0"),
    row("of a small float", make(1.0, 1, "nf4"), dt.ParamsError, "must be 0", "got 1"),
    row("fractional", make(1.0, 0.5, "uint8"), dt.ParamsError, "integers", "0.5", "round the zero point"),
    row("NaN", make(1.0, NAN, "uint8"), dt.ParamsError, "integers", "nan"),
    row("infinite", make(1.0, INF, "uint8"), dt.ParamsError, "integers", "inf"),
    row("beyond int32", make(1.0, 2**32, "uint8"), dt.ParamsError, "int32", str(2**32)),
    row("text", make(1.0, "3", "uint8"), dt.DtypeError, "zero_point", "'3'"),
    row("boolean", make(1.0, True, "uint8"), dt.DtypeError, "zero_point", "True"),
    row("shape", make([1.0, 1.0], [1, 2, 3], "uint8/axis0"), dt.ShapeError, "(3,)", "(2,)"),
)
def test_zero_point(call, error, words):
    check(call, error, words)


def ranged(lo, hi, spec="int8", **more):
    return lambda: dt.QuantParams.from_range(spec, lo, hi, **more)


ERROR = dt.Convention.from_dict(
    dt.Convention.onnx.to_dict() | {"name": "strict", "zero_range": {"kind": "error", "value": 0.0}}
)


@table(
    row("lo > hi", ranged(1.0, -1.0), dt.RangeError, "lo 1.0", "hi -1.0", "swap"),
    row("lo > hi in one set", ranged([0, 2], [1, 1], "int8/axis0"), dt.RangeError, "lo 2.0", "index (1,)", "1 of 2"),
    row("NaN", ranged(NAN, 1.0), dt.RangeError, "finite", "lo nan", "hi 1.0"),
    row("infinite lo", ranged(-INF, 1.0), dt.RangeError, "finite", "lo -inf"),
    row("infinite hi", ranged(0.0, INF), dt.RangeError, "finite", "hi inf"),
    row("text", ranged("low", 1.0), dt.DtypeError, "lo", "numbers", "'low'"),
    row("none", ranged(0.0, None), dt.DtypeError, "hi", "numbers", "None"),
    row("ragged", ranged([[1.0], [1.0, 2.0]], 3.0, "int8/axis0"), dt.DtypeError, "lo", "numbers"),
    row("empty", ranged([], [], "int8/axis0"), dt.RangeError, "(0,)", "empty"),
    row("two shapes", ranged([0, 0, 0], [1, 1], "int8/axis0"), dt.ShapeError, "(3,)", "(2,)"),
    row("scalars for an axis", ranged(0.0, 1.0, "int8/axis0"), dt.ShapeError, "axis0", "shape=x.shape"),
    row("another shape", ranged([0, 0], [1, 1], "int8/axis0", shape=(3, 4)), dt.ShapeError, "(2,)", "(3,)"),
    row("dtype", ranged(0.0, 1.0, dtype="float16"), dt.DtypeError, "float32", "float64", "got", "float16"),
    row("beyond float32", ranged(0.0, 1e300), dt.RangeError, "1e+300", "float32", "dtype='float64'"),
    row("beyond float32, nvfp4", ranged([[0.0]], [[1e300]], "nvfp4"), dt.RangeError, "1e+300", "rescale"),
    row("zero range", ranged(0.0, 0.0, dt.QuantSpec("int8", convention=ERROR)), dt.RangeError, "'strict'", "1 of 1"),
    row(
        "statistics of another shape",
        lambda: dt.QuantParams.channel_wise(3, "int8").from_statistics(np.zeros(4), np.ones(4)),
        dt.ShapeError,
        "(4,)",
        "(3,)",
    ),
    row(
        "statistics reversed",
        lambda: dt.QuantParams.int8_symmetric().from_statistics(2.0, -2.0),
        dt.RangeError,
        "lo 2.0",
        "hi -2.0",
    ),
)
def test_range(call, error, words):
    check(call, error, words)


def of_data(x, spec="int8"):
    return lambda: dt.QuantParams.from_data(spec, x)


@table(
    row("empty", of_data(np.zeros((3, 0), np.float32)), dt.RangeError, "(3, 0)", "empty"),
    row("NaN", of_data(np.array([[1.0, 2.0], [NAN, NAN]])), dt.RangeError, "not finite in 2 of 4", "(1, 0)", "MinMax"),
    row("infinite", of_data(np.array([INF, 0.0])), dt.RangeError, "not finite in 1 of 2", "(0,)", "MinMax"),
    row("integers", of_data(np.arange(3)), dt.DtypeError, "int64", "float32", "astype"),
    row("none", of_data(None), dt.DtypeError, "NumPy array", "NoneType"),
    row("ragged", of_data([[1.0, 2.0], [3.0]]), dt.DtypeError, "x"),
    row("axis", of_data(np.ones((2, 3)), "int8/axis2"), dt.ShapeError, "axis2", "(2, 3)", "from -2 to 1"),
    row("0-d token", of_data(np.ones(()), "int8/token"), dt.ShapeError, "token", "0-d"),
    row("channels", lambda: dt.QuantParams.channel_wise(0, "int8"), dt.ShapeError, "channels", "integer", "got 0"),
    row("block size", lambda: dt.QuantParams.block_wise(0, "int8"), dt.SpecError, "at least 1", "got 0"),
)
def test_data(call, error, words):
    check(call, error, words)


def changed(**changes):
    """Call from_json with uint8 parameters in which some entries are updated, or replaced if not a dict."""
    data = json.loads(dt.QuantParams("uint8", 0.5, 3).to_json())
    for name, value in changes.items():
        data[name] = data[name] | value if isinstance(value, dict) else value
    text = json.dumps({name: value for name, value in data.items() if value is not ...})
    return lambda: dt.QuantParams.from_json(text)


@table(
    row("no json", lambda: dt.QuantParams.from_json("{"), dt.ParamsError, "not valid JSON"),
    row("deep", lambda: dt.QuantParams.from_json("[" * 100_000), dt.ParamsError, "not valid JSON"),
    row("a list", lambda: dt.QuantParams.from_json("[]"), dt.ParamsError, "JSON object"),
    row("none", lambda: dt.QuantParams.from_json(None), dt.ParamsError, "JSON text"),
    row("version", changed(version=2), dt.ParamsError, "version 1", "update"),
    row("version true", changed(version=True), dt.ParamsError, "version 1"),
    row("no version", changed(version=...), dt.ParamsError, "version"),
    row("no scale", changed(scale=...), dt.ParamsError, "'scale'"),
    row("spec", changed(spec={"format": "int99"}), dt.SpecError, "int99"),
    row("array is a list", changed(scale=[0.5]), dt.ParamsError, "0.5"),
    row("values of text", changed(scale={"values": ["x"]}), dt.ParamsError, "'x'"),
    row("too many values", changed(scale={"values": [1.0, 2.0]}), dt.ParamsError, "2"),
    row("unknown dtype", changed(scale={"dtype": "object"}), dt.ParamsError, "object"),
    row("dtype list", changed(scale={"dtype": []}), dt.ParamsError, "scale", "float32"),
    row("shape -1", changed(scale={"shape": [-1]}), dt.ParamsError, "-1"),
    row("shape 0.5", changed(scale={"shape": [0.5]}), dt.ParamsError, "0.5"),
    row("fractional zero point", changed(zero_point={"values": [2.5]}), dt.ParamsError, "2.5"),
    row("zero point that wraps", changed(zero_point={"values": [2**32 + 3]}), dt.ParamsError, str(2**32 + 3)),
    row("scale beyond float32", changed(scale={"values": [1e300]}), dt.ParamsError, "1e+300", "float32"),
    row("scale NaN", changed(scale={"values": [NAN]}), dt.ParamsError, "NaN"),
    row("missing array", lambda: dt.QuantParams.from_arrays("int8", {"scale": 1.0}), dt.ParamsError, "'zero_point'"),
    row(
        "extra array",
        lambda: dt.QuantParams.from_arrays("int8", {"scale": 1.0, "zero_point": 0, "bias": 1.0}),
        dt.ParamsError,
        "'bias'",
    ),
    row(
        "block scales as floats",
        lambda: dt.QuantParams.from_arrays("nvfp4", {"scale": [1.0], "zero_point": 0, "block_scale": [1.0]}),
        dt.ParamsError,
        "uint8",
        "float64",
    ),
    row("min_val of text", make(1.0, min_val="a", max_val=1.0), dt.DtypeError, "min_val", "'a'"),
    row("min_val > max_val", make(1.0, min_val=2.0, max_val=1.0), dt.RangeError, "lo 2.0", "hi 1.0"),
)
def test_stored(call, error, words):
    check(call, error, words)
