"""Layers that compute their weights: pruned, weight-normed, spectral-normed and parametrized layers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch_bits import assert_same

import detent as dt
import detent.torch as qt
from detent.torch.computed_weights import current_weight, is_computed, weight_for_forward

X, LABELS = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 4


def pruned(layer, name="weight"):
    prune.l1_unstructured(layer, name, 0.5)
    return layer


MAKERS = {
    "pruned": pruned,
    "weight_norm hook": pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore:.*weight_norm")),
    "spectral_norm hook": spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
cases = pytest.mark.parametrize(
    "make", [each if hasattr(each, "values") else pytest.param(each) for each in MAKERS.values()], ids=list(MAKERS)
)


def network(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    make(model[2])
    return model


def trained(make, recipe="w4a4", steps=3):
    model = qt.prepare(network(make), recipe)
    with qt.calibrating(model):
        model(X)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(X), LABELS).backward()
        optimizer.step()
    return model


@cases
def test_the_computed_weight_is_quantized_and_its_parameters_train(make):
    model = trained(make)
    layer = model[2].eval()
    originals = [each for name, each in layer.named_parameters() if "quantizer" not in name and name != "bias"]
    assert originals
    assert all(each.grad is not None and bool(each.grad.any()) for each in originals)
    weight = current_weight(layer, "weight")
    stored = qt.quantized_state(model)["2.weight"]
    expected = dt.quantize(weight.numpy(), layer.weight_quantizer.params)
    assert np.array_equal(stored.codes, expected.codes)
    x = torch.randn(4, 16)
    quantized = functional.linear(layer.input_quantizer(x), torch.from_numpy(stored.dequantize()), layer.bias)
    with torch.no_grad():
        assert_same(layer(x), quantized)


@cases
@pytest.mark.parametrize("recipe", ["w8a8", "w4a4"])
def test_export_and_verify(make, recipe, tmp_path):
    model = trained(make, recipe)
    path = qt.export_onnx(model, X, tmp_path / "model.onnx")
    report = dt.verify(model, path, [X])
    assert report.ok
    assert report.differing_codes == 0
    assert is_computed(model[2], "weight")  # the model itself is unchanged


@cases
def test_a_copy_after_backward_computes_the_same(make):
    model = trained(make)
    twin = copy.deepcopy(model)
    assert_same(twin.eval()(X), model.eval()(X))
    with torch.no_grad():
        for parameter in twin[2].parameters():
            parameter.mul_(1.5)
    assert not torch.equal(twin(X), model(X))


@cases
def test_state_dicts_load_and_unprepare_restores_the_layer(make):
    model = trained(make)
    other = qt.prepare(network(make), "w4a4")
    other.load_state_dict(model.state_dict())
    assert_same(other.eval()(X), model.eval()(X))
    plain = qt.unprepare(model)
    assert is_computed(plain[2], "weight")
    assert bool(torch.isfinite(plain(X)).all())


def test_spectral_norm_iterates_once_per_training_step_and_never_outside():
    model = qt.prepare(network(parametrizations.spectral_norm), "w8a8").train()
    norm = model[2].parametrizations.weight[0]
    plain = network(parametrizations.spectral_norm).train()
    model(X)
    plain(X)
    assert_same(norm._u, plain[2].parametrizations.weight[0]._u)
    before = norm._u.clone()
    current_weight(model[2], "weight")
    qt.plan(network(parametrizations.spectral_norm), "w8a8")
    qt.quantized_state(model)
    assert_same(norm._u, before)
    assert norm.training


def test_a_layer_pruned_after_prepare_is_quantized():
    model = qt.prepare(network(lambda _: None), "w8a16")
    pruned(model[2])
    codes = qt.quantized_state(model)["2.weight"].codes
    assert (codes == 0).mean() >= 0.5
    prune.remove(model[2], "weight")
    assert np.array_equal(qt.quantized_state(model)["2.weight"].codes, codes)


def test_layers_with_their_own_forward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Unflatten(1, (8, 2)), nn.ConvTranspose1d(8, 4, 3))
    pruned(model[0])
    parametrizations.weight_norm(model[3])
    tokens = torch.arange(20).reshape(10, 2) % 10
    qt.prepare(model, "w8a16")
    model.train()(tokens).sum().backward()
    assert model[0].weight_orig.grad is not None
    assert model[3].parametrizations.weight.original1.grad is not None
    state = qt.quantized_state(model.eval())
    assert (state["0.weight"].codes == 0).mean() >= 0.5
    expected = functional.conv_transpose1d(
        model[2](model[1](torch.from_numpy(state["0.weight"].dequantize())[tokens])),
        torch.from_numpy(state["3.weight"].dequantize()),
        model[3].bias,
    )
    assert_same(model(tokens), expected)


def test_a_pruned_lstm():
    torch.manual_seed(0)
    layer = nn.LSTM(8, 4)
    pruned(layer, "weight_hh_l0")
    model = qt.prepare(nn.Sequential(layer), "w8a16")
    output, _ = model.train()(torch.randn(5, 2, 8))
    output.sum().backward()
    assert layer.weight_hh_l0_orig.grad is not None
    assert set(qt.quantized_state(model)) == {"0.weight_ih_l0", "0.weight_hh_l0"}


def test_a_parametrization_of_ones_own():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

    model = nn.Sequential(nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    qt.prepare(model, "w8a16")
    weight = weight_for_forward(model[0], "weight")
    assert weight.grad_fn is not None
    assert_same(weight.detach(), weight.detach().T)
    codes = qt.quantized_state(model)["0.weight"]
    assert codes.shape == (8, 8)


def test_a_folded_batch_norm_after_a_weight_norm(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(1, 4, 3)), nn.BatchNorm2d(4), nn.ReLU())
    assert qt.plan(model, "w8a8").layers[0].norm == "1"
    x = torch.randn(4, 1, 6, 6)
    qt.prepare(model, "w8a8").train()(x).sum().backward()
    report = dt.verify(model, qt.export_onnx(model, x, tmp_path / "model.onnx"), [x])
    assert report.ok
    unfused = model.eval()(x)
    torch.testing.assert_close(qt.freeze(model)(x), unfused, rtol=1e-4, atol=1e-5)
