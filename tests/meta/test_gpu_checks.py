"""The table of docs/howto/gpu.md is rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_checks")


def test_the_table_is_rendered_from_the_committed_results(checks):
    page = checks.PAGE.read_text(encoding="utf-8")
    committed = json.loads(checks.RESULT.read_text(encoding="utf-8"))
    assert checks.placed(page, checks.rendered(committed)) == page, "run benchmarks/gpu_checks.py"


def test_results_are_added_up(checks):
    rows = [
        {"test": "a", "points": 5},
        {"test": "b", "points": 7},
        {"test": "c", "values": 2},
        {"test": "d", "kernels": 3, "target": "sm_80"},
        {"test": "e", "kernels": 4, "target": "sm_80"},
    ]
    assert checks.summed(rows) == {"tests": 5, "points": 12, "values": 2, "kernels": {"sm_80": 7}}


@pytest.mark.parametrize(("points", "expected"), [(10**8, "goal: 10^8, met"), (10**8 - 1, "not met yet")])
def test_the_goal(checks, points, expected):
    result = {"date": "2026-01-01", "versions": {"torch": "2"}, "points": points, "values": 0, "kernels": {"sm_80": 1}}
    assert expected in checks.rendered(result)["gpu-checks"]
