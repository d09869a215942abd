"""The QAT tables of docs/benchmarks.md are rendered from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WIDTHS = (8, 4, 3, 2)
METHODS = ("PTQ", "QAT, EMA", "QAT, learned")


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_qat")


@pytest.fixture
def cost(render):
    return json.loads(render.COST.read_text(encoding="utf-8"))


@pytest.fixture
def accuracy(render):
    return json.loads(render.ACCURACY.read_text(encoding="utf-8"))


@pytest.fixture
def defaults(render):
    return json.loads(render.DEFAULTS.read_text(encoding="utf-8"))


def test_tables_are_rendered_from_the_committed_results(render, cost, accuracy, defaults):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(cost, accuracy, defaults)) == page, "run benchmarks/render_qat.py"


def test_a_slow_step_is_marked(render, cost, accuracy, defaults):
    for row in cost["rows"]:
        row["ratio"] = 0.5
    assert "(not met)" not in render.rendered(cost, accuracy, defaults)["cost"]
    next(row for row in cost["rows"] if row["tool"] == "detent")["ratio"] = 9.87
    assert "9.87 (not met)" in render.rendered(cost, accuracy, defaults)["cost"]


def test_goals_of_integer_products_and_learned_scales(render):
    assert render.step_goal("detent, integer products", "cnn", "channels last") == 0.92
    assert render.step_goal("detent, integer and learned", "cnn", "channels last") == 1.02
    assert render.step_goal("detent, learned scales", "mlp", "NCHW") == 1.25
    assert render.step_goal("brevitas", "mlp", "NCHW") is None


def test_too_many_bytes_are_marked(render, cost, accuracy, defaults):
    next(row for row in cost["memory"] if row["tool"] == "detent")["saved_ratio"] = 9.87
    assert "9.87 (not met)" in render.rendered(cost, accuracy, defaults)["memory"]


def test_lost_accuracy_is_marked(render, cost, accuracy, defaults):
    for row in accuracy["rows"]:
        if (row["method"], row["bits"]) == ("QAT, learned", 2):
            row["accuracy"] = 0.0
    line = next(
        line
        for line in render.rendered(cost, accuracy, defaults)["accuracy"].splitlines()
        if line.startswith("| QAT, learned | 2 |")
    )
    assert "(not met)" in line


def test_results_are_full_runs(cost, accuracy):
    assert not cost["quick"]
    assert not accuracy["quick"]
    models = {"cnn", "resnet18", "mobilenet", "transformer", "encoder-256", "encoder-512", "mlp", "mlp-1024", "small"}
    assert {row["model"] for row in cost["rows"]} == models
    pictures = {"cnn", "resnet18", "mobilenet", "small"}
    assert {row["model"] for row in cost["rows"] if row["layout"] == "channels last"} == pictures
    assert len({row["threads"] for row in cost["rows"]}) == 2
    ours = {"detent", "detent, integer products"}
    for model, layout, threads in {(row["model"], row["layout"], row["threads"]) for row in cost["rows"]}:
        key = {"model": model, "layout": layout, "threads": threads}
        assert ours <= {row["tool"] for row in cost["rows"] if key.items() <= row.items()}
    assert {"detent", "torch.ao FX", "torchao", "brevitas"} <= {row["tool"] for row in cost["rows"]}
    measured = {(row["method"], row["bits"], row["seed"]) for row in accuracy["rows"]}
    assert {(method, bits, seed) for method in METHODS for bits in WIDTHS for seed in accuracy["seeds"]} <= measured
    assert len(accuracy["seeds"]) >= 2


def test_bits_claimed_are_bits_used(accuracy):
    """No inner convolution or matmul has more distinct values than its bit width has codes."""
    checked = 0
    for row in accuracy["rows"]:
        if row["method"] not in METHODS:
            continue
        assert len(row["distinct_values"]) == 6
        for layer in row["distinct_values"][1:-1]:
            assert max(layer["inputs"], layer["weights"]) <= 2 ** row["bits"], row
            checked += 1
    assert checked


def test_default_settings_were_compared_on_all_seeds(defaults):
    assert not defaults["quick"]
    measured = {(row["task"], row["seed"], row["method"], row["bits"]) for row in defaults["rows"]}
    for task in ("cnn", "transformer"):
        for method in ("detent, default", "plain LSQ", "brevitas"):
            assert {(task, seed, method, 2) for seed in range(5)} <= measured
        for method, bits in (("float, same epochs", None), ("detent, integer products", 8)):
            assert {(task, seed, method, bits) for seed in range(5)} <= measured


def test_default_settings_below_another_method_are_marked(render, cost, accuracy, defaults):
    for row in defaults["rows"]:
        row["accuracy"] = {"detent, default": 90.0, "detent, integer products": 90.0}.get(row["method"], 89.0)
        row["accuracy"] += 0.01 * (row["seed"] % 2)
    assert "(not met)" not in render.rendered(cost, accuracy, defaults)["defaults"]
    for row in defaults["rows"]:
        if row["method"] in ("plain LSQ", "float, same epochs"):
            row["accuracy"] = 93.0 + 0.1 * row["seed"]
    lines = [line for line in render.rendered(cost, accuracy, defaults)["defaults"].splitlines() if "(not met)" in line]
    assert all("| plain LSQ |" in line or "| 2 | detent, default |" in line for line in lines)
    assert len(lines) > 2
