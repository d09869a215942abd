"""Render the QAT tables of docs/benchmarks.md from the committed results.

::

    python benchmarks/render_qat.py

Milliseconds of the float step are means of the medians of all rounds; "alive" counts what the C library says.
"""

import json
from pathlib import Path
from statistics import mean

from budget import QAT_POINTS, QAT_SAVED, QAT_STEP
from page import placed

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
COST = ROOT / "benchmarks" / "results" / "qat_cost.json"
ACCURACY = ROOT / "benchmarks" / "results" / "qat_accuracy.json"
OURS = "detent"
CONTINUED = "float, trained on"
DATA = {"mnist": "MNIST", "fashion": "Fashion-MNIST"}


def rendered(cost: dict, accuracy: dict) -> dict[str, str]:
    """Each section by its name, as Markdown."""
    return {"cost": _cost(cost), "memory": _memory(cost), "accuracy": _accuracy(accuracy)}


def _cost(result: dict) -> str:
    """The time of a step over the float step's: a row per contestant, a column per model and number of threads."""
    machine, versions = result["machine"], result["versions"]
    names = ("torch", "torchao", "brevitas", "nvidia-modelopt")
    first = (
        f"{machine['cpu']} ({machine['level']}), load average {machine['load_average']:g} at the start, "
        f"{result['date']}; " + ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    )
    found = {(row["contestant"], row["model"], row["threads"]): row for row in result["rows"]}
    columns = list(dict.fromkeys((model, threads) for _, model, threads in found))
    heads = [f"{model}, {threads} thread{'s' * (threads > 1)}" for model, threads in columns]
    plain = [_float(model, threads, found) for model, threads in columns]
    lines = [
        first,
        "",
        _line("step time / float step time (lower is better)", *heads),
        "|---|" + "--:|" * len(columns),
        _line("float", *plain),
    ]
    for contestant in dict.fromkeys(name for name, _, _ in found):
        cells = []
        for model, threads in columns:
            row = found.get((contestant, model, threads))
            cells.append("" if row is None else _judged(row["ratio"], QAT_STEP if contestant == OURS else None))
        lines.append(_line(_bold(contestant), *cells))
    lines += ["", f"Goal for detent: at most {QAT_STEP:g}. " + _titles(result)]
    return "\n".join(lines)


def _float(model: str, threads: int, found: dict) -> str:
    """The milliseconds of the float step, over everybody's rounds."""
    return f"{mean(row['float_ms'] for (_, m, t), row in found.items() if (m, t) == (model, threads)):.0f} ms"


def _memory(result: dict) -> str:
    """The bytes saved for backward over the float model's, and all that is alive because of a step."""
    found = {(row["contestant"], row["model"]): row for row in result["memory"]}
    models = list(dict.fromkeys(model for _, model in found))
    heads = [f"{model}, {kind}" for model in models for kind in ("saved", "alive")]
    lines = [_line("bytes / float's (lower is better)", *heads), "|---|" + "--:|" * len(heads)]
    for contestant in dict.fromkeys(name for name, _ in found):
        cells = []
        for model in models:
            cells += _bytes(found.get((contestant, model)), contestant)
        lines.append(_line(_bold(contestant), *cells))
    lines += ["", f"Goal for the bytes that detent saves: at most {QAT_SAVED:g}."]
    return "\n".join(lines)


def _bytes(row: dict | None, contestant: str) -> list[str]:
    if row is None:
        return ["", ""]
    if contestant == "float":
        return [_megabytes(row["saved_bytes"]), _megabytes(row["held_bytes"])]
    held = row.get("held_ratio")
    saved = _judged(row["saved_ratio"], QAT_SAVED if contestant.startswith(OURS) else None)
    return [saved, "" if held is None else f"{held:.2f}"]


def _accuracy(result: dict) -> str:
    """Test accuracy, the mean of the seeds, and the distance to the float model trained on."""
    found: dict[tuple[str, int | None], list[dict]] = {}
    for row in result["rows"]:
        found.setdefault((row["method"], row["bits"]), []).append(row)
    score = {key: mean(row["accuracy"] for row in rows) for key, rows in found.items()}
    float_score = score[CONTINUED, None]
    first = (
        f"{DATA[result['data']]} ({result['package']}), {result['pictures']} training images, "
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
    lines = [first, "", _line("method", "bits", *heads), "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for (method, bits), rows in found.items():
        bar = QAT_POINTS.get((method, bits))
        below = float_score - score[method, bits]
        missed = " (not met)" if bar is not None and below > bar else ""
        seeds = ", ".join(f"{row['accuracy']:.2f}" for row in rows)
        cells = [method, str(bits or 32), f"{score[method, bits]:.2f}", seeds, f"{below:+.2f}{missed}"]
        cells += [f"≤ {bar:g}" if bar else "", *(_values(rows) if bits else ("", ""))]
        lines.append(_line(*cells))
    return "\n".join(lines)


def _values(rows: list[dict]) -> tuple[str, str]:
    """The most distinct values in any inner product, and in the first and in the last one, over all seeds."""
    runs = [row["products"] for row in rows]
    inner = [product for run in runs for product in run[1:-1]]
    ends = [[run[place] for run in runs] for place in (0, -1)]
    return _most(inner), ", ".join(_most(end) for end in ends)


def _most(products: list[dict]) -> str:
    return " / ".join(str(max(product[part] for product in products)) for part in ("inputs", "weights"))


def _titles(result: dict) -> str:
    return "; ".join(result["titles"].values()) + "."


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _bold(contestant: str) -> str:
    return f"**{contestant}**" if contestant == OURS else contestant


def _judged(value: float, bar: float | None) -> str:
    return f"{value:.2f}" + (" (not met)" if bar is not None and value > bar else "")


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f} MB"


def main() -> None:
    """Rewrite the page."""
    cost, accuracy = (json.loads(path.read_text(encoding="utf-8")) for path in (COST, ACCURACY))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(placed(page, rendered(cost, accuracy)), encoding="utf-8")


if __name__ == "__main__":
    main()
