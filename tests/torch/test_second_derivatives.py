"""Second derivatives and forward mode of prepared layers: correct if supported, else a clear error."""

from __future__ import annotations

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp  # noqa: E402

import detent.torch as qt  # noqa: E402

# Not ours: PyTorch scripts the forward-mode formulas of some operators.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

torch.manual_seed(5)
X = torch.randn(6, 4, 5, dtype=torch.float64)


class Twin(nn.Module):
    """The computation of a prepared layer in autograd operations: straight-through estimators around constants."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model:
            if not hasattr(layer, "input_quantizer"):
                x = layer(x)
                continue
            x = straight_through(x, layer.input_quantizer.params)
            factor = (
                1 if layer._factor(layer.weight, layer.weight_quantizer) is None else layer.fold.factor(layer.weight)
            )
            params = layer.weight_quantizer.params_for(layer.weight * factor)
            weight = straight_through(layer.weight * factor, params) / factor
            product = nn.functional.linear if layer.weight.ndim == 2 else nn.functional.conv1d
            x = product(x, weight, layer.bias)
        return x


def straight_through(x: torch.Tensor, params: dt.QuantParams) -> torch.Tensor:
    data = x.detach().numpy()
    mask = torch.from_numpy(dt.fake_quantize_backward(data * 0 + 1, data, params))
    return torch.from_numpy(dt.fake_quantize(data, params)) + mask * (x - x.detach())


def prepared(mode: str = "ema", ste: object = None, *, norm: bool = False, spec: object = "int4/axis0") -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 6, 3), *[nn.BatchNorm1d(6)] * norm, nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)]
    model = nn.Sequential(*layers).double()
    qt.prepare(model, dt.Recipe([dt.Rule(weight=spec, input="uint8", mode=mode, ste=ste)]))
    with qt.calibrating(model):
        model(0.7 * X)  # so that some are clipped
    return model.eval()


def penalty(model: nn.Module, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), [x, *parameters], allow_unused=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if not n.endswith("_shift")]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("spec", ["int4/axis0", dt.QuantSpec("int4", "axis0", qmin=-3)], ids=str)
@pytest.mark.parametrize("mode", ["ema", "fixed"])
def test_a_gradient_penalty(mode, spec, norm, native, monkeypatch):
    model = prepared(mode, norm=norm, spec=spec)
    expected = penalty(Twin(model), trained(model))
    if not native:
        monkeypatch.setattr("detent.torch.native_step.run", lambda *_: None)
        for module in ("quantizer", "quantized_layer"):
            monkeypatch.setattr(f"detent.torch.{module}.is_plain", lambda x: False)
    for ours, theirs in zip(penalty(model, trained(model)), expected, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            assert theirs.any()
            torch.testing.assert_close(ours, theirs)


def test_first_derivatives_are_the_same_with_a_graph():
    model = prepared()
    model(X).square().sum().backward()
    gradients = torch.autograd.grad(model(X).square().sum(), trained(model), create_graph=True)
    for ours, theirs in zip(gradients, trained(model), strict=True):
        assert torch.equal(ours, theirs.grad)


def test_frozen_learned_scales():
    model = prepared("learned")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("_shift"))
    for ours, theirs in zip(penalty(model, trained(model)), penalty(Twin(model), trained(model)), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("mode", "ste", "message"),
    [("learned", None, "learned scales have no second"), ("ema", dt.ste.HardTanh(), "HardTanh.* has no second")],
)
def test_unsupported_second_derivatives_are_rejected(mode, ste, message, native, monkeypatch):
    if not native:
        monkeypatch.setattr("detent.torch.native_step.run", lambda *_: None)
        for module in ("quantizer", "quantized_layer"):
            monkeypatch.setattr(f"detent.torch.{module}.is_plain", lambda x: False)
    model = prepared(mode, ste)
    with pytest.raises(dt.UnsupportedError, match=message):
        penalty(model, trained(model))


def test_functions_of_tensors():
    params = dt.QuantParams(dt.QuantSpec("int8"), 0.5)
    x = torch.tensor([0.3, 0.9, 99.0], requires_grad=True)
    (slope,) = torch.autograd.grad(qt.fake_quantize(x, params).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert second.tolist() == [3.0, 6.0, 0.0]  # 6 y where the gradient passes


def test_forward_mode_is_the_transpose_of_reverse_mode():
    model, v = prepared(), torch.randn_like(X)
    (_, tangent) = jvp(model, (X,), (v,))
    expected = torch.einsum("ijkl,kl->ij", jacrev(lambda x: model(x[None])[0])(X[0])[None], v[0])
    torch.testing.assert_close(tangent[:1], expected)
    torch.testing.assert_close(jacfwd(lambda x: model(x[None])[0])(X[0]), jacrev(lambda x: model(x[None])[0])(X[0]))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(X, v)))
    torch.testing.assert_close(dual.tangent, tangent)


def test_forward_over_reverse():
    model = prepared()
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(weight):
        return functional_call(model, {**parameters, "3.weight": weight}, (X,)).square().sum()

    second = hessian(loss)(parameters["3.weight"])
    assert second.any()
    torch.testing.assert_close(second, jacrev(grad(loss))(parameters["3.weight"]))


def test_forward_mode_of_learned_scales_is_rejected():
    model = prepared("learned")
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    jvp(lambda x: functional_call(model, parameters, (x,)), (X,), (X,))  # constants
    with pytest.raises(dt.UnsupportedError, match="no second or forward-mode"):
        jvp(lambda p: functional_call(model, p, (X,)), (parameters,), (parameters,))
