"""Gradients of weights follow the contract for every spec: native, in torch operations, and compiled."""

from __future__ import annotations

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_bits import assert_same  # noqa: E402

import detent.torch as qt  # noqa: E402

SPECS = {
    "int8": dt.QuantSpec("int8", "axis0"),
    "qmin": dt.QuantSpec("int8", "axis0", qmin=-20),
    "qmin_below": dt.QuantSpec("int8", "axis0", qmin=-128, qmax=100),
    "qmax": dt.QuantSpec("int8", "axis0", qmin=-1, qmax=20),
    "uint8_symmetric": dt.QuantSpec("uint8", "axis0", symmetric=True),
    "uint8_qmin": dt.QuantSpec("uint8", "axis0", symmetric=True, qmin=100),
    "floor": dt.QuantSpec("int8", "axis0", rounding="floor"),
    "half_away": dt.QuantSpec("int8", "axis0", rounding="half_away"),
    "stochastic": dt.QuantSpec("int8", "axis0", rounding="stochastic(1)"),
    "fp8": dt.QuantSpec("float8_e4m3fn", "axis0"),
    "fp8_e5m2": dt.QuantSpec("float8_e5m2", "axis0"),
    "fp4": dt.QuantSpec("float4_e2m1fn", "group8"),
    "nf4": dt.QuantSpec("nf4", "group8"),
    "mxfp4": dt.mxfp4,
    "affine": dt.QuantSpec("uint8", "axis0"),
    "int16": dt.QuantSpec("int16", "axis0"),
    **{name: dt.QuantSpec("int8", "axis0", convention=name) for name in ("torch", "torch_fused", "oxicuda", "rlx")},
}
ESTIMATORS = {
    "clipped": dt.ste.Clipped(),
    "exclusive": dt.ste.Clipped(bounds="exclusive"),
    "value": dt.ste.Clipped(on="value"),
    "identity": dt.ste.Identity(),
}
ROWS, COLUMNS = 64, 96


def gradient(spec: dt.QuantSpec, ste: object, *, compiled: bool = False) -> tuple[torch.Tensor, np.ndarray]:
    """The gradient of a weight in training, and the gradient by the contract."""
    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)), dt.Recipe([dt.Rule(weight=spec, ste=ste)]))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(ROWS, COLUMNS) * torch.linspace(0.1, 3, ROWS)[:, None])
    weight = model[0].weight
    params = dt.QuantParams.from_data(spec, weight.detach().numpy())
    g = torch.randn(ROWS, COLUMNS)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(torch.eye(COLUMNS)).backward(g.T)
    return weight.grad, dt.fake_quantize_backward(g.numpy(), weight.detach().numpy(), params, ste=ste)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("ste", ESTIMATORS)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_weights_follow_the_contract(spec, ste, native, monkeypatch):
    if not native:
        if SPECS[spec].scale_format != "float":
            pytest.skip("such scales are not supported in torch operations")
        monkeypatch.setattr("detent.torch.native_step.run", lambda *_: None)
        for module in ("quantizer", "quantized_layer"):
            monkeypatch.setattr(f"detent.torch.{module}.is_plain", lambda x: False)
    assert_same(*gradient(SPECS[spec], ESTIMATORS[ste]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it
@pytest.mark.parametrize("spec", ["qmin", "floor", "fp8"])
def test_compiled_gradients_are_the_same(spec):
    assert_same(*gradient(SPECS[spec], ESTIMATORS["clipped"], compiled=True))
