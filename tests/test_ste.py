"""Estimators: construction and comparison, and the gradients of smooth estimators."""

import numpy as np
import pytest

import detent as dt
from detent.ste import Clipped, Custom, HardTanh, Identity, Tanh, get_estimator

P = dt.QuantParams("uint8", 0.5, 100)  # values from -50 to 77.5
X = np.array([-60.0, -50.25, -50.0, 0.0, 13.75, 40.0, 77.5, 77.7, 90.0])
G = np.linspace(1.0, 2.0, X.size)


@pytest.mark.parametrize(
    ("name", "value"),
    [("identity", Identity()), ("clipped", Clipped()), ("hard_tanh", HardTanh()), ("tanh", Tanh())],
)
def test_names(name, value):
    assert get_estimator(name, dt.Convention.onnx) == value
    assert get_estimator(value, dt.Convention.onnx) is value
    assert np.array_equal(dt.fake_quantize_backward(G, X, P, ste=name), dt.fake_quantize_backward(G, X, P, ste=value))


def test_callables_are_wrapped_and_see_the_operands():
    seen = []

    def mine(g, x, params):
        seen.append((g, x, params))
        return g * 3

    assert isinstance(get_estimator(mine, dt.Convention.onnx), Custom)
    assert np.array_equal(dt.fake_quantize_backward(G, X, P, ste=mine), G * 3)
    assert np.array_equal(dt.quantize_backward(G, X, P, ste=mine), G * 3 / 0.5)
    gx, gs, _ = dt.fake_quantize_learned_backward(G, X, P, ste=mine)
    assert np.array_equal(gx, G * 3)
    assert gs == dt.fake_quantize_learned_backward(G, X, P)[1]
    assert all(np.array_equal(g, G) and np.array_equal(x, X) and p is P for g, x, p in seen)


def test_an_estimator_that_cannot_be_hashed():
    class Unhashable:
        __hash__ = None

        def __call__(self, g, x, params):
            return -g

    assert np.array_equal(dt.fake_quantize_backward(G, X, P, ste=Unhashable()), -G)


@pytest.mark.parametrize(
    ("ste", "passes"),
    [
        (Identity(), [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (Clipped(), [0, 1, 1, 1, 1, 1, 1, 1, 0]),  # -50.25 is a tie to the even code 0, 77.7 rounds to 255
        (Clipped(on="value"), [0, 0, 1, 1, 1, 1, 1, 0, 0]),
        (Clipped(bounds="exclusive"), [0, 0, 0, 1, 1, 1, 0, 0, 0]),
        (Clipped("value", "exclusive"), [0, 0, 0, 1, 1, 1, 0, 0, 0]),
    ],
    ids=repr,
)
def test_masks(ste, passes):
    assert np.array_equal(dt.fake_quantize_backward(G, X, P, ste=ste), G * np.array(passes))


def test_smooth_estimators_by_their_formulas():
    centre, half = (127.5 - 100) * 0.5, 127.5 * 0.5
    v = (X - centre) / half
    hard = dt.fake_quantize_backward(G, X, P, ste=HardTanh())
    np.testing.assert_allclose(hard, G * np.maximum(0, 1 - np.abs(v)), rtol=1e-15)
    assert hard[4] == G[4]  # the middle of the range
    np.testing.assert_allclose(dt.fake_quantize_backward(G, X, P, ste=Tanh()), G * (1 - np.tanh(v) ** 2), rtol=1e-14)
    step = dt.fake_quantize_backward(G, X, P, ste=Tanh(unit="step"))
    np.testing.assert_allclose(step, G * (1 - np.tanh(X / 0.5) ** 2), rtol=1e-14)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_mask_of_other_formats(name):
    params = dt.QuantParams(name, 0.5)
    top = params.spec.qmax * 0.5
    x = np.array([-top * 1.01, -top, 0.0, top, top * 1.01], np.float32)
    ones = np.ones_like(x)
    assert dt.fake_quantize_backward(ones, x, params).tolist() == [0, 1, 1, 1, 0]
    exclusive = dt.fake_quantize_backward(ones, x, params, ste=Clipped(bounds="exclusive"))
    assert exclusive.tolist() == [0, 0, 1, 0, 0]


def test_each_default_is_the_conventions():
    x = np.array([-200.0, 127.4, 200.0], np.float32)
    ones = np.ones_like(x)
    for name, expected in {
        "onnx": [0, 1, 0],
        "oxicuda": [0, 0, 0],
        "rlx": [1, 1, 1],
        "baracuda_token": [0, 0, 0],
    }.items():
        params = dt.QuantParams(dt.QuantSpec("int8", convention=name), 1.0)
        assert dt.fake_quantize_backward(ones, x, params).tolist() == expected, name
