"""Render the calibration tables of docs/benchmarks.md from the committed results.

::

    python benchmarks/render_calibration.py
"""

import json
from pathlib import Path

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "calibration.json"
SPEED_GOALS = {
    "entropy threshold, 2048 bins": ("onnxruntime", 100.0),
    "histogram of 2^20 numbers": ("torch", 10.0),
}
MINMAX = "detent min-max"  # detent's own observer without a histogram
MAX_TIMES_MINMAX = 4.0


def rendered(result: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    sections = {"calibration-speed": _speed(result)}
    for name, first in (
        ("errors", "4 bits, error / error of MSE (lower is better)"),
        ("activations", "SQNR in dB (higher is better)"),
    ):
        rows = result[name]
        kinds = list(next(iter(rows.values())))
        lines = [f"| {first} | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds)]
        digits = 3 if name == "errors" else 1
        lines += [
            f"| {row} | " + " | ".join(f"{cells[kind]:.{digits}f}" for kind in kinds) + " |"
            for row, cells in rows.items()
        ]
        sections[f"calibration-{name}"] = "\n".join(lines)
    return sections


def _speed(result: dict) -> str:
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"{machine['cpu']} ({machine['level']}), {machine['threads']} threads, {result['date']}; "
        + ", ".join(f"{name} {versions[name]}" for name in ("numpy", "torch", "onnxruntime")),
        "",
        "| one call | detent | other tool | other / detent (higher is better) | goal |",
        "|---|--:|--:|--:|--:|",
    ]
    for row, times in result["speed"].items():
        for tool in times:
            if tool in {"detent", MINMAX}:
                continue
            goal = SPEED_GOALS[row][1] if SPEED_GOALS.get(row, ("", 0))[0] == tool else None
            factor = times[tool] / times["detent"]
            not_met = " (not met)" if goal is not None and factor < goal else ""
            goal_cell = f"≥ {goal:g}x" if goal else ""
            lines.append(
                table_row(
                    row, _time(times["detent"]), f"{tool} {_time(times[tool])}", f"{factor:.3g}x{not_met}", goal_cell
                )
            )
    lines += ["", "| one call of detent | histogram | min-max only | histogram / min-max (lower is better) | goal |"]
    lines.append("|---|--:|--:|--:|--:|")
    for row, times in result["speed"].items():
        if MINMAX in times:
            goal = MAX_TIMES_MINMAX if row.endswith("2^24 numbers") else None
            factor = times["detent"] / times[MINMAX]
            not_met = " (not met)" if goal is not None and factor > goal else ""
            goal_cell = f"≤ {goal:g}x" if goal else ""
            lines.append(
                table_row(row, _time(times["detent"]), _time(times[MINMAX]), f"{factor:.3g}x{not_met}", goal_cell)
            )
    return "\n".join(lines)


def _time(microseconds: float) -> str:
    return f"{microseconds / 1000:.3g} ms"


def main() -> None:
    """Rewrite the page."""
    page = PAGE.read_text(encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(page, rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
