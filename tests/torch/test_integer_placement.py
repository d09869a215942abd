"""Output quantizers for integer kernels; exported networks equal ONNX Runtime bit for bit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from random_networks import batches, random_network, train  # noqa: E402
from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent import onnx_model  # noqa: E402
from detent.demo.network import TrainingRun, make_network, read_digits  # noqa: E402
from detent.torch.preparation import plan_of  # noqa: E402

INTEGER_KERNELS = ("QLinearConv", "QGemm", "MatMulIntegerToFloat", "QLinearMatMul")
FLOAT_KERNELS = ("Conv", "FusedConv", "Gemm", "FusedGemm")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.conv(x) if x.sum() > -1e9 else x


def causes(model, recipe="w8a8"):
    layers = qt.plan(model, recipe, arithmetic="integer").layers
    return {
        layer.name: (layer.output_cause, layer.next_layer, layer.after_relu or layer.next_after_relu)
        for layer in layers
    }


def test_readers_of_convolutions():
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 1), nn.SiLU()),
        *(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Conv2d(4, 2, 1),
    )
    assert causes(net) == {
        "0": ("", "4", True),
        "4": ("feeds 5 (SiLU)", "", False),
        "6": ("feeds 8 (AdaptiveAvgPool2d)", "", True),
        "9": ("is an output of the model", "", False),
    }


def test_residuals():
    assert causes(Residual()) == {"first": ("", "second", True), "second": ("feeds add", "", False)}


def test_linear_layers_need_no_output_quantizer():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert causes(net) == {"0": ("", "2", True), "2": ("", "", False), "4": ("", "", False)}


def test_signed_inputs_after_a_relu_need_a_quantizer():
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input="int8/tensor")])
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert causes(net, recipe)["0"] == ("2 has signed input codes after a ReLU", "", True)


def test_output_specs_of_the_recipe_are_kept():
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input="uint8/tensor/affine", output="uint4/tensor/affine")])
    layer = qt.plan(nn.Sequential(nn.Conv2d(3, 4, 1)), recipe, arithmetic="integer").layers[0]
    assert (layer.output.bits, layer.output_cause) == (4, "")


def test_untraceable_models_say_so():
    layer = qt.plan(Untraceable(), "w8a8", arithmetic="integer").layers[0]
    assert layer.output is None
    assert "cannot be traced" in layer.arithmetic_note


def test_nothing_is_placed_for_float_products():
    plan = qt.plan(Residual(), "w8a8")
    assert all(layer.output is None and not layer.next_layer for layer in plan.layers)


def test_quantizer_after_a_relu_has_no_negative_codes():
    torch.manual_seed(0)
    net = qt.prepare(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)), "w8a8", arithmetic="integer"
    )
    y = net(torch.randn(4, 3, 6, 6))
    quantizer = net[0].output_quantizer
    assert int(quantizer.zero_point) == 0
    assert (y.detach() >= 0).all()
    y.sum().backward()
    assert net[0].weight.grad is not None


def outputs(model, tmp_path, x):
    """Return the outputs of a model and of its file in ONNX Runtime, and the optimized file's operators."""
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    session = onnx_model.make_session(onnx_model.load(path))
    (name,) = (each.name for each in session.get_inputs())
    with torch.no_grad():
        ours = model(x).numpy()
    optimized = onnx_model.optimized(onnx_model.load(path))
    return ours, session.run(None, {name: x.numpy()})[0], Counter(node.op_type for node in optimized.graph.node)


@pytest.mark.parametrize("seed", [0, 1, 4, 5, pytest.param(11, marks=pytest.mark.slow)])
def test_trained_networks_equal_onnx_runtime(seed, tmp_path):
    model = train(qt.prepare(random_network(seed), "w8a8", arithmetic="integer"), seed)
    ours, theirs, kernels = outputs(model, tmp_path, batches(1000 + seed, 1, 32)[0][0])
    assert np.array_equal(ours, theirs)
    assert sum(kernels[name] for name in INTEGER_KERNELS) == len(plan_of(model).quantized)
    assert not any(kernels[name] for name in FLOAT_KERNELS)


@pytest.mark.slow
def test_twenty_trained_networks_equal_onnx_runtime(tmp_path):
    integer = equal = 0
    for seed in range(20):
        model = train(qt.prepare(random_network(seed), "w8a8", arithmetic="integer"), seed)
        ours, theirs, kernels = outputs(model, tmp_path, batches(1000 + seed, 1, 64)[0][0])
        if sum(kernels[name] for name in INTEGER_KERNELS) == len(plan_of(model).quantized):
            integer += 1
            equal += np.array_equal(ours, theirs)
    assert integer >= 15
    assert equal == integer


def test_the_demo_network_equals_onnx_runtime(tmp_path):
    pictures, test = read_digits()
    torch.manual_seed(0)
    model = qt.prepare(make_network(), "w8a8", arithmetic="integer")
    run = TrainingRun(pictures, 3, 2e-3, seed=0)
    assert run.steps >= 50
    run.train(model, lambda: None)
    x = torch.from_numpy(test.first(64).images)
    ours, theirs, kernels = outputs(model, tmp_path, x)
    assert np.array_equal(ours, theirs)
    assert sum(kernels[name] for name in INTEGER_KERNELS) == len(plan_of(model).quantized) == 8
    report = dt.verify(model, tmp_path / "model.onnx", [x])
    assert report.ok
    assert "output matches bit for bit" in str(report)


def test_verify_says_that_outputs_match(tmp_path):
    model = train(qt.prepare(random_network(1), "w8a8", arithmetic="integer"), 1, steps=10)
    x = batches(7, 1)[0][0]
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    report = dt.verify(model, path, [x])
    assert report.ok
    assert "end to end, optimized: all codes match; output matches bit for bit" in str(report)


def test_frozen_models_equal_onnx_runtime(tmp_path):
    model = train(qt.prepare(random_network(3), "w8a8", arithmetic="integer"), 3, steps=10)
    x = batches(8, 1)[0][0]
    with torch.no_grad():
        before = model(x)
        assert torch.equal(qt.freeze(model)(x), before)
    ours, theirs, _ = outputs(model, tmp_path, x)
    assert np.array_equal(ours, theirs)
