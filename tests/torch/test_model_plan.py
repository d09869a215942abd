"""The scale modes that a plan chooses by bit width."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_bits import assert_same

import detent as dt
import detent.torch as qt

LEARNED, AVERAGE, WEIGHTS = dt.Learned("mse", "auto", 10.0), dt.EMA(0.99), dt.PerBatch()
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def modes(recipe, layer=1):
    line = qt.plan(mlp(), recipe).layers[layer]
    return line.mode, line.weight_mode


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("w8a8", (AVERAGE, WEIGHTS)),
        ("w5a5", (AVERAGE, WEIGHTS)),
        ("w4a8", (AVERAGE, LEARNED)),
        ("w8a4", (LEARNED, WEIGHTS)),
        ("w4a4", (LEARNED, LEARNED)),
        ("w3a3", (LEARNED, LEARNED)),
        ("w2a2", (LEARNED, LEARNED)),
        ("fp8", (AVERAGE, WEIGHTS)),
        (dt.Recipe.preset("w2a2", mode="ema"), (dt.EMA(), WEIGHTS)),
        (dt.Recipe.preset("w2a2", mode="learned"), (dt.Learned(), dt.Learned())),
        (dt.Recipe.preset("w2a2", mode="fixed"), (dt.Fixed(), dt.Fixed())),
        (dt.Recipe([dt.Rule(weight="mxfp4", input="uint4/token")]), (AVERAGE, WEIGHTS)),
    ],
    ids=str,
)
def test_few_bits_are_learned_unless_the_recipe_says_otherwise(recipe, expected):
    assert modes(recipe) == expected


def test_the_first_and_last_layer_of_a_preset_keep_ema_ranges():
    assert modes("w2a2", 0) == modes("w2a2", 2) == (AVERAGE, WEIGHTS)


def test_the_plan_shows_both_modes_if_they_differ():
    table = str(qt.plan(mlp(), "w4a8"))
    assert "EMA(decay=0.99), weights Learned(start='mse', zero_point='auto', rate=10.0)" in table


def test_weights_have_scales_without_calibration():
    model = qt.prepare(mlp(), "w4a16-g8")
    before = model.eval()(X)  # nothing to calibrate
    with qt.calibrating(model):
        model(X)
    assert_same(model(X), before)


def test_activations_start_at_the_least_error_of_the_first_batch():
    model, twin = qt.prepare(mlp(), "w2a2"), qt.prepare(mlp(), "w2a2")
    model.train()(X)
    inputs = []
    twin[2].input_quantizer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
    with torch.no_grad():
        twin.train()(X)
    expected = dt.observers.MSE().observe(torch.relu(twin[0](X)).detach().numpy()).params(twin[2].input_quantizer.spec)
    quantizer = model[2].input_quantizer
    assert quantizer.params.scale == pytest.approx(expected.scale, rel=0.05)
    largest = torch.relu(model[0](X)).max().item() / 3
    assert quantizer.scale.item() < largest  # min-max would not clip


def test_the_zero_point_of_non_negative_data_stays():
    module = qt.FakeQuantize("uint2/tensor/affine", LEARNED)
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        module(X.abs()).sum().backward()
        optimizer.step()
    assert module.zero_point.item() == 0
    assert module.zero_point_shift.item() == 0.0
    assert module.scale_shift.item() != 0.0
    signed = qt.FakeQuantize("uint2/tensor/affine", LEARNED)
    signed(X).sum().backward()
    assert signed.zero_point_shift.grad.item() != 0.0


def test_the_rate_changes_steps_of_adam_but_not_of_sgd():
    def scale_after(mode, make):
        module = qt.FakeQuantize("int4", mode)
        optimizer = make(module.parameters())
        module(X).square().sum().backward()
        start = module.scale.item()
        optimizer.step()
        return module.refresh().scale.item() / start

    slow, fast = dt.Learned("mse", "auto", 1.0), dt.Learned("mse", "auto", 10.0)
    steps = [abs(scale_after(mode, lambda p: torch.optim.Adam(p, 1e-3)) - 1) for mode in (slow, fast)]
    assert steps == pytest.approx([1e-3, 1e-2], rel=1e-2)
    first, second = (scale_after(mode, lambda p: torch.optim.SGD(p, 1e-3)) for mode in (slow, fast))
    assert first == pytest.approx(second, rel=1e-5)


def test_loading_a_float_checkpoint_sets_the_scales_of_weights_again():
    model, other = qt.prepare(mlp(), "w4a4"), mlp()
    with torch.no_grad():
        other[2].weight.mul_(3.0)
    model.load_state_dict(other.state_dict(), strict=False)
    expected = qt.prepare(other, "w4a4")
    assert_same(model[2].weight_quantizer.scale, expected[2].weight_quantizer.scale)
    wrapped = nn.ModuleDict({"inner": qt.prepare(mlp(), "w4a4")})
    wrapped.load_state_dict({f"inner.{k}": v for k, v in mlp().state_dict().items()}, strict=False)
    assert wrapped["inner"][2].weight_quantizer.is_initialized


def test_loading_a_prepared_checkpoint_keeps_its_scales():
    model = qt.prepare(mlp(), "w4a4")
    model.train()(X).sum().backward()
    with torch.no_grad():
        model[2].weight_quantizer.scale_shift.add_(0.01)
    twin = qt.prepare(mlp(), "w4a4")
    twin.load_state_dict(model.state_dict())
    assert_same(twin.eval()(X), model.eval()(X))


def test_integer_convolutions_in_channels_first_order_get_advice():
    advice = "model.to(memory_format=torch.channels_last)"
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    assert advice in str(qt.plan(model, "w8a8", arithmetic="integer"))
    assert advice not in str(qt.plan(model, "w8a8"))
    assert advice not in str(qt.plan(model.to(memory_format=torch.channels_last), "w8a8", arithmetic="integer"))
    assert advice not in str(qt.plan(nn.Sequential(nn.Linear(4, 2)), "w8a8", arithmetic="integer"))
