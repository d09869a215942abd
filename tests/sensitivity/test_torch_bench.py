"""Sensitivity of PyTorch modules: equal to the noise of ``qt.prepare``, and close to the sensitivity in ONNX."""

import warnings

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import detent as dt
import detent.sensitivity as qs
import detent.torch as qt
from detent.errors import DtypeError, SpecError, UnsupportedError
from detent.sensitivity.torch_bench import first_samples


class Network(nn.Module):
    """A convolution with a batch norm, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        t = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(torch.relu(self.body(self.drop(t))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    network = Network()
    with torch.no_grad():
        network.norm.running_mean.normal_(0, 0.1)
        network.norm.running_var.uniform_(0.5, 2)
    return network


@pytest.fixture
def data():
    torch.manual_seed(1)
    return [torch.randn(4, 8, 6, 6) for _ in range(4)]


def outputs(model, data):
    model.eval()
    with torch.no_grad():
        return torch.cat([model(x) for x in data]).double()


def relative(old, new):
    return float(((new - old) ** 2).sum() / (old**2).sum())


def test_noise_of_one_layer_is_that_of_preparing_one_layer(model, data):
    sensitivity = qs.measure(model, data, widths=(4, 8), progress=False)
    assert [layer.name for layer in sensitivity.layers] == ["conv", "body", "head"]
    expected = outputs(model, data)
    for layer in sensitivity.layers:
        for option, noise in layer.noise.items():
            prepared = qt.prepare(model, dt.Recipe([dt.Rule(layer.name, weight=option)]))
            assert noise == pytest.approx(relative(expected, outputs(prepared, data)), rel=1e-3)
            qt.unprepare(model)


def test_the_model_does_not_change(model, data):
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sensitivity = qs.measure(model, data, progress=False)
    qs.run_mix(model, data, sensitivity.choose(10**6))
    assert model.training
    assert type(model.conv) is nn.Conv2d
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert list(model.state_dict()) == list(before)


def test_a_failing_batch_does_not_change_the_model(model, data):
    class OddError(Exception):
        pass

    calls = []

    def hook(_module, _args):
        calls.append(1)
        if len(calls) > 20:
            raise OddError

    handle = model.register_forward_pre_hook(hook)
    with pytest.raises(OddError):
        qs.measure(model, data, widths=(4, 8), progress=False)
    handle.remove()
    assert type(model.conv) is nn.Conv2d
    assert torch.isfinite(outputs(model, data)).all()


def test_a_recipe_quantizes_weight_and_input(model, data):
    both, weights = (qs.measure(model, data, name, progress=False) for name in ("w8a4", "w8a16"))
    assert both.options == ("w8a4",)
    assert both.layers[1].noise["w8a4"] > 3 * weights.layers[1].noise["w8a16"]
    mix = both.choose(10**6)
    assert [rule.match for rule in mix.recipe.rules] == ["conv", "body", "head"]
    assert qt.plan(model, mix.recipe).layers[1].input.bits == 4
    ran = qs.run_mix(model, data, mix)
    assert ran.measured_sqnr_db == pytest.approx(ran.predicted_sqnr_db, abs=3)


def written_by_hand(model):
    """Build the network as an ONNX model, layer by layer."""

    def constant(name, values):
        return numpy_helper.from_array(values.detach().numpy(), name)

    norm = [model.norm.weight, model.norm.bias, model.norm.running_mean, model.norm.running_var]
    nodes = [
        helper.make_node("Conv", ["x", "cw", "cb"], ["a"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", *(f"n{i}" for i in range(4))], ["b"], name="norm"),
        helper.make_node("Relu", ["b"], ["c"], name="relu"),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], name="mean"),
        helper.make_node("Flatten", ["d"], ["e"], name="flat"),
        helper.make_node("Gemm", ["e", "bw", "bb"], ["f"], name="body", transB=1),
        helper.make_node("Relu", ["f"], ["g"], name="relu2"),
        helper.make_node("Gemm", ["g", "hw", "hb"], ["y"], name="head", transB=1),
    ]
    weights = [constant(f"n{i}", each) for i, each in enumerate(norm)]
    for letter, layer in (("c", model.conv), ("b", model.body), ("h", model.head)):
        weights += [constant(f"{letter}w", layer.weight), constant(f"{letter}b", layer.bias)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 6, 6])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def exported(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own deprecations
        example = torch.zeros(2, 8, 6, 6)
        shapes = {"x": {0: torch.export.Dim("n")}}
        return torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False).model_proto


@pytest.mark.parametrize("export", [written_by_hand, pytest.param(exported, marks=pytest.mark.slow)])
def test_module_and_export_agree(model, data, export):
    other, arrays = export(model.eval()), [x.numpy() for x in data]
    ours = qs.measure(model, data, widths=(4, 8, 10), progress=False)
    theirs = qs.measure(other, arrays, widths=(4, 8, 10), progress=False)
    assert [layer.elements for layer in ours.layers] == [layer.elements for layer in theirs.layers]
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.nbytes == other.nbytes
        for option in ours.options:  # below 8 bits, the ranges in the file are MSE-optimal
            near = 4 if option == "int4/axis0" else 0.5
            assert qs.sqnr_of(mine.noise[option]) == pytest.approx(qs.sqnr_of(other.noise[option]), abs=near)


def test_the_mix_is_what_prepare_makes(model, data):
    sensitivity = qs.measure(model, data, widths=(3, 4, 6, 8), storage="packed", progress=False)
    mix = qs.run_mix(model, data, sensitivity.choose(sensitivity.uniform("int4/axis0").nbytes))
    expected = outputs(model, data)
    prepared = qt.prepare(model, mix.recipe)
    weights = {line.name: line.weights["weight"].format.name for line in qt.plan(Network(), mix.recipe).quantized}
    assert weights == {name: option.split("/")[0] for name, option in mix.options.items()}
    assert mix.measured_sqnr_db == pytest.approx(qs.sqnr_of(relative(expected, outputs(prepared, data))), abs=0.01)
    packed = sum(line.nbytes_after for line in qt.plan(Network(), mix.recipe).quantized)
    assert packed == mix.nbytes


def test_refining_a_module(model, data):
    sensitivity = qs.measure(model, data, widths=(2, 3, 4, 6), storage="packed", progress=False)
    budget = sensitivity.uniform("int3/axis0").nbytes
    best = qs.refine(model, data, sensitivity, budget, runs=6, progress=False)
    assert best.nbytes <= budget
    for start in (sensitivity.uniform("int3/axis0"), sensitivity.choose(budget)):
        assert best.measured_sqnr_db >= qs.run_mix(model, data, start).measured_sqnr_db - 1e-3
    assert best.measured_sqnr_db == pytest.approx(qs.run_mix(model, data, best).measured_sqnr_db, abs=1e-2)


def test_tied_weights_are_one_choice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.free = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.free(torch.relu(self.two(torch.relu(self.one(x)))))

    torch.manual_seed(0)
    model, batch = Tied(), [torch.randn(8, 8)]
    sensitivity = qs.measure(model, batch, widths=(4, 8), progress=False)
    assert [layer.names for layer in sensitivity.layers] == [("one", "two"), ("free",)]
    assert sensitivity.nbytes_float == 2 * 64 * 4
    for mix in (sensitivity.choose(10**4), sensitivity.mixed({"one": "int4/axis0", "free": "int8/axis0"})):
        assert qs.run_mix(model, batch, mix).measured_sqnr_db > 5


def test_outputs_and_batches_of_all_forms(model):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, *, scale=1.0):
            y = self.fc(x) * scale
            return {"y": y, "many": (y.argmax(-1), [y.double()])}

    x = torch.randn(6, 4)
    noise = [
        qs.measure(Both(), [batch], widths=(4,), skip=(), progress=False).samples
        for batch in (x, (x,), [x], {"x": x, "scale": 2.0})
    ]
    assert noise == [6, 6, 6, 6]


def test_samples_are_cut():
    calls, count = first_samples([(torch.zeros(4, 2), torch.zeros(4, 3))] * 5, 6)
    assert [[len(each) for each in call.args] for call in calls] == [[4, 4], [2, 2]]
    assert count == 6
    calls, count = first_samples([(torch.zeros(4, 2), torch.zeros(3, 3))] * 5, 6)
    assert [len(call.args[0]) for call in calls] == [4, 4]
    assert count == 8


def test_skipped_layers_are_not_measured(model, data):
    sensitivity = qs.measure(model, data, widths=(4,), skip=["b*"], progress=False)
    assert [layer.name for layer in sensitivity.layers] == ["conv", "head"]
    sensitivity = qs.measure(model, data, skip="b*", progress=False)
    assert [layer.name for layer in sensitivity.layers] == ["conv", "head"]
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("head", skip=True)])
    for widths in (None, (4,)):
        sensitivity = qs.measure(model, data, recipe, widths=widths, progress=False)
        assert [layer.name for layer in sensitivity.layers] == ["conv", "body"]


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        ([], SpecError, "no batches"),
        (torch.zeros(2, 8, 6, 6), SpecError, r"pass \[data\] for one batch"),
        ("file.npz", SpecError, "expected a list of batches"),
        ([np.zeros((2, 8, 6, 6))], DtypeError, "got ndarray for batch 0"),
    ],
    ids=["none", "tensor", "path", "array"],
)
def test_data_that_cannot_be(model, batches, error, words):
    with pytest.raises(error, match=words):
        qs.measure(model, batches, widths=(4,), progress=False)


def test_prepared_models_are_rejected(model, data):
    with pytest.raises(SpecError, match="prepared already"):
        qs.measure(qt.prepare(model, "w8a8"), data)


def test_models_without_layers_are_rejected(data):
    with pytest.raises((UnsupportedError, SpecError)):
        qs.measure(nn.ReLU(), data, widths=(4,))
    with pytest.raises(UnsupportedError, match="no layer of the model can be measured"):
        qs.measure(nn.Sequential(nn.Conv2d(8, 2, 1)), data, widths=(4,), skip="*")
