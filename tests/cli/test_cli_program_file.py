"""`detent quantize` of a PyTorch program (.pt2)."""

import contextlib
import io
import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402 - torch may be missing

import detent as dt  # noqa: E402
from detent.cli import main  # noqa: E402
from detent.onnx_model import load  # noqa: E402
from detent.report import Report  # noqa: E402

from .cli_cases import write_data  # noqa: E402


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
        )
        self.classifier = nn.Linear(8, 4)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A directory with a program, a program for batches of 2, and data."""
    directory = tmp_path_factory.mktemp("programs")
    example = (torch.randn(2, 8, 8, 8),)
    batch = torch.export.Dim("batch")
    model = Classifier().eval()
    torch.export.save(torch.export.export(model, example, dynamic_shapes=({0: batch},)), directory / "net.pt2")
    torch.export.save(torch.export.export(model, example), directory / "fixed.pt2")
    write_data(directory / "calib.npz")
    return directory


@pytest.fixture
def desk(programs, tmp_path, monkeypatch):
    """A new directory with programs and data, which is the working directory."""
    for each in programs.iterdir():
        shutil.copy(each, tmp_path / each.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(directory):
    return sorted(each.name for each in directory.iterdir())


@pytest.fixture(scope="module")
def quantized(programs, tmp_path_factory):
    """A directory with the results of one run with --json."""
    directory = tmp_path_factory.mktemp("quantized")
    for name in ("net.pt2", "calib.npz"):
        shutil.copy(programs / name, directory / name)
    summary = io.StringIO()
    paths = [str(directory / "net.pt2"), "--data", str(directory / "calib.npz")]
    with contextlib.redirect_stdout(summary):
        assert main(["quantize", *paths, "--trust-model", "--no-bench", "--json"]) == 0
    (directory / "summary.json").write_text(summary.getvalue())
    return directory


def test_both_models_are_written(quantized):
    assert files(quantized) == ["calib.npz", "net.float.onnx", "net.pt2", "net.w8a8.onnx", "summary.json"]


def test_the_summary_names_modules(quantized):
    summary = json.loads((quantized / "summary.json").read_text())
    assert [layer["name"] for layer in summary["layers"]] == ["features.0", "features.3", "classifier"]
    assert {each["layer"] for each in summary["sensitive_layers"]} <= {"features.0", "features.3", "classifier"}
    assert summary["verified"]
    assert summary["model"].endswith("net.pt2")
    assert "fixed-batch" not in [each["code"] for each in summary["warnings"]]


def test_the_file_matches_the_float_model(quantized):
    report = dt.verify(quantized / "net.float.onnx", quantized / "net.w8a8.onnx")
    assert report.ok
    assert load(quantized / "net.float.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_program_needs_trust(desk, capsys):
    before = files(desk)
    assert main(["quantize", "net.pt2", "--data", "calib.npz"]) == 2
    assert "pass --trust-model if you trust its author" in capsys.readouterr().err
    assert files(desk) == before


def test_a_dry_run_writes_nothing(desk, capsys):
    before = files(desk)
    assert main(["quantize", "net.pt2", "--data", "calib.npz", "--trust-model", "--dry-run"]) == 0
    assert "features.3" in capsys.readouterr().out
    assert files(desk) == before


def test_a_fixed_batch_is_reported(desk, capsys):
    arguments = ["--data", "calib.npz", "--trust-model", "--batch-size", "2", "--no-bench", "--no-rank", "--no-verify"]
    assert main(["quantize", "fixed.pt2", *arguments, "--json", "--report", "r.json"]) == 0
    out, err = capsys.readouterr()
    text = "axis 0 of x is fixed to 2, as in the exported program"
    assert err.startswith("converting fixed.pt2 to ONNX\nwarning: axis 0"), "before the work"
    assert f"\nwarning: fixed-batch: {text}" in err, "and after it"
    (warning,) = [each for each in json.loads(out)["warnings"] if each["code"] == "fixed-batch"]
    assert warning["text"].startswith(text)
    assert dict(Report.load("r.json").facts)["Warning: fixed-batch"] == warning["text"]
    assert main(["quantize", "fixed.pt2", *arguments, "--dry-run", "--strict"]) == 1
    assert "fixed-batch" in capsys.readouterr().err.splitlines()[-1]


def bad_data(path):
    x = np.zeros((8, 8, 8, 8), np.float32)
    x[5, 1, 2, 3] = np.nan
    np.savez(path, x=x)


@pytest.mark.parametrize(
    ("prepare", "arguments", "text"),
    [
        (lambda desk: bad_data(desk / "calib.npz"), [], "NaN"),
        (lambda desk: np.savez(desk / "calib.npz", x=np.zeros((4, 3, 8, 8), np.float32)), [], "shape"),
        (lambda desk: (desk / "net.pt2").write_bytes(b"PK" + bytes(50)), [], "damaged"),
        (lambda desk: (desk / "net.float.onnx").write_bytes(b""), [], "net.float.onnx already exists"),
        (lambda _: None, ["--output", "net.float.onnx"], "are the same file"),
        (lambda _: None, ["--skip", "*"], "no layer was quantized"),
    ],
)
def test_nothing_is_written_after_an_error(desk, capsys, prepare, arguments, text):
    prepare(desk)
    before = files(desk)
    assert main(["quantize", "net.pt2", "--data", "calib.npz", "--trust-model", *arguments]) != 0
    assert text in capsys.readouterr().err
    assert files(desk) == before
