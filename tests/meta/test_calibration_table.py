"""The tables of docs/howto/calibrate.md are what benchmarks/render_calibration.py makes of the committed results."""

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


def test_a_missed_bar_is_called_missed(render, result):
    result["speed"]["entropy threshold, 2048 bins"]["detent"] = 1e9
    assert "(missed)" in render.rendered(result)["speed"]


def test_no_other_range_was_better_than_the_searched_one(result):
    for name, errors in result["errors"].items():
        assert min(errors.values()) >= 0.999, name
