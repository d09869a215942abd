"""`detent quantize` with a metric, labels, evaluation data and a limit of the drop."""

import json

import numpy as np
import pytest

import detent.report as qr
from detent.cli import main
from detent.onnx_model import make_session

from .cli_cases import detent, write_data, write_model

QUICK = ("--no-verify", "--no-bench", "--no-rank")
METRIC = """
import numpy as np

def closeness(outputs, labels):
    return -float(np.abs(outputs["y"].argmax(1) - labels).mean())

def broken(outputs):
    raise KeyError("scores")
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A model, calibration data, and evaluation data with the model's own classes as labels."""
    directory = tmp_path_factory.mktemp("metric")
    model = write_model(directory / "model.onnx", hidden=24)
    write_data(directory / "calib.npz", 32)
    data = write_data(directory / "eval.npz", 128, seed=7)
    with np.load(data) as arrays:
        scores = make_session(model).run(None, {"x": arrays["x"]})[0]
    np.savetxt(directory / "labels.txt", scores.argmax(1), fmt="%d")
    (directory / "my_metric.py").write_text(METRIC)
    return directory


def run(desk, monkeypatch, *arguments, recipe="w8a8"):
    monkeypatch.chdir(desk)
    options = ("--data", "calib.npz", "--recipe", recipe, "--output", f"{recipe}.onnx", "--force", *QUICK)
    return main(["quantize", "model.onnx", *options, *arguments])


def test_a_metric_and_its_labels_are_in_the_summary(desk, monkeypatch, capsys):
    assert run(desk, monkeypatch, "--eval-data", "eval.npz", "--labels", "labels.txt", "--metric", "top1") == 0
    out = capsys.readouterr().out
    assert "top1:              " in out
    assert "(float 1.0000, drop " in out
    assert "on 128 held-out batches" in out


def test_a_function_of_the_current_directory(desk):
    """The program finds a module in the current directory, although scripts do not have it in their search path."""
    options = ("--data", "calib.npz", "--eval-data", "eval.npz", "--labels", "labels.txt", "--json", *QUICK)
    result = detent(
        "quantize", "model.onnx", *options, "--metric", "my_metric:closeness", "--output", "own.onnx", cwd=desk
    )
    assert result.returncode == 0, result.stderr
    metric = json.loads(result.stdout)["metric"]
    assert (metric["name"], metric["float_value"], metric["samples"]) == ("my_metric:closeness", 0.0, 128)


def test_max_drop_keeps_layers_in_float(desk, monkeypatch, capsys):
    options = ("--eval-data", "eval.npz", "--metric", "cosine", "--max-drop", "0.02%", "--report", "report.json")
    code = run(desk, monkeypatch, *options, "--json", recipe="w2a8")
    document = json.loads(capsys.readouterr().out)
    search, metric = document["max_drop_search"], document["metric"]
    assert (document["max_drop"], search["before"]["samples"], metric["samples"]) == (0.0002, 64, 64)
    assert search["before"]["drop"] > 0.0002
    assert search["steps"]
    reasons = {layer["name"]: layer["reason"] for layer in document["layers"] if layer["name"] in search["layers"]}
    assert "kept in float to meet max_drop" in reasons.values()
    assert all(reason.startswith(("kept in float to meet", "float fallback")) for reason in reasons.values())
    assert code == int(metric["drop"] > 0.0002) == int(not document["ok"])
    report = qr.Report.load(desk / "report.json")
    assert report.tables[0].title == "Steps to meet max_drop 0.0002"
    assert "Limit max_drop" in dict(report.facts)
    assert "Steps to meet max_drop" in report.to_html()
    assert main(["verify", "model.onnx", "w2a8.onnx"]) == 0


def test_a_limit_that_is_not_met_exits_with_1_and_writes_the_file(desk, monkeypatch, capsys):
    options = ("--eval-data", "eval.npz", "--metric", "cosine", "--max-drop", "0")
    assert run(desk, monkeypatch, *options, recipe="w4a8") == 1
    out, err = capsys.readouterr()
    assert "max_drop:          0 not met" in out
    assert "cosine drops by" in err
    assert "(w4a8.onnx was still written)" in err
    assert (desk / "w4a8.onnx").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metric", "top3"), "there is no metric 'top3': did you mean 'top1'?"),
        (("--metric", "my_metric:none"), "'none' in module 'my_metric' does not exist"),
        (("--metric", "my_metric:broken"), "metric my_metric:broken raised KeyError: 'scores'"),
        (("--labels", "labels.txt"), "got 128 labels for 32 samples"),
        (("--labels", "none.txt"), "none.txt: there is no such file"),
        (("--labels", "model.onnx"), "expected labels in an .npy, .npz, .txt or .csv file"),
        (("--eval-data", "none.npz"), "none.npz"),
        (("--max-drop", "much"), "max_drop must be a number such as 0.005 or '0.5%', got 'much'"),
        (("--max-drop", "1%", "--dry-run"), "--max-drop needs outputs, but --dry-run compares no outputs"),
        (("--max-drop", "1%", "--batch-size", "16"), "max_drop needs at least 4 batches"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_bad_input_writes_nothing(options, message, desk, monkeypatch, capsys):
    assert run(desk, monkeypatch, *options, recipe="w8a16") == 2
    assert message in capsys.readouterr().err
    assert not (desk / "w8a16.onnx").exists()


def test_a_missing_module_has_its_own_exit_code(desk, monkeypatch, capsys):
    assert run(desk, monkeypatch, "--metric", "missing_module:f", recipe="w8a16") == 3
    assert "module 'missing_module' of the metric cannot be imported" in capsys.readouterr().err


def test_the_options_need_data(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    assert main(["quantize", "model.onnx", "--recipe", "w8a16", "--metric", "top1", "--max-drop", "1%"]) == 2
    assert "--metric, --max-drop need calibration data: pass --data" in capsys.readouterr().err
