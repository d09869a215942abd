"""The dry run: estimates and errors."""

import numpy as np
import pytest
from onnx import parser

from detent.errors import DetentError, UnsupportedError
from detent.evaluate import DryRun, dry_run, dry_run_estimate
from detent.onnx_model import save


@pytest.fixture
def model(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {3.0, 1.5}> { [head] y = MatMul(x, w) }"""
    save(parser.parse_model(text), tmp_path / "a.onnx")
    return tmp_path / "a.onnx"


def test_some_batches_stand_for_all(model, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((50, 2), np.float32))
    estimate = dry_run(model, tmp_path / "a.npz")
    assert (estimate.batches, estimate.total_batches) == (32, 50)
    assert [layer["name"] for layer in estimate.layers] == ["head"]
    assert estimate.total_seconds >= estimate.seconds
    assert dry_run(model, tmp_path / "a.npz", numbers=[1, 5]).total_batches == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "a.onnx"]


def test_it_raises_the_error_of_quantize(model, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 2), np.float32))
    with pytest.raises(DetentError, match="did you mean 'head'"):
        dry_run(model, tmp_path / "a.npz", recipe="w8a8", skip=["haed"])


def test_a_killed_process(monkeypatch):
    monkeypatch.setattr(dry_run_estimate, "_CODE", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UnsupportedError, match="killed by signal 9"):
        dry_run("a.onnx")


def test_a_process_that_crashes(monkeypatch):
    monkeypatch.setattr(dry_run_estimate, "_CODE", "raise RuntimeError('oh')")
    with pytest.raises(UnsupportedError, match="RuntimeError: oh"):
        dry_run("a.onnx")


def test_memory_is_not_known_everywhere(monkeypatch, tmp_path):
    monkeypatch.setattr(dry_run_estimate, "_STATUS", tmp_path / "nothing")
    assert dry_run_estimate._memory("VmRSS") is None
    assert DryRun(1, 1, None, 1.0, 0, 0, 0.0, (), ()).memory_bound is None
