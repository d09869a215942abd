"""The ONNX benchmark evaluates files in both runtimes, and retries OpenVINO without AMX if its process dies."""

import importlib
from pathlib import Path

import numpy as np
import onnx
import pytest

from detent.verification import openvino

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WORKER = """
import os, runpy, sys
if "ONEDNN_MAX_CPU_ISA" not in os.environ:
    sys.exit(3)
runpy.run_path({worker!r}, run_name="__main__")
"""

pytestmark = pytest.mark.skipif(not openvino.is_installed(), reason="OpenVINO is not installed")


@pytest.fixture
def evaluation(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("onnx_evaluation")


@pytest.fixture
def path(tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }""")
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def feeds():
    return [{"x": np.array([[-1.0, 0.5, 2.0]], np.float32)}, {"x": np.array([[4.0, -3.0, 1.0]], np.float32)}]


def test_a_float_file_has_no_difference(evaluation, path, feeds):
    outputs = evaluation.outputs(path, feeds)
    result = evaluation.in_openvino(path, feeds, outputs, outputs)
    assert result == {"sqnr_db": 200.0, "mean_sqnr_db": 200.0, "largest_difference": 0.0, "note": ""}


def test_a_dead_process_is_retried_without_amx(evaluation, path, feeds, tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(worker=str(openvino.WORKER)), encoding="utf-8")
    monkeypatch.setattr(openvino, "WORKER", worker)
    outputs = evaluation.outputs(path, feeds)
    assert evaluation.in_openvino(path, feeds, outputs, outputs)["note"] == "AMX disabled, because the process crashed"


def test_an_unsupported_file_is_reported(evaluation, path, feeds, tmp_path):
    outputs = evaluation.outputs(path, feeds)
    model = onnx.load(path)
    model.graph.node[0].op_type = "Unknown"
    onnx.save(model, tmp_path / "unknown.onnx")
    result = evaluation.in_openvino(tmp_path / "unknown.onnx", feeds, outputs, outputs)
    assert set(result) == {"failed"}
