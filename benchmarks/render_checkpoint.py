"""Render the table of block formats in docs/benchmarks.md from the committed results.

::

    python benchmarks/render_checkpoint.py
"""

import json
from pathlib import Path

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "checkpoint.json"
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
GOALS = {**dict.fromkeys(K_QUANTS, 4.0), "q4_0": 1.0, "q8_0": 1.0}  # speed relative to ggml, one thread
THREADS_GOAL, DEQUANTIZE_GOAL = 1.7, 1.0
HEAD = (
    "format",
    "bits per weight",
    "M elements/s",
    "x ggml",
    "with importance",
    "x ggml",
    "2 threads",
    "dequantize, x ggml",
)


def ratio(speeds: dict) -> float:
    """Return the speed of detent relative to ggml."""
    return float(speeds["detent"] / speeds["ggml"])


def missed(result: dict) -> list[str]:
    """Return the goals that are not met, each as a text."""
    texts = []
    for name, row in result["formats"].items():
        goal = GOALS.get(name)
        parts = [("quantize", row["plain"])] + (
            [("quantize with importance", row["weighted"])] if "weighted" in row else []
        )
        texts += [f"{name} {what}" for what, speeds in parts if goal is not None and ratio(speeds) < goal]
        if ratio(row["dequantize"]) < DEQUANTIZE_GOAL:
            texts.append(f"{name} dequantize")
        if row["plain"]["two_threads"] < THREADS_GOAL:
            texts.append(f"{name} on two threads")
        if not row["equal"]:
            texts.append(f"{name} bytes")
    return texts


def rendered(result: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    lines = [table_row(*HEAD), "|---|" + "--:|" * (len(HEAD) - 1)]
    lines += [table_row(*_cells(name, row)) for name, row in result["formats"].items()]
    equal = sum(row["equal"] for row in result["formats"].values())
    not_met = missed(result)
    reading = (
        f"Bytes and values equal those of ggml for {equal} of {len(result['formats'])} formats. Goals: q4_0 and q8_0 "
        "at least as fast as ggml on one thread, K-quants at least 4 times; two threads at least "
        f"{THREADS_GOAL:g} times one; dequantize at least as fast as ggml. Not met: {', '.join(not_met) or 'none'}."
    )
    return {"block-formats": "\n".join(lines), "block-formats-reading": reading}


def _cells(name: str, row: dict) -> tuple[str, ...]:
    weighted = row.get("weighted")
    return (
        f"`{name}`",
        f"{row['bits_per_weight']:g}",
        f"{row['plain']['detent']:,.0f}",
        f"{ratio(row['plain']):.1f}",
        "-" if weighted is None else f"{weighted['detent']:,.0f}",
        "-" if weighted is None else f"{ratio(weighted):.1f}",
        f"{row['plain']['two_threads']:.2f}",
        f"{ratio(row['dequantize']):.1f}",
    )


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
