"""Render the table of alternatives to float fallback in docs/onnx-benchmark.md.

::

    python benchmarks/render_rescues.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "onnx-benchmark.md"
RESULT = ROOT / "benchmarks" / "results" / "rescues.json"
NAMES = {
    "quantized": "none",
    "float": "float fallback",
    "16-bit": "16-bit inputs",
    "split 12 %": "split channels, 12 % more",
    "split 50 %": "split channels, 50 % more",
}


def rendered(models: Mapping[str, Any]) -> dict[str, str]:
    """Render the table by its name: a row per model, and the SQNR, size and time of each file."""
    lines = [table_row("model", "layers", *NAMES.values()), "|---|--:|" + "--:|" * len(NAMES)]
    for model, facts in models.items():
        cells = [_cell(facts["rows"][row]) for row in NAMES] if facts["layers"] else [""] * len(NAMES)
        lines.append(table_row(model, str(len(facts["layers"])), *cells))
    return {"rescues-table": "\n".join(lines)}


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['sqnr_db']:.1f} dB, {row['size_ratio']:.2f}, {row['time']['ratio']:.2f}"


def committed() -> Mapping[str, Any]:
    """Read the results."""
    return json.loads(RESULT.read_text(encoding="utf-8"))["models"]


def main() -> None:
    """Write the page."""
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(committed())), encoding="utf-8")


if __name__ == "__main__":
    main()
