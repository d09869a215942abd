"""Loaded models: read and checked once, accepted wherever a path is, and never changed."""

import numpy as np
import onnx
import pytest
from onnx import parser

import detent as dt
import detent.onnx as qo
from detent.onnx_model import files
from detent.onnx_model.files import load, load_model, save
from detent.onnx_model.sessions import make_session

MODEL = parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {3.0, 1.5}> { [fc] y = MatMul(x, w) }"""
)


@pytest.fixture
def path(tmp_path):
    save(MODEL, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_loaded_file_has_its_path_and_size(path):
    model = load_model(path)
    assert (model.path, model.nbytes) == (path, path.stat().st_size)
    assert [info.name for info in model.inputs] == ["x"]
    assert model.outputs == ("y",)
    assert model.digest == load_model(MODEL).digest
    assert load_model(MODEL).path is None


def test_a_loaded_model_is_not_checked_again(path, monkeypatch):
    model = load_model(path)
    monkeypatch.setattr(files, "_check", None)
    assert load_model(model) is model
    assert load(model) == model.proto
    assert make_session(model).run(None, {"x": np.ones((1, 2), np.float32)})[0] == 4.5


def test_what_load_returns_may_be_changed(path):
    model = load_model(path)
    load(model).graph.node[0].op_type = "Neg"
    assert model.proto.graph.node[0].op_type == "MatMul"
    given = onnx.ModelProto()
    given.CopyFrom(MODEL)
    kept = load_model(given)
    given.graph.node[0].op_type = "Neg"
    assert kept.proto.graph.node[0].op_type == "MatMul"


def test_a_session_needs_no_file_of_a_loaded_model(path):
    model = load_model(path)
    path.unlink()
    assert make_session(model).run(None, {"x": np.ones((1, 2), np.float32)})[0] == 4.5


def test_functions_accept_loaded_models(path, tmp_path):
    model, batch = load_model(path), [np.float32([[1.0, 2.0]])]
    result = qo.quantize(model, tmp_path / "small.onnx", batch)
    assert (tmp_path / "small.onnx").read_bytes() == _quantized(path, tmp_path, batch)
    assert result.nbytes_before == model.nbytes
    assert dt.verify(model, load_model(tmp_path / "small.onnx"), batch).ok
    assert qo.load_quantized(load_model(tmp_path / "small.onnx")).weights


def _quantized(path, folder, batch):
    qo.quantize(path, folder / "again.onnx", batch)
    return (folder / "again.onnx").read_bytes()


@pytest.mark.parametrize("source", [3, None, ["m.onnx"]], ids=repr)
@pytest.mark.parametrize("function", [load, load_model, qo.decide, qo.load_quantized])
def test_values_that_are_not_models_are_rejected(function, source):
    with pytest.raises(dt.SpecError, match="expected the model as a path, a ModelProto or a LoadedModel, got "):
        function(source)


def test_remove_deletes_a_model_and_its_own_external_data(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    node, shape = onnx.helper.make_node("MatMul", ["x", "w"], ["y"]), ["n", 64]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy")
    versions = {"opset_imports": [onnx.helper.make_opsetid("", 17)], "ir_version": 8}
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y], [weight]), **versions)
    other = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y], [weight]), **versions)
    other.graph.initializer[0].raw_data = np.zeros((64, 64), np.float32).tobytes()
    for each, name in ((model, "a.onnx"), (other, "b.onnx"), (other, "a.onnx.onnx")):
        save(each, tmp_path / name, limit=1)
    assert len(list(tmp_path.iterdir())) == 6
    files.remove(tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()
    assert len(list(tmp_path.iterdir())) == 4
    assert load(tmp_path / "b.onnx") == load(tmp_path / "a.onnx.onnx")


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_an_older_model_and_its_external_data_are_put_back(tmp_path, monkeypatch, linked, same):
    if not linked:
        monkeypatch.setattr(files.Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError))
    arrays = np.ones((64, 64), np.float32), np.full((64, 64), 1 if same else 2, np.float32)
    graphs = [onnx.helper.make_graph([], "g", [], [], [onnx.numpy_helper.from_array(each, "w")]) for each in arrays]
    models = [onnx.helper.make_model(each) for each in graphs]
    path = tmp_path / "a.onnx"
    save(models[0], path, limit=1)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert len(before) == 2
    with files.older_file(path) as older:
        save(models[1], path, limit=1)
        files.remove(path, older)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    with files.older_file(path), pytest.raises(KeyError):
        raise KeyError
    with files.older_file(tmp_path / "b.onnx") as older:
        assert older is None
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_remove_keeps_external_data_of_other_tools(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    graph = onnx.helper.make_graph([], "g", [], [], [weight])
    location = tmp_path / "a.onnx"
    onnx.save(onnx.helper.make_model(graph), location, save_as_external_data=True, location="a.data", size_threshold=0)
    files.remove(location)
    assert [each.name for each in tmp_path.iterdir()] == ["a.data"]
