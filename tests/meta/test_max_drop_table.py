"""The table of max_drop in docs/benchmarks.md is rendered from the committed results, which meet the goals."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_max_drop")


@pytest.fixture
def committed(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def test_the_table_is_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_max_drop.py"


def test_three_networks_at_two_recipes(committed):
    pairs = {(row["network"], row["recipe"]) for row in committed["rows"]}
    assert len(pairs) == 6
    assert {recipe for _, recipe in pairs} == {"w8a8", "w4a8"}
    assert all(row["layers"] <= 10 and row["verified"] for row in committed["rows"])


def test_the_limit_is_met_on_samples_that_the_search_has_not_seen(committed):
    for row in committed["rows"]:
        assert row["evaluation"]["drop"] <= row["max_drop"], (row["network"], row["recipe"])


def test_bytes_are_near_those_of_an_exhaustive_search(render, committed):
    for row in committed["rows"]:
        assert row["sets"] >= 2**5
        assert render.ratio(row) <= render.MAX_RATIO, (row["network"], row["recipe"])


def test_goals_that_are_not_met_are_marked(render, committed):
    row = {**committed["rows"][0], "is_met": False, "nbytes_after": 2000, "nbytes_best": 1000}
    table, reading = render.rendered({"rows": [row]}).values()
    assert table.count("(not met)") == 2
    assert "(0 of 1)" in reading
