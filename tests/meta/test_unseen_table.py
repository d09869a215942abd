"""The table of unseen models in the docs shows the committed results."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render_unseen")


def results(render):
    return [json.loads(path.read_text(encoding="utf-8")) for path in (render.RESULT, render.STABILITY, render.LARGE)]


def test_the_page_is_rendered_from_the_committed_results(render):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(*results(render))) == page, "run benchmarks/render_unseen.py"


def test_the_table_of_stability_shows_goals_that_are_not_met(render):
    rows = [{"part": "counts", "model": "a", "sqnr_db": {"32": 30.0, "128": 29.0}, "loss_db": 1.0, "ok": False}]
    assert render._stability(rows).splitlines()[-1] == (
        "| a | number of samples | 32: 30.0, 128: 29.0 | 1.0 | **not met** |"
    )


def test_every_model_has_a_row_for_the_default_target(render):
    result, *others = results(render)
    models = render.by_model(result)
    table = render.rendered(result, *others)["unseen-table"].splitlines()
    assert len(table) == 2 + len(models)
    assert all("detent" in rows for rows in models.values())
    assert all(any(line.startswith(f"| {name} |") for line in table) for name in models)
