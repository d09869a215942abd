"""``torch.func``: gradients and state of a plain training step from inside its transforms."""

from __future__ import annotations

import copy

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.func import functional_call, grad, stack_module_state, vjp, vmap  # noqa: E402
from torch_bits import WEIGHT_AND_INPUT_BY_ROUNDING  # noqa: E402

import detent.torch as qt  # noqa: E402

X = torch.linspace(-2, 3, 24).sin().reshape(6, 4)


def prepared(mode: str, rounding: str = "half_even", *, norm: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), *[nn.BatchNorm1d(5)] * norm, nn.ReLU(), nn.Linear(5, 2))
    weight, data = WEIGHT_AND_INPUT_BY_ROUNDING[rounding]
    qt.prepare(model, dt.Recipe([dt.Rule(weight=weight, input=data, mode=mode)]))
    with qt.calibrating(model):
        model(0.5 * X)
    return model.train()


def stepped(model: nn.Module) -> nn.Module:
    for _ in range(2):
        model.zero_grad()
        model(X).square().sum().backward()
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in model.named_parameters()}


def by_grad(model):
    return grad(lambda p: functional_call(model, p, (X,)).square().sum())(values(model))


def by_buffers(model):
    def loss(p, b):
        return functional_call(model, (p, b), (X,)).square().sum()

    return grad(loss)(values(model), dict(model.named_buffers()))


def by_vjp(model):
    y, pull = vjp(lambda p: functional_call(model, p, (X,)), values(model))
    return pull(2 * y)[0]


def by_call(model):
    parameters = {name: each.clone().requires_grad_() for name, each in values(model).items()}
    functional_call(model, parameters, (X,)).square().sum().backward()
    return {name: each.grad for name, each in parameters.items()}


def by_samples(model):
    def loss(p, x):
        return functional_call(model, p, (x[None],)).square().sum()

    return {name: each.sum(0) for name, each in vmap(grad(loss), in_dims=(None, 0))(values(model), X).items()}


def assert_plain_step(compute_gradients, *settings: str, norm: bool = False) -> None:
    plain, model = stepped(prepared(*settings, norm=norm)), prepared(*settings, norm=norm)
    for _ in range(2):
        gradients = compute_gradients(model)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, msg=lambda m, key=key: f"{key}: {m}")
    for name, each in plain.named_parameters():
        torch.testing.assert_close(gradients[name], each.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("compute_gradients", [by_call, by_grad, by_vjp, by_buffers])
@pytest.mark.parametrize("rounding", WEIGHT_AND_INPUT_BY_ROUNDING)
@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned", "fixed"])
def test_a_step_is_a_plain_step(mode, rounding, compute_gradients):
    assert_plain_step(compute_gradients, mode, rounding)


@pytest.mark.parametrize("compute_gradients", [by_call, by_buffers])
@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_batch_norms_where_pytorch_keeps_their_statistics(mode, compute_gradients):
    assert_plain_step(compute_gradients, mode, norm=True)


@pytest.mark.parametrize("mode", ["ema", "fixed"])
def test_gradients_of_samples_add_up(mode):
    """The state is updated once, by the range of all samples."""
    assert_plain_step(by_samples, mode)


@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned"])
def test_samples_without_gradients(mode):
    model, plain = prepared(mode), prepared(mode)
    y = vmap(lambda x: model(x[None])[0])(X)
    expected = plain(X)
    if mode == "per_batch":  # by definition each sample has its own range
        before = plain.state_dict()
        expected = torch.cat([plain(x[None]) for x in X])
        assert torch.equal(model[0].weight_quantizer.scale, before["0.weight_quantizer.scale"])
    else:
        for key, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
    torch.testing.assert_close(y, expected)


def test_models_side_by_side():
    """An ensemble: each model has its own state."""
    models = [prepared("ema", seed=seed) for seed in range(3)]
    alone = [copy.deepcopy(model) for model in models]
    parameters, buffers = stack_module_state(models)
    y = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)), in_dims=(0, 0, None))(parameters, buffers, X)
    for i, model in enumerate(alone):
        torch.testing.assert_close(y[i], model(X))
        for name, each in model.named_buffers():
            torch.testing.assert_close(buffers[name][i], each)


def test_a_delay_observes_from_inside():
    plain, model = prepared("ema"), prepared("ema")
    for each in (plain, model):
        qt.Schedule(each, delay=9)
    plain(X)
    by_samples(model)
    assert torch.equal(model[0].input_quantizer.hi, plain[0].input_quantizer.hi)
