"""Render the mixed-precision tables of docs/benchmarks.md from the committed results.

::

    python benchmarks/render_mixed.py
"""

import json
from pathlib import Path

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "mixed_precision.json"
KINDS = ("packed", "onnx")


def rendered(result: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {f"mixed-{kind}": _table(result["models"], kind) for kind in KINDS} | {
        "mixed-reading": _reading(result["models"]),
        "mixed-models": _models(result["models"]),
    }


def is_won(row: dict) -> bool:
    """Return whether the mixed-precision file has the higher SQNR and is not larger."""
    return "mix_bytes" in row and row["mix_bytes"] <= row["bytes"] and row["mix_sqnr_db"] > row["sqnr_db"]


def _table(models: dict, kind: str) -> str:
    """Render a row per uniform bit width and a column per model: SQNR and bytes of the uniform and the mixed file."""
    widths = [row["bits"] for row in next(iter(models.values()))["files"][kind]]
    lines = [table_row("uniform bits", *models), "|--:|" + "--:|" * len(models)]
    for place, bits in enumerate(widths):
        rows = [facts["files"][kind][place] for facts in models.values()]
        lines.append(table_row(str(bits), *map(_cell, rows)))
    return "\n".join(lines)


def _cell(row: dict) -> str:
    if "mix_bytes" not in row:
        return f"{row['sqnr_db']:.1f} dB in {row['bytes'] / 1000:,.1f} kB; no mix fits"
    mix = f"{row['mix_sqnr_db']:.1f}"
    mix = f"**{mix}**" if is_won(row) else mix
    return f"{row['sqnr_db']:.1f} → {mix} dB in {row['bytes'] / 1000:,.1f} → {row['mix_bytes'] / 1000:,.1f} kB"


def _reading(models: dict) -> str:
    """Count the bit widths at which each model's mixed-precision file has the higher SQNR, with the gains."""
    lines = []
    for kind, words in zip(KINDS, ("Packed files", "ONNX files"), strict=True):
        parts = []
        for name, facts in models.items():
            rows = facts["files"][kind]
            gains = [row["mix_sqnr_db"] - row["sqnr_db"] for row in rows if "mix_bytes" in row]
            span = f" ({min(gains):+.1f} to {max(gains):+.1f} dB)" if gains else ""
            parts.append(f"{name} {sum(map(is_won, rows))} of {len(rows)}{span}")
        lines.append(
            f"- {words}, number of bit widths at which the mix has the higher SQNR, and its gain: {'; '.join(parts)}."
        )
    return "\n".join(lines)


def _models(models: dict) -> str:
    """Render the settings of each model. In old results, as many samples were held out as the search used."""
    head = ("model", "layers", "samples", "evaluated on", "candidates", "runs", "seconds", "runs per search")
    lines = [table_row(*head), "|---|" + "--:|" * (len(head) - 1)]
    for name, facts in models.items():
        samples, candidates = facts["samples"], len(facts["candidates"])
        cells = (facts["layers"], samples, facts.get("held_out_samples", samples), candidates, facts["runs"])
        lines.append(table_row(name, *map(str, cells), f"{facts['seconds']:.0f}", str(facts.get("refine_runs", 24))))
    return "\n".join(lines)


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
