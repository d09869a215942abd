"""FakeQuantize: what each mode does in training and evaluation, and what backward uses."""

import copy
import pickle

import numpy as np
import pytest

import detent as dt

F32 = np.float32


def batch(scale=1.0, seed=0):
    return (np.random.default_rng(seed).normal(size=(4, 6)) * scale).astype(np.float32)


X, BIG, G = batch(), batch(10.0, seed=1), batch(seed=2)
STOCHASTIC = dt.QuantSpec("int8", rounding=dt.rounding.stochastic(3))


def same(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_starts_training_enabled_with_an_average():
    fq = dt.FakeQuantize("int8")
    assert (fq.mode, fq.training, fq.enabled, fq.is_initialized, fq.step) == (dt.EMA(0.99), True, True, False, 0)
    assert fq.ste == dt.ste.Clipped()
    assert dt.FakeQuantize("int8/rlx").ste == dt.ste.Identity()


# Modes


@pytest.mark.parametrize("training", [True, False])
def test_per_batch_uses_the_batch_at_hand(training):
    fq = dt.FakeQuantize("uint8/axis0", mode=dt.PerBatch()).train(training)
    for x in (X, BIG, X):
        params = dt.QuantParams.from_data(fq.spec, x)
        assert same(fq(x), dt.fake_quantize(x, params))
        assert np.array_equal(fq.scale, params.scale)


def average(ranges, decay):
    """The moving average of (lo, hi) pairs by docs/numerics.md, in float32 with one rounding per operation."""
    kept, added = F32(decay), F32(1.0 - decay)
    lo, hi = ranges[0]
    for new_lo, new_hi in ranges[1:]:
        lo = F32(F32(kept * lo) + F32(added * new_lo))
        hi = F32(F32(kept * hi) + F32(added * new_hi))
    return lo, hi


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99, 1 / 3])
def test_ema_updates_its_state_and_then_uses_it(decay):
    fq = dt.FakeQuantize("uint8", mode=dt.EMA(decay))
    seen = []
    for seed in range(6):
        x = batch(1.0 + seed, seed)
        seen.append((x.min(), x.max()))
        y = fq(x)
        params = dt.QuantParams.from_range("uint8", *average(seen, decay))
        assert (fq.scale, fq.zero_point) == (params.scale, params.zero_point)
        assert same(y, dt.fake_quantize(x, params))


def test_ema_of_the_first_batch_is_that_batch():
    assert np.array_equal(dt.FakeQuantize("int8")(X), dt.fake_quantize(X, dt.QuantParams.from_data("int8", X)))


def test_eval_never_updates():
    fq = dt.FakeQuantize("int8")
    fq(X)
    before = fq.state_dict()
    fq.eval()
    assert same(fq(BIG), dt.fake_quantize(BIG, fq.params))
    assert all(np.array_equal(value, before[name]) for name, value in fq.state_dict().items())


def test_ema_skips_and_counts_what_is_not_finite():
    fq = dt.FakeQuantize("int8")
    y = fq(np.array([1.0, np.nan, -np.inf, 2.0], np.float32))
    assert fq.scale == F32(2.0 / 127)
    assert np.isnan(y).tolist() == [False, True, False, False]
    assert fq.state_dict()["observer.nonfinite"] == 2


def test_fixed_keeps_what_calibration_found():
    fq = dt.FakeQuantize("int8", mode=dt.Fixed()).calibrate(X)
    expected = dt.QuantParams.from_data("int8", X)
    assert same(fq(BIG), dt.fake_quantize(BIG, expected))
    assert fq.params == expected
    fq.calibrate(BIG)
    assert fq.params == dt.QuantParams.from_data("int8", BIG)


def test_forward_with_calibration_calibrates_once():
    fq = dt.FakeQuantize.q8()
    fq.forward_with_calibration(X)
    fq.forward_with_calibration(BIG)
    assert fq.params == dt.QuantParams.from_data("int8", X)


def test_calibrate_restarts_the_average():
    fq = dt.FakeQuantize("int8", mode=dt.EMA(0.5))
    fq(BIG)
    fq.calibrate(X)
    assert fq.scale == dt.QuantParams.from_data("int8", X).scale
    fq(BIG)
    lo, hi = average([(X.min(), X.max()), (BIG.min(), BIG.max())], 0.5)
    assert fq.scale == dt.QuantParams.from_range("int8", lo, hi).scale


def test_learned_starts_from_the_first_batch_and_then_only_learns():
    fq = dt.FakeQuantize("uint8/axis0", mode=dt.Learned())
    fq(X)
    first = fq.params
    assert np.array_equal(first.scale, dt.QuantParams.from_data("uint8/axis0", X).scale)
    fq(BIG)
    assert fq.params == first


def test_learned_gradients_and_update():
    fq = dt.FakeQuantize("uint8/axis0", mode=dt.Learned())
    fq(X)
    fq(BIG)
    gx = fq.backward(G)
    expected = dt.fake_quantize_learned_backward(G, BIG, fq.params)
    for got, reference in zip((gx, fq.scale_grad, fq.zero_point_grad), expected, strict=True):
        assert same(got, reference)
    fq.update_params(fq.scale - 1e-4 * fq.scale_grad, fq.zero_point - fq.zero_point_grad)
    assert fq.zero_point.dtype == np.float32
    whole = np.clip(np.round(fq.zero_point), 0, 255)
    assert np.array_equal(fq.params.zero_point, whole)


@pytest.mark.parametrize(("given", "used"), [(2.5, 2), (3.5, 4), (-7.25, 0), (300.0, 255), (3.49, 3)])
def test_learned_zero_point_is_rounded_and_clamped_for_use_only(given, used):
    fq = dt.FakeQuantize("uint8", mode=dt.Learned()).update_params(0.5, given)
    assert (fq.zero_point, fq.params.zero_point) == (F32(given), used)
    again = dt.FakeQuantize("uint8", mode=dt.Learned()).load_state_dict(fq.state_dict())
    assert again.zero_point == F32(given)
    assert same(fq(X), dt.fake_quantize(X, dt.QuantParams("uint8", 0.5, used)))


@pytest.mark.parametrize("zero_point", [3.0, [3.0], np.float32(3.0), np.array(3)], ids=repr)
def test_learned_zero_point_in_any_shape_of_one(zero_point):
    fq = dt.FakeQuantize("uint8", mode=dt.Learned()).update_params(0.5, zero_point)
    assert (fq.zero_point.shape, fq.zero_point.item()) == ((), 3.0)


def test_a_symmetric_zero_point_is_not_learned():
    fq = dt.FakeQuantize("int8", mode=dt.Learned())
    fq(X)
    fq.backward(G)
    assert fq.scale_grad is not None
    assert fq.zero_point_grad is None


@pytest.mark.parametrize("mode", ["fixed", "learned"])
def test_parameters_are_read_only(mode):
    fq = dt.FakeQuantize("uint8/axis0", mode=mode).calibrate(X)
    assert not fq.scale.flags.writeable
    assert not fq.zero_point.flags.writeable


# Backward


@pytest.mark.parametrize("mode", ["per_batch", "ema", "fixed", "learned"])
def test_backward_uses_the_forwards_data_and_parameters(mode):
    fq = dt.FakeQuantize("int4", mode=mode)
    fq.calibrate(X)
    fq(BIG)
    used = fq.params
    assert same(fq.backward(G), dt.fake_quantize_backward(G, BIG, used))
    assert same(fq.backward(G, X), dt.fake_quantize_backward(G, X, used))
    assert fq.params == used


def test_backward_of_the_last_forward_in_eval():
    fq = dt.FakeQuantize("int4")
    fq(X)
    fq.eval()(BIG)
    assert same(fq.backward(G), dt.fake_quantize_backward(G, BIG, fq.params))


def test_backward_without_a_forward_uses_the_current_parameters():
    fq = dt.FakeQuantize.from_bits(4, scale=0.1)
    assert same(fq.backward(G, X), dt.fake_quantize_backward(G, X, fq.params))


@pytest.mark.parametrize("ste", ["identity", "hard_tanh", dt.ste.Clipped(on="value"), lambda g, x, params: g * 2])
def test_backward_uses_the_estimator_and_backward_clamped_its_own(ste):
    fq = dt.FakeQuantize("int4", mode="fixed", ste=ste).update_params(0.1)
    fq(X)
    assert same(fq.backward(G), dt.fake_quantize_backward(G, X, fq.params, ste=ste))
    clamped = dt.fake_quantize_backward(G, X, fq.params, ste=dt.ste.Clipped(on="value"))
    assert same(fq.backward_clamped(G, X), clamped)
    lo, hi = fq.float_range()
    assert np.array_equal(clamped != 0, (F32(lo) <= X) & (F32(hi) >= X))


# Stochastic rounding


def test_each_forward_takes_the_next_step():
    fq = dt.FakeQuantize(STOCHASTIC, mode="fixed").update_params(0.3)
    for step in range(3):
        assert fq.step == step
        assert same(fq(X), dt.fake_quantize(X, fq.params, step=step))
    fq.eval()(X)
    assert fq.step == 3


def test_backward_takes_the_forwards_step():
    fq = dt.FakeQuantize(STOCHASTIC, mode="fixed").update_params(1.0)
    edge = np.full(200, 127.5, np.float32)
    fq(edge)
    fq(edge)
    ones = np.ones_like(edge)
    assert same(fq.backward(ones), dt.fake_quantize_backward(ones, edge, fq.params, step=1))
    assert not same(fq.backward(ones), dt.fake_quantize_backward(ones, edge, fq.params, step=2))


def test_the_step_is_saved_and_wraps():
    fq = dt.FakeQuantize(STOCHASTIC, mode="fixed").update_params(0.3)
    fq.load_state_dict(fq.state_dict() | {"step": 2**32 - 1})
    assert same(fq(X), dt.fake_quantize(X, fq.params, step=2**32 - 1))
    assert fq.step == 0


def test_noise_and_disabled_forwards_take_no_step():
    fq = dt.FakeQuantize(STOCHASTIC, mode="fixed").update_params(0.3)
    fq.quantization_noise(X)
    fq.enabled = False
    fq(X)
    assert fq.step == 0


def test_no_steps_without_randomness():
    fq = dt.FakeQuantize("int8")
    fq(X)
    assert fq.step == 0


# Disabled


def test_disabled_passes_copies_through_and_leaves_the_state():
    fq = dt.FakeQuantize("int8")
    fq.enabled = False
    y, gx = fq(X), fq.backward(G)
    assert same(y, X)
    assert same(gx, G)
    assert same(fq.backward_clamped(G, X), G)
    assert not np.shares_memory(y, X)
    assert not np.shares_memory(gx, G)
    assert not fq.is_initialized
    assert fq.quantization_noise(X) == 0.0
    fq.forward_with_calibration(X)
    assert not fq.is_initialized
    fq.enabled = True
    assert not same(fq(X), X)


# Questions


@pytest.mark.parametrize(
    ("fq", "bits", "symmetric", "ends", "levels"),
    [
        (dt.FakeQuantize.q8(), 8, True, (-127, 127), 255),
        (dt.FakeQuantize.q4(), 4, True, (-7, 7), 15),
        (dt.FakeQuantize.q8(convention="oxicuda"), 8, True, (-128, 127), 256),
        (dt.FakeQuantize.from_bits(6, symmetric=False), 6, False, (0, 63), 64),
        (dt.FakeQuantize("float8_e5m2"), 8, True, (-57344.0, 57344.0), 248),
    ],
)
def test_questions(fq, bits, symmetric, ends, levels):
    assert (fq.bits, fq.symmetric, fq.quant_range(), fq.num_levels) == (bits, symmetric, ends, levels)


def test_float_range():
    assert dt.FakeQuantize.from_bits(8, symmetric=False, scale=0.5, zero_point=10).float_range() == (-5.0, 122.5)
    lo, hi = dt.FakeQuantize("int4/axis0", mode="fixed").update_params([0.5, 1.0]).float_range()
    assert lo.tolist() == [-3.5, -7.0]
    assert hi.tolist() == [3.5, 7.0]


def test_quantization_noise_is_the_mse_of_forward():
    for mode in ("per_batch", "fixed", "ema"):
        fq = dt.FakeQuantize("int4", mode=mode).calibrate(X)
        before = fq.state_dict()
        noise = fq.quantization_noise(X)
        assert all(np.array_equal(value, before[name]) for name, value in fq.state_dict().items())
        assert noise == dt.metrics.mse(X, fq.eval()(X)) > 0


def test_repr():
    assert repr(dt.FakeQuantize("int8", mode="fixed")) == "FakeQuantize('int8/tensor', mode=Fixed(), initialized=False)"
    named = repr(dt.FakeQuantize("int8", ste="tanh"))
    assert named == "FakeQuantize('int8/tensor', mode=EMA(decay=0.99), ste=Tanh(unit='range'), initialized=False)"


# State


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("spec", ["int8", "uint8", "int8/axis0"])
@pytest.mark.parametrize("mode", [dt.PerBatch(), dt.EMA(0.5), dt.Fixed(), dt.Learned()], ids=str)
def test_copies_share_no_state(mode, spec, again):
    def state(one):
        grads = {"scale_grad": one.scale_grad, "zero_point_grad": one.zero_point_grad}
        flat = {**one.state_dict(), **grads, "enabled": one.enabled, "training": one.training}
        return {name: np.copy(value) if isinstance(value, np.ndarray) else value for name, value in flat.items()}

    def same(one, other):
        return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

    x = np.array([[1.0, -2.0], [3.0, 4.5]], np.float32)
    fq = dt.FakeQuantize(spec, mode=mode).calibrate(x)
    fq(x)
    fq.backward(np.ones_like(x))
    before = state(fq)
    copied = again(fq)
    assert same(state(copied), before)
    assert copied(x).tobytes() == fq(x).tobytes()
    before = state(fq)
    for grad in (copied.scale_grad, copied.zero_point_grad):
        if grad is not None:
            grad[...] = 99.0
    copied.eval().train()(9 * x)
    copied.calibrate(5 * x).backward(np.ones_like(x))
    copied.step, copied.enabled = 7, False
    copied.eval().load_state_dict({**fq.state_dict(), "step": 3})
    assert same(state(fq), before)


def test_state_is_a_copy():
    fq = dt.FakeQuantize("int8/axis0")
    fq(X)
    state = fq.state_dict()
    before = fq.params
    for value in state.values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    assert fq.params == before


def test_uninitialised_state_has_no_arrays():
    state = dt.FakeQuantize("int8").state_dict()
    assert state["initialized"] is False
    assert not any(isinstance(value, np.ndarray) for value in state.values())


def test_loading_goes_on_where_the_other_stopped():
    whole, first = (dt.FakeQuantize("uint8/axis0", mode=dt.EMA(0.9)) for _ in range(2))
    for fq in (whole, first):
        fq(X)
    second = dt.FakeQuantize("uint8/axis0", mode=dt.EMA(0.9)).load_state_dict(first.state_dict())
    assert same(second(BIG), whole(BIG))
    assert second.params == whole.params


def test_loading_forgets_the_last_forward():
    fq = dt.FakeQuantize("int8")
    fq(X)
    fq.load_state_dict(fq.state_dict())
    with pytest.raises(dt.NotCalibratedError):
        fq.backward(G)
