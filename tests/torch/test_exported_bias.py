"""The exported bias: the int32 codes of files, with straight-through gradients."""

from __future__ import annotations

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch.exported_bias import bias_codes, exported_bias  # noqa: E402


def test_codes_are_rounded_half_to_even():
    codes = bias_codes(torch.tensor([0.25, 0.75, -0.25, 1.0]), torch.full((4,), 0.5))
    assert codes.tolist() == [0, 2, 0, 2]
    assert codes.dtype == torch.int32


def test_biases_that_files_keep_in_float_have_no_codes():
    assert bias_codes(torch.tensor([1.0]), torch.tensor([1e-10])) is None
    assert bias_codes(torch.tensor([1.0]), torch.tensor([1e-40])) is None
    assert exported_bias(torch.tensor([0.1234567]), torch.tensor([1e-40])).tolist() == [np.float32(0.1234567)]


def test_gradient_passes_straight_through():
    bias = torch.tensor([0.3, -0.7], requires_grad=True)
    rounded = exported_bias(bias, torch.tensor([0.25, 0.5]))
    assert rounded.tolist() == [0.25, -0.5]
    (rounded * torch.tensor([2.0, 3.0])).sum().backward()
    assert bias.grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv2d(6, 5, 1)], ids=["linear", "conv"])
def test_float_products_use_the_bias_of_the_file(layer):
    torch.manual_seed(0)
    x = torch.randn(7, 6) if isinstance(layer, nn.Linear) else torch.randn(7, 6, 3, 3)
    model = qt.prepare(nn.Sequential(layer), "w8a8", bias="exported")
    y = model(x)
    module = model[0]
    unit = module.input_quantizer.scale * module.weight_quantizer.scale
    rounded = exported_bias(module.bias.detach(), unit)
    assert not torch.equal(rounded, module.bias)
    operands = module.input_quantizer.eval()(x), module.weight_quantizer(module.weight)
    expected = nn.functional.linear(*operands, rounded) if x.ndim == 2 else nn.functional.conv2d(*operands, rounded)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert torch.equal(module.bias.grad, torch.full((5,), float(y[:, 0].numel())))


def test_default_keeps_the_float_bias():
    torch.manual_seed(0)
    x, layer = torch.randn(7, 6), nn.Linear(6, 5)
    model = qt.prepare(nn.Sequential(layer), "w8a8")
    y = model(x)
    operands = model[0].input_quantizer.eval()(x), model[0].weight_quantizer(layer.weight)
    assert torch.equal(y, nn.functional.linear(*operands, layer.bias))


def test_unknown_rule_is_rejected():
    with pytest.raises(dt.errors.SpecError, match="got bias='int32', expected 'float' or 'exported'"):
        qt.prepare(nn.Linear(2, 2), "w8a8", bias="int32")
