"""qt.FakeQuantize: every mode against the array operator, bit for bit; copies, devices and checkpoints."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

torch = pytest.importorskip("torch")

from torch_bits import array, assert_same, bits, tensor  # noqa: E402

import detent.torch as qt  # noqa: E402

# Not ours: how dynamo looks at autograd functions.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")

SPECS = {
    "int8": dt.QuantSpec("int8"),
    "uint8": dt.QuantSpec("uint8"),
    "uint4/axis1": dt.QuantSpec("uint4", "axis1"),
    "int4/group5": dt.QuantSpec("int4", "group5"),
    "int8/token": dt.QuantSpec("int8", "token"),
    "float8": dt.QuantSpec("float8_e4m3fn"),
    "nf4": dt.QuantSpec("nf4", "axis0"),
    "torch": dt.QuantSpec("uint8", convention="torch"),
    "oxicuda": dt.QuantSpec("int8", symmetric=False, convention="oxicuda"),
    "stochastic": dt.QuantSpec("int4", rounding="stochastic(9)"),
    "mxfp8": dt.spec.NAMED_SPECS["mxfp8"],
}
STATEFUL = [name for name in SPECS if name != "mxfp8"]
SHAPE = (3, 4, 7)


def batches(dtype: str = "float32", count: int = 6) -> list[NDArray]:
    """Batches with different ranges; one contains an infinity."""
    rng = np.random.default_rng(3)
    data = [(rng.normal(size=SHAPE) * (1 + k) - 0.3 * k).astype(dtype) for k in range(count)]
    data[1][0, 0, 0] = np.inf
    return data


def check_step(module: qt.FakeQuantize, operator: dt.FakeQuantize, x: NDArray) -> None:
    """Compare one forward and backward of both."""
    g = np.random.default_rng(4).normal(size=x.shape).astype(x.dtype)
    t = tensor(x).requires_grad_()
    y = module(t)
    assert_same(y, operator(x))
    y.backward(tensor(g))
    assert_same(t.grad, operator.backward(g))
    if module.scale.shape == (0,):  # depends on the batch: no state
        assert module.params == operator.params
        return
    assert_same(module.scale.reshape(operator.scale.shape), operator.scale.astype(array(module.scale).dtype))
    assert_same(module.zero_point.reshape(operator.scale.shape), operator.params.zero_point)


@pytest.mark.parametrize("ste", [None, "identity", "hard_tanh"])
@pytest.mark.parametrize("mode", ["ema", dt.EMA(0.5), dt.EMA(0.0), "per_batch"], ids=str)
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_observing_modes_step_by_step(dtype: str, name: str, mode: dt.ScaleMode | str, ste: str | None) -> None:
    module, operator = qt.FakeQuantize(SPECS[name], mode, ste), dt.FakeQuantize(SPECS[name], mode, ste)
    for i, x in enumerate(batches(dtype)):
        for each in (module, operator):
            each.train(i not in (2, 4))  # evaluation in between
        check_step(module, operator, x)


def test_per_batch_of_block_formats() -> None:
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        module, operator = qt.FakeQuantize(name, "per_batch"), dt.FakeQuantize(name, "per_batch")
        x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
        assert_same(module(tensor(x)), operator(x))


@pytest.mark.parametrize("mode", ["ema", "per_batch"])
@pytest.mark.parametrize("name", STATEFUL)
def test_float64_step_by_step(name: str, mode: str) -> None:
    module = qt.FakeQuantize(SPECS[name], mode, dtype=torch.float64)
    operator = dt.FakeQuantize(SPECS[name], mode)
    for x in batches("float64", 4):
        assert_same(module(tensor(x)), operator(x))


@pytest.mark.parametrize("name", STATEFUL)
def test_fixed(name: str) -> None:
    x = batches()[0]
    params = dt.QuantParams.from_data(SPECS[name], x)
    module, operator = qt.FakeQuantize(SPECS[name], "fixed", shape=SHAPE), dt.FakeQuantize(SPECS[name], "fixed")
    for train in (True, False):
        with pytest.raises(dt.NotCalibratedError):
            module.train(train)(tensor(x))
    module.train().set_params(params)
    operator.update_params(params.scale, params.zero_point)
    for x in batches():
        check_step(module, operator, x)


@pytest.mark.parametrize("name", [n for n in STATEFUL if n != "stochastic"])
def test_learned_forward_and_gradients(name: str) -> None:
    """The shifts are trained; scale, zero point and raw gradients equal those of the array operator."""
    spec = SPECS[name]
    module, operator = qt.FakeQuantize(spec, "learned", shape=SHAPE), dt.FakeQuantize(spec, "learned")
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for i, x in enumerate(batches(count=3)):
        g = np.random.default_rng(i).normal(size=SHAPE).astype(np.float32)
        t = tensor(x).requires_grad_()
        y = module(t)
        if i == 0:
            assert_same(y, operator(x))
        else:
            module.refresh()
            shift = module.zero_point_shift
            zero = None if shift is None else array(module.zero_point).reshape(operator.scale.shape)
            operator.update_params(array(module.scale).reshape(operator.scale.shape), zero)
            assert_same(y, operator(x))
        optimizer.zero_grad()
        y.backward(tensor(g))
        assert_same(t.grad, operator.backward(g))
        scale_grad = tensor(operator.scale_grad).reshape(module.scale_shift.shape)
        assert_same(module.scale_shift.grad, scale_grad / module.initial_scale)
        if module.zero_point_shift is not None:
            unit = (spec.qmax - spec.qmin) * module.initial_scale * module.initial_scale
            assert_same(
                module.zero_point_shift.grad, tensor(operator.zero_point_grad).reshape(module.scale.shape) / unit
            )
        before = array(module.scale)
        optimizer.step()
        module.refresh()
        moved = np.abs(array(module.scale) / before - 1)
        assert moved.max() < 0.03  # a step of 1e-2 is about 1 %
        assert moved.max() > 0


def test_a_learned_scale_stays_positive() -> None:
    module = qt.FakeQuantize("int8", "learned").set_params(dt.QuantParams("int8", 0.5))
    with torch.no_grad():
        module.scale_shift.fill_(-5.0)
    y = module(torch.tensor([0.3]))
    assert torch.isfinite(y).all()
    assert module.refresh().scale.item() > 0


# State


def uncalibrated(name: str, mode: str) -> qt.FakeQuantize:
    return qt.FakeQuantize(SPECS[name], mode, shape=SHAPE)


@pytest.mark.parametrize("mode", ["ema", "fixed", "learned", "per_batch"])
@pytest.mark.parametrize("name", STATEFUL)
def test_strict_load_into_an_uncalibrated_one(name: str, mode: str) -> None:
    source = uncalibrated(name, mode)
    first, second = batches()[:2]
    if mode == "fixed":
        source.set_params(dt.QuantParams.from_data(SPECS[name], first))
    source(tensor(first))
    target = uncalibrated(name, mode)
    shapes = {key: value.shape for key, value in target.state_dict().items()}
    assert {key: value.shape for key, value in source.state_dict().items()} == shapes
    target.load_state_dict(source.state_dict(), strict=True)
    for key, value in source.state_dict().items():
        assert bits(value) == bits(target.state_dict()[key]), key
    assert_same(target(tensor(second)), source(tensor(second)))
    assert_same(target.eval()(tensor(first)), source.eval()(tensor(first)))


@pytest.mark.parametrize("mode", ["ema", "fixed"])
def test_a_state_whose_shape_was_unknown(mode: str) -> None:
    x = batches()[0]
    source = qt.FakeQuantize("int8/axis1", mode)
    source.set_params(dt.QuantParams.from_data("int8/axis1", x))
    target = qt.FakeQuantize("int8/axis1", mode)
    target.load_state_dict(source.state_dict())
    assert_same(target.eval()(tensor(x)), source.eval()(tensor(x)))


def test_learned_parameters_whose_shape_is_unknown() -> None:
    """Otherwise, an optimizer built before the first batch would train nothing."""
    with pytest.raises(dt.SpecError, match="pass shape="):
        qt.FakeQuantize("int8/axis1", "learned")
    assert qt.FakeQuantize("int8/axis1", "learned", shape=(2, 3)).scale_shift.shape == (3,)


@pytest.mark.parametrize("mode", ["fixed", "ema", "learned"])
def test_a_state_says_the_same_before_and_after_saving(mode: str) -> None:
    """Also with float64 parameters in a float32 state."""
    spec = dt.QuantSpec("int8")
    source, target = qt.FakeQuantize(spec, mode), qt.FakeQuantize(spec, mode)
    source.set_params(dt.QuantParams(spec, np.float64(0.1)))
    target.load_state_dict(source.state_dict())
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    assert_same(source.eval()(x), target.eval()(x))


@pytest.mark.parametrize("mode", ["ema", "fixed", "learned"])
def test_parameters_are_written_on_other_devices(mode: str) -> None:
    """The meta device, which every machine has, supports no NumPy arrays, as a GPU."""
    module = qt.FakeQuantize("int8", mode).to("meta")
    module.set_params(dt.QuantParams("int8", 0.5))
    assert module.scale.device.type == "meta"


def test_states_of_other_specs_are_rejected() -> None:
    state = qt.FakeQuantize("int4").state_dict()
    with pytest.raises(dt.DetentError, match=re.escape("int4/tensor")):
        qt.FakeQuantize("int8").load_state_dict(state)
    with pytest.raises(dt.DetentError, match=re.escape("decay=0.5")):
        qt.FakeQuantize("int4", dt.EMA(0.5)).load_state_dict(state)


@pytest.mark.parametrize(
    "junk",
    [torch.zeros(3, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), torch.ones(2), "text", None, 5],
    ids=str,
)
def test_junk_as_extra_state(junk: object) -> None:
    state = {**qt.FakeQuantize("int8").state_dict(), "_extra_state": junk}
    with pytest.raises(dt.DetentError):
        qt.FakeQuantize("int8").load_state_dict(state)


@pytest.mark.parametrize("mode", ["ema", "fixed", "learned", "per_batch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_do_not_change_scales(dtype: torch.dtype, mode: str) -> None:
    module = uncalibrated("uint8", mode).set_params(dt.QuantParams("uint8", 0.0123, 7))
    before = {key: bits(value) for key, value in module.state_dict().items()}
    for cast in (lambda m: m.to(dtype), lambda m: m.type(dtype), lambda m: torch.nn.Sequential(m).to(dtype)):
        cast(module)
        assert {key: bits(value) for key, value in module.state_dict().items()} == before
    x = torch.linspace(-1, 3, 99).to(dtype)
    module.eval()
    if mode != "per_batch":
        assert_same(module(x), dt.fake_quantize(array(x), dt.QuantParams("uint8", np.float32(0.0123), 7)))


def assert_twins(one: qt.FakeQuantize, other: qt.FakeQuantize) -> None:
    assert one is not other
    for x in batches(count=3):
        assert_same(other(tensor(x)), one(tensor(x)))
    mine, theirs = one.state_dict(), other.state_dict()
    assert {key: bits(value) for key, value in mine.items()} == {key: bits(value) for key, value in theirs.items()}
    addresses = {value.data_ptr() for value in mine.values() if value.numel()}
    assert addresses.isdisjoint(value.data_ptr() for value in theirs.values() if value.numel())


@pytest.mark.parametrize("mode", ["ema", "learned", "per_batch"])
@pytest.mark.parametrize("name", ["uint8", "uint4/axis1", "stochastic"])
def test_copies_are_independent(name: str, mode: str) -> None:
    module = uncalibrated(name, mode)
    module(tensor(batches()[0]))
    assert_twins(module, copy.deepcopy(module))
    assert_twins(module, pickle.loads(pickle.dumps(module)))


@pytest.mark.parametrize("mode", ["ema", "learned"])
@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "buffers"])
def test_averaged_models(mode: str, buffers: bool) -> None:
    torch.manual_seed(0)  # averages of one range need not round to it
    model = torch.nn.Sequential(torch.nn.Linear(7, 2), uncalibrated("uint8", mode))
    x = tensor(batches()[0])
    model(x)
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=buffers)
    for _ in range(3):
        model(x)
        averaged.update_parameters(model)
    assert_same(averaged.eval()(x), model.eval()(x))


# Behavior


def test_disabled_passes_and_learns_nothing() -> None:
    module = qt.FakeQuantize("int8")
    module.enabled = False
    x = torch.tensor([0.3])
    assert module(x) is x
    assert not module.is_initialized


def test_not_observing_keeps_the_parameters() -> None:
    module = qt.FakeQuantize("int8")
    module(torch.tensor([1.0]))
    before = bits(module.scale)
    module.observing = False
    module(torch.tensor([100.0]))
    assert bits(module.scale) == before


@pytest.mark.parametrize("mode", ["ema", "fixed", "learned"])
def test_evaluation_before_calibration(mode: str) -> None:
    module = qt.FakeQuantize("int8", mode).eval()
    module.name = "body.0.input_quantizer"
    with pytest.raises(dt.NotCalibratedError, match=re.escape("body.0.input_quantizer")):
        module(torch.ones(2))


@pytest.mark.parametrize("mode", ["ema", "learned", "per_batch"])
def test_nan_names_the_module_and_leaves_the_state(mode: str) -> None:
    module = qt.FakeQuantize("int8", mode)
    module.name = "body.0.input_quantizer"
    x = torch.ones(2, 3)
    x[1, 2] = float("nan")
    with pytest.raises(dt.NaNError, match=re.escape("body.0.input_quantizer")) as info:
        module(x)
    assert (info.value.count, info.value.first_index) == (1, (1, 2))
    assert not module.is_initialized
    pickle.loads(pickle.dumps(info.value))


def test_nan_passes_where_no_range_is_taken() -> None:
    module = qt.FakeQuantize("int8", "fixed").set_params(dt.QuantParams("int8", 0.5))
    assert torch.isnan(module(torch.tensor([float("nan")]))).all()


@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned"])
@pytest.mark.parametrize("spec", ["int8", "int8/axis0"])
def test_nothing_finite_is_an_error(spec: str, mode: str) -> None:
    module = qt.FakeQuantize(spec, mode, shape=(2, 2))
    with pytest.raises(dt.DetentError):
        module(torch.tensor([[1.0, 2.0], [np.inf, -np.inf]]) if "axis" in spec else torch.full((3,), np.inf))
    assert not module.is_initialized


def test_a_changed_number_of_channels_is_an_error() -> None:
    module = qt.FakeQuantize("int8/axis1")
    module(torch.ones(2, 3))
    module(torch.ones(5, 3))
    with pytest.raises(dt.DetentError, match=r"\(3,\)"):
        module(torch.ones(2, 4))
    with pytest.raises(dt.DetentError):
        module.eval()(torch.ones(2, 4))


@pytest.mark.parametrize("mode", ["ema", "learned", "per_batch", "fixed"])
def test_empty_batches(mode: str) -> None:
    module = qt.FakeQuantize("int8", mode)
    assert module(torch.zeros(0, 3)).shape == (0, 3)
    assert not module.is_initialized


@pytest.mark.parametrize("bad", [torch.arange(3), np.ones(3, np.float32), [1.0]], ids=["integers", "array", "list"])
def test_wrong_data(bad: object) -> None:
    with pytest.raises(dt.DetentError):
        qt.FakeQuantize("int8")(bad)


@pytest.mark.parametrize("spec", ["int8", "int8/axis0"])
@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned"])
def test_inference_mode(mode: str, spec: str) -> None:
    """The first batch may come in inference mode, and training continues afterwards."""
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    module = qt.FakeQuantize(spec, mode, shape=x.shape)
    with torch.inference_mode():
        y = module(x)
    expected = dt.FakeQuantize(spec, mode)
    assert_same(y.clone(), expected(x.numpy()))
    t = (3 * x).requires_grad_()
    z = module(t)
    assert_same(z, expected(3 * x.numpy()))
    z.sum().backward()


def test_the_step_of_stochastic_rounding() -> None:
    spec = dt.QuantSpec("int8", rounding="stochastic(5)")
    params = dt.QuantParams(spec, 1.0)
    module = qt.FakeQuantize(spec, "fixed").set_params(params)
    x = torch.full((200,), 0.5)
    for step in range(3):
        assert_same(module(x), dt.fake_quantize(x.numpy(), params, step=step))
    for _ in range(2):  # evaluation does not count
        assert_same(module.eval()(x), dt.fake_quantize(x.numpy(), params, step=3))
    other = qt.FakeQuantize(spec, "fixed")
    other.load_state_dict(module.state_dict())
    assert_same(other.train()(x), dt.fake_quantize(x.numpy(), params, step=3))


def test_the_step_wraps_around_as_in_the_operator() -> None:
    spec = dt.QuantSpec("int8", rounding="stochastic(5)")
    module = qt.FakeQuantize(spec, "fixed").set_params(dt.QuantParams(spec, 1.0))
    module.step.fill_(2**32 - 1)
    x = torch.full((200,), 0.5)
    module(x)
    assert_same(module(x), dt.fake_quantize(x.numpy(), module.params, step=0))


def test_writes_to_the_scale_are_detected() -> None:
    """For every way to write."""
    module = qt.FakeQuantize("int8", "fixed").set_params(dt.QuantParams("int8", 1.0))
    x = torch.linspace(-5, 5, 99)
    writes = {
        0.5: lambda: module.scale.fill_(0.5),
        0.25: lambda: setattr(module, "scale", torch.tensor(0.25)),
        0.125: lambda: module.scale.data.fill_(0.125),
        0.3: lambda: module.load_state_dict({**module.state_dict(), "scale": torch.tensor(0.3)}),
    }
    for scale, write in writes.items():
        module(x)
        write()
        assert_same(module(x), dt.fake_quantize(x.numpy(), dt.QuantParams("int8", np.float32(scale))), scale)


def test_extra_repr() -> None:
    module = qt.FakeQuantize("int8/axis0", dt.EMA(0.9))
    assert "not calibrated" in repr(module)
    module(torch.tensor([[1.0], [2.0]]))
    text = repr(module)
    assert "\n" not in text
    for part in ("int8/axis0/symmetric", "EMA(decay=0.9)", "scales 0.00787 to 0.0157"):
        assert part in text
    module.enabled = False
    assert "disabled" in repr(module)


@pytest.mark.parametrize("mode", ["ema", "learned", "per_batch", "fixed"])
def test_func_transforms_of_the_module(mode: str) -> None:
    module = qt.FakeQuantize("uint8", mode)
    x = torch.linspace(-1, 2, 24).reshape(4, 6)
    if mode == "fixed":
        module.set_params(dt.QuantParams.from_data("uint8", x.numpy()))
    module(x)
    module.eval()
    expected = module(x)
    if mode != "per_batch":
        assert_same(torch.func.vmap(module)(x), expected)
    assert_same(torch.func.functional_call(module, dict(module.named_parameters()), (x,)), expected)
    gradient = torch.func.grad(lambda x: module(x).sum())(x)
    assert_same(gradient, torch.ones_like(x))


@pytest.mark.parametrize("switch", ["training", "sync", "observing=False", "evaluation"])
@pytest.mark.parametrize("mode", ["ema", dt.EMA(0.0), "learned", "per_batch", "fixed"], ids=str)
@pytest.mark.parametrize("name", STATEFUL)
def test_values_and_state_are_the_same_traced(name: str, mode: dt.ScaleMode | str, switch: str) -> None:
    """``traced_values_for`` and ``values_for`` return the same values and leave the same state."""
    for dtype in ("bfloat16", "float32", "float64"):
        check_traced_values_and_state(name, mode, switch, dtype)


def check_traced_values_and_state(name: str, mode: dt.ScaleMode | str, switch: str, dtype: str) -> None:
    data = batches(dtype)
    scale_dtype = torch.float64 if dtype == "float64" else torch.float32
    native, traced = (qt.FakeQuantize(SPECS[name], mode, shape=SHAPE, dtype=scale_dtype) for _ in range(2))
    for each in (native, traced):
        each.set_params(dt.QuantParams.from_data(SPECS[name], data[0]))
        each.train(switch != "evaluation")
        each.sync, each.observing = switch == "sync", switch != "observing=False"
    for x in data[1:]:
        values = native.values_for(tensor(x))
        scale, zero_point = traced.traced_values_for(tensor(x))
        assert_same(scale.detach().reshape(values.params.scale.shape), values.params.scale)
        expected = values.params.zero_point if values.zero_point is None else array(values.zero_point)
        assert_same(zero_point.detach().reshape(expected.shape), expected)
    for key, state in native.state_dict().items():
        assert bits(traced.state_dict()[key]) == bits(state), key
    if isinstance(native.mode, dt.EMA):
        assert bits(traced.pending) == bits(native.pending)


@pytest.mark.parametrize("mode", ["ema", "learned", "per_batch", "fixed"])
def test_compiled_steps_are_the_eager_ones(mode: str) -> None:
    torch._dynamo.reset()
    eager, module = (qt.FakeQuantize("uint8", mode) for _ in range(2))
    for each in (eager, module):
        each.set_params(dt.QuantParams.from_data("uint8", batches()[0]))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for x in batches(count=3):
        one, other = tensor(x).requires_grad_(), tensor(x).requires_grad_()
        y, expected = compiled(one), eager(other)
        assert_same(y, expected)
        for each in (y, expected):
            each.square().sum().backward()
        assert_same(one.grad, other.grad)
    for ours, theirs in zip(eager.parameters(), module.parameters(), strict=True):
        assert_same(theirs.grad, ours.grad)
    assert bits(module.scale) == bits(eager.scale)


def test_compiled_evaluation_per_batch_keeps_the_parameters_of_the_last_batch() -> None:
    torch._dynamo.reset()
    eager, module = (qt.FakeQuantize("uint8", "per_batch").eval() for _ in range(2))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for x in batches(count=3):
        assert_same(compiled(tensor(x)), eager(tensor(x)))
        assert module.params == eager.params


def test_exported_evaluation_per_batch_writes_nothing() -> None:
    module = qt.FakeQuantize("uint8", "per_batch").eval()
    exported = torch.export.export(module, (tensor(batches()[0]),))
    assert not exported.graph_signature.buffers_to_mutate
    assert_same(exported.module()(tensor(batches()[2])), module(tensor(batches()[2])))


def test_vmap_per_batch_takes_the_range_of_each_sample() -> None:
    module = qt.FakeQuantize("uint8", "per_batch").eval()
    x = torch.linspace(-1, 2, 24).reshape(4, 6)
    assert_same(torch.func.vmap(module)(x), torch.stack([module(row) for row in x]))
