"""The public NumPy API: every public name is called once, as users call it.

Exactness has its own tests; these hold the names, the argument order, the types that come back and one
telling value of each, so that a rename or a changed signature fails here first.
"""

import dataclasses
import inspect

import numpy as np
import pytest

import detent as dt
from detent import observers
from detent.verification import VerifyReport

INTEGERS = [f"{sign}int{bits}" for bits in range(1, 17) for sign in ("", "u")]
OTHER_FORMATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4"]
NAMED_SPECS = ["mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4"]
CONVENTIONS = [
    "onnx",
    "torch",
    "torch_fused",
    "compressed_tensors",
    "oxicuda",
    "entrenar",
    "torsh",
    "rlx",
    "baracuda",
    "baracuda_channel",
    "baracuda_token",
]
ERRORS = [
    "DtypeError",
    "FileFormatError",
    "NaNError",
    "NotCalibratedError",
    "OutError",
    "ParamsError",
    "RangeError",
    "ShapeError",
    "SpecError",
    "StateError",
    "UnsupportedError",
    "VerificationError",
    "WorkerError",
]


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)


@pytest.fixture
def g(x):
    return np.ones_like(x)


@pytest.fixture
def spec():
    return dt.QuantSpec(dt.int8, granularity=dt.PerAxis(0))


@pytest.fixture
def params(spec, x):
    return dt.QuantParams.from_data(spec, x)


# Specs and params


def test_spec_resolves_its_defaults(spec):
    assert (spec.symmetric, spec.convention, spec.rounding) == (
        True,
        dt.Convention.onnx,
        dt.rounding.half_even,
    )
    assert (spec.qmin, spec.qmax) == (-127, 127)
    spelled = dt.QuantSpec(
        dt.int8,
        granularity=dt.PerAxis(0),
        symmetric=None,
        convention=dt.Convention.onnx,
        rounding=None,
        qmin=None,
        qmax=None,
    )
    assert spelled == spec
    assert hash(spelled) == hash(spec)


def test_params_from_data_and_from_range_agree(spec, params, x):
    lo, hi = x.min(axis=1), x.max(axis=1)
    assert params.scale.shape == (64,)
    assert np.array_equal(dt.QuantParams.from_range(spec, lo, hi).scale, params.scale)
    assert np.array_equal(params.scale, (np.abs(x).max(axis=1).astype(np.float64) / 127).astype(np.float32))


def test_params_from_numbers(spec):
    params = dt.QuantParams(spec, scale=np.full(64, 0.5, np.float32), zero_point=np.zeros(64, np.int32))
    assert params.num_parameter_sets == 64


def test_quantize_gives_a_quantized_tensor(x, params):
    q = dt.quantize(x, params)
    assert isinstance(q, dt.QuantizedTensor)
    assert q.codes.dtype == np.int8
    assert q.codes.shape == q.shape == x.shape
    assert q.packed.dtype == np.uint8
    assert q.packed.ndim == 1
    assert q.params is params or q.params == params
    assert q.dtype == np.float32
    assert q.nbytes >= q.packed.nbytes == x.size
    assert np.abs(q.codes).max() == 127


def test_dequantize_equals_fake_quantize(x, params):
    q = dt.quantize(x, params)
    y = dt.fake_quantize(x, params)
    assert y.dtype == x.dtype
    assert np.array_equal(q.dequantize(), y)
    assert np.array_equal(dt.dequantize(q), y)
    assert np.array_equal(dt.dequantize(q.codes, params), y)


def test_backward(g, x, params):
    gx = dt.fake_quantize_backward(g, x, params, ste=dt.ste.Clipped())
    assert np.array_equal(gx, g)  # a range taken from the data clips nothing
    assert not dt.fake_quantize_backward(g, x * 1000 + 1000, params).all()


def test_raw_backwards(g, x, params):
    scale = params.scale[:, None]
    assert np.array_equal(dt.dequantize_backward(g, params), np.broadcast_to(scale, x.shape))
    assert np.array_equal(dt.quantize_backward(g, x, params), np.broadcast_to(1 / scale, x.shape))


def test_learned_backward(g, x, params):
    gx, gs, gz = dt.fake_quantize_learned_backward(g, x, params)
    assert np.array_equal(gx, g)
    assert gs.shape == gz.shape == params.scale.shape
    assert np.any(gs)
    assert not np.any(gz)  # nothing is clipped


def test_out_is_filled_in_place(g, x, params):
    y, gx, codes = np.empty_like(x), np.empty_like(x), np.empty(x.shape, np.int8)
    q = dt.quantize(x, params, out=codes)
    assert np.array_equal(codes, dt.quantize(x, params).codes)
    assert np.shares_memory(q.codes, codes)
    assert dt.fake_quantize(x, params, out=y) is y
    assert np.array_equal(y, dt.fake_quantize(x, params))
    assert dt.fake_quantize_backward(g, x, params, out=gx) is gx
    assert np.array_equal(gx, g)


def test_packed_out(x):
    params = dt.QuantParams.from_data("int4/group32", x)
    packed = np.empty(x.size // 2, np.uint8)
    dt.quantize(x, params, out=packed)
    assert np.array_equal(packed, dt.quantize(x, params).packed)


def test_metrics(x, params):
    y = dt.quantize(x, params).dequantize()
    assert dt.metrics.sqnr_db(x, y) > 35
    assert dt.metrics.mse(x, y) < 1e-3
    assert 0 < dt.metrics.mae(x, y) < dt.metrics.max_error(x, y) <= params.quantization_error_bound() * 1.001
    assert dt.metrics.cosine(x, y) == pytest.approx(1, abs=1e-3)
    assert dt.metrics.clip_fraction(x, params) == 0
    assert 0 < dt.metrics.code_usage(dt.quantize(x, params)) <= 1
    assert 0 < dt.metrics.entropy_bits(dt.quantize(x, params)) <= 8


# Vocabulary


@pytest.mark.parametrize("name", INTEGERS + OTHER_FORMATS)
def test_format(name):
    value = getattr(dt, name)
    assert value.name == name
    assert dt.formats.FORMATS[name] is value
    if not (value.bits == 1 and value.signed):
        assert dt.QuantSpec(value).format is value


@pytest.mark.parametrize("name", NAMED_SPECS)
def test_named_spec(name):
    spec = getattr(dt, name)
    assert isinstance(spec, dt.QuantSpec)
    assert dt.QuantSpec.parse(name) == spec


@pytest.mark.parametrize(
    ("granularity", "scale_shape"),
    [
        (dt.PerTensor(), ()),
        (dt.PerAxis(0), (6,)),
        (dt.PerAxis(-1), (10,)),
        (dt.PerToken(), (6,)),
        (dt.PerGroup(4), (6, 3)),
        (dt.PerGroup(4, axis=0), (2, 10)),
        (dt.PerBlock(2, 5), (3, 2)),
    ],
    ids=repr,
)
def test_granularity(granularity, scale_shape):
    x = np.arange(60, dtype=np.float32).reshape(6, 10) - 30
    params = dt.QuantParams.from_data(dt.QuantSpec(dt.int8, granularity=granularity), x)
    assert params.scale.shape == params.zero_point.shape == scale_shape
    assert params.num_parameter_sets == max(1, int(np.prod(scale_shape)))


@pytest.mark.parametrize("name", CONVENTIONS)
def test_convention(name, x):
    convention = getattr(dt.Convention, name)
    assert convention.name == name
    assert dt.convention.PRESETS[name] is convention
    params = dt.QuantParams.from_data(dt.QuantSpec(dt.int8, convention=convention), x)
    assert dt.metrics.sqnr_db(x, dt.fake_quantize(x, params)) > 30


def test_every_preset_is_listed():
    assert set(dt.convention.PRESETS) == set(CONVENTIONS)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("int4/group128", dt.QuantSpec(dt.int4, granularity=dt.PerGroup(128))),
        ("uint8/tensor/affine", dt.QuantSpec(dt.uint8, symmetric=False)),
        ("int8/axis0", dt.QuantSpec(dt.int8, granularity=dt.PerAxis(0))),
        ("int8/axis-1/symmetric", dt.QuantSpec(dt.int8, granularity=dt.PerAxis(-1), symmetric=True)),
        (
            "int8/token/torch",
            dt.QuantSpec(dt.int8, granularity=dt.PerToken(), convention=dt.Convention.torch),
        ),
        ("float8_e4m3fn/block128x64", dt.QuantSpec(dt.float8_e4m3fn, granularity=dt.PerBlock(128, 64))),
    ],
)
def test_parse(text, spec):
    assert dt.QuantSpec.parse(text) == spec
    assert dt.QuantSpec.parse(str(spec)) == spec


def test_spec_json(spec):
    assert dt.QuantSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("shorthand", ["int4", "int4/group128"])
def test_shorthands_are_taken_at_the_border(shorthand, g, x):
    spec = dt.QuantSpec.parse(shorthand)
    params = dt.QuantParams.from_data(shorthand, x)
    assert params.spec == spec
    assert dt.FakeQuantize(shorthand).bits == 4
    named = dt.fake_quantize_backward(g, x, params, ste="clipped")
    assert np.array_equal(named, dt.fake_quantize_backward(g, x, params, ste=dt.ste.Clipped()))


# Params


def test_params_are_frozen_and_replace_revalidates(params):
    assert [field.name for field in dataclasses.fields(params)][:5] == [
        "spec",
        "scale",
        "zero_point",
        "min_val",
        "max_val",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.scale = 1.0
    with pytest.raises(ValueError, match="read-only"):
        params.scale[0] = 1.0
    with pytest.raises(dt.ParamsError):
        dataclasses.replace(params, scale=-params.scale)
    assert np.array_equal(dataclasses.replace(params, scale=params.scale * 2).scale, params.scale * 2)


def test_min_and_max_are_kept_or_none(spec, params):
    assert params.min_val.shape == params.max_val.shape == params.scale.shape
    bare = dt.QuantParams(spec, scale=params.scale)
    assert bare.min_val is None
    assert bare.max_val is None


@pytest.mark.parametrize(
    ("make", "format_", "zero_point"),
    [
        (dt.QuantParams.int8_symmetric, dt.int8, 0),
        (dt.QuantParams.uint8_asymmetric, dt.uint8, 128),
        (dt.QuantParams.int4_symmetric, dt.int4, 0),
    ],
)
def test_placeholders(make, format_, zero_point):
    params = make()
    assert params.spec.format is format_
    assert (params.scale.item(), params.zero_point.item()) == (1.0, zero_point)


def test_channel_wise_and_block_wise():
    channels = dt.QuantParams.channel_wise(64, dt.int8)
    assert (channels.num_parameter_sets, channels.is_per_channel) == (64, True)
    blocks = dt.QuantParams.block_wise(128, dt.int8)
    assert (blocks.spec.granularity, blocks.num_parameter_sets) == (dt.PerGroup(128), 1)


def test_from_statistics_and_questions():
    p = dt.QuantParams.int8_symmetric().from_statistics(-2.0, 2.0)
    p.validate()
    assert p.scale.item() == np.float32(2 / 127)
    assert (p.num_parameter_sets, p.is_per_channel) == (1, False)
    assert p.quantization_error_bound() == pytest.approx(1 / 127)
    assert p.compression_ratio(include_params=False) == 4.0
    assert p.compression_ratio((64, 256)) < 4.0


# The stateful quantizer


def test_fake_quantize_operator(g, x, spec):
    fq = dt.FakeQuantize(spec, mode=dt.EMA(decay=0.99), ste=dt.ste.Clipped())
    assert not fq.is_initialized
    y = fq(x)
    assert fq.is_initialized
    assert np.array_equal(y, dt.fake_quantize(x, dt.QuantParams.from_data(spec, x)))
    assert np.allclose(fq.forward(x), y, rtol=1e-6)  # the average of a range with itself, rounded
    assert np.array_equal(fq.backward(g), g)
    assert np.array_equal(fq.backward(g, x), g)
    assert np.array_equal(fq.backward_clamped(g, x), g)
    assert not np.array_equal(fq.backward_clamped(g, x + 100), g)


def test_default_mode(spec):
    assert dt.FakeQuantize(spec).mode == dt.EMA(0.99)


@pytest.mark.parametrize("bits", [8, 4])
def test_q8_and_q4(bits, x):
    fq = dt.FakeQuantize.q8() if bits == 8 else dt.FakeQuantize.q4()
    assert (fq.bits, fq.mode, fq.is_initialized) == (bits, dt.Fixed(), False)
    fq.calibrate(x)
    assert fq.is_initialized
    first = dt.FakeQuantize.q8() if bits == 8 else dt.FakeQuantize.q4()
    assert np.array_equal(first.forward_with_calibration(x), fq.forward(x))


def test_from_bits(x):
    fq = dt.FakeQuantize.from_bits(8, symmetric=True, scale=0.1, zero_point=0)
    assert fq.is_initialized
    assert (fq.bits, fq.symmetric) == (8, True)
    assert float(fq.scale) == np.float32(0.1)
    assert int(fq.zero_point) == 0
    assert fq.quant_range() == (fq.params.spec.qmin, fq.params.spec.qmax)
    assert fq.num_levels == fq.quant_range()[1] - fq.quant_range()[0] + 1
    lo, hi = fq.float_range()
    assert float(lo) == np.float32(fq.quant_range()[0]) * np.float32(0.1)
    assert float(hi) == np.float32(fq.quant_range()[1]) * np.float32(0.1)
    assert fq.quantization_noise(x) == dt.metrics.mse(x, fq.forward(x))


def test_from_bits_defaults():
    fq = dt.FakeQuantize.from_bits(8, symmetric=True)
    assert (float(fq.scale), int(fq.zero_point)) == (1.0, 0)


def test_update_params_and_enabled(x):
    fq = dt.FakeQuantize.q8()
    fq.update_params(0.1, 0)
    assert fq.is_initialized
    assert float(fq.scale) == np.float32(0.1)
    assert not np.array_equal(fq.forward(x), x)
    fq.enabled = False
    assert np.array_equal(fq.forward(x), x)


def test_train_eval_and_state(x, spec):
    fq = dt.FakeQuantize(spec)
    fq(x)
    fq.eval()
    before = np.array(fq.scale)
    fq(x * 10)
    assert np.array_equal(fq.scale, before)
    other = dt.FakeQuantize(spec)
    other.load_state_dict(fq.state_dict())
    assert other.is_initialized
    other.eval()
    assert np.array_equal(other(x), fq(x))
    fq.train()
    fq(x * 10)
    assert not np.array_equal(fq.scale, before)


def test_scale_modes_are_values():
    modes = [dt.PerBatch(), dt.EMA(0.9), dt.EMA(0.99), dt.Fixed(), dt.Learned()]
    assert len(set(modes)) == len(modes)
    assert [dt.ScaleMode.from_json(mode.to_json()) for mode in modes] == modes


@pytest.mark.parametrize("mode", [dt.PerBatch(), dt.EMA(0.9), dt.Fixed(), dt.Learned()], ids=repr)
def test_every_mode_runs(mode, x, spec):
    fq = dt.FakeQuantize(spec, mode=mode)
    fq.calibrate(x)
    assert dt.metrics.sqnr_db(x, fq(x)) > 35


# Observers


@pytest.mark.parametrize("make", [observers.MinMax, observers.EMAMinMax])
def test_observer(make, x, spec, params):
    observer = make(granularity=dt.PerAxis(0))
    assert observer.observe(x) is observer
    lo, hi = observer.range().lo, observer.range().hi
    assert np.array_equal(lo, x.min(axis=1))
    assert np.array_equal(hi, x.max(axis=1))
    assert np.array_equal(observer.params(spec).scale, params.scale)
    assert (observer.count, observer.nonfinite) == (x.size, 0)
    assert np.array_equal(make.from_bytes(observer.to_bytes()).range().lo, lo)
    assert make().observe(x).range().lo == x.min()


def test_observers_merge(x):
    left, right = observers.MinMax().observe(x[:10]), observers.MinMax().observe(x[10:])
    assert left.merge(right) is left
    assert left.range() == observers.MinMax().observe(x).range()
    assert isinstance(left.range(), observers.Range)


# Errors


def test_error_tree():
    classes = [getattr(dt, name) for name in ERRORS]
    assert all(issubclass(cls, dt.DetentError) for cls in classes)
    assert all(issubclass(cls, (ValueError, TypeError, RuntimeError, AssertionError)) for cls in classes)


# Verification


def test_verify_s_arguments():
    parameters = inspect.signature(dt.verify).parameters
    assert list(parameters) == ["source", "artifact", "data", "levels", "raise_on_difference", "importance"]
    assert (parameters["data"].default, parameters["levels"].default) == (None, None)  # all that the data allow
    assert parameters["raise_on_difference"].default is False


def test_a_report_is_neither_true_nor_false():
    report = VerifyReport((1,), 1, 10, 0)
    assert report.ok
    with pytest.raises(TypeError, match=r"report\.ok"):
        bool(report)


# Plans


OPERATIONS = ["quantize", "dequantize", "fake_quantize", "quantize_backward", "dequantize_backward"]


def test_plan(x, spec, params):
    codes = np.empty(x.shape, np.int8)
    plan = dt.Plan.select("quantize", shape=x.shape, dtype="float32", spec=spec)
    assert plan.sku
    assert isinstance(plan.workspace_size, int)
    assert plan.precision_guarantee
    assert plan.can_implement(x, params, codes)
    plan.run(x, params, out=codes)
    assert np.array_equal(codes, dt.quantize(x, params).codes)


@pytest.mark.parametrize("operation", [*OPERATIONS, "fake_quantize_backward"])
def test_plan_of_every_operation(operation, x, spec):
    plan = dt.Plan.select(operation, shape=x.shape, dtype="float32", spec=spec)
    assert operation in repr(plan)


def test_capabilities_and_threads(x, params):
    assert "fake_quantize" in repr(dt.capabilities())
    y = dt.fake_quantize(x, params)
    dt.set_num_threads(2)
    assert np.array_equal(dt.fake_quantize(x, params), y)


def test_all_names_exist():
    assert [name for name in dt.__all__ if not hasattr(dt, name)] == []


def test_rare_bit_widths_exist_without_being_listed():
    integers = {name for name in dir(dt) if name.lstrip("u").startswith("int")}
    assert integers == {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16)}
    assert integers < set(INTEGERS) <= set(vars(dt))


def test_dir_and_star_import_list_the_public_names():
    names = {}
    exec("from detent import *", names)
    assert sorted(dt.__all__) == dir(dt) == sorted(set(names) - {"__builtins__"})
