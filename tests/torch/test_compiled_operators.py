"""Quantizers under torch.compile: one node each, with the bits and the state of eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_bits import assert_same

import detent as dt
import detent.torch as qt

MODES = {
    "ema": dt.EMA(0.9),
    "per_batch": dt.PerBatch(),
    "learned": dt.Learned(),
    "default": dt.Learned("mse", "auto", 10.0),
    "fixed": dt.Fixed(),
}
SPECS = ("int4/axis0", "uint8/tensor/affine")


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()


def module_of(spec, mode, shape):
    module = qt.FakeQuantize(spec, mode, shape=shape)
    module.set_params(dt.QuantParams.from_data(module.spec, torch.randn(shape).numpy()))
    return module


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("spec", SPECS)
def test_values_gradients_and_state_are_those_of_eager(spec, mode, training):
    torch.manual_seed(0)
    eager = module_of(spec, mode, (6, 8)).train(training)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(6, 8)
        g = torch.randn(6, 8)
        pairs = [x.clone().requires_grad_() for _ in range(2)]
        theirs, ours = (function(each) for function, each in zip((eager, run), pairs, strict=True))
        assert_same(ours.detach(), theirs.detach())
        theirs.backward(g)
        ours.backward(g)
        assert_same(pairs[1].grad, pairs[0].grad)
        for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert_same(ours.grad, theirs.grad)
            with torch.no_grad():
                for each in (ours, theirs):
                    each.sub_(1e-3 * each.grad.sign())
    for ours, theirs in zip(compiled.state_dict().items(), eager.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert_same(ours[1], theirs[1])


@pytest.mark.parametrize("mode", [dt.EMA(0.9), dt.PerBatch()], ids=["ema", "per_batch"])
def test_ranges_after_a_relu_are_those_of_eager(mode):
    torch.manual_seed(0)
    eager = qt.FakeQuantize("uint8/tensor/affine", mode)
    eager.after_relu = True
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(6, 8)
        assert_same(run(x), eager(x))
    assert int(compiled.zero_point) == 0  # the range starts at 0
    assert_same(compiled.scale, eager.scale)


def test_a_start_after_a_relu_ignores_negative_values():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    module = qt.FakeQuantize("uint4/tensor/affine", dt.Learned("mse"))
    twin = copy.deepcopy(module)
    module.after_relu = True
    module(x)
    twin(torch.relu(x))
    assert int(module.params.zero_point) == 0
    assert_same(module.scale, twin.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=dtype)
    for mode in (dt.EMA(0.9), dt.Learned()):
        module = qt.FakeQuantize("uint8/tensor/affine", mode, dtype=torch.float64 if x.itemsize == 8 else torch.float32)
        module.set_params(dt.QuantParams.from_range(module.spec, -1.0, 2.0))
        twin = copy.deepcopy(module)
        assert_same(torch.compile(twin, fullgraph=True, backend="aot_eager")(x), module(x))


def graph_of(model, x):
    nodes = []

    def count(graph, _):
        nodes.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    torch.compile(model, fullgraph=True, backend=count)(x)
    return nodes[0]


@pytest.mark.parametrize("recipe", ["w8a8", "w4a4"])
def test_a_layer_adds_few_nodes(recipe):
    model = qt.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), recipe)
    x = torch.randn(16, 8)
    with qt.calibrating(model):
        model(x)
    nodes = graph_of(model, x)
    assert sum("detent." in each for each in nodes) <= 12  # three layers, two quantizers, at most two nodes each
    assert len(nodes) <= 60


def test_exported_programs_have_plain_operations():
    model = qt.prepare(nn.Sequential(nn.Linear(8, 4)), "w8a8")
    x = torch.randn(16, 8)
    with qt.calibrating(model):
        model(x)
    program = torch.export.export(model.eval(), (x,))
    assert not any("detent" in str(node.target) for node in program.graph.nodes)
    assert_same(program.module()(x), model(x))


def test_scales_of_the_wrong_shape_raise():
    module = module_of("int8/axis0", dt.Learned(), (6, 8))
    with pytest.raises(Exception, match="need scales of shape"):
        torch.compile(module, backend="aot_eager")(torch.randn(5, 8))


@pytest.mark.slow
def test_a_trained_model_is_the_same_under_inductor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    qt.prepare(model, "w4a4")
    x, labels = torch.randn(32, 8), torch.arange(32) % 4
    with qt.calibrating(model):
        model(x)
    twin = copy.deepcopy(model)
    for run, each in ((model, model), (torch.compile(twin), twin)):
        optimizer = torch.optim.SGD(each.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(run(x), labels).backward()
            optimizer.step()
    for (name, ours), theirs in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)
