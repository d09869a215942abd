"""Render the tables of dynamic quantization in docs/benchmarks.md from the committed results.

::

    python benchmarks/render_dynamic.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "dynamic.json"
HEAD = ("model", "for", "tool", "SQNR", "cosine", "same decisions", "size", "CPU time")
METRICS = {"sqnr_db": 1, "cosine": 1, "decisions": 1, "size_ratio": -1}  # 1 if higher is better, -1 if lower is better
SAME_TIME = 0.02  # time ratios within 2 % are equal: other processes run on the machine


def rendered(result: Mapping[str, Any]) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {"dynamic-table": _table(result["models"]), "dynamic-reading": _reading(result["models"])}


def worse_metrics(rows: Mapping[str, Any]) -> list[str]:
    """List the metrics in which a file of detent is worse than the per-channel file of ONNX Runtime."""
    worse = []
    for suffix in ("", " vnni"):
        ours, theirs = rows[f"detent{suffix}"], rows[f"onnxruntime per channel{suffix}"]
        worse += [f"{name}{suffix}" for name, sign in METRICS.items() if sign * ours[name] < sign * theirs[name]]
        if ours["time"]["ratio"] > theirs["time"]["ratio"] + SAME_TIME:
            worse.append(f"time{suffix}")
    return worse


def _table(models: Mapping[str, Any]) -> str:
    lines = [table_row(*HEAD), "|---|---|---|--:|--:|--:|--:|--:|"]
    for name, facts in models.items():
        for tool, row in facts["rows"].items():
            lines.append(
                table_row(
                    name,
                    row["cpu"],
                    tool.removesuffix(" vnni"),
                    f"{row['sqnr_db']:.1f} dB",
                    f"{row['cosine']:.5f}",
                    f"{row['decisions']:.2%}",
                    f"{row['size_ratio']:.3f}",
                    f"{row['time']['ratio']:.2f}",
                )
            )
    return "\n".join(lines)


def _reading(models: Mapping[str, Any]) -> str:
    """Summarize the comparison with each kind of file of ONNX Runtime."""
    worse = [f"{name} ({metric})" for name, facts in models.items() for metric in worse_metrics(facts["rows"])]
    where = f"only in {', '.join(worse)}" if worse else "in no metric of any model"
    gains, times = [], []
    for facts in models.values():
        for suffix in ("", " vnni"):
            ours, theirs = (facts["rows"][f"{tool}{suffix}"] for tool in ("detent", "onnxruntime per tensor"))
            gains.append(ours["sqnr_db"] - theirs["sqnr_db"])
            times.append(ours["time"]["ratio"] / theirs["time"]["ratio"])
    return (
        f"detent is worse than `quantize_dynamic(per_channel=True)` {where}; times within {SAME_TIME:.0%} of the float "
        f"model's time count as equal. Compared with `per_channel=False`, the "
        f"SQNR is {min(gains):.1f} to {max(gains):.1f} dB higher, and inference takes {min(times):.2f} to "
        f"{max(times):.2f} times as long."
    )


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
