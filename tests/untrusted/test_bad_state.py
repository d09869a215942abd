"""Use before calibration, states that do not match, batches of unexpected shapes."""

import numpy as np

import detent as dt
from detent.observers import EMAMinMax, MinMax

from .refusal import check, row, table

X = np.array([[1.0, -2.0], [0.5, 0.25]], np.float32)
NANS = np.full((2, 2), np.nan, np.float32)
AXIS = "int8/axis0"


def quantizer(mode, calibrated=True, spec="int8"):
    fq = dt.FakeQuantize(spec, mode=mode)
    return fq.calibrate(X) if calibrated else fq


FIXED = quantizer("fixed")


@table(
    row("scale", lambda: dt.FakeQuantize.q8().scale, dt.NotCalibratedError, "calibrate(x)", "update_params"),
    row("zero point", lambda: dt.FakeQuantize.q8().zero_point, dt.NotCalibratedError, "calibrate(x)"),
    row("float range", lambda: dt.FakeQuantize.q4().float_range(), dt.NotCalibratedError, "calibrate(x)"),
    row("forward, fixed", lambda: dt.FakeQuantize.q8()(X), dt.NotCalibratedError, "forward_with_calibration"),
    row("forward, eval", lambda: dt.FakeQuantize("int8").eval()(X), dt.NotCalibratedError, "calibrate(x)"),
    row("learned, eval", lambda: quantizer("learned", False).eval()(X), dt.NotCalibratedError, "calibrate(x)"),
    row("noise", lambda: dt.FakeQuantize.q8().quantization_noise(X), dt.NotCalibratedError, "calibrate(x)"),
    row("backward", lambda: FIXED.backward(X), dt.NotCalibratedError, "forward(x)", "backward(g, x)"),
    row("backward of x", lambda: dt.FakeQuantize.q8().backward(X, X), dt.NotCalibratedError, "calibrate(x)"),
    row("clamped", lambda: dt.FakeQuantize.q8().backward_clamped(X, X), dt.NotCalibratedError, "calibrate(x)"),
    row(
        "no finite value",
        lambda: dt.FakeQuantize(AXIS)(NANS),
        dt.NotCalibratedError,
        "2 of 2 parameter sets",
        "4 non-finite",
    ),
    row("range", lambda: MinMax().range(), dt.NotCalibratedError, "MinMax", "observe(x)"),
    row("params", lambda: EMAMinMax().params("int8"), dt.NotCalibratedError, "EMAMinMax", "observe(x)"),
    row("empty batches", lambda: MinMax().observe(X[:0]).range(), dt.NotCalibratedError, "1 of 1 parameter sets"),
)
def test_before_calibration(call, error, words):
    check(call, error, words)


@table(
    row("integers", lambda: dt.FakeQuantize("int8")(np.arange(3)), dt.DtypeError, "int64", "astype"),
    row("NaN per batch", lambda: quantizer("per_batch")(NANS), dt.RangeError, "4 of 4 elements"),
    row("calibrate on NaN", lambda: FIXED.calibrate(NANS), dt.RangeError, "not finite"),
    row("calibrate on nothing", lambda: FIXED.calibrate(X[:0]), dt.RangeError, "(0, 2)", "empty"),
    row("another shape", lambda: quantizer("fixed", spec=AXIS)(X[:1]), dt.ShapeError, "(2,)", "(1, 2)", "(1,)"),
    row("another shape, EMA", lambda: quantizer("ema", spec=AXIS)(X[:1]), dt.ShapeError, "(1,)", "(2,)"),
    row("gradient's shape", lambda: quantizer("per_batch").backward(X[:1], X), dt.ShapeError, "(1, 2)", "(2, 2)"),
    row("bits", lambda: dt.FakeQuantize.from_bits(17), dt.SpecError, "1..16", "17"),
    row("one symmetric bit", lambda: dt.FakeQuantize.from_bits(1), dt.SpecError, "int1", "symmetric=False"),
    row("scale", lambda: dt.FakeQuantize.from_bits(8, scale=0.0), dt.ParamsError, "positive", "0.0"),
    row("zero point", lambda: FIXED.update_params(1.0, 7), dt.ParamsError, "symmetric", "7"),
    row("mode", lambda: dt.FakeQuantize("int8", mode="moving"), dt.SpecError, "'moving'", "ema"),
    row("estimator", lambda: dt.FakeQuantize("int8", ste="clip"), dt.SpecError, "did you mean 'clipped'?"),
    row(
        "learned zero point",
        lambda: quantizer("learned", spec="uint8").update_params(1.0, np.nan),
        dt.ParamsError,
        "finite",
        "nan",
    ),
)
def test_quantizer(call, error, words):
    check(call, error, words)


def loaded(mode="fixed", spec="int8", drop=(), **changes):
    """Call load_state_dict with a changed state on a quantizer of the same kind."""

    def call():
        state = quantizer(mode, spec=spec).state_dict() | changes
        quantizer(mode, spec=spec).load_state_dict({k: v for k, v in state.items() if k not in drop})

    return call


@table(
    row("not a dict", lambda: FIXED.load_state_dict(5), dt.StateError, "state_dict()"),
    row("a list", lambda: FIXED.load_state_dict(["version"]), dt.StateError, "state_dict()"),
    row("missing key", loaded(drop=("step",)), dt.StateError, "missing ['step']", "state_dict()"),
    row("missing scale", loaded(drop=("scale",)), dt.StateError, "scale"),
    row("missing scale, learned", loaded("learned", drop=("scale",)), dt.StateError, "scale"),
    row("unknown key", loaded(bias=np.ones(1)), dt.StateError, "bias"),
    row("unknown key, learned", loaded("learned", bias=np.ones(1)), dt.StateError, "bias"),
    row("version", loaded(version=2), dt.StateError, "version 1", "got version 2"),
    row("step", loaded(step=-1), dt.StateError, "step", "-1"),
    row("initialized", loaded(initialized="yes"), dt.StateError, "initialized", "'yes'"),
    row("arrays but not initialized", loaded(initialized=False), dt.StateError, "initialized is False", "scale"),
    row("bad scale", loaded(scale=np.float32(-1.0)), dt.StateError, "positive", "-1.0"),
    row("scale of text", loaded(scale="x"), dt.StateError, "'x'"),
    row("scale is None", loaded("learned", scale=None), dt.StateError, "None"),
    row("zero point", loaded(spec="uint8", zero_point=np.int32(256)), dt.StateError, "256"),
    row("another granularity", loaded(scale=np.ones(3, np.float32)), dt.StateError, "(3,)"),
    row("observer missing", lambda: quantizer("ema").load_state_dict(FIXED.state_dict()), dt.StateError, "observer"),
    row("observer extra", lambda: FIXED.load_state_dict(quantizer("ema").state_dict()), dt.StateError, "observer"),
    row("observer of NaN", loaded("ema", **{"observer.lo": np.float32(np.nan)}), dt.StateError, "nan"),
    row("observer of a dict", loaded("ema", **{"observer.lo": {}}), dt.StateError, "lo"),
    row(
        "observer's shape",
        loaded("ema", **{"observer.lo": np.zeros(3), "observer.hi": np.ones(3)}),
        dt.StateError,
        "(3,)",
    ),
    row("observer's count", loaded("ema", **{"observer.count": -1}), dt.StateError, "count", "-1"),
    row("observer's key", loaded("ema", **{"observer.mean": 1}), dt.StateError, "mean"),
)
def test_quantizer_state(call, error, words):
    check(call, error, words)


def observed(granularity="tensor", make=MinMax):
    return make(granularity=granularity).observe(X)


def observer_state(drop=(), **changes):
    state = {k: v for k, v in (observed().state_dict() | changes).items() if k not in drop}
    return lambda: MinMax().load_state_dict(state)


@table(
    row("integers", lambda: MinMax().observe(np.arange(3)), dt.DtypeError, "int64", "astype"),
    row("none", lambda: MinMax().observe(None), dt.DtypeError, "NoneType"),
    row("another shape", lambda: observed("axis0").observe(X[:1]), dt.ShapeError, "(1, 2)", "(1,)", "(2,)", "axis0"),
    row("rank", lambda: MinMax("axis1").observe(X[0]), dt.ShapeError, "axis1", "(2,)"),
    row("merge another kind", lambda: observed().merge(observed(make=EMAMinMax)), dt.DtypeError, "MinMax", "EMAMinMax"),
    row("merge a range", lambda: observed().merge(observed().range()), dt.DtypeError, "Range"),
    row("merge another decay", lambda: EMAMinMax(0.5).merge(EMAMinMax(0.6)), dt.StateError, "0.5", "0.6"),
    row("merge another granularity", lambda: observed().merge(observed("axis0")), dt.StateError, "axis0", "MinMax()"),
    row("merge another shape", lambda: observed("axis0").merge(MinMax("axis0").observe(X[:1])), dt.ShapeError, "(1,)"),
    row("spec", lambda: observed().params("int8/axis0"), dt.ShapeError, "axis0", "tensor", "the same"),
    row("granularity", lambda: MinMax("row"), dt.SpecError, "'row'"),
    row("decay", lambda: EMAMinMax(2.0), dt.SpecError, "decay", "2.0"),
    row("state: not a dict", lambda: MinMax().load_state_dict(5), dt.StateError, "MinMax"),
    row("state: missing", observer_state(drop=("count",)), dt.StateError, "count"),
    row("state: hi only", observer_state(drop=("lo",)), dt.StateError, "'hi'"),
    row("state: version", observer_state(version=2), dt.StateError, "version"),
    row("state: count", observer_state(count=-1), dt.StateError, "count", "-1"),
    row("state: count of text", observer_state(count="3"), dt.StateError, "count", "'3'"),
    row("state: NaN", observer_state(lo=np.float64(np.nan)), dt.StateError, "nan"),
    row("state: shapes", observer_state(lo=np.zeros(2)), dt.StateError, "shape"),
    row("state: granularity", observer_state(lo=np.zeros(2), hi=np.ones(2)), dt.StateError, "(2,)"),
    row("state: infinite", observer_state(lo=np.float64(-np.inf)), dt.StateError, "inf"),
    row("state: reversed", observer_state(lo=np.float64(5.0)), dt.StateError, "5."),
)
def test_observer(call, error, words):
    check(call, error, words)
