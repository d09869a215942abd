"""Tensors that can be equalized, and factors in the parameters of modules."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import relu

import detent.torch as qt
from detent.torch.channel_equalization import Between, Equalized, apply, find_between, multiplied
from detent.torch.parameter_changes import ParameterChanges


def conv(before, after, **options):
    return nn.Conv2d(before, after, 3, padding=1, **options)


class Branches(nn.Module):
    def __init__(self, extra_reader=False):
        super().__init__()
        self.first, self.left, self.right = conv(2, 4), conv(4, 3), conv(4, 3)
        self.extra_reader = extra_reader

    def forward(self, x):
        y = relu(self.first(x))
        z = self.left(y) + self.right(y)
        return z + y.mean() if self.extra_reader else z


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(relu(self.inner(relu(self.inner(x)))))


class ReadsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(relu(self.first(x))) + self.first.weight.sum()


def norm_without_gain():
    return nn.Sequential(conv(2, 4), nn.BatchNorm2d(4, affine=False), nn.ReLU(), conv(4, 2))


def tied():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)


def with_hook():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1].register_forward_hook(lambda module, args, output: output + 1)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(conv(2, 4), nn.ReLU(), conv(4, 2)), [("0", ("2",))]),
        (nn.Sequential(conv(2, 4), conv(4, 2)), [("0", ("1",))]),
        (nn.Sequential(conv(2, 4), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv(4, 4, groups=4)), [("1", ("3",))]),
        (nn.Sequential(conv(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), conv(4, 2)), [("0", ("4",))]),
        (nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 2)), [("0", ("2",))]),
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), [("0", ("1",))]),
        (nn.Sequential(nn.GroupNorm(2, 4), conv(4, 2)), [("0", ("1",))]),
        (Branches(), [("first", ("left", "right"))]),
        (Branches(extra_reader=True), []),
        (CalledTwice(), []),
        (ReadsWeight(), []),
        (tied(), []),
        (with_hook(), []),
        (norm_without_gain(), []),
        (nn.Sequential(conv(2, 4), nn.Sigmoid(), conv(4, 2)), []),
        (nn.Sequential(conv(2, 4), nn.ReLU6(), conv(4, 2)), []),
        (nn.Sequential(conv(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), []),
        (nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(1), nn.Linear(4, 2)), []),
    ],
)
def test_tensors_between_layers(model, expected):
    assert [(each.maker, each.readers) for each in find_between(model)] == expected


def test_a_model_that_cannot_be_traced_raises():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(Exception, match="control flow"):
        find_between(Branching())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (
            nn.Sequential(conv(2, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 8, groups=2), nn.ReLU(), conv(8, 2)),
            (2, 2, 4, 4),
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)), (5, 3)),
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), (2, 5, 4)),
        (Branches(), (2, 2, 4, 4)),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_factors_do_not_change_what_the_model_computes(model, shape, training):
    model.train(training)
    x, random = torch.randn(shape), np.random.default_rng(0)
    with torch.no_grad():
        expected = model(x)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        equalized = []
        for each in find_between(model):
            size = len(model.get_submodule(each.maker).weight)
            equalized.append(Equalized(each, random.uniform(0.01, 1, size).astype(np.float32), 1.0, 0.5))
        changes = ParameterChanges()
        changed = apply(model, equalized, changes)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert equalized
    assert len(changed) >= 2
    changes.undo()
    norms = ("running_mean", "running_var", "num_batches_tracked")
    assert all(torch.equal(each, before[key]) for key, each in model.state_dict().items() if not key.endswith(norms))


def test_factors_of_a_grouped_convolution():
    weight = torch.ones(4, 2, 1, 1)
    result = multiplied(weight, np.float32([1, 2, 3, 4]), groups=2)
    assert result.reshape(4, 2).tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_unequal_channels_are_equalized():
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8, groups=8), nn.ReLU(), conv(8, 2)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.logspace(-2, 1, 8))
        model[3].weight.mul_((1 / torch.logspace(-2, 1, 8)).reshape(8, 1, 1, 1))
    x = [torch.randn(2, 3, 8, 8) for _ in range(16)]
    plain, equalized = (nn.Sequential(*model) for _ in range(2))
    qt.quantize(plain, x, equalize=False)
    plain_sqnr = qt.ptq_report(plain).output_sqnr_db
    qt.unprepare(plain)
    qt.quantize(equalized, x)
    report = qt.ptq_report(equalized)
    assert report.output_sqnr_db > plain_sqnr + 6
    assert any("equalization" in step and "1 -> 3" in step for step in report.steps)


def test_batch_norm_over_sequences_is_not_a_maker_for_a_linear_layer():
    model = nn.Sequential(nn.Conv1d(2, 6, 1), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.logspace(-2, 1, 6))
    assert find_between(model) == (Between("1", ("2",)),)
    before = model[1].weight.clone()
    qt.quantize(model, [torch.randn(64, 2, 6) for _ in range(8)])
    assert torch.equal(model[1].weight, before)
