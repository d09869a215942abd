"""Compiled integer layers have the bits of eager mode: outputs, gradients and state."""

from __future__ import annotations

import copy

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 4, 1), nn.SiLU(), nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3)),
    )


def prepared(mode):
    model = qt.prepare(network(), dt.Recipe.preset("w8a8", mode=mode), arithmetic="integer")
    x = torch.randn(5, 3, 6, 6)
    with qt.calibrating(model):
        model(x)
    return model, x


@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_compiled_training_has_the_bits_of_eager_mode(mode):
    torch._dynamo.reset()
    model, x = prepared(mode)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    first, second = model(x), compiled(x)
    assert torch.equal(first, second)
    for y in (first, second):
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_compiled_evaluation_has_the_bits_of_eager_mode():
    torch._dynamo.reset()
    model, x = prepared("ema")
    model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_signed_inputs():
    x, one = torch.tensor([[-1.0, 1.5]]), torch.ones(1)
    weight, zero = torch.tensor([[3.0, -4.0]]), torch.zeros(1)
    y = torch.ops.detent.multiply_quantized(x, weight, None, one / 2, zero, one, True, [], False)
    assert y.tolist() == [[-9.0]]
