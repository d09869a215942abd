"""Render the tables of attention, float16 models, ragged groups and PTQ in PyTorch in docs/benchmarks.md.

::

    python benchmarks/render_ptq.py
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
FILES = {"attention": "attention_matmuls.json", "float16": "float16_groups.json", "torch": "torch_ptq.json"}
KINDS = {"float16": "float16", "groups": "ragged groups"}  # section, and kind of the cases
NOT_RUN = "ONNX Runtime cannot load the file"


def rendered(results: Mapping[str, Any]) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {
        "attention-table": _attention(results["attention"]["models"]),
        "torch-ptq-table": _torch(results["torch"]["rows"]),
        **{f"{section}-table": _kinds(results["float16"]["models"], kind) for section, kind in KINDS.items()},
    }


def _torch(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("network", "recipe", "calibration alone", "`qt.quantize`", "`qo.quantize`", "verified")
    lines = [table_row(*head), "|---|---|--:|--:|--:|---|"]
    for row in rows:
        values = [f"{row[name]:.1f} dB" for name in ("plain_db", "torch_db", "onnx_db")]
        lines.append(table_row(row["network"], row["recipe"], *values, "yes" if row["verified"] else "**no**"))
    return "\n".join(lines)


def _attention(models: Mapping[str, Any]) -> str:
    lines = [
        table_row("model", "heads", "matmuls", "SQNR, float", "SQNR, quantized", "time, float", "time, quantized"),
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, facts in models.items():
        plain, quantized = facts["rows"]["float"], facts["rows"]["quantized"]
        values = [f"{row['sqnr_db']:.1f} dB" for row in (plain, quantized)]
        times = [_times(row) for row in (plain, quantized)]
        lines.append(table_row(name, str(facts["head"]), str(quantized["matmuls"]), *values, *times))
    return "\n".join(lines)


def _times(row: Mapping[str, Any]) -> str:
    long = row.get("long")
    return f"{row['time']['ratio']:.2f}" + ("" if long is None else f" ({long['ratio']:.2f} for 256 tokens)")


def _kinds(models: Mapping[str, Any], kind: str) -> str:
    chosen = {name: facts for name, facts in models.items() if facts["kind"] == kind}
    has_default = any("default_sqnr_db" in row for facts in chosen.values() for row in facts["rows"].values())
    default = ("SQNR, default",) * has_default
    head = ("model", "file", "layers quantized", "SQNR", *default, "same decisions", "size", "CPU time")
    lines = [table_row(*head), "|---|---|" + "--:|" * (len(head) - 2)]
    for name, facts in chosen.items():
        for tool, row in facts["rows"].items():
            file = tool if tool.startswith("ORT") else f"detent {tool}"
            if "failed" in row:
                lines.append(table_row(name, file, "", NOT_RUN, *[""] * (len(head) - 4)))
                continue
            count = f"{row['quantized']} of {row['layers']}" if "layers" in row else ""
            decisions = "" if row["decisions"] is None else f"{row['decisions']:.1%}"
            other = row.get("default_sqnr_db", row["sqnr_db"])  # files of ONNX Runtime store how they run
            sqnr = [f"{row['sqnr_db']:.1f} dB", *[f"{other:.1f} dB"] * has_default]
            ratios = f"{row['size_ratio']:.3f}", f"{row['time']['ratio']:.2f}"
            lines.append(table_row(name, file, count, *sqnr, decisions, *ratios))
    return "\n".join(lines)


def main() -> None:
    """Rewrite the page."""
    results = {name: json.loads((RESULTS / file).read_text(encoding="utf-8")) for name, file in FILES.items()}
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
