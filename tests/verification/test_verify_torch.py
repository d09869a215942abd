"""verify with a prepared model as source: an export passes, and each single change is named."""

import copy

import numpy as np
import pytest
import torch
from onnx import ModelProto
from qdq_models import change, change_axis
from torch import nn

import detent as dt
import detent.torch as qt
from detent.onnx_model import Provenance, load
from detent.torch.onnx_export import export_onnx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    """Dense and depthwise convolutions, a folded batch norm, a square and a flat matrix."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.square = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.depthwise(x)).mean((2, 3))
        return self.head(torch.relu(self.square(x)))


def trained(net, recipe, data, *, freeze=True):
    """A prepared model after calibration and a few training steps."""
    torch.manual_seed(0)
    model = qt.prepare(net, recipe)
    with qt.calibrating(model):
        for x in data:
            model(*x) if isinstance(x, tuple) else model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data[:2]:
        out = model(*x) if isinstance(x, tuple) else model(x)
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    return qt.freeze(model).eval() if freeze else model.eval()


def images(count=3, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, 8, 8, generator=generator) for _ in range(count)]


ACTIVATIONS = 3 * 16 * (3 * 64 + 32 * 16 + 32 + 32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.manual_seed(0)
    model = trained(Net(), "w8a8", images())
    path = tmp_path_factory.mktemp("proof") / "net.onnx"
    export_onnx(model, images()[0], path)
    return model, load(path)


@pytest.fixture(scope="module")
def report(pair):
    return dt.verify(*pair, images())


def test_what_was_trained_is_what_is_shipped(report):
    assert report.ok
    assert report.differing_codes == 0
    weights, biases = 32 * 3 * 9 + 32 * 9 + 32 * 32 + 320, 32 + 32 + 32 + 10
    assert report.compared_codes == weights + biases + ACTIVATIONS
    assert report.batches == 3
    assert not report.notes


def test_end_to_end_stays_close(report):
    for run in ("unoptimized", "optimized"):
        result = report.end_to_end[run]
        assert result.compared_codes == ACTIVATIONS
        assert result.differing_codes <= result.compared_codes // 100
        assert result.max_steps <= 1
        assert result.output_sqnr_db["output"] > 40
        assert result.agreement >= 0.97
        assert bool(result.cause) == bool(result.differing_codes)


def test_integer_kernels_are_exact(report):
    assert {row.kernel for row in report.kernels} >= {"QLinearConv", "QGemm"}
    assert sum(row.differing for row in report.kernels) == 0
    assert sum(row.compared for row in report.kernels) > 0


def test_the_model_is_left_as_it_was(pair):
    model, artifact = pair
    before = copy.deepcopy(model.state_dict())
    model.train()
    model.norm.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    watch = qt.watch(model)
    watchers = [module.watcher for module in model.modules() if isinstance(module, qt.FakeQuantize)]
    try:
        assert dt.verify(model, artifact, images(1)).ok
        assert modes == {name: module.training for name, module in model.named_modules()}
        assert watchers == [module.watcher for module in model.modules() if isinstance(module, qt.FakeQuantize)]
        assert all(not module._forward_pre_hooks for module in model.modules())
    finally:
        watch.stop()
        model.eval()
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before if isinstance(before[key], torch.Tensor))


# One thing changed


def up(index):
    def change_scale(values):
        values[index] = np.nextafter(values[index], np.float32(np.inf))

    return change_scale


def plus_one(index):
    def change_number(values):
        values[index] += 1

    return change_number


CHANGES = {
    "weight_code": ("conv.weight_codes", plus_one((3, 1, 2, 0)), "1 of 864 values changed", (3, 1, 2, 0), 1),
    "depthwise_code": ("depthwise.weight_codes", plus_one((3, 0, 2, 0)), "1 of 288 values changed", (3, 0, 2, 0), 1),
    "weight_scale": ("conv.weight_scale", up(5), "1 of 32 values changed", (5,), 27),
    "weight_zero_point": ("square.weight_zero_point", plus_one(2), "1 of 32 values changed", (2,), 32),
    "bias_code": ("head.bias_codes", plus_one(4), "1 of 10 values changed", (4,), 1),
    "bias_scale": ("head.bias_scale", up(4), "1 of 10 values changed", (4,), 1),
    "activation_scale": ("square.input_scale", up(...), "changed", (), 16 * 32),
    "activation_zero_point": ("conv.input_zero_point", plus_one(...), "changed", (), 16 * 192),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_named(pair, name):
    model, artifact = pair
    tensor, edit, cause, index, least = CHANGES[name]
    report = dt.verify(model, change(artifact, tensor, edit), images(1), levels=(1,))
    assert not report.ok
    difference = report.first_difference
    assert (difference.tensor, difference.index) == (tensor, index)
    assert cause in difference.cause
    assert report.failure.endswith(
        "only trained values differ: if the model was trained after the export, export it again"
    )
    assert difference.node == f"constant {tensor}"
    assert difference.expected != difference.got
    assert least <= report.differing_codes <= report.compared_codes
    assert str(report).startswith(f"not ok: constant {tensor}: {cause}")


@pytest.mark.parametrize(("layer", "axis"), [("square", 1), ("head", 1), ("conv", 1)])
def test_a_swapped_axis_is_named(pair, layer, axis):
    model, artifact = pair
    file = change_axis(artifact, f"{layer}.weight_DequantizeLinear", axis)
    report = dt.verify(model, file, images(1))
    assert not report.ok
    difference = report.first_difference
    assert (difference.node, difference.expected, difference.got) == (f"{layer}.weight_DequantizeLinear", 0, 1)
    assert difference.tensor == "attribute axis"


def test_a_wrong_input_of_a_quantizer_is_no_difference_of_its_own(pair):
    """Level 1 uses each quantizer's own input, so a change before it is named where it is."""
    model, artifact = pair
    report = dt.verify(model, change(artifact, "conv.weight_codes", plus_one((3, 1, 2, 0))), images(1))
    assert report.differing_codes == 1
    assert report.end_to_end["unoptimized"].differing_codes > 0


def test_what_the_file_lacks_is_named(pair):
    model, artifact = pair
    file = ModelProto()
    file.CopyFrom(artifact)
    about = Provenance.read(artifact)
    weights = {name: key for name, key in about.weights.items() if key != "head.weight"}
    activations = {name: key for name, key in about.activations.items() if key != "head.input_quantizer"}
    Provenance(weights, about.activations, about.target).write(file)
    report = dt.verify(model, file, images(1), levels=(1,))
    assert report.first_difference.cause == "quantized weight of the source is missing in the file"
    assert report.differing_codes == 320
    Provenance(about.weights, activations, about.target).write(file)
    report = dt.verify(model, file, images(1), levels=(1,))
    assert report.first_difference.node == "head.input_quantizer"
    assert not report.ok


def test_a_file_of_another_model_is_not_ok(pair):
    torch.manual_seed(5)
    other = trained(Net(), "w8a8", images(seed=5))
    report = dt.verify(other, pair[1], images(1), levels=(1,))
    assert not report.ok
    assert report.differing_codes > report.compared_codes // 2


@pytest.mark.parametrize("levels", [(1,), (1, 2, 3), (2,)], ids=str)
def test_a_file_without_provenance_is_not_replayed(pair, levels):
    file = ModelProto()
    file.CopyFrom(pair[1])
    del file.metadata_props[:]
    report = dt.verify(pair[0], file, images(1), levels=levels)
    assert not report.ok
    assert (report.differing_codes, report.first_difference) == (0, None)
    if 1 in levels:
        assert "not replayed: " in report.failure
        assert "qt.export_onnx" in report.replay.reason
    if 2 in levels:
        assert str(report.segments).startswith("inconclusive: ")
        assert report.end_to_end["unoptimized"].output_sqnr_db["output"] > 40


def test_a_model_that_is_not_prepared_is_refused(pair):
    with pytest.raises(dt.StateError, match="prepare"):
        dt.verify(nn.Linear(2, 2), pair[1], images(1))


# Recipes and layers


SYMMETRIC = dt.Recipe([dt.Rule(types=("Linear", "Conv2d"), weight="int8/axis0", input="int8")])
RECIPES = {
    "w4a8": "w4a8",
    "w2a8": "w2a8",
    "w4a4": "w4a4",
    "w8a16": "w8a16",
    "w4a16-g32": "w4a16-g32",
    "clipped": SYMMETRIC,
    "learned": dt.Recipe.preset("w4a8", mode=dt.Learned()),
}


@pytest.mark.parametrize(
    "name",
    [each if each == "clipped" else pytest.param(each, marks=pytest.mark.slow) for each in RECIPES],
)
def test_recipes(name, tmp_path):
    torch.manual_seed(0)
    model = trained(Net(), RECIPES[name], images())
    path = tmp_path / "net.onnx"
    export_onnx(model, images()[0], path)
    report = dt.verify(model, path, images())
    assert report.ok
    assert report.compared_codes > 0
    assert report.end_to_end["unoptimized"].output_sqnr_db["output"] > 20
    assert sum(row.differing for row in report.kernels) == 0
    if name == "clipped":
        assert any(node.op_type == "Clip" for node in load(path).graph.node)
        shorter = change(load(path), "square.input_highest", lambda values: np.multiply(values, 0.5, out=values))
        changed = dt.verify(model, shorter, images(), levels=(1,))
        assert (changed.first_difference.node, changed.ok) == ("constant square.input_highest", False)
    if "a16" in name:
        assert report.end_to_end["accuracy_level_0"].output_sqnr_db["output"] > 100


class Words(nn.Module):
    """An embedding with per-row scales, and two inputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, ids, mask):
        return self.out(self.table(ids) * mask.unsqueeze(-1))


def words():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 50, (6, 9), generator=generator), torch.ones(6, 9)) for _ in range(3)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    torch.manual_seed(0)
    recipe = dt.Recipe(
        [
            dt.Rule(types=("Embedding",), weight="int8/axis0"),
            dt.Rule(types=("Linear",), weight="int8/axis0", input="uint8"),
        ]
    )
    model = trained(Words(), recipe, words())
    path = tmp_path_factory.mktemp("table") / "words.onnx"
    export_onnx(model, words()[0], path)
    return model, path


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_an_embedding_and_two_inputs(table, form):
    model, path = table
    data = words() if form == "tuple" else [{"mask": mask.numpy(), "ids": ids.numpy()} for ids, mask in words()]
    report = dt.verify(model, path, data)
    assert report.ok
    assert report.compared_codes >= 50 * 32 + 128 + 3 * 6 * 9 * 32


@pytest.mark.parametrize(
    ("tensor", "edit", "index"),
    [("table.weight_codes", plus_one((7, 3)), (7, 3)), ("table.weight_scale", up(7), (7,))],
    ids=["code", "scale"],
)
def test_one_change_of_a_table_is_named(table, tensor, edit, index):
    model, path = table
    report = dt.verify(model, change(load(path), tensor, edit), words(), levels=(1,))
    assert not report.ok
    assert (report.first_difference.tensor, report.first_difference.index) == (tensor, index)


@pytest.mark.slow
def test_a_transformer(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    net = nn.Sequential(layer, nn.Linear(32, 5))
    data = [torch.randn(4, 7, 32) for _ in range(3)]
    model = trained(net, "w8a8", data)
    path = tmp_path / "encoder.onnx"
    export_onnx(model, data[0], path)
    report = dt.verify(model, path, data)
    assert report.ok
    assert report.compared_codes > 0
    assert report.end_to_end["optimized"].output_sqnr_db["output"] > 20


def test_a_model_that_is_not_frozen(tmp_path):
    torch.manual_seed(0)
    model = trained(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        "w8a8",
        images(),
        freeze=False,
    )
    path = tmp_path / "net.onnx"
    export_onnx(model, images()[0], path)
    report = dt.verify(model, path, images())
    assert report.ok
    assert report.agreement is None  # its output is an image
    assert model[1].training is False
