"""The tables of block formats and checkpoints in docs/benchmarks.md are rendered from the committed results."""

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
    return {
        name: json.loads((render.RESULTS / file).read_text(encoding="utf-8")) for name, file in render.FILES.items()
    }


def test_the_tables_are_rendered_from_the_committed_results(render):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.sections()) == page, "run benchmarks/render_checkpoint.py"


def test_every_format_was_measured_and_equal(committed):
    rows = committed["formats"]["formats"]
    assert set(rows) == set(dt.gguf.BLOCK_FORMATS)
    assert all(row["equal"] for row in rows.values())


def test_conversions_hold_what_the_page_says(committed):
    proofs, gemma = committed["proofs"], committed["gemma"]
    assert proofs["memory"]["verified"]
    assert proofs["memory"]["source_bytes"] >= 20e9
    assert proofs["memory"]["largest_anonymous_bytes"] < 1e9
    assert proofs["kill"]["same_bytes"] == proofs["kill"]["kills"] == 100
    assert proofs["kill"]["leftovers"] == []
    assert proofs["speed"]["tensors_that_differ"] == 0
    assert min(proofs["speed"]["times_as_fast"].values()) >= 2
    for row in proofs["mutations"].values():
        assert row["valid"] + row["errors"] == row["files"] == 10_000
        assert row["slowest_seconds"] < 1
        assert row["grown_bytes"] < 200 << 20
    assert all(row["same_logits"] and not row["tensors_that_differ"] for row in gemma["mixtures"].values())


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
