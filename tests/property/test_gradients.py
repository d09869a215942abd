"""Properties of gradients: composition of backward passes, and agreement with finite differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt

from .cases import PRESETS, TILINGS, Case, cases, make_params, same_bits

MASKS = (
    None,
    dt.ste.Identity(),
    *(dt.ste.Clipped(on, b) for on in ("code", "value") for b in ("inclusive", "exclusive")),
)


def _gradient(case, seed):
    """Random gradients with many significant bits whose product with the scale is a normal number."""
    g = np.random.default_rng(seed).uniform(0.5, 2.0, size=case.x.shape)
    return (g * np.where(g > 1, 1, -1)).astype(case.x.dtype)


@given(cases(roundings=(None, "floor", "stochastic(5)")), st.sampled_from(MASKS), st.integers(0, 1000))
def test_backward_of_the_parts_is_backward_of_the_whole(case, ste, seed):
    if case.x.dtype == np.float16:  # keep g * s a normal float16 number
        case = Case(dt.QuantParams(case.spec, np.float32(0.0123), case.params.zero_point), case.x)
    g = _gradient(case, seed)
    whole = dt.fake_quantize_backward(g, case.x, case.params, ste=ste)
    parts = dt.quantize_backward(dt.dequantize_backward(g, case.params), case.x, case.params, ste=ste)
    assert np.array_equal(whole == 0, parts == 0)
    step = np.abs(np.nextafter(g, np.full_like(g, np.inf)) - g)
    assert (np.abs(whole.astype(np.float64) - parts.astype(np.float64)) <= step.astype(np.float64)).all()


@given(cases(roundings=(None, "floor", "stochastic(5)")), st.sampled_from(MASKS), st.integers(0, 1000))
def test_masks_select_the_gradient_or_zero(case, ste, seed):
    g = _gradient(case, seed)
    gx = dt.fake_quantize_backward(g, case.x, case.params, ste=ste)
    assert all(same_bits(a, b) or not a for a, b in zip(gx, g, strict=True))


@given(cases(roundings=(None, "floor", "stochastic(5)")))
def test_inclusive_masks_hold_the_exclusive_ones(case):
    g = np.ones_like(case.x)
    for on in ("code", "value"):
        wide = dt.fake_quantize_backward(g, case.x, case.params, ste=dt.ste.Clipped(on, "inclusive"))
        tight = dt.fake_quantize_backward(g, case.x, case.params, ste=dt.ste.Clipped(on, "exclusive"))
        assert (tight <= wide).all()


@given(cases())
def test_infinite_gradients_are_selected_not_multiplied(case):
    g = np.full_like(case.x, np.inf)
    for ste in (*MASKS, "hard_tanh", "tanh"):
        assert not np.isnan(dt.fake_quantize_backward(g, case.x, case.params, ste=ste)).any()


@given(cases())
def test_nan_in_x_gets_no_gradient_but_from_identity(case):
    x = np.full_like(case.x, np.nan)
    g = np.ones_like(x)
    for ste in ("clipped", dt.ste.Clipped(on="value"), "hard_tanh", "tanh", dt.ste.Tanh(unit="step")):
        assert not dt.fake_quantize_backward(g, x, case.params, ste=ste).any()
    assert same_bits(dt.fake_quantize_backward(g, x, case.params, ste="identity"), g)
    _, gs, gz = dt.fake_quantize_learned_backward(g, x, case.params)
    assert (gs, gz) == (0.0, 0.0)


# Gradients of learned parameters against finite differences of s * (clip(x/s + e + z, qmin, qmax) - z) with constant e,
# the rounding error in steps.


def _away_from_kinks(rng, spec, params, shape):
    """Random data with codes inside the range or at least two steps outside it, away from ties."""
    s, z = (_spread(params, value, shape) for value in (params.scale, params.zero_point))
    inside = rng.integers(spec.qmin + 1, spec.qmax, size=shape)
    beyond = np.where(rng.random(shape) < 0.5, spec.qmin - 2, spec.qmax + 2)
    code = np.where(rng.random(shape) < 0.6, inside, beyond)
    return (code - z + rng.uniform(-0.4, 0.4, size=shape)) * s


def _spread(params, values, shape):
    """Expand one value per parameter set to one value per element, index by index."""
    tiling = params.spec.granularity.tiling(shape)
    grid = np.reshape(values, tiling.grid)
    spread = np.empty(shape)
    for index in np.ndindex(shape):
        tile = tuple(min(i // b, n - 1) for i, b, n in zip(index, tiling.block, tiling.grid, strict=True))
        spread[index] = grid[tile]
    return spread


def _surrogate(spec, params, shape, g, x, e, scale, zero_point):
    s, z = _spread(params, scale, shape), _spread(params, zero_point, shape)
    return g * s * (np.clip(x / s + e + z, spec.qmin, spec.qmax) - z)


@pytest.mark.parametrize("convention", PRESETS)
@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
def test_learned_gradients_are_those_of_the_surrogate(granularity, shape, convention):
    rng = np.random.default_rng(3)
    spec = dt.QuantSpec("uint4", granularity, convention=convention)
    params = make_params(rng, spec, shape)
    params = dt.QuantParams(spec, params.scale.astype(np.float64), params.zero_point)
    x, g = _away_from_kinks(rng, spec, params, shape), rng.normal(size=shape)
    e = np.round(x / _spread(params, params.scale, shape)) - x / _spread(params, params.scale, shape)
    gx, gs, gz = dt.fake_quantize_learned_backward(g, x, params, ste="clipped", grad_scale=1.0)

    def slope(name, index):
        values = {"scale": params.scale.copy(), "zero_point": params.zero_point.astype(np.float64)}
        width = 1e-4 * (values[name][index] if name == "scale" else 1.0)
        ends = []
        for sign in (1, -1):
            moved = values[name].copy()
            moved[index] += sign * width
            ends.append(_surrogate(spec, params, shape, g, x, e, **{**values, name: moved}))
        return float(np.sum(ends[0] - ends[1])) / (2 * width)

    for index in np.ndindex(params.scale.shape):
        assert gs[index] == pytest.approx(slope("scale", index), rel=1e-6, abs=1e-7)
        assert gz[index] == pytest.approx(slope("zero_point", index), rel=1e-6, abs=1e-7)
    codes = dt.quantize(x, params).codes
    assert np.array_equal(gx, np.where((codes > spec.qmin) & (codes < spec.qmax), g, 0.0))


@pytest.mark.parametrize("format_", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4"])
def test_learned_gradients_of_small_floats_and_nf4(format_):
    """The surrogate is s * clip(x/s + e, -max, max): the scale gradient is e inside, -max or max outside."""
    params = dt.QuantParams(format_, np.float64(0.3))
    top = params.spec.qmax
    t = np.random.default_rng(1).uniform(-1.5, 1.5, size=50) * top
    g = np.random.default_rng(2).normal(size=50)
    _, gs, gz = dt.fake_quantize_learned_backward(g, t * 0.3, params, grad_scale=1.0)
    values = dt.fake_quantize(t * 0.3, params) / 0.3
    expected = g * np.where(np.abs(t) <= top, values - t, np.sign(t) * top)
    assert gs == pytest.approx(expected.sum(), rel=1e-9)
    assert gz == 0.0


@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
def test_the_default_grad_scale_counts_the_elements_of_each_set(granularity, shape):
    rng = np.random.default_rng(4)
    params = make_params(rng, dt.QuantSpec("uint4", granularity), shape)
    x, g = rng.normal(size=shape), rng.normal(size=shape)
    _, raw_s, raw_z = dt.fake_quantize_learned_backward(g, x, params, grad_scale=1.0)
    _, gs, gz = dt.fake_quantize_learned_backward(g, x, params)
    tiling = granularity.tiling(shape)
    members = np.zeros(tiling.grid)
    for index in np.ndindex(shape):
        members[tuple(min(i // b, n - 1) for i, b, n in zip(index, tiling.block, tiling.grid, strict=True))] += 1
    factor = 1 / np.sqrt(members.reshape(tiling.scale_shape) * 15)
    np.testing.assert_allclose(gs, raw_s * factor, rtol=1e-6)
    np.testing.assert_allclose(gz, raw_z * factor, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("ste", ["identity", "hard_tanh", "tanh"])
def test_the_estimator_of_x_leaves_the_learned_gradients_alone(ste, dtype):
    rng = np.random.default_rng(6)
    params = dt.QuantParams("int4", 0.3)
    x, g = rng.normal(size=40).astype(dtype), rng.normal(size=40).astype(dtype)
    gx, gs, gz = dt.fake_quantize_learned_backward(g, x, params, ste=ste)
    _, gs0, gz0 = dt.fake_quantize_learned_backward(g, x, params)
    assert (gs, gz) == (gs0, gz0)
    assert same_bits(gx, dt.fake_quantize_backward(g, x, params, ste=ste))
