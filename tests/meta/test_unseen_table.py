"""The table of unseen models in the docs shows the committed results."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render_unseen")


def test_the_page_is_rendered_from_the_committed_results(render):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(*render.committed())) == page, "run benchmarks/render_unseen.py"


def test_sections_of_fresh_models_are_rendered_like_the_others(render):
    result, stability, large, _ = render.committed()
    without = render.rendered(result, stability, large)
    assert (without["fresh-summary"], without["fresh-table"]) == ("", "")
    with_results = render.rendered(result, stability, large, result)
    assert with_results["fresh-summary"] == with_results["unseen-summary"]
    assert with_results["fresh-table"] == with_results["unseen-table"]


def test_a_benchmark_that_was_not_run_has_no_result(render, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "FRESH", tmp_path / "none.json")
    assert render.committed()[-1] is None


def test_the_table_of_stability_shows_goals_that_are_not_met(render):
    rows = [{"part": "counts", "model": "a", "sqnr_db": {"32": 30.0, "128": 29.0}, "loss_db": 1.0, "ok": False}]
    assert render._stability(rows).splitlines()[-1] == (
        "| a | number of samples, compared with 32 | 32: 30.0, 128: 29.0 | 1.0 | **not met** |"
    )


def test_drops_between_larger_numbers_of_samples_are_named(render):
    ratios = {"32": 28.1, "128": 35.7, "256": 32.2}
    rows = [
        {"part": "counts", "model": "a", "sqnr_db": ratios},
        {"part": "counts", "model": "b", "sqnr_db": {"32": 30.0, "128": 31.0}},
    ]
    assert render._drops(rows) == (
        "From one number of samples to the next, the SQNR drops on 1 of 2 models: a 3.5 dB. No goal covers this."
    )
    assert render._drops(rows[1:]) == "From one number of samples to the next, the SQNR drops on 0 of 1 models."


def test_every_model_has_a_row_for_the_default_target(render):
    result, *others = render.committed()
    models = render.by_model(result)
    table = render.rendered(result, *others)["unseen-table"].splitlines()
    assert len(table) == 2 + len(models)
    assert all("detent" in rows for rows in models.values())
    assert all(any(line.startswith(f"| {name} |") for line in table) for name in models)
