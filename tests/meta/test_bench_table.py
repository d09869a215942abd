"""The kernel table of docs/benchmarks.md is rendered from the committed results, and a changed result changes it."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render")


@pytest.fixture
def result(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def test_table_is_rendered_from_the_committed_results(render, result):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(result)) == page, "run benchmarks/render.py"


def test_a_changed_result_changes_the_table(render, result):
    before = render.rendered(result)
    for row in result["rows"]:
        row["times_copy"] += 1.0
    assert render.rendered(result) != before


def test_a_goal_not_met_is_marked(render, result):
    result["calls"][0]["median_us"] = 1e6
    assert "1000000.00 (not met)" in render.rendered(result)


def test_results_are_a_full_run_and_say_where(result):
    assert not result["quick"]
    assert result["machine"]["cpu"]
    assert result["versions"]["numpy"]
    assert {row["size"] for row in result["rows"]} == {1000, 2**16, 2**20, 2**24}
