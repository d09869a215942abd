"""What training loops do with prepared models: averages of weights, copies, accumulation, checkpointing, autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch_bits import assert_same

import detent as dt
import detent.torch as qt

X, LABELS = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 4
INTEGER = "w8a8, integer products"
recipes = pytest.mark.parametrize("recipe", ["w8a8", "w4a4", "w2a2", INTEGER])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def prepare(recipe):
    return qt.prepare(network(), recipe.partition(",")[0], arithmetic="integer" if recipe == INTEGER else "float")


def prepared(recipe):
    model = prepare(recipe)
    with qt.calibrating(model):
        model(X)
    return model.train()


def step(model, optimizer, parts=1):
    optimizer.zero_grad()
    for x, labels in zip(X.chunk(parts), LABELS.chunk(parts), strict=True):
        (functional.cross_entropy(model(x), labels) / parts).backward()
    optimizer.step()


@recipes
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("average", ["equal", "exponential"])
def test_an_average_of_weights_evaluates_saves_and_exports(recipe, use_buffers, average, tmp_path):
    model = prepared(recipe)
    function = None if average == "equal" else get_ema_multi_avg_fn(0.9)
    averaged = AveragedModel(model, multi_avg_fn=function, use_buffers=use_buffers)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10):
        step(model, optimizer)
        averaged.update_parameters(model)
    averaged.eval()
    with torch.no_grad():
        y, plain = averaged(X), qt.unprepare(copy.deepcopy(averaged.module))(X)
    assert dt.metrics.sqnr_db(plain.numpy(), y.numpy()) > {"w8a8": 30, INTEGER: 30, "w4a4": 15, "w2a2": 5}[recipe]
    again = prepare(recipe)
    again.load_state_dict(averaged.module.state_dict())
    assert_same(again.eval()(X), y)
    report = dt.verify(averaged.module, qt.export_onnx(averaged.module, X, tmp_path / "model.onnx"), [X])
    assert report.ok


@pytest.mark.parametrize("zero_point", [1, 2, 3, 127])
def test_averages_of_buffers_keep_constant_parameters(zero_point):
    spec = dt.QuantSpec("uint2" if zero_point < 4 else "uint8")
    module = qt.FakeQuantize(spec, dt.Learned("mse", "auto", 10.0))
    module.set_params(dt.QuantParams(spec, scale=0.3, zero_point=zero_point))
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    for _ in range(50):
        averaged.update_parameters(module)
    again = qt.FakeQuantize(spec, module.mode)
    again.load_state_dict(averaged.module.state_dict())
    x = torch.linspace(-1, 1, 50)
    assert again.is_initialized
    assert_same(again.eval()(x), module.eval()(x))


@recipes
def test_a_copy_trains_like_the_model(recipe):
    model = prepared(recipe)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        optimizer = torch.optim.Adam(each.parameters(), 1e-2)
        for _ in range(3):
            step(each, optimizer)
    for ours, theirs in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        assert_same(ours, theirs)


def test_gradient_accumulation_has_the_gradient_of_the_whole_batch():
    whole, parts = prepared("w2a2"), prepared("w2a2")
    for each in (whole, parts):
        qt.Schedule(each, observe_until=0)  # EMA ranges of the first and the last layer depend on the parts
    for model, count in ((whole, 1), (parts, 4)):
        step(model, torch.optim.SGD(model.parameters(), 0.0), count)
    for (name, ours), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        if "input_quantizer" not in name:  # the factor of LSQ depends on the number of elements
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


@recipes
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_has_the_bits_of_a_plain_step(recipe, use_reentrant):
    plain, repeated = prepared(recipe), prepared(recipe)
    x, y = (X.clone().requires_grad_() for _ in range(2))
    functional.cross_entropy(plain(x), LABELS).backward()
    functional.cross_entropy(checkpoint(repeated, y, use_reentrant=use_reentrant), LABELS).backward()
    assert_same(y.grad, x.grad)
    for ours, theirs in zip(repeated.parameters(), plain.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad)
    for ours, theirs in zip(repeated.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_same(ours, theirs)


@recipes
def test_autocast_trains_and_keeps_precise_scales(recipe):
    model = prepared(recipe)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(X), LABELS)
        loss.backward()
        optimizer.step()
    assert all(bool(torch.isfinite(each.grad).all()) for each in model.parameters())
    scales = [each.scale for each in model.modules() if isinstance(each, qt.FakeQuantize)]
    assert all(each.dtype == torch.float32 for each in scales)


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = cell(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        state = None
        for i in range(x.shape[1]):
            state = self.cell(x[:, i], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("recipe", ["w8a8", "w4a8"])
def test_recurrent_cells_train_export_and_verify(cell, recipe, tmp_path):
    model, x = qt.prepare(Recurrent(cell), recipe), torch.randn(16, 3, 8)
    with qt.calibrating(model):
        model(x)
    model.train()(x).sum().backward()
    assert model.cell.weight_ih.grad is not None
    assert model.cell.weight_hh.grad is not None
    state = qt.quantized_state(model)
    assert set(state) == {"cell.weight_ih", "cell.weight_hh", "head.weight"}
    plain = Recurrent(cell).eval()
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh"):
            getattr(plain.cell, name).copy_(torch.from_numpy(state[f"cell.{name}"].dequantize()))
    ours, theirs = model.eval().cell(x[:, 0]), plain.cell(x[:, 0])
    assert_same(*(each[0] if isinstance(each, tuple) else each for each in (ours, theirs)))
    report = dt.verify(model, qt.export_onnx(model, x, tmp_path / "model.onnx"), [x])
    assert report.ok
