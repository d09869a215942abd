"""ExportRecord: round trips through files, and reproduces an export byte for byte."""

import pytest
import torch
from torch import nn

import detent as dt
import detent.torch as qt
from detent.onnx_model import Provenance, load
from detent.torch import export_record
from detent.torch.export_record import ExportRecord
from detent.verification import torch_source

Dim = torch.export.Dim
SHAPES = [
    None,
    ({0: Dim("batch", min=2, max=64)},),
    ({0: Dim.AUTO, 1: Dim.STATIC},),
    {"x": {0: "n", 1: 4}},
    [{0: Dim.DYNAMIC}],
    (None, {1: Dim("length")}),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=range(len(SHAPES)))
def test_dynamic_shapes_survive(shapes):
    record = ExportRecord.of((torch.ones(2, 4),), 21, None, shapes)
    again = ExportRecord.from_dict(record.to_dict())
    assert again == record
    assert not again.problem
    assert repr(again.shapes()) == repr(shapes)


def test_examples_survive():
    example = {"x": torch.ones(2, 3), "i": torch.ones(2, dtype=torch.int64)}
    record = ExportRecord.from_dict(ExportRecord.of(example, 18, "int8", None).to_dict())
    example = record.example()
    assert {name: (x.dtype, x.shape) for name, x in example.items()} == {
        name: (x.dtype, x.shape) for name, x in example.items()
    }
    assert isinstance(ExportRecord.of((torch.ones(1),), 18, None, None).example(), tuple)


def test_shapes_that_json_cannot_represent_are_a_problem():
    record = ExportRecord.of((torch.ones(2, 4),), 21, None, ({0: object()},))
    assert "does not record dynamic_shapes" in record.problem


HOSTILE = {
    "no version": lambda each: each.pop("version"),
    "no inputs": lambda each: each.pop("inputs"),
    "container": lambda each: each.update(container="float"),
    "shapes": lambda each: each.update(dynamic_shapes=3),
    "unknown shapes": lambda each: each.update(dynamic_shapes={"value": {"call": "exit"}}),
    "name of a size": lambda each: each.update(dynamic_shapes={"value": {"dim": "a b", "min": 0, "max": 1}}),
    "limits of a size": lambda each: each.update(dynamic_shapes={"value": {"dim": "b", "min": 5, "max": 2}}),
    "limit that is text": lambda each: each.update(dynamic_shapes={"value": {"dim": "b", "min": "5", "max": None}}),
    "hint": lambda each: each.update(dynamic_shapes={"value": {"hint": "mro"}}),
    "opset": lambda each: each.update(opset=-3),
    "empty inputs": lambda each: each.update(inputs=[]),
    "one name twice": lambda each: each.update(inputs=[{**each["inputs"][0], "name": "x"}] * 2),
    "negative": lambda each: each["inputs"][0].update(shape=[-1]),
    "dtype": lambda each: each["inputs"][0].update(dtype="object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_records_are_rejected(name):
    entry = ExportRecord.of((torch.ones(2, 4),), 21, None, None).to_dict()
    HOSTILE[name](entry)

    def read():
        record = ExportRecord.from_dict(entry)
        return record.shapes(), record.example()

    with pytest.raises(dt.FileFormatError, match="export record"):
        read()


def test_examples_are_limited_over_all_inputs():
    entry = ExportRecord.of((torch.ones(2, 4),), 21, None, None).to_dict()
    for shape in ([1 << 20, 1 << 20], [0, 1 << 50]):
        entry["inputs"][0].update(shape=shape)
        assert "export with a smaller batch" in ExportRecord.from_dict(entry).problem
    entry["inputs"][0].update(shape=[1 << 16])
    assert not ExportRecord.from_dict(entry).problem
    entry["inputs"] *= (1 << 10) + 1
    assert "elements" in ExportRecord.from_dict(entry).problem


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), "w8a8")
    data = torch.randn(5, 8)
    with qt.calibrating(model):
        model(data)
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    shapes = ({0: Dim("batch", min=1, max=32)},)
    return model, qt.export_onnx(model, data, path, opset=20, container="int8", dynamic_shapes=shapes), data


def test_an_export_is_replayed(exported):
    model, path, data = exported
    record = ExportRecord.from_dict(Provenance.read(load(path)).export)
    assert (record.opset, record.container, record.inputs[0].shape) == (20, "int8", (5, 8))
    assert dt.verify(model, path).ok
    report = dt.verify(model, path, [data])
    assert report.ok
    assert report.segments.bound


def test_a_model_that_was_trained_on_is_not_the_source(exported):
    model, path, data = exported
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: each.clone() for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    try:
        model(data).square().mean().backward()
        other.step()
        report = dt.verify(model, path)
    finally:
        model.load_state_dict(before, strict=False)
    assert not report.ok
    assert report.failure.endswith(
        "; only trained values differ: if the model was trained after the export, export it again"
    )


def test_an_export_by_a_different_version_is_not_replayed(exported, monkeypatch):
    model, path, _ = exported
    monkeypatch.setattr(export_record, "exporter_versions", lambda: {"torch": "9.9", "onnxscript": "9.9"})
    report = dt.verify(model, path)
    assert not report.ok
    assert "is installed and may write a different graph" in report.failure


def with_record(path, change):
    """The file with a changed record of its export."""
    model = load(path)
    about = Provenance.read(model)
    change(about.export)
    about.write(model)
    return model


def only_input(entry):
    return entry["inputs"][0]


MALFORMED = {
    "limits of a size": lambda each: each.update(dynamic_shapes={"value": {"dim": "b", "min": 5, "max": 2}}),
    "hint": lambda each: each.update(dynamic_shapes={"value": {"tuple": [{"hint": "mro"}]}}),
    "negative": lambda each: only_input(each).update(shape=[-1, 8]),
    "another rank": lambda each: only_input(each).update(shape=[5, 8, 1]),
    "another fixed size": lambda each: only_input(each).update(shape=[5, 9]),
    "another fixed size by name": lambda each: only_input(each).update(shape=[5, 9], name="input"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_file_with_a_malformed_record_is_rejected(exported, name, monkeypatch):
    model, path, _ = exported
    monkeypatch.setattr(torch_source, "exported_model", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(dt.FileFormatError, match="export record"):
        dt.verify(model, with_record(path, MALFORMED[name]))


def test_a_record_with_a_huge_example_is_not_replayed(exported):
    model, path, _ = exported
    report = dt.verify(model, with_record(path, lambda each: only_input(each).update(shape=[1 << 40, 8])))
    assert not report.ok
    assert "export with a smaller batch" in report.replay.reason


def test_a_changed_graph_is_not_reported_as_further_training(exported):
    model, path, _ = exported
    changed = load(path)
    attributes = next(node for node in changed.graph.node if node.op_type == "Gemm").attribute
    next(each for each in attributes if each.name == "beta").f = 0.5
    report = dt.verify(model, changed)
    assert not report.ok
    assert "trained on" not in str(report)
