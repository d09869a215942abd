"""Render the QAT tables of docs/benchmarks.md from the committed results.

::

    python benchmarks/render_qat.py

The time of the float step is the mean over the rounds of all tools. "alive" is measured with the C library's allocator.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

from goals import QAT_DEFAULT_POINTS, QAT_INTEGER, QAT_LEARNED, QAT_POINTS, QAT_SAVED, QAT_STEP
from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
COST = ROOT / "benchmarks" / "results" / "qat_cost.json"
ACCURACY = ROOT / "benchmarks" / "results" / "qat_accuracy.json"
DEFAULTS = ROOT / "benchmarks" / "results" / "qat_defaults.json"
OURS, LEARNED = "detent", "detent, learned scales"
INTEGER, INTEGER_LEARNED = "detent, integer products", "detent, integer and learned"
CONTINUED = "float, same epochs"
DEFAULT, DEFAULT_INTEGER = "detent, default", "detent, integer products"
NETWORKS = {"cnn": "CNN", "transformer": "transformer"}
NOISE = 2  # standard errors of a difference that is explained by chance
DATA = {"mnist": "MNIST", "fashion": "Fashion-MNIST"}


def rendered(cost: dict, accuracy: dict, defaults: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    sections = {"cost": _cost(cost), "memory": _memory(cost), "accuracy": _accuracy(accuracy)}
    return sections | {"defaults": _defaults(defaults)}


def _cost(result: dict) -> str:
    """Render step times relative to the float step: a table per number of threads, a row per model and layout."""
    machine, versions = result["machine"], result["versions"]
    names = ("torch", "torchao", "brevitas", "nvidia-modelopt")
    first = f"{machine['cpu']} ({machine['level']}), {result['date']}; " + ", ".join(
        f"{name} {versions[name]}" for name in names if versions.get(name)
    )
    lines = [first]
    for threads in sorted({row["threads"] for row in result["rows"]}):
        lines += ["", *_times(result, threads)]
    return "\n".join([*lines, "", _titles(result)])


def _times(result: dict, threads: int) -> list[str]:
    rows_by_key = {
        (row["model"], row["layout"], row["tool"]): row for row in result["rows"] if row["threads"] == threads
    }
    tools = list(dict.fromkeys(tool for _, _, tool in rows_by_key))
    head = f"{threads} thread{'s' * (threads > 1)}: step / float step (lower is better)"
    lines = [table_row(head, "float", *map(_bold, tools)), "|---|" + "--:|" * (1 + len(tools))]
    for model, layout in dict.fromkeys((model, layout) for model, layout, _ in rows_by_key):
        own = {tool: rows_by_key.get((model, layout, tool)) for tool in tools}
        plain = mean(row["float_ms"] for row in own.values() if row is not None)
        cells = [
            "" if row is None else _marked(row["ratio"], step_goal(tool, model, layout)) for tool, row in own.items()
        ]
        name = f"{model}, {layout}" if result_has_both(result, model) else model
        lines.append(table_row(name, f"{plain:.3g} ms", *cells))
    return lines


def result_has_both(result: dict, model: str) -> bool:
    """Return whether a model was measured in both memory formats."""
    return len({row["layout"] for row in result["rows"] if row["model"] == model}) > 1


def step_goal(tool: str, model: str, layout: str) -> float | None:
    """Return the goal for a step of detent, as a multiple of the float step; None for a row without a goal."""
    goals = {OURS: QAT_STEP, INTEGER: QAT_INTEGER[layout]}
    for name, base in ((LEARNED, OURS), (INTEGER_LEARNED, INTEGER)):
        goals[name] = {key: round(value + QAT_LEARNED, 2) for key, value in goals[base].items()}
    return goals.get(tool, {}).get(model)


def _memory(result: dict) -> str:
    """Render bytes kept for backward ("saved") and bytes allocated by a step ("alive"), relative to the float model."""
    rows_by_key = {(row["tool"], row["model"]): row for row in result["memory"] if row["layout"] == "NCHW"}
    tools = [tool for tool in dict.fromkeys(name for name, _ in rows_by_key) if tool != "float"]
    lines = [
        table_row("saved / alive, relative to float (lower is better)", "float, saved", *map(_bold, tools)),
        "|---|" + "--:|" * (1 + len(tools)),
    ]
    for model in dict.fromkeys(model for _, model in rows_by_key):
        cells = [_bytes(rows_by_key.get((tool, model)), tool) for tool in tools]
        lines.append(table_row(model, _megabytes(rows_by_key["float", model]["saved_bytes"]), *cells))
    lines += ["", f"Goal for *saved* of detent: at most {QAT_SAVED:g}."]
    return "\n".join(lines)


def _bytes(row: dict | None, tool: str) -> str:
    if row is None:
        return ""
    held = row.get("held_ratio")
    saved = _marked(row["saved_ratio"], QAT_SAVED if tool.startswith(OURS) else None)
    return saved if held is None else f"{saved} / {held:.2f}"


def _accuracy(result: dict) -> str:
    """Render test accuracy, mean over the seeds, and points below the float model trained for as many epochs."""
    rows_by_key: dict[tuple[str, int | None], list[dict]] = {}
    for row in result["rows"]:
        rows_by_key.setdefault((row["method"], row["bits"]), []).append(row)
    accuracy_by_key = {key: mean(row["accuracy"] for row in rows) for key, rows in rows_by_key.items()}
    float_accuracy = accuracy_by_key[CONTINUED, None]
    first = (
        f"{DATA[result['data']]} ({result['package']}), {result['images']} training images, "
        f"{len(result['seeds'])} seeds; float for {result['epochs']} epochs, "
        f"then {result['more_epochs']} more with each method; {result['date']}"
    )
    heads = (
        "test accuracy in %",
        "seeds",
        "points below float (lower is better)",
        "goal",
        "distinct values in inputs / weights",
        "first and last layer",
    )
    lines = [first, "", table_row("method", "bits", *heads), "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for (method, bits), rows in rows_by_key.items():
        goal = QAT_POINTS.get((method, bits))
        below = float_accuracy - accuracy_by_key[method, bits]
        not_met = " (not met)" if goal is not None and below > goal else ""
        seeds = ", ".join(f"{row['accuracy']:.2f}" for row in rows)
        cells = [method, str(bits or 32), f"{accuracy_by_key[method, bits]:.2f}", seeds, f"{below:+.2f}{not_met}"]
        cells += [f"≤ {goal:g}" if goal else "", *(_values(rows) if bits else ("", ""))]
        lines.append(table_row(*cells))
    return "\n".join(lines)


def _defaults(result: dict) -> str:
    """Render the accuracy of default settings and other methods: means and standard errors over the seeds."""
    accuracy: dict[tuple[str, int | None, str], dict[int, float]] = {}
    for row in result["rows"]:
        accuracy.setdefault((row["task"], row["bits"], row["method"]), {})[row["seed"]] = row["accuracy"]
    seeds = max(len(by_seed) for by_seed in accuracy.values())
    tools = ", ".join(f"{name} {result['tools'][name]}" for name in ("brevitas",) if result["tools"].get(name))
    lines = [f"{_machine(result)}; {seeds} seeds; {tools}", ""]
    heads = ("test accuracy in %", "points below float (lower is better)", "goal", "points above detent's default")
    lines += [table_row("network", "bits", "method", *heads), "|---|--:|---|--:|--:|--:|--:|"]
    order = ["float", CONTINUED, DEFAULT, DEFAULT_INTEGER]
    order += sorted({method for _, _, method in accuracy} - set(order))
    for task, bits, method in sorted(accuracy, key=lambda key: (key[0], -(key[1] or 32), order.index(key[2]))):
        own = accuracy[task, bits, method]
        below = _difference(accuracy.get((task, None, CONTINUED)), own)
        goal = QAT_DEFAULT_POINTS.get(bits or 32) if method == DEFAULT else None
        missed = goal is not None and below is not None and below[0] > goal
        cells = [NETWORKS[task], str(bits or 32), method, _with_error(_spread(own.values()))]
        cells += [_signed(below) + (" (not met)" if missed else ""), f"≤ {goal:g}" if goal else ""]
        lines.append(table_row(*cells, _against_default(method, own, accuracy.get((task, bits, DEFAULT)))))
    return "\n".join([*lines, "", *_budgets(result)])


def _against_default(method: str, own: dict[int, float], default: dict[int, float] | None) -> str:
    """Render how much better a method is than the default, and whether the goal for their difference is met."""
    if method == DEFAULT:
        return ""
    difference = _difference(own, default)
    if difference is None:
        return ""
    points, error = difference
    is_met = abs(points) <= NOISE * error if method == DEFAULT_INTEGER else points <= error
    return _signed(difference) + ("" if is_met else " (not met)")


def _difference(first: dict[int, float] | None, second: dict[int, float] | None) -> tuple[float, float] | None:
    """Return mean and standard error of the difference between two methods, seed by seed."""
    if not first or not second or not first.keys() & second.keys():
        return None
    return _spread([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def _spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    points = list(values)
    return mean(points), stdev(points) / len(points) ** 0.5 if len(points) > 1 else 0.0


def _with_error(spread: tuple[float, float]) -> str:
    return f"{spread[0]:.2f} ± {spread[1]:.2f}"


def _signed(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f"{spread[0]:+.2f} ± {spread[1]:.2f}"


def _budgets(result: dict) -> list[str]:
    """Render the data and the budget of each network."""
    lines = []
    for name, task in result["tasks"].items():
        data = f"{DATA[task['data']]} ({task['package']}), {task['images']} training images"
        training = f"batches of {task['size']}, Adam from {task['rate']:g}"
        epochs = f"float for {task['epochs']} epochs, then {task['more_epochs']} more with each method"
        lines.append(f"- {NETWORKS[name]}: {data}, {training}; {epochs}.")
    return lines


def _machine(result: dict) -> str:
    return f"{result['machine']['cpu']}, {result['date']}"


def _values(rows: list[dict]) -> tuple[str, str]:
    """Return the largest number of distinct values over all seeds: in inner layers, and in the first and last layer."""
    runs = [row["distinct_values"] for row in rows]
    inner = [layer for run in runs for layer in run[1:-1]]
    edges = [[run[place] for run in runs] for place in (0, -1)]
    return _most(inner), ", ".join(_most(edge) for edge in edges)


def _most(layers: list[dict]) -> str:
    return " / ".join(str(max(layer[part] for layer in layers)) for part in ("inputs", "weights"))


def _titles(result: dict) -> str:
    return "; ".join(result["titles"].values()) + "."


def _bold(tool: str) -> str:
    return f"**{tool}**" if tool == OURS else tool


def _marked(value: float, goal: float | None) -> str:
    return f"{value:.2f}" + (" (not met)" if goal is not None and value > goal else "")


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f} MB"


def main() -> None:
    """Rewrite the page."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in (COST, ACCURACY, DEFAULTS)]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(placed(page, rendered(*results)), encoding="utf-8")


if __name__ == "__main__":
    main()
