"""Render the QAT tables of docs/benchmarks.md from the committed results.

::

    python benchmarks/render_qat.py

The time of the float step is the mean over the rounds of all tools. "alive" is measured with the C library's allocator.
"""

import json
from pathlib import Path
from statistics import mean

from goals import QAT_POINTS, QAT_SAVED, QAT_STEP
from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
COST = ROOT / "benchmarks" / "results" / "qat_cost.json"
ACCURACY = ROOT / "benchmarks" / "results" / "qat_accuracy.json"
OURS = "detent"
CONTINUED = "float, same epochs"
DATA = {"mnist": "MNIST", "fashion": "Fashion-MNIST"}


def rendered(cost: dict, accuracy: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {"cost": _cost(cost), "memory": _memory(cost), "accuracy": _accuracy(accuracy)}


def _cost(result: dict) -> str:
    """Render step times relative to the float step: a row per tool, a column per model and number of threads."""
    machine, versions = result["machine"], result["versions"]
    names = ("torch", "torchao", "brevitas", "nvidia-modelopt")
    first = (
        f"{machine['cpu']} ({machine['level']}), load average {machine['load_average']:g} at the start, "
        f"{result['date']}; " + ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    )
    rows_by_key = {(row["tool"], row["model"], row["threads"]): row for row in result["rows"]}
    columns = list(dict.fromkeys((model, threads) for _, model, threads in rows_by_key))
    heads = [f"{model}, {threads} thread{'s' * (threads > 1)}" for model, threads in columns]
    plain = [_float(model, threads, rows_by_key) for model, threads in columns]
    lines = [
        first,
        "",
        table_row("step time / float step time (lower is better)", *heads),
        "|---|" + "--:|" * len(columns),
        table_row("float", *plain),
    ]
    for tool in dict.fromkeys(name for name, _, _ in rows_by_key):
        cells = []
        for model, threads in columns:
            row = rows_by_key.get((tool, model, threads))
            cells.append("" if row is None else _marked(row["ratio"], QAT_STEP if tool == OURS else None))
        lines.append(table_row(_bold(tool), *cells))
    lines += ["", f"Goal for detent: at most {QAT_STEP:g}. " + _titles(result)]
    return "\n".join(lines)


def _float(model: str, threads: int, rows_by_key: dict) -> str:
    """Format the milliseconds of the float step, a mean over the rounds of all tools."""
    return f"{mean(row['float_ms'] for (_, m, t), row in rows_by_key.items() if (m, t) == (model, threads)):.0f} ms"


def _memory(result: dict) -> str:
    """Render bytes kept for backward ("saved") and bytes allocated by a step ("alive"), relative to the float model."""
    rows_by_key = {(row["tool"], row["model"]): row for row in result["memory"]}
    models = list(dict.fromkeys(model for _, model in rows_by_key))
    heads = [f"{model}, {kind}" for model in models for kind in ("saved", "alive")]
    lines = [table_row("bytes / bytes of float (lower is better)", *heads), "|---|" + "--:|" * len(heads)]
    for tool in dict.fromkeys(name for name, _ in rows_by_key):
        cells = []
        for model in models:
            cells += _bytes(rows_by_key.get((tool, model)), tool)
        lines.append(table_row(_bold(tool), *cells))
    lines += ["", f"Goal for *saved* of detent: at most {QAT_SAVED:g}."]
    return "\n".join(lines)


def _bytes(row: dict | None, tool: str) -> list[str]:
    if row is None:
        return ["", ""]
    if tool == "float":
        return [_megabytes(row["saved_bytes"]), _megabytes(row["held_bytes"])]
    held = row.get("held_ratio")
    saved = _marked(row["saved_ratio"], QAT_SAVED if tool.startswith(OURS) else None)
    return [saved, "" if held is None else f"{held:.2f}"]


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
    cost, accuracy = (json.loads(path.read_text(encoding="utf-8")) for path in (COST, ACCURACY))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(placed(page, rendered(cost, accuracy)), encoding="utf-8")


if __name__ == "__main__":
    main()
