"""Arrays, outputs, policies and plans that operators reject."""

import numpy as np
import pytest

import detent as dt

from .refusal import check, row, table

NAN = float("nan")
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
P = dt.QuantParams("int8", 0.01)
AXIS = dt.QuantParams.channel_wise(3, "int8")
Q = dt.quantize(X, P)
PLAN = dt.Plan.select("quantize", shape=(3, 4), dtype="float32", spec="int8")


@table(
    row("integers", lambda: dt.quantize(np.arange(4), P), dt.DtypeError, "int64", "float32", "astype"),
    row("a list of integers", lambda: dt.fake_quantize([1, 2], P), dt.DtypeError, "int64", "astype"),
    row("booleans", lambda: dt.fake_quantize(X > 0, P), dt.DtypeError, "bool", "float16, bfloat16, float32"),
    row("complex", lambda: dt.fake_quantize(X + 1j, P), dt.DtypeError, "complex64"),
    row("long double", lambda: dt.fake_quantize(X.astype(np.longdouble), P), dt.DtypeError, "expected float16"),
    row("text", lambda: dt.quantize("abc", P), dt.DtypeError, "NumPy array", "str", "np.asarray"),
    row("none", lambda: dt.quantize(None, P), dt.DtypeError, "NumPy array", "NoneType"),
    row("ragged", lambda: dt.quantize([[1.0], [1.0, 2.0]], P), dt.DtypeError, "x"),
    row("no params", lambda: dt.quantize(X, 0.1), dt.DtypeError, "QuantParams", "float", "from_data"),
    row("params and x swapped", lambda: dt.quantize(P, X), dt.DtypeError, "x", "QuantParams"),
    row("shape", lambda: dt.quantize(X.T, AXIS), dt.ShapeError, "(3,)", "(4, 3)", "(4,)", "axis0", "from x"),
    row("rank", lambda: dt.fake_quantize(np.float32(1.0), AXIS), dt.ShapeError, "axis0", "0-d"),
    row(
        "group shape",
        lambda: dt.fake_quantize(X, dt.QuantParams.block_wise(2, "int8")),
        dt.ShapeError,
        "(1,)",
        "(3, 4)",
        "(3, 2)",
    ),
    row("NaN", lambda: dt.quantize(np.array([[1, NAN], [NAN, 2]]), P), dt.NaNError, "2 NaN", "(0, 1)", "nan='qmin'"),
    row("NaN in fake", lambda: dt.fake_quantize([NAN], P, nan="raise"), dt.NaNError, "1 NaN", "nan='zero_point'"),
    row("policy", lambda: dt.quantize(X, P, nan="zero"), dt.SpecError, "'zero'", "did you mean 'zero_point'?"),
    row("propagate codes", lambda: dt.quantize(X, P, nan="propagate"), dt.SpecError, "'propagate'", "qmin"),
    row("step", lambda: dt.quantize(X, P, step=-1), dt.SpecError, "0..2**32-1", "got -1"),
    row("step too large", lambda: dt.fake_quantize(X, P, step=2**32), dt.SpecError, "0..2**32-1", str(2**32)),
    row("step 1.0", lambda: dt.fake_quantize(X, P, step=1.0), dt.SpecError, "integer", "1.0"),
    row(
        "float64 scale beyond float32",
        lambda: dt.fake_quantize(X, dt.QuantParams("int8", np.float64(1e-100))),
        dt.ParamsError,
        "1e-100",
        "float32",
        "rescale",
    ),
)
def test_input(call, error, words):
    check(call, error, words)


def frozen(array):
    array.setflags(write=False)
    return array


@table(
    row("dtype", lambda: dt.quantize(X, P, out=np.empty((3, 4), np.int16)), dt.OutError, "int16", "int8", "(3, 4)"),
    row("shape", lambda: dt.fake_quantize(X, P, out=np.empty((4, 3), np.float32)), dt.OutError, "(4, 3)", "(3, 4)"),
    row("packed size", lambda: dt.quantize(X, P, out=np.empty(11, np.uint8)), dt.OutError, "(11,)", "uint8", "(12,)"),
    row("dtype of fake", lambda: dt.fake_quantize(X, P, out=np.empty((3, 4))), dt.OutError, "float64", "float32"),
    row("a list", lambda: dt.fake_quantize(X, P, out=[0.0]), dt.OutError, "NumPy array", "list"),
    row("read-only", lambda: dt.fake_quantize(X, P, out=frozen(np.empty_like(X))), dt.OutError, "read-only"),
    row("itself", lambda: dt.fake_quantize(X, P, out=X), dt.OutError, "overlaps x", "separate array"),
    row("overlap of codes", lambda: dt.quantize(X, P, out=X.view(np.int8)[:, :4]), dt.OutError, "overlaps x"),
    row("overlap of g", lambda: dt.fake_quantize_backward(X, X + 1, P, out=X), dt.OutError, "overlaps g"),
    row("overlap of x", lambda: dt.quantize_backward(X + 1, X, P, out=X), dt.OutError, "overlaps x"),
    row("overlap in dequantize", lambda: dt.dequantize_backward(X, P, out=X), dt.OutError, "overlaps g"),
    row("values", lambda: Q.dequantize(out=np.empty((3, 4))), dt.OutError, "float64", "float32"),
    row("values of codes", lambda: dt.dequantize(Q, out=np.empty(12, np.float32)), dt.OutError, "(12,)", "(3, 4)"),
)
def test_out(call, error, words):
    check(call, error, words)


def test_overlap_is_of_elements_not_of_spans():
    both = np.zeros((4, 2), np.float32)
    x, out = both[:, 0], both[:, 1]
    assert dt.fake_quantize(x, P, out=out) is out


@table(
    row("shape of g", lambda: dt.fake_quantize_backward(X[:2], X, P), dt.ShapeError, "g", "(2, 4)", "(3, 4)"),
    row("dtype of g", lambda: dt.quantize_backward(X.astype("f8"), X, P), dt.DtypeError, "g", "float64", "float32"),
    row("integers as g", lambda: dt.dequantize_backward(np.arange(3), P), dt.DtypeError, "g", "int64"),
    row("estimator", lambda: dt.fake_quantize_backward(X, X, P, ste="clip"), dt.SpecError, "did you mean 'clipped'?"),
    row(
        "estimator's shape",
        lambda: dt.fake_quantize_backward(X, X, P, ste=lambda g, x, params: g[0]),
        dt.DtypeError,
        "ste returned",
        "(3, 4)",
        "(4,)",
    ),
    row(
        "estimator's dtype",
        lambda: dt.quantize_backward(X, X, P, ste=lambda g, x, params: g.astype("f8")),
        dt.DtypeError,
        "float32",
        "float64",
    ),
    row(
        "grad_scale",
        lambda: dt.fake_quantize_learned_backward(X, X, P, grad_scale="big"),
        dt.DtypeError,
        "grad_scale",
        "'big'",
    ),
    row("no params", lambda: dt.dequantize_backward(X, None), dt.DtypeError, "QuantParams", "NoneType"),
)
def test_backward(call, error, words):
    check(call, error, words)


@table(
    row("codes of floats", lambda: dt.dequantize(X, P), dt.DtypeError, "integers", "float32"),
    row("codes alone", lambda: dt.dequantize(Q.codes), dt.DtypeError, "params", "dequantize(codes, params)"),
    row("params twice", lambda: dt.dequantize(Q, P), dt.DtypeError, "its own params", "leave params out"),
    row("code too large", lambda: dt.dequantize([128], P), dt.ParamsError, "[-127, 127]", "128"),
    row("code too small", lambda: dt.dequantize([-128], P), dt.ParamsError, "[-127, 127]", "-128"),
    row("huge code", lambda: dt.dequantize(np.array([2**64 - 1], "u8"), P), dt.ParamsError, str(2**64 - 1)),
    row("nf4 code", lambda: dt.dequantize([16], dt.QuantParams("nf4", 1.0)), dt.ParamsError, "[0, 15]", "16"),
    row("float8 as ints", lambda: dt.dequantize([1], dt.QuantParams("float8_e5m2", 1.0)), dt.DtypeError, "float8_e5m2"),
    row("result type", lambda: dt.dequantize(Q, dtype="int8"), dt.DtypeError, "int8", "float16"),
    row("no type", lambda: Q.dequantize("taolf"), dt.DtypeError, "taolf", "float16"),
    row("a broken type", lambda: Q.dequantize("f4,("), dt.DtypeError, "f4,(", "float16"),
    row("shape", lambda: dt.dequantize(np.zeros((2, 4), int), AXIS), dt.ShapeError, "(3,)", "(2, 4)", "(2,)"),
    row("params", lambda: dt.QuantizedTensor.from_codes([1], 0.5), dt.DtypeError, "QuantParams", "float"),
)
def test_codes(call, error, words):
    check(call, error, words)


def of_packed(packed, shape=(3,), spec="int4"):
    return lambda: dt.QuantizedTensor.from_packed(packed, dt.QuantParams(spec, 1.0), shape)


@table(
    row("too few bytes", of_packed(np.zeros(1, np.uint8)), dt.FileFormatError, "bits=4 and count=3", "(2,)", "(1,)"),
    row("too many bytes", of_packed(np.zeros(3, np.uint8)), dt.FileFormatError, "(2,)", "(3,)"),
    row("not bytes", of_packed(np.zeros(2, np.int16)), dt.FileFormatError, "uint8", "int16"),
    row("code outside", of_packed(np.array([0x80], np.uint8), (2,)), dt.ParamsError, "[-7, 7]", "-8"),
    row("huge shape", of_packed(np.zeros(1, np.uint8), (2**60, 2**60)), dt.FileFormatError, "(1,)"),
    row("no shape", of_packed(np.zeros(2, np.uint8), 3), dt.ShapeError, "3"),
    row("bits", lambda: dt.packing.pack(Q.codes, 17), dt.SpecError, "1..16", "17"),
    row("no bits", lambda: dt.packing.unpack(Q.packed, 0, 1), dt.SpecError, "1..16", "got 0"),
    row("floats", lambda: dt.packing.pack(X, 4), dt.DtypeError, "integers", "float32"),
    row("layout", lambda: dt.packing.pack(Q.codes, 4, "low"), dt.SpecError, "'low'", "did you mean 'low_first'?"),
    row(
        "layout of 3 bits",
        lambda: dt.packing.pack(Q.codes, 3, "split_half"),
        dt.ShapeError,
        "expected 4 bits",
        "'low_first'",
    ),
    row("count", lambda: dt.packing.unpack(Q.packed, 8, 13), dt.FileFormatError, "count=13", "(13,)", "(12,)"),
    row(
        "bits after the last code",
        lambda: dt.packing.unpack(np.array([0xF1], np.uint8), 4, 1),
        dt.FileFormatError,
        "4 padding bits",
        "must be zero",
    ),
    row(
        "codes after the last one",
        lambda: dt.packing.unpack(np.array([0x1F], np.uint8), 4, 1, layout="high_first"),
        dt.FileFormatError,
        "1 padding code of",
        "must be zero",
    ),
    row("negative count", lambda: dt.packing.unpack(Q.packed[:0], 8, -1), dt.SpecError, "at least 0", "-1"),
)
def test_packing(call, error, words):
    check(call, error, words)


GROUPS = dt.quantize(X, dt.QuantParams("int8/group2", np.ones((3, 2))))


@table(
    row("an index", lambda: Q[1], dt.ShapeError, "slices", "index 1", "i:i+1"),
    row("a list", lambda: Q[[0, 1]], dt.ShapeError, "slices", "[0, 1]"),
    row("a new axis", lambda: Q[None], dt.ShapeError, "slices", "None"),
    row("too many", lambda: Q[:, :, :], dt.ShapeError, "too many", "(3, 4)"),
    row("two ellipses", lambda: Q[..., ...], dt.ShapeError, "too many"),
    row("cut start", lambda: GROUPS[:, 1:], dt.ShapeError, "axis 1", "groups of 2", "dequantize first"),
    row("cut end", lambda: GROUPS[:, :3], dt.ShapeError, "0:3:1", "groups of 2", "multiples of 2"),
    row("step", lambda: GROUPS[:, ::2], dt.ShapeError, "0:4:2", "step 1"),
    row("reversed", lambda: GROUPS[:, ::-1], dt.ShapeError, "axis 1", "step 1"),
    row("step 0", lambda: Q[::0], dt.ShapeError, "step"),
    row("length of 0-d", lambda: len(dt.quantize(np.float32(1.0), P)), dt.ShapeError, "0-d"),
)
def test_slices(call, error, words):
    check(call, error, words)


def selected(operation="quantize", shape=(3, 4), dtype="float32", spec="int8", **more):
    return lambda: dt.Plan.select(operation, shape=shape, dtype=dtype, spec=spec, **more)


@table(
    row("operation", selected("transpose"), dt.UnsupportedError, "'transpose'", "fake_quantize"),
    row("a reduction", selected("minmax"), dt.UnsupportedError, "'minmax'", "quantize"),
    row("dtype", selected(dtype="int8"), dt.DtypeError, "int8", "float16"),
    row("spec", selected(spec="int99"), dt.SpecError, "'int99'"),
    row("shape", selected(shape=(), spec="int8/axis0"), dt.ShapeError, "axis0", "0-d"),
    row("shape of -1", selected(shape=(-1,)), dt.ShapeError, "-1"),
    row("shape of 2.5", selected(shape=(2.5,)), dt.ShapeError, "2.5"),
    row("shape of one size", selected(shape=3), dt.ShapeError, "3"),
    row("estimator", selected(ste="clipped"), dt.SpecError, "no estimator", "leave ste out"),
    row("policy", selected("dequantize", nan="qmin"), dt.SpecError, "'qmin'", "propagate"),
    row("operands", lambda: PLAN.check(X), dt.DtypeError, "x, params", "got 1"),
    row("shape of x", lambda: PLAN.check(X.T, P), dt.ShapeError, "(4, 3)", "(3, 4)"),
    row("dtype of x", lambda: PLAN.check(X.astype("f8"), P), dt.DtypeError, "float64", "float32"),
    row("another spec", lambda: PLAN.check(X, dt.QuantParams("int4", 1.0)), dt.ParamsError, "dt.int4", "dt.int8"),
    row("no array", lambda: PLAN.check([1.0], P), dt.DtypeError, "NumPy array", "list"),
    row("threads", lambda: dt.set_num_threads(0), dt.SpecError, "1..1024", "got 0"),
)
def test_plan(call, error, words):
    check(call, error, words)


@table(
    row("shapes", lambda: dt.metrics.mse(X, X.T), dt.ShapeError, "(3, 4)", "(4, 3)"),
    row("integers", lambda: dt.metrics.mae(X, np.zeros((3, 4), int)), dt.DtypeError, "y", "int64"),
    row("array for tensor", lambda: dt.metrics.entropy_bits(X), dt.DtypeError, "QuantizedTensor", "ndarray"),
    row("no params", lambda: dt.metrics.clip_fraction(X, 0.1), dt.DtypeError, "QuantParams", "float"),
    row("params shape", lambda: dt.metrics.clip_fraction(X.T, AXIS), dt.ShapeError, "(3,)", "(4, 3)"),
)
def test_metrics(call, error, words):
    check(call, error, words)


def test_nan_error_counts():
    with pytest.raises(dt.NaNError) as caught:
        dt.quantize(np.array([[1.0, 2.0], [NAN, NAN]]), P)
    assert (caught.value.count, caught.value.first_index) == (2, (1, 0))
