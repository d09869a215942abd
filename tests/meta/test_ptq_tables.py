"""Tables of attention, float16 models and ragged groups are rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_ptq")


@pytest.fixture
def committed(render):
    return {
        name: json.loads((render.RESULTS / file).read_text(encoding="utf-8")) for name, file in render.FILES.items()
    }


def test_tables_are_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_ptq.py"


def rows_of(committed, kind):
    models = committed["float16"]["models"].values()
    return [facts["rows"] for facts in models if facts["kind"] == kind]


def test_float16_files_are_more_accurate_than_those_of_onnx_runtime(committed):
    rows = rows_of(committed, "float16")
    assert len(rows) >= 3
    for each in rows:
        assert all(row["verified"] for tool, row in each.items() if not tool.startswith("ORT"))
        assert each["w8a8 float16"]["sqnr_db"] == each["w8a8"]["sqnr_db"]
        assert each["w8a8 float16"]["size_ratio"] <= each["w8a8"]["size_ratio"]
        ort = each["ORT static"]
        assert "failed" in ort or each["w8a8"]["sqnr_db"] > ort["sqnr_db"]


def test_all_linear_layers_are_quantized_in_ragged_groups(committed):
    rows = rows_of(committed, "ragged groups")
    assert len(rows) >= 3
    for each in rows:
        assert each["w4a16"]["verified"]
        reasons = set(each["w4a16"]["in_float"])
        conv = "per-group scales need a MatMul, Gemm, Gather or recurrent layer, not Conv"
        assert reasons <= {"a matmul of two activations", conv}


def test_ragged_groups_with_data_are_more_accurate_than_those_of_onnx_runtime(committed):
    for each in rows_of(committed, "ragged groups"):
        ours, theirs = each["w4a16 MatMul data"], [each["ORT affine"], each["ORT symmetric"]]
        assert ours["verified"]
        assert ours["sqnr_db"] >= max(row["sqnr_db"] for row in theirs)
        assert ours["size_ratio"] <= min(row["size_ratio"] for row in theirs)


def test_quantized_attention_is_verified(committed):
    models = committed["attention"]["models"]
    assert {"minilm", "bert", "gpt", "vit"} <= models.keys()
    for facts in models.values():
        assert all(row["verified"] for row in facts["rows"].values())
        assert facts["rows"]["quantized"]["matmuls"] > facts["rows"]["float"]["matmuls"] == 0
