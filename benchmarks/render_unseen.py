"""Render the tables of unseen models of docs/onnx-benchmark.md from the committed results.

::

    python benchmarks/render_unseen.py
"""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

from page import placed, table_row
from unseen_goals import MAX_COST, OTHERS, OURS, Comparison, compare, summary

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "onnx-benchmark.md"
RESULTS = ROOT / "benchmarks" / "results"
RESULT, FRESH = RESULTS / "onnx_unseen.json", RESULTS / "onnx_fresh.json"
STABILITY, LARGE = RESULTS / "onnx_stability.json", RESULTS / "onnx_large.json"
BASELINE = OTHERS[OURS[0]][0]
MIN_DROP_DB = 0.05  # smaller drops are 0.0 in the table
HEAD = ("model", "SQNR in dB", "best other", "agreement", "best other", "time", "ORT", "size", "best other", "not met")


def by_model(result: dict) -> dict[str, dict[str, dict]]:
    """Return the rows of a result by model and tool."""
    rows: dict[str, dict[str, dict]] = {}
    for row in result["rows"]:
        rows.setdefault(row["model"], {})[row["tool"]] = row
    return rows


def rendered(result: dict, stability: dict, large: dict, fresh: dict | None = None) -> dict[str, str]:
    """Render each section by its name, as Markdown; without results, the sections of fresh models are empty."""
    models, fresh_models = by_model(result), by_model(fresh) if fresh else {}
    return {
        "fresh-summary": _summary(fresh_models) if fresh_models else "",
        "fresh-table": _table(fresh_models) if fresh_models else "",
        "unseen-table": _table(models),
        "unseen-summary": _summary(models),
        "unseen-stability": f"{_stability(stability['rows'])}\n\n{_drops(stability['rows'])}",
        "unseen-large": _large(by_model(large)),
    }


def _stability(rows: list[dict]) -> str:
    """Render a row per model and part of the benchmark of stability."""
    lines = ["| model | what changes | SQNR in dB | largest loss in dB | goal |", "|---|---|---|--:|---|"]
    for row in rows:
        cells = row["model"], *_PARTS[row["part"]](row), "met" if row["ok"] else "**not met**"
        lines.append(table_row(*cells))
    return "\n".join(lines)


def _drops(rows: list[dict]) -> str:
    """Say how far the SQNR drops from one number of samples to the next; the goal compares only with the first."""
    counts = [row for row in rows if row["part"] == "counts"]
    drops = {row["model"]: max(a - b for a, b in pairwise(row["sqnr_db"].values())) for row in counts}
    drops = {model: drop for model, drop in drops.items() if drop >= MIN_DROP_DB}
    start = f"From one number of samples to the next, the SQNR drops on {len(drops)} of {len(counts)} models"
    listed = ", ".join(f"{model} {drop:.1f} dB" for model, drop in drops.items())
    return f"{start}: {listed}. No goal covers this." if drops else f"{start}."


def _orders(row: dict) -> tuple[str, str, str]:
    ratios = row["sqnr_db"]
    text = f"{min(ratios):.1f} to {max(ratios):.1f}"
    return f"order and batch size, {len(ratios)} runs", text, f"{row['spread_db']:.1f}"


def _counts(row: dict) -> tuple[str, str, str]:
    text = ", ".join(f"{count}: {ratio:.1f}" for count, ratio in row["sqnr_db"].items())
    return f"number of samples, compared with {next(iter(row['sqnr_db']))}", text, f"{row['loss_db']:.1f}"


def _skipping(row: dict) -> tuple[str, str, str]:
    text = "; ".join(", ".join(f"{ratio:.1f}" for ratio in chain) for chain in row["sqnr_db"])
    return "more and more layers skipped", text, f"{row['loss_db']:.1f}"


_PARTS = {"orders": _orders, "counts": _counts, "skipping": _skipping}


def _large(models: dict[str, dict[str, dict]]) -> str:
    """Render the cost of quantizing large models."""
    lines = [
        "| model | tool | CPU time / that of ORT MinMax | memory growth / that of ORT MinMax |",
        "|---|---|--:|--:|",
    ]
    for name, rows in models.items():
        base = rows["ORT MinMax"]
        for tool, row in rows.items():
            absolute = tool == "ORT MinMax"
            cost = f"{row['cpu_seconds']:.0f} s" if absolute else f"{row['cpu_seconds'] / base['cpu_seconds']:.2f}"
            memory = f"{row['growth'] / 2**20:.0f} MB" if absolute else f"{row['growth'] / base['growth']:.2f}"
            lines.append(table_row(name, tool, cost, memory))
    return "\n".join(lines)


def _table(models: dict[str, dict[str, dict]]) -> str:
    """Render a row per model for detent's default target."""
    lines = [table_row(*HEAD), "|---|" + "--:|" * (len(HEAD) - 2) + "---|"]
    for name, rows in models.items():
        lines += [_line(name, each) for each in compare(rows) if each.row["tool"] == OURS[0]]
    return "\n".join(lines)


def _line(name: str, each: Comparison) -> str:
    row, best = each.row, each.best
    reasons = "; ".join(each.failures)
    if "cpu_1" not in row:
        return table_row(name, *["-"] * (len(HEAD) - 2), reasons)
    pairs = [
        (row["sqnr_db"], best["sqnr_db"], 1),
        (row.get("agreement"), best["agreement"], 3),
        (row["cpu_1"]["ratio"], best["time"], 2),
        (row["size_ratio"], best["size_ratio"], 2),
    ]
    return table_row(name, *(_number(value, digits) for *pair, digits in pairs for value in pair), reasons)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _summary(models: dict[str, dict[str, dict]]) -> str:
    """Count, for each of detent's targets, the models with the highest SQNR and those that are faster than float."""
    lines = [f"- {line}." for line in summary(models).splitlines()]
    times = [rows[OURS[0]]["cpu_1"]["ratio"] for rows in models.values() if "cpu_1" in rows.get(OURS[0], {})]
    verified = [rows[tool].get("verify_ok", False) for rows in models.values() for tool in OURS if tool in rows]
    lines.append(
        f"- The default target is faster than float on {sum(time < 1 for time in times)} of {len(times)} models."
    )
    lines.append(f"- `dt.verify` accepts {sum(verified)} of {len(verified)} files.")
    return "\n".join([*lines, *_cost_without_imports(models)])


def _cost_without_imports(models: dict[str, dict[str, dict]]) -> list[str]:
    """Compare the CPU time to quantize without that of imports; [] for results in which the two are not separate."""
    pairs = [(rows[OURS[0]], rows[BASELINE]) for rows in models.values() if OURS[0] in rows and BASELINE in rows]
    pairs = [pair for pair in pairs if all("import_cpu_seconds" in row for row in pair)]
    if not pairs:
        return []
    ratios = [ours["cpu_seconds"] / other["cpu_seconds"] for ours, other in pairs]
    slow = [ours["cpu_seconds"] for (ours, _), ratio in zip(pairs, ratios, strict=True) if ratio > MAX_COST]
    most = f" These take at most {max(slow):.0f} s." if slow else ""
    return [
        f"- Without imports, detent needs {median(ratios):.1f} times the CPU time of ONNX Runtime's MinMax (median), "
        f"and over {MAX_COST:g} times on {len(slow)} of {len(pairs)} models.{most}"
    ]


def committed() -> list[dict | None]:
    """Read the results of all benchmarks on this page; None for a benchmark that was not run yet."""
    paths = RESULT, STABILITY, LARGE, FRESH
    return [json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None for path in paths]


def main() -> None:
    """Write the page."""
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(*committed())), encoding="utf-8")


if __name__ == "__main__":
    main()
