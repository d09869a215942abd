"""The tables of dynamic quantization in docs/benchmarks.md are rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOOLS = ("detent", "onnxruntime per channel", "onnxruntime per tensor")


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_dynamic")


@pytest.fixture
def committed(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def row(**changed):
    time = {"ratio": changed.pop("ratio", 0.5)}
    equal = {"cpu": "VNNI", "sqnr_db": 30.0, "cosine": 0.999, "decisions": 0.9, "size_ratio": 0.25, "time": time}
    return equal | changed


def rows(**changed):
    return {f"{tool}{suffix}": row() for tool in TOOLS for suffix in ("", " vnni")} | {"detent": row(**changed)}


def test_tables_are_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_dynamic.py"


def test_sqnr_size_and_time_are_not_worse_than_per_channel(render, committed):
    assert {"minilm", "bert", "gpt"} <= committed["models"].keys()
    for name, facts in committed["models"].items():
        worse = {metric.removesuffix(" vnni") for metric in render.worse_metrics(facts["rows"])}
        assert worse.isdisjoint({"sqnr_db", "cosine", "size_ratio", "time"}), name


@pytest.mark.parametrize(
    ("changed", "worse"),
    [
        ({}, []),
        ({"sqnr_db": 31.0, "ratio": 0.51}, []),
        ({"sqnr_db": 29.9}, ["sqnr_db"]),
        ({"size_ratio": 0.26, "ratio": 0.53}, ["size_ratio", "time"]),
    ],
)
def test_what_is_worse(render, changed, worse):
    assert render.worse_metrics(rows(**changed)) == worse


def test_the_summary_names_what_is_worse(render):
    sections = render.rendered({"models": {"net": {"rows": rows(size_ratio=0.3)}}})
    assert "only in net (size_ratio)" in sections["dynamic-reading"]
    assert "| net | VNNI | detent | 30.0 dB | 0.99900 | 90.00% | 0.300 | 0.50 |" in sections["dynamic-table"]
    assert "in no metric" in render.rendered({"models": {"net": {"rows": rows()}}})["dynamic-reading"]
