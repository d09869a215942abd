"""Render the table of max_drop in docs/benchmarks.md from the committed results.

::

    python benchmarks/render_max_drop.py
"""

import json
from pathlib import Path

from page import placed

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "max_drop.json"
MAX_RATIO = 1.1  # goal: bytes relative to the best set of the exhaustive search
HEAD = (
    "network",
    "recipe",
    "limit",
    "float",
    "without limit",
    "with limit",
    "layers in float",
    "bytes",
    "best",
    "models",
)


def rendered(result: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "--:|" * (len(HEAD) - 2)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result["rows"]]
    met = sum(row["is_met"] for row in result["rows"])
    near = sum(ratio(row) <= MAX_RATIO for row in result["rows"])
    total = len(result["rows"])
    reading = (
        f"Goals: the limit is met on the evaluation samples ({met} of {total}), and the bytes are at most "
        f"{MAX_RATIO:g} times those of the best set ({near} of {total})."
    )
    return {"max-drop": "\n".join(lines), "max-drop-reading": reading}


def ratio(row: dict) -> float:
    """Return the bytes of the result relative to the best set."""
    return float(row["nbytes_after"] / row["nbytes_best"])


def _cells(row: dict) -> tuple[str, ...]:
    search, evaluation = row["search"], row["evaluation"]
    drop = f"{100 * evaluation['drop']:+.2f}"
    share = f"{row['nbytes_after'] / 1000:,.1f} kB"
    return (
        row["network"],
        row["recipe"],
        f"{100 * row['max_drop']:.1f}",
        f"{100 * evaluation['float_value']:.1f} %",
        f"{100 * search['before']['drop']:+.2f} ± {100 * search['before']['standard_error']:.2f}",
        drop if row["is_met"] else f"{drop} (not met)",
        f"{len(row['float_layers'])} of {row['layers']}",
        share if ratio(row) <= MAX_RATIO else f"{share} (not met)",
        f"{row['nbytes_best'] / 1000:,.1f} kB",
        f"{row['trials']} of {row['sets']}",
    )


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
