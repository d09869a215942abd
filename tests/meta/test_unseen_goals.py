"""The benchmark on unseen models reports which goals a file does not meet, and why."""

import importlib

import numpy as np
import pytest


@pytest.fixture
def goals(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module("unseen_goals")


@pytest.fixture
def worker(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module("unseen_worker")


def row(tool, **changed):
    plain = {
        "tool": tool,
        "sqnr_db": 20.0,
        "agreement": 0.99,
        "size_ratio": 0.3,
        "cpu_1": {"ratio": 0.5},
        "cpu_2": {"ratio": 0.5},
        "cpu_seconds": 2.0,
        "verify_ok": True,
    }
    return plain | changed


def failures(goals, ours=None, other=None):
    rows = [row("detent", **(ours or {})), row("ORT MinMax, reduced", **(other or {}))]
    (comparison,) = goals.compare({each["tool"]: each for each in rows})
    return list(comparison.failures)


def test_equal_files_meet_all_goals(goals):
    assert failures(goals) == []


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        ({"sqnr_db": 19.8}, {}, []),
        ({"sqnr_db": 19.0}, {}, ["SQNR -1.0 dB"]),
        ({"sqnr_db": None}, {}, []),
        ({"agreement": 0.986}, {}, []),
        ({"agreement": 0.98}, {}, ["agreement -1.0 points"]),
        ({"cpu_1": {"ratio": 0.52}}, {}, []),
        ({"cpu_1": {"ratio": 0.6}}, {}, ["time 1.20x of ONNX Runtime's file"]),
        ({"cpu_1": {"ratio": 0.97}}, {}, ["time 0.97 of float, ONNX Runtime's 0.50"]),
        ({"cpu_1": {"ratio": 1.2}}, {"cpu_1": {"ratio": 1.2}}, ["slower than float without a warning"]),
        ({"cpu_1": {"ratio": 1.2}, "warnings": ["slower than float"]}, {"cpu_1": {"ratio": 1.2}}, []),
        ({"size_ratio": 0.33}, {}, ["size 1.10x of the smallest"]),
        ({"cpu_seconds": 10.0}, {}, ["5.0x the CPU time to quantize"]),
        ({"verify_ok": False, "verify_error": "wrong code"}, {}, ["verify: wrong code"]),
    ],
)
def test_each_goal_names_its_reason(goals, ours, other, expected):
    assert failures(goals, ours, other) == expected


def test_a_tool_without_a_file_is_left_out(goals):
    rows = {"detent": row("detent"), "NNCF, reduced": {"tool": "NNCF, reduced", "failed": "not installed"}}
    (comparison,) = goals.compare(rows)
    assert comparison.failures == ()
    assert comparison.best["sqnr_db"] is None


def test_detent_that_fails_is_a_failure(goals):
    (comparison,) = goals.compare({"detent": {"tool": "detent", "failed": "ShapeError: two"}})
    assert comparison.failures == ("failed: ShapeError: two",)
    assert "ShapeError: two" in goals.table({"small": {"detent": {"tool": "detent", "failed": "ShapeError: two"}}})


def test_full_range_tools_are_compared_with_the_vnni_target(goals):
    rows = [row("detent"), row("detent, vnni"), row("ORT MinMax", sqnr_db=30.0)]
    default, vnni = goals.compare({each["tool"]: each for each in rows})
    assert default.failures == ()
    assert vnni.failures == ("SQNR -10.0 dB",)


def test_the_summary_counts(goals):
    rows = [row("detent", sqnr_db=21.0), row("ORT MinMax, reduced")]
    text = goals.summary({"small": {each["tool"]: each for each in rows}})
    assert text.splitlines()[0] == "detent: 1 of 1 models meet all goals; highest SQNR on 1 of 1"


def test_outputs_of_other_lengths_are_left_out_of_sqnr(worker):
    plain = [[np.ones(3, np.float32)], [np.ones(2, np.float32)]]
    quantized = [[np.full(3, 1.1, np.float32)], [np.ones(1, np.float32)]]
    result = worker._quality(None, plain, quantized)
    assert result["skipped_runs"] == 1
    assert result["sqnr_db"] == pytest.approx(20.0, abs=0.01)


def test_missing_decisions_count_as_different(worker):
    plain, quantized = [[np.array([1.0, 2.0])]], [[np.array([1.0])]]
    result = worker._quality(lambda outputs: outputs[0].astype(int), plain, quantized)
    assert result["agreement"] == 0.5
