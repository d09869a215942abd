"""Batch norm folding: the exported codes, the float model with quantizers disabled, and layers that are not folded."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_bits import array, assert_same, bits  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402


class Untraceable(nn.Module):
    """A model whose forward depends on data, so that a symbolic trace fails."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if x.abs().sum() >= 0 else x


def _pair(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[int, ...]]:
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.3, 3.0)
        if norm.affine:
            norm.weight.normal_()
            norm.bias.normal_()
    return nn.Sequential(layer, norm, nn.ReLU()), shape


def pairs() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    conv2 = lambda **k: nn.Conv2d(4, 6, 3, **k)  # noqa: E731
    return {
        "linear": _pair(nn.Linear(4, 6), nn.BatchNorm1d(6), (16, 4)),
        "conv1d": _pair(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (8, 4, 9)),
        "conv2d": _pair(conv2(padding=1), nn.BatchNorm2d(6), (4, 4, 8, 8)),
        "conv2d_no_bias": _pair(conv2(bias=False, stride=2), nn.BatchNorm2d(6), (4, 4, 8, 8)),
        "conv2d_groups": _pair(conv2(groups=2, padding="same"), nn.BatchNorm2d(6), (4, 4, 8, 8)),
        "conv2d_reflect": _pair(conv2(padding=1, padding_mode="reflect"), nn.BatchNorm2d(6), (4, 4, 8, 8)),
        "conv3d": _pair(nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), (3, 4, 4, 4, 4)),
        "not_affine": _pair(conv2(), nn.BatchNorm2d(6, affine=False), (4, 4, 8, 8)),
        "cumulative": _pair(conv2(), nn.BatchNorm2d(6, momentum=None, eps=1e-2), (4, 4, 8, 8)),
    }


NAMES = list(pairs())


def prepared_pair(name: str, recipe: str | dt.Recipe = "w8a8") -> tuple[nn.Module, torch.Tensor]:
    model, shape = pairs()[name]
    qt.prepare(model, recipe)
    torch.manual_seed(1)
    return model, torch.randn(shape)


def factor(norm: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    gain = torch.rsqrt(norm.running_var + norm.eps)
    gain = gain if norm.weight is None else gain * norm.weight
    return gain.detach().reshape(-1, *(1,) * (weight.ndim - 1))


def switch(model: nn.Module, enabled: bool) -> None:
    for quantizer in quantizers_of(model).values():
        quantizer.enabled = enabled


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_shows_the_fold(name: str) -> None:
    model, _ = pairs()[name]
    assert qt.plan(model, "w8a8").layers[0].norm == "1"
    assert "folds 1" in str(qt.plan(model, "w8a8"))


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "w4a4", "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_codes_are_those_of_the_folded_weight(name: str, recipe: str) -> None:
    model, x = prepared_pair(name, recipe)
    for _ in range(2):
        model(x)
        state = qt.quantized_state(model)["0.weight"]
        folded = array(model[0].weight * factor(model[1], model[0].weight))
        expected = dt.quantize(folded, dt.QuantParams.from_data(state.params.spec, folded))
        assert np.array_equal(state.codes, expected.codes)
        assert bits(state.params.scale) == bits(expected.params.scale)


@pytest.mark.parametrize("name", NAMES)
def test_training_uses_the_exported_weight(name: str) -> None:
    """The layer multiplies by the exported weight divided by the factor; then the batch norm runs as usual."""
    model, x = prepared_pair(name, "w8a16")
    twin, _ = pairs()[name]
    for _ in range(2):
        f = factor(twin[1], twin[0].weight)
        folded = array(twin[0].weight * f)
        exported = dt.fake_quantize(folded, dt.QuantParams.from_data("int8/axis0", folded))
        saved = twin[0].weight.detach().clone()
        with torch.no_grad():
            twin[0].weight.copy_(torch.from_numpy(exported) / f)
        expected = twin(x)
        with torch.no_grad():
            twin[0].weight.copy_(saved)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(model[1].buffers(), twin[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NAMES)
def test_disabled_quantizers_give_the_float_model(name: str, train: bool) -> None:
    """Values, gradients and statistics are equal bit for bit."""
    model, x = prepared_pair(name)
    twin, _ = pairs()[name]
    switch(model, False)
    for _ in range(2):
        results = []
        for each in (model, twin):
            each.train(train).zero_grad()
            t = x.clone().requires_grad_()
            y = each(t)
            y.square().sum().backward()
            results.append([y, t.grad, *(p.grad for p in each.parameters()), *each[1].buffers()])
        for ours, theirs in zip(*results, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("mode", ["ema", "learned"])
@pytest.mark.parametrize("name", NAMES)
def test_frozen_equals_unfused_within_rounding(name: str, mode: str) -> None:
    model, x = prepared_pair(name, dt.Recipe.preset("w8a8", mode=mode))
    model(x)
    model.eval()
    with torch.no_grad():
        before = model(x)
        qt.freeze(model)
        after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    state = qt.quantized_state(model)["0.weight"]
    with torch.no_grad():
        model.train()
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert state == qt.quantized_state(model)["0.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", ["int8/axis0", "int4/axis0", "float8_e4m3fn/axis0", "uint8/axis0", "int8"])
@pytest.mark.parametrize("mode", ["ema", "learned", "fixed"])
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_frozen_weights_are_the_same_traced(name: str, mode: str, spec: str, dtype: torch.dtype) -> None:
    """If the scales absorb the gain, the scale is multiplied by the gain, not each value."""
    model, shape = pairs()[name]
    with torch.no_grad():
        model[1].weight[:4] = torch.tensor([0.0, -0.7, 1e-30, -1e-6])
    qt.prepare(model.to(dtype), dt.Recipe([dt.Rule(weight=spec, mode=mode)]))
    with qt.calibrating(model):
        model(torch.randn(shape, dtype=dtype))
    layer = qt.freeze(model.eval())[0]
    constant = layer._native_weight(layer.weight, layer.weight_quantizer)[1].tensor
    assert_same(layer._traced_weight(layer.weight, layer.weight_quantizer), constant)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_a_frozen_model_computes_the_same_compiled(mode: str) -> None:
    torch._dynamo.reset()
    model, x = prepared_pair("conv2d", dt.Recipe.preset("w8a8", mode=mode))
    model(x)
    qt.freeze(model.eval())
    assert_same(torch.compile(model, backend="aot_eager")(x), model(x))


def test_freezing_keeps_the_codes() -> None:
    model, x = prepared_pair("conv2d")
    model(x)
    before = qt.quantized_state(model)["0.weight"]
    qt.freeze(model).eval()
    model(x)
    assert qt.quantized_state(model)["0.weight"] == before


@pytest.mark.parametrize("value", [0.0, -0.0, -0.7, 1e-12, -1e-30], ids=str)
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d_no_bias"])
def test_unusual_gammas(name: str, value: float) -> None:
    """Channels with gain zero, with negative gain, and with tiny gain."""
    model, shape = pairs()[name]
    with torch.no_grad():
        model[1].weight[::2] = value
    torch.manual_seed(1)
    x = torch.randn(shape)
    expected = copy.deepcopy(model).eval()(x)
    qt.prepare(model, "w8a16")
    model.train()(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        model[1].running_mean.copy_(pairs()[name][0][1].running_mean)
        model[1].running_var.copy_(pairs()[name][0][1].running_var)
        model.eval()
        unfused = model(x)
        torch.testing.assert_close(unfused, expected, rtol=0.1, atol=0.1)
        folded = array(model[0].weight * factor(model[1], model[0].weight))
        codes = qt.quantized_state(model)["0.weight"].codes
        assert np.array_equal(codes, dt.quantize(folded, dt.QuantParams.from_data("int8/axis0", folded)).codes)
        qt.freeze(model)
        torch.testing.assert_close(model(x), unfused, rtol=1e-4, atol=1e-4)


def test_unprepare_after_freezing_is_the_float_model() -> None:
    model, x = prepared_pair("conv2d")
    keys = {name: set(vars(m)) for name, m in pairs()["conv2d"][0].named_modules()}
    model(x)
    qt.freeze(model.eval())
    model(x)
    state = {k: bits(v) for k, v in model.state_dict().items() if "quantizer" not in k}
    qt.unprepare(model)
    assert {k: bits(v) for k, v in model.state_dict().items()} == state
    assert {name: set(vars(m)) for name, m in model.named_modules()} == keys
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    twin, _ = pairs()["conv2d"]
    twin.load_state_dict(model.state_dict())
    assert_same(model(x), twin.eval()(x))


def test_copies_have_their_own_batch_norm() -> None:
    model, x = prepared_pair("conv2d")
    model(x)
    model.eval()
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin(x), expected)
        assert twin[0].fold.norm is twin[1]
        with torch.no_grad():
            twin[1].running_var.mul_(4.0)
        assert not torch.equal(twin(x), expected)
    assert_same(model(x), expected)


def test_gradients_pass_through_the_fold() -> None:
    """Without clipping, weight gradients equal those of autograd for the same convolution and batch norm."""
    model, x = prepared_pair("conv2d", "w8a16")
    twin, _ = pairs()["conv2d"]
    f = factor(twin[1], twin[0].weight)
    folded = array(twin[0].weight * f)
    exported = dt.fake_quantize(folded, dt.QuantParams.from_data("int8/axis0", folded))
    with torch.no_grad():
        twin[0].weight.copy_(torch.from_numpy(exported) / f)
    for each in (model, twin):
        each(x).square().sum().backward()
    for key, p in twin.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[key].grad, p.grad, rtol=1e-4, atol=1e-4)


def test_evaluation_after_training_uses_the_new_statistics() -> None:
    """PyTorch's version counters do not count how batch norm updates its statistics."""
    model, x = prepared_pair("conv2d")
    model(x)
    for _ in range(3):
        model.train()(3 * x)
        got = model.eval()(x)
        twin, _ = prepared_pair("conv2d")
        twin.load_state_dict(model.state_dict())
        assert_same(got, twin.eval()(x))


# Layers that are not folded


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x)) + self.norm(self.b(x))


class LayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(self.a(x)))


class OtherUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.norm(y) + y


class TiedWeights(nn.Module):
    """Folding the batch norm of the first layer would change the weight of the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def shared_in_sequentials() -> nn.Module:
    norm = nn.BatchNorm2d(2)
    return Untraceable(nn.Conv2d(2, 2, 1), norm, nn.Conv2d(2, 2, 1), norm)


def layer_twice_in_sequentials() -> nn.Module:
    layer = nn.Conv2d(2, 2, 1)
    return Untraceable(layer, nn.BatchNorm2d(2), layer, nn.BatchNorm2d(2))


NOT_FOLDED = {
    "shared": Shared,
    "layer_twice": LayerTwice,
    "other_use": OtherUse,
    "tied": TiedWeights,
    "shared_untraceable": shared_in_sequentials,
    "layer_twice_untraceable": layer_twice_in_sequentials,
    "no_statistics": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)),
    "after_relu": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.BatchNorm2d(2)),
    "instance_norm": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 1), nn.BatchNorm2d(2)),
    "other_axis": lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
}


@pytest.mark.parametrize("name", [n for n in NOT_FOLDED if n != "other_axis"])
def test_layers_that_are_not_folded(name: str) -> None:
    torch.manual_seed(0)
    model = NOT_FOLDED[name]()
    assert [layer.norm for layer in qt.plan(model, "w8a8").layers] == [""] * len(qt.plan(model, "w8a8").layers)
    qt.prepare(model, "w8a8")
    x = torch.randn(4, 2, 5, 5)
    model(x).sum().backward()
    model.eval()
    before = model(x)
    qt.freeze(model)
    torch.testing.assert_close(model(x), before)


def test_a_linear_layer_whose_channels_are_not_the_normalized_axis() -> None:
    """Linear has its channels last, BatchNorm1d normalizes axis 1: with 3-d data these are different axes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        model[1].weight.normal_()
        model[1].running_var.uniform_(0.2, 4)
    x = torch.randn(8, 3, 4)  # (batch, channels of the norm, features)
    expected = copy.deepcopy(model).eval()(x)
    qt.prepare(model, "w8a16").eval()
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    qt.freeze(model)
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)


def test_untraceable_models_fold_in_sequentials() -> None:
    model = Untraceable(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    assert qt.plan(model, "w8a8").layers[0].norm == "body.1"


def test_a_plan_does_not_change_the_model() -> None:
    class CountsCalls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.calls = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last, self.calls = x, self.calls + 1
            return self.norm(self.a(x))

    model = CountsCalls()
    keys = set(vars(model))
    qt.plan(model, "w8a8")
    assert (set(vars(model)), model.calls) == (keys, 0)


@pytest.mark.parametrize("mode", ["learned", "fixed"])
def test_constant_scales_absorb_the_gain_of_each_channel(mode: str) -> None:
    """Constant per-channel scales belong to the unfolded weight, so codes do not change with the statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4))
    qt.prepare(model, dt.Recipe.preset("w8a8", mode=mode))
    x = torch.randn(4, 2, 6, 6)
    with qt.calibrating(model):
        model(x)
    before = qt.quantized_state(model)["0.weight"]
    with torch.no_grad():
        model[1].running_var.copy_(torch.tensor([0.01, 1.0, 9.0, 100.0]))
        model[1].weight.copy_(torch.tensor([1.0, -2.0, 0.0, 3.0]))
    after = qt.quantized_state(model)["0.weight"]
    gain = (model[1].weight / (model[1].running_var + model[1].eps).sqrt()).detach().numpy()
    signs = np.sign(gain).astype(np.int8).reshape(-1, 1, 1, 1)
    assert np.array_equal(after.codes, before.codes * signs)
    kept = gain != 0
    own = model[0].weight_quantizer.params.scale
    assert np.allclose(after.params.scale[kept], own[kept] * np.abs(gain[kept]), rtol=1e-6)
    model.eval()
    expected = model(x)
    assert torch.allclose(qt.freeze(model)(x), expected, rtol=1e-4, atol=1e-4)
