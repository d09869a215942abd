"""Bias correction of PyTorch layers."""

import torch
from torch import nn

import detent as dt
import detent.torch as qt
from detent.torch.bias_shift import correct, mean_errors
from detent.torch.parameter_changes import ParameterChanges


def calibrated(model, data, recipe="w2a8"):
    qt.prepare(model.eval(), dt.Recipe([dt.Rule(weight="int2/axis0", input="uint8/affine", mode=dt.Fixed())], recipe))
    with qt.calibrating(model):
        model(data)
    return model


def mean_difference(model, reference, data, axes):
    with torch.no_grad():
        return (model(data) - reference).mean(axes).abs().max().item()


def check_cancels(model, data, axes):
    with torch.no_grad():
        reference = model.eval()(data)
    calibrated(model, data)
    before = mean_difference(model, reference, data, axes)
    errors = mean_errors(model, lambda: model(data))
    changes = ParameterChanges()
    correct(model, errors, changes)
    after = mean_difference(model, reference, data, axes)
    changes.undo()
    assert after < 1e-3 * before
    assert abs(mean_difference(model, reference, data, axes) - before) < 1e-6


def test_mean_error_of_a_linear_layer_is_cancelled():
    torch.manual_seed(0)
    check_cancels(nn.Sequential(nn.Linear(8, 4)), torch.rand(64, 8), 0)


def test_a_missing_bias_is_created_and_removed_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
    check_cancels(model, torch.rand(8, 3, 6, 6), (0, 2, 3))
    assert model[0].bias is None


def test_the_running_mean_of_a_folded_batch_norm_is_corrected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    with torch.no_grad():
        model.train()(torch.rand(32, 3, 6, 6))
        model[1].weight.uniform_(0.5, 2)
        model[1].weight[0] = -1.0
    check_cancels(model, torch.rand(8, 3, 6, 6), (0, 2, 3))
    assert model[0].bias is None


def test_layers_that_are_not_quantized_have_no_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    qt.prepare(model.eval(), dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("1", skip=True)]))
    assert set(mean_errors(model, lambda: model(torch.rand(4, 4)))) == {"0"}
