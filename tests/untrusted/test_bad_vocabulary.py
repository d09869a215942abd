"""Invalid formats, granularities, roundings, conventions, estimators, modes and specs."""

import dataclasses
import json

import pytest

import detent as dt
from detent.convention import get_convention
from detent.formats import get_format
from detent.granularity import get_granularity, granularity_from_dict
from detent.scale_mode import get_scale_mode
from detent.ste import get_estimator

from .refusal import check, row, table

ONNX = dt.Convention.onnx


def spec_json(**changes):
    """JSON of a spec with some fields replaced, or removed if the value is `...`."""
    data = json.loads(dt.QuantSpec("int8").to_json()) | changes
    return json.dumps({name: value for name, value in data.items() if value is not ...})


def convention_json(**changes):
    return spec_json(convention=ONNX.to_dict() | {"name": "mine"} | changes)


@table(
    row("unknown", lambda: get_format("int44"), dt.SpecError, "'int44'", "did you mean 'int4'?", "int1..int16"),
    row("a typo", lambda: dt.QuantSpec("flaot8_e4m3fn"), dt.SpecError, "did you mean 'float8_e4m3fn'?"),
    row("a named spec", lambda: dt.QuantSpec.parse("mxfp5"), dt.SpecError, "did you mean 'mxfp"),
    row("nothing alike", lambda: get_format("zzz"), dt.SpecError, "'zzz'", "expected int1..int16"),
    row("empty", lambda: dt.QuantSpec.parse(""), dt.SpecError, "unknown format ''"),
    row("a number", lambda: dt.QuantSpec(8), dt.DtypeError, "got 8", "dt.int8"),
    row("none", lambda: dt.QuantSpec(None), dt.DtypeError, "got None"),
)
def test_format(call, error, words):
    check(call, error, words)


@table(
    row("unknown", lambda: get_granularity("grup128"), dt.SpecError, "'grup128'", "did you mean 'group128'?", "groupN"),
    row("no number", lambda: get_granularity("axis"), dt.SpecError, "'axis'", "did you mean 'axis0'?"),
    row("signed block", lambda: get_granularity("block-1x2"), dt.SpecError, "'block-1x2'", "blockNxM"),
    row("trailing text", lambda: get_granularity("group8x8"), dt.SpecError, "'group8x8'"),
    row("in a spec", lambda: dt.QuantSpec.parse("int8/tensr"), dt.SpecError, "'tensr'", "did you mean 'tensor'?"),
    row("another type", lambda: get_granularity(3), dt.DtypeError, "got 3", "dt.PerAxis(0)", "'axis0'"),
    row("group size 0", lambda: dt.PerGroup(0), dt.SpecError, "at least 1", "got 0"),
    row("group size -8", lambda: dt.QuantSpec.parse("int8/group-8"), dt.SpecError, "at least 1", "got -8"),
    row("group size 2.5", lambda: dt.PerGroup(2.5), dt.SpecError, "integer", "got 2.5"),
    row("group size True", lambda: dt.PerGroup(True), dt.SpecError, "integer", "got True"),
    row("block size 0", lambda: dt.PerBlock(4, 0), dt.SpecError, "PerBlock", "at least 1", "got 0"),
    row("no block size", dt.PerBlock, dt.SpecError, "PerBlock(128, 128)"),
    row("axis 1.5", lambda: dt.PerAxis(1.5), dt.SpecError, "axis", "integer", "got 1.5"),
    row("axis too high", lambda: dt.PerAxis(2).tiling((4, 5)), dt.ShapeError, "axis2", "(4, 5)", "from -2 to 1"),
    row("axis too low", lambda: dt.PerAxis(-3).tiling((4, 5)), dt.ShapeError, "axis-3", "(4, 5)", "from -2 to 1"),
    row("group axis", lambda: dt.PerGroup(2, 3).tiling((4,)), dt.ShapeError, "group2@3", "(4,)", "from -1 to 0"),
    row("0-d axis", lambda: dt.PerAxis(0).tiling(()), dt.ShapeError, "axis0", "0-d", "PerTensor()"),
    row("0-d token", lambda: dt.PerToken().tiling(()), dt.ShapeError, "token", "0-d", "PerTensor()"),
    row("0-d group", lambda: dt.PerGroup(4).tiling(()), dt.ShapeError, "group4", "0-d", "PerTensor()"),
    row("block rank", lambda: dt.PerBlock(2, 2).tiling((5,)), dt.ShapeError, "at least 2", "(5,)", "reshape"),
    row("dict without size", lambda: granularity_from_dict({"kind": "group"}), dt.SpecError, "'group'", "size"),
    row("dict of no kind", lambda: granularity_from_dict({"kind": ["axis"]}), dt.SpecError, "as granularity"),
    row("dict is a list", lambda: granularity_from_dict([]), dt.SpecError, "as granularity", "[]"),
    row("sizes no list", lambda: granularity_from_dict({"kind": "block", "sizes": 3}), dt.SpecError, "list", "3"),
)
def test_granularity(call, error, words):
    check(call, error, words)


@table(
    row("unknown", lambda: dt.rounding.get_rounding("half_eve"), dt.SpecError, "did you mean 'half_even'?", "floor"),
    row("not a string", lambda: dt.rounding.get_rounding(3), dt.SpecError, "unknown rounding 3"),
    row("an open seed", lambda: dt.rounding.get_rounding("stochastic(7"), dt.SpecError, "'stochastic(7'", "SEED"),
    row("seed too large", lambda: dt.rounding.stochastic(2**64), dt.SpecError, "2**64-1", str(2**64)),
    row("negative seed", lambda: dt.rounding.stochastic(-1), dt.SpecError, "0..2**64-1", "got -1"),
    row("seed of floor", lambda: dt.rounding.get_rounding("floor(3)"), dt.SpecError, "seed 3", "'floor'"),
    row("of a small float", lambda: dt.QuantSpec("nf4", rounding="floor"), dt.SpecError, "nf4", "leave out rounding="),
)
def test_rounding(call, error, words):
    check(call, error, words)


def replaced(**changes):
    return lambda: dataclasses.replace(ONNX, **({"name": "mine"} | changes))


@table(
    row("unknown", lambda: get_convention("tensorrt"), dt.SpecError, "'tensorrt'", "onnx", "baracuda_token"),
    row("a typo", lambda: dt.QuantSpec.parse("int8/tensor/symmetric/torc"), dt.SpecError, "did you mean 'torch'?"),
    row("a list", lambda: dt.QuantSpec("int8", convention=["onnx"]), dt.SpecError, "['onnx']"),
    row("a preset's name", replaced(name="onnx", narrow=False), dt.SpecError, "'onnx'", "preset", "name"),
    row("name", replaced(name="my runtime"), dt.SpecError, "identifier", "'my runtime'"),
    row("division", replaced(division="divde"), dt.SpecError, "division", "did you mean 'divide'?", "reciprocal"),
    row("zero point", replaced(zero_point="before"), dt.SpecError, "zero_point", "'before'", "before_round"),
    row("scale rule", replaced(symmetric_scale="max"), dt.SpecError, "symmetric_scale", "'max'", "qmax"),
    row("mask", replaced(mask="code"), dt.SpecError, "mask", "'code'", "code_inclusive"),
    row("narrow", replaced(narrow=1), dt.SpecError, "narrow", "True or False", "narrow=1"),
    row("zero range", replaced(zero_range="unit"), dt.SpecError, "ZeroRange", "'unit'"),
    row("zero range kind", lambda: dt.ZeroRange("units"), dt.SpecError, "did you mean 'unit'?"),
    row("eps needs a value", lambda: dt.ZeroRange("eps"), dt.SpecError, "positive finite value", "value=0.0"),
    row("eps of NaN", lambda: dt.ZeroRange("eps", float("nan")), dt.SpecError, "positive finite value", "nan"),
    row("eps of text", lambda: dt.ZeroRange("eps", "small"), dt.SpecError, "number", "'small'"),
    row("unit takes none", lambda: dt.ZeroRange("unit", 1.0), dt.SpecError, "no value", "value=1.0"),
    row("unit takes no negative", lambda: dt.ZeroRange("unit", -5.0), dt.SpecError, "no value", "value=-5.0"),
    row("unit takes no NaN", lambda: dt.ZeroRange("unit", float("nan")), dt.SpecError, "no value", "nan"),
    row("missing key", lambda: dt.Convention.from_dict({"name": "x"}), dt.SpecError, "missing", "division"),
)
def test_convention(call, error, words):
    check(call, error, words)


@table(
    row("unknown", lambda: get_estimator("cliped", ONNX), dt.SpecError, "did you mean 'clipped'?", "ste.Clipped()"),
    row("a class", lambda: get_estimator(dt.ste.Clipped, ONNX), dt.SpecError, "Clipped", "callable f(g, x, params)"),
    row("a number", lambda: get_estimator(3, ONNX), dt.SpecError, "3", "identity"),
    row("on", lambda: dt.ste.Clipped(on="codes"), dt.SpecError, "Clipped", "'codes'", "did you mean 'code'?"),
    row("bounds", lambda: dt.ste.Clipped(bounds="open"), dt.SpecError, "bounds", "'open'", "exclusive"),
    row("unit", lambda: dt.ste.Tanh(unit="rng"), dt.SpecError, "unit", "'rng'", "range or step"),
    row("mode", lambda: get_scale_mode("emma"), dt.SpecError, "'emma'", "did you mean 'ema'?", "per_batch"),
    row("mode value", lambda: get_scale_mode(None), dt.SpecError, "None", "fixed"),
    row("decay of 1", lambda: dt.EMA(1.0), dt.SpecError, "decay", "[0, 1)", "decay 1.0"),
    row("decay of NaN", lambda: dt.EMA(float("nan")), dt.SpecError, "decay", "nan"),
    row("decay of text", lambda: dt.EMA("0.9"), dt.SpecError, "decay", "'0.9'"),
    row("mode json", lambda: dt.ScaleMode.from_json('{"kind": "SGD"}'), dt.SpecError, "SGD", '"EMA"'),
    row("mode json field", lambda: dt.ScaleMode.from_json('{"kind": "Fixed", "decay": 1}'), dt.SpecError, "decay"),
    row("mode no json", lambda: dt.ScaleMode.from_json("["), dt.SpecError, "not the JSON of a scale mode"),
)
def test_estimator_and_mode(call, error, words):
    check(call, error, words)


@table(
    row("symmetric int1", lambda: dt.QuantSpec("int1"), dt.SpecError, "int1", "symmetric=False", "more bits"),
    row(
        "symmetric uint1",
        lambda: dt.QuantSpec("uint1", symmetric=True),
        dt.SpecError,
        "uint1",
        "positive values",
    ),
    row("parsed int1", lambda: dt.QuantSpec.parse("int1/axis0"), dt.SpecError, "int1", "symmetric=False"),
    row("range without zero", lambda: dt.QuantSpec("int8", qmin=5, qmax=9), dt.SpecError, "[5, 9]", "zero point 0"),
    row("range reversed", lambda: dt.QuantSpec("uint8", qmin=9, qmax=5), dt.SpecError, "qmin=9", "qmax=5", "<"),
    row("range too wide", lambda: dt.QuantSpec("int4", qmax=8), dt.SpecError, "int4", "[-8, 7]", "qmax=8"),
    row("fractional range", lambda: dt.QuantSpec("int4", qmin=-7.0), dt.SpecError, "qmin", "integer", "-7.0"),
    row("range of a float", lambda: dt.QuantSpec("nf4", qmax=2.0), dt.SpecError, "nf4", "leave out qmin= and qmax="),
    row("affine float", lambda: dt.QuantSpec("nf4", symmetric=False), dt.SpecError, "nf4", "no zero point", "False"),
    row("symmetric=1", lambda: dt.QuantSpec("int8", symmetric=1), dt.SpecError, "True, False or None", "symmetric=1"),
    row("scale format", lambda: dt.QuantSpec("int8", scale_format="e8m0"), dt.SpecError, "'e8m0'", "int8"),
    row("scale format name", lambda: dt.QuantSpec("int8", scale_format="x"), dt.SpecError, "'x'", "e4m3"),
    row("replace", lambda: dt.QuantSpec("int8").replace(bits=4), dt.SpecError, "['bits']", "format"),
    row("parse: order", lambda: dt.QuantSpec.parse("int8/torch/axis0"), dt.SpecError, "axis0"),
    row("parse: too much", lambda: dt.QuantSpec.parse("int8/axis0/affine/onnx/x"), dt.SpecError, "'x'", "symmetric"),
    row("parse: symmetry", lambda: dt.QuantSpec.parse("int8/symetric"), dt.SpecError, "did you mean 'symmetric'?"),
    row("parse: no string", lambda: dt.QuantSpec.parse(8), dt.SpecError, "got 8", "'int8/axis0'"),
)
def test_spec(call, error, words):
    check(call, error, words)


@table(
    row("no json", lambda: dt.QuantSpec.from_json("{"), dt.SpecError, "not valid JSON"),
    row("none", lambda: dt.QuantSpec.from_json(None), dt.SpecError, "JSON text", "NoneType"),
    row("deep", lambda: dt.QuantSpec.from_json("[" * 100_000), dt.SpecError, "not valid JSON"),
    row("a list", lambda: dt.QuantSpec.from_json("[]"), dt.SpecError, "JSON object", "[]"),
    row("missing key", lambda: dt.QuantSpec.from_json(spec_json(qmin=...)), dt.SpecError, "keys", "qmin"),
    row("extra key", lambda: dt.QuantSpec.from_json(spec_json(extra=1)), dt.SpecError, "keys", "extra"),
    row("version 2", lambda: dt.QuantSpec.from_json(spec_json(version=2)), dt.SpecError, "version 1", "2", "update"),
    row("version true", lambda: dt.QuantSpec.from_json(spec_json(version=True)), dt.SpecError, "version 1", "True"),
    row("null", lambda: dt.QuantSpec.from_json(spec_json(symmetric=None)), dt.SpecError, "no None in other fields"),
    row("qmin NaN", lambda: dt.QuantSpec.from_json(spec_json(qmin=float("nan"))), dt.SpecError, "NaN"),
    row("format list", lambda: dt.QuantSpec.from_json(spec_json(format=["int8"])), dt.SpecError, "['int8']"),
    row("granularity text", lambda: dt.QuantSpec.from_json(spec_json(granularity="axis0")), dt.SpecError, "'axis0'"),
    row("rounding number", lambda: dt.QuantSpec.from_json(spec_json(rounding=3)), dt.SpecError, "rounding 3"),
    row("convention text", lambda: dt.QuantSpec.from_json(spec_json(convention="onnx")), dt.SpecError, "'onnx'"),
    row("no zero range", lambda: dt.QuantSpec.from_json(convention_json(zero_range=[])), dt.SpecError, "zero_range"),
    row(
        "zero range of text",
        lambda: dt.QuantSpec.from_json(convention_json(zero_range={"kind": "eps", "value": "x"})),
        dt.SpecError,
        "'x'",
    ),
    row("mask list", lambda: dt.QuantSpec.from_json(convention_json(mask=["identity"])), dt.SpecError, "mask"),
)
def test_spec_json(call, error, words):
    check(call, error, words)


@pytest.mark.parametrize(
    "value",
    [dt.int8, dt.PerGroup(4), dt.rounding.half_even, dt.Convention.onnx, dt.ste.Clipped(), dt.EMA(0.9), dt.mxfp4],
    ids=repr,
)
def test_vocabulary_is_frozen(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
