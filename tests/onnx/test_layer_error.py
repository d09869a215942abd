"""A switchable model: quantized with constant weights, its outputs are those of the session with switches."""

import numpy as np
import pytest
from onnx_graphs import conv_chain, images

import detent as dt
import detent.onnx as qo
from detent.onnx import layer_error
from detent.onnx.calibration import choose_params
from detent.onnx.layer_error import Switch, SwitchableModel
from detent.onnx_model.sessions import array_outputs


def switchable(recipe="w8a8"):
    """Return a model with switches, its outputs, its quantized weights, and all flags."""
    plan = qo.plan(qo.prepare(conv_chain()), recipe)
    params = choose_params(plan.placements(), qo.calibrate(plan, images()))
    switches = [Switch(f"{tensor}//input", tensor, each) for tensor, each in params.items()]
    model = SwitchableModel(plan.model, {each.name: [each.name] for each in plan.quantized}, switches, plan.target)
    weights = {
        each.name: dt.fake_quantize(model.weights[each.name], plan.weight_params(each)) for each in plan.quantized
    }
    return model, array_outputs(plan.model), weights, [each.flag for each in switches]


@pytest.mark.parametrize("recipe", ["w8a8", "w4a4"])  # the pairs of w4a4 have a Clip
@pytest.mark.parametrize("limit", [0, layer_error.MAX_SOURCE_BYTES])
def test_a_quantized_run_has_the_outputs_of_a_switched_run(recipe, limit, monkeypatch):
    monkeypatch.setattr(layer_error, "MAX_SOURCE_BYTES", limit)
    model, names, weights, flags = switchable(recipe)
    feed = images(1, batch=1)[0]
    for used in (weights, {}, {"first": weights["first"]}):
        (expected,), (actual,) = model.run(names, feed, used, flags), model.run_quantized(names, feed, used, {})
        # Rounding errors of float kernels may change a code by one.
        assert dt.metrics.sqnr_db(expected, actual) > 40
        assert np.median(np.abs(expected - actual)) <= 1e-6 * np.abs(expected).max()
    assert model.run_quantized([], feed, weights, {}) == []


def test_a_quantized_run_uses_new_parameters():
    model, names, weights, flags = switchable()
    feed = images(1, batch=1)[0]
    coarse = dt.QuantParams.from_range(dt.QuantSpec("uint8"), np.float32(-50), np.float32(50))
    (before,) = model.run_quantized(names, feed, weights, {})
    (once,) = model.run_quantized(names, feed, weights, model.prepared({flags[0]: coarse}))
    (after,) = model.run_quantized(names, feed, weights, {})
    np.testing.assert_array_equal(before, after)
    assert dt.metrics.sqnr_db(before, once) < 30
    model.set_params(flags[0], coarse)
    np.testing.assert_array_equal(model.run_quantized(names, feed, weights, {})[0], once)
    np.testing.assert_allclose(model.run(names, feed, weights, flags)[0], once, atol=0.05 * np.abs(once).max())


def test_other_weights_take_another_session_and_the_same_ones_do_not():
    model, names, weights, _ = switchable()
    feed, first = images(1, batch=1)[0], dict(weights)
    model.run_quantized(names, feed, first, {})
    session = model._quantized
    model.run_quantized(names, feed, dict(first), {})
    assert model._quantized is session
    model.run_quantized(names, feed, {**first, "last": first["last"].copy()}, {})
    assert model._quantized is not session
