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


def test_the_page_is_rendered_from_the_committed_results(render):
    result = json.loads(render.RESULT.read_text(encoding="utf-8"))
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(result)) == page, "run benchmarks/render_unseen.py"


def test_every_model_has_a_row_for_the_default_target(render):
    result = json.loads(render.RESULT.read_text(encoding="utf-8"))
    models = render.by_model(result)
    table = render.rendered(result)["unseen-table"].splitlines()
    assert len(table) == 2 + len(models)
    assert all("detent" in rows for rows in models.values())
    assert all(any(line.startswith(f"| {name} |") for line in table) for name in models)
