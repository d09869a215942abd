"""Render the tables of kinds of graphs in docs/onnx-benchmark.md from the committed results.

::

    python benchmarks/render_graph_kinds.py
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "onnx-benchmark.md"
RESULT = ROOT / "benchmarks" / "results" / "graph_kinds.json"
HEAD = ("model", "kind of graph", "tool", "SQNR", "same decisions", "size", "CPU time", "verified")
RIVALS = {"w8a8": "ORT static", "w8a8-dynamic": "ORT dynamic"}  # recipes of detent, and what they are compared with


def rendered(result: Mapping[str, Any]) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {"kinds-table": _table(result["models"]), "kinds-reading": _reading(result["models"])}


def lower_sqnr(models: Mapping[str, Any]) -> Iterator[str]:
    """Yield each model and recipe with a lower SQNR than the file of ONNX Runtime, with both SQNR and sizes."""
    for name, facts in models.items():
        for recipe, rival in RIVALS.items():
            ours, theirs = (facts["rows"].get(tool, {}) for tool in (recipe, rival))
            if "sqnr_db" in ours and "sqnr_db" in theirs and ours["sqnr_db"] < theirs["sqnr_db"]:
                both = " and ".join(f"{row['sqnr_db']:.1f} dB at {row['size_ratio']:.2f}" for row in (ours, theirs))
                yield f"{name} with {recipe} ({both} of the size)"


def _table(models: Mapping[str, Any]) -> str:
    lines = [table_row(*HEAD), "|---|---|---|--:|--:|--:|--:|---|"]
    for name, facts in models.items():
        for tool, row in facts["rows"].items():
            lines.append(table_row(name, facts["kind"], tool, *_cells(row)))
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return "fails", "-", "-", "-", ""
    return (
        f"{row['sqnr_db']:.1f} dB",
        "-" if row["decisions"] is None else f"{row['decisions']:.2%}",
        f"{row['size_ratio']:.3f}",
        f"{row['time']['ratio']:.2f}",
        {True: "yes", False: "**no**"}.get(row.get("verified"), ""),  # only files of detent
    )


def _reading(models: Mapping[str, Any]) -> str:
    """Summarize the comparison with ONNX Runtime's tools."""
    rows = [(tool, row) for facts in models.values() for tool, row in facts["rows"].items()]
    ours = [row for _, row in rows if "verified" in row]
    verified = sum(row["verified"] for row in ours)
    lower = list(lower_sqnr(models))
    where = f"lower only for {', '.join(lower)}" if lower else "lower for no model"
    failed = [
        f"{tool} for {name}" for name, each in models.items() for tool, row in each["rows"].items() if "failed" in row
    ]
    text = f"`dt.verify` accepts {verified} of {len(ours)} files of detent. The SQNR of detent is {where}."
    return f"{text} These tools fail: {', '.join(failed)}." if failed else text


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
