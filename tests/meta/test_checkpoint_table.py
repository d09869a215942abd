"""The table of block formats in docs/benchmarks.md is rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

import detent as dt

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_checkpoint")


@pytest.fixture
def committed(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def test_the_table_is_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_checkpoint.py"


def test_every_format_was_measured_and_equal(committed):
    assert set(committed["formats"]) == set(dt.gguf.BLOCK_FORMATS)
    assert all(row["equal"] for row in committed["formats"].values())


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"plain": {"detent": 3.9, "ggml": 1.0, "two_threads": 1.8}}, ["q4_k quantize"]),
        ({"plain": {"detent": 5.0, "ggml": 1.0, "two_threads": 1.6}}, ["q4_k on two threads"]),
        ({"dequantize": {"detent": 0.9, "ggml": 1.0}}, ["q4_k dequantize"]),
        ({"equal": False}, ["q4_k bytes"]),
    ],
)
def test_goals_that_are_not_met_are_named(render, changed, missed):
    fast = {"detent": 5.0, "ggml": 1.0, "two_threads": 1.8}
    row = {"bits_per_weight": 4.5, "equal": True, "plain": fast, "weighted": fast, "dequantize": fast} | changed
    assert render.missed({"formats": {"q4_k": row}}) == missed
