"""qt.program_to_onnx: exported programs as ONNX models whose layers have the names of modules."""

import json
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")

import onnxruntime as ort

import detent as dt
import detent.onnx as qo
import detent.torch as qt


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.attention = nn.Linear(8, 16)
        self.head = nn.ModuleDict({"fc": nn.Linear(8, 4)})

    def forward(self, x):
        x = self.features(x).flatten(2).transpose(1, 2)
        query, key = self.attention(x).chunk(2, dim=-1)
        x = torch.softmax(query @ key.transpose(1, 2), dim=-1) @ x
        return self.head["fc"](x.mean(1))


def exported(*, dynamic=True):
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    return torch.export.export(Small().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def program_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "small.pt2"
    torch.export.save(exported(), path)
    return path


@pytest.fixture(scope="module")
def model(program_file):
    return qt.program_to_onnx(program_file, trust=True)


def test_layers_have_the_names_of_modules(model):
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    plan = qo.plan(model, "w8a8")
    layers = [layer.name for layer in plan.layers]
    assert {"features.0", "features.3", "attention", "head.fc"} <= set(layers)
    assert set(layers) <= set(names)


def test_rules_can_name_modules(model):
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input="uint8/affine"), dt.Rule("features.*", skip=True)])
    kept = {layer.name: layer.reason for layer in qo.plan(model, recipe).layers if layer.reason}
    assert {"features.0", "features.3"} <= kept.keys()
    assert kept["features.3"] == "excluded"
    assert "head.fc" not in kept


def test_the_model_computes_what_the_program_computes(model):
    x = torch.randn(5, 3, 8, 8)
    session = ort.InferenceSession(model.SerializeToString())
    with torch.no_grad():
        expected = Small().eval()(x).numpy()
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], expected, rtol=1e-4, atol=1e-5)


def test_the_batch_axis_is_dynamic(model):
    (value,) = model.graph.input
    assert value.name == "x"
    assert value.type.tensor_type.shape.dim[0].dim_param == "batch"


def test_no_paths_of_source_files_remain(model):
    assert b".py" not in model.SerializeToString()


def test_a_fixed_batch_is_reported():
    with pytest.warns(UserWarning, match="axis 0 of x is fixed to 2, as in the exported program"):
        model = qt.program_to_onnx(exported(dynamic=False))
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_a_file_is_loaded_only_if_it_is_trusted(program_file):
    with pytest.raises(dt.errors.SpecError, match=r"can execute code from the file: pass trust=True"):
        qt.program_to_onnx(program_file)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return shutil.copyfile, (__file__, str(self.path))


def test_code_in_an_untrusted_file_does_not_run(program_file, tmp_path):
    """torch.export.load would run it, so that the flag is needed."""
    trap, bad = tmp_path / "trap", tmp_path / "bad.pt2"
    payload = pickle.dumps(Malicious(trap))
    rewritten(program_file, bad, lambda name, data: payload if name.endswith("sample_inputs/model.pt") else data)
    with pytest.raises(dt.errors.SpecError):
        qt.program_to_onnx(bad)
    assert not trap.exists()


def rewritten(source, target, change):
    """Copy an archive, with the bytes of each entry changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)


def with_schema(name, data):
    if not name.endswith("models/model.json"):
        return data
    document = json.loads(data)
    document["schema_version"]["major"] += 1
    document["torch_version"] = "9.9.0"
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_schema, r"it was saved by torch 9\.9\.0, and this is torch"),
        (lambda name, data: None if name.endswith("models/model.json") else data, "has no exported program"),
        (lambda name, data: b"{" if name.endswith("models/model.json") else data, "damaged"),
        (lambda name, data: None if "weights" in name else data, r"torch\.export\.load failed"),
        (lambda name, data: data[: len(data) // 2] if "weights" in name else data, r"torch\.export\.load failed"),
    ],
)
def test_damaged_files_and_files_of_other_versions_are_rejected(program_file, tmp_path, change, text, caplog):
    bad = tmp_path / "bad.pt2"
    rewritten(program_file, bad, change)
    with pytest.raises(dt.errors.FileFormatError, match=f"bad.pt2: .*{text}"):
        qt.program_to_onnx(bad, trust=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "text"), [(None, "there is no such file"), (b"", "damaged"), (b"PK\x03\x04" + bytes(99), "damaged")]
)
def test_files_that_are_not_archives_are_rejected(tmp_path, content, text):
    path = tmp_path / "bad.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(dt.errors.FileFormatError, match=text):
        qt.program_to_onnx(path, trust=True)


def test_truncated_files_are_rejected(program_file, tmp_path):
    data, path = program_file.read_bytes(), tmp_path / "bad.pt2"
    for size in (len(data) // 2, len(data) - 30):
        path.write_bytes(data[:size])
        with pytest.raises(dt.errors.FileFormatError, match=r"damaged|has no exported program"):
            qt.program_to_onnx(path, trust=True)


def test_wrong_arguments_are_rejected():
    with pytest.raises(dt.errors.SpecError, match="expected an ExportedProgram or the path"):
        qt.program_to_onnx(Small())
    with pytest.raises(dt.errors.DetentError, match="opset"):
        qt.program_to_onnx(exported(), opset=7)
