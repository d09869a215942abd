"""The tables of kinds of graphs in docs/onnx-benchmark.md are rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_graph_kinds")


@pytest.fixture
def committed(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def row(sqnr_db=30.0, **changed):
    return {"sqnr_db": sqnr_db, "decisions": 0.9, "size_ratio": 0.25, "time": {"ratio": 0.5}} | changed


def models(ours, theirs):
    return {"net": {"kind": "LSTM", "rows": {"w8a8": ours, "ORT static": theirs}}}


def test_tables_are_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_graph_kinds.py"


def test_all_files_of_detent_are_verified(committed):
    rows = [row for facts in committed["models"].values() for row in facts["rows"].values()]
    assert [row for row in rows if row.get("verified") is False] == []
    assert sum(row.get("verified") is True for row in rows) >= 10


@pytest.mark.parametrize("name", ["lstm", "captcha", "arabic", "silero-vad", "hebrew"])
def test_sqnr_is_not_below_that_of_onnx_runtime(render, committed, name):
    assert list(render.lower_sqnr({name: committed["models"][name]})) == []


def test_what_is_lower_is_named(render):
    lower = models(row(29.0, verified=True), row())
    assert list(render.lower_sqnr(lower)) == ["net with w8a8 (29.0 dB at 0.25 and 30.0 dB at 0.25 of the size)"]
    assert list(render.lower_sqnr(models(row(verified=True), row()))) == []
    sections = render.rendered({"models": lower})
    assert "lower only for net with w8a8" in sections["kinds-reading"]
    assert "| net | LSTM | w8a8 | 29.0 dB | 90.00% | 0.250 | 0.50 | yes |" in sections["kinds-table"]


def test_failures_and_rejected_files_are_shown(render):
    sections = render.rendered({"models": models(row(verified=False), {"failed": "ValueError: no"})})
    assert "accepts 0 of 1 files" in sections["kinds-reading"]
    assert "These tools fail: ORT static for net." in sections["kinds-reading"]
    assert "| ORT static | fails | - | - | - |" in sections["kinds-table"]
    assert "**no**" in sections["kinds-table"]
