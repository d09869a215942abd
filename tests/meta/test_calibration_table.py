"""The calibration tables of docs/benchmarks.md are rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_calibration")


@pytest.fixture
def result(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def test_tables_are_rendered_from_the_committed_results(render, result):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(result)) == page, "run benchmarks/render_calibration.py"


def test_a_goal_not_met_is_marked(render, result):
    result["speed"]["entropy threshold, 2048 bins"]["detent"] = 1e9
    assert "(not met)" in render.rendered(result)["calibration-speed"]


def test_no_other_range_was_better_than_the_searched_one(result):
    for name, errors in result["errors"].items():
        assert min(errors.values()) >= 0.999, name
