"""Render the kernel table of docs/benchmarks.md from the committed results.

::

    python benchmarks/render.py [--check]

The script rewrites the text between the markers on that page. With ``--check``, it only prints whether the table is up
to date.
"""

import json
import sys
from pathlib import Path

import page
from goals import CALL_MICROSECONDS, TIMES_COPY, TORCH_FACTOR, TORCH_OPERATIONS, TORCH_SIZE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "latest.json"
SIZES = (2**20, 2**24)
OTHER_TOOLS = ("torch eager", "torch.compile", "onnxruntime", "numpy")


def rendered(result: dict) -> str:
    """Render the section between the markers as Markdown."""
    machine, versions = result["machine"], result["versions"]
    rows = {
        (row["operation"], row["granularity"], row["size"], row["tool"]): row
        for row in result["rows"]
        if row["dtype"] == "float32"
    }
    ours = [row for row in result["rows"] if row["tool"] == "detent"]
    undisturbed = sum(row["undisturbed_samples"] for row in ours) / sum(row["samples"] for row in ours)
    lines = [
        f"{machine['cpu']} ({machine['level']}), {machine['threads']} threads, "
        f"load average {machine['load_average']:g} at the start, "
        f"{undisturbed:.0%} of detent's samples undisturbed by other processes, {result['date']}; "
        + ", ".join(f"{name} {versions[name]}" for name in ("numpy", "torch", "onnxruntime")),
        "",
        "| float32 | scales per | time / fastest copy, 2^20 (lower is better) | 2^24 | goal | GB/s, 2^24 | "
        + " | ".join(f"speedup over {tool}" for tool in OTHER_TOOLS)
        + " |",
        "|---|---|--:|--:|--:|--:|" + "--:|" * len(OTHER_TOOLS),
    ]
    pairs = dict.fromkeys((operation, granularity) for operation, granularity, _, _ in rows)
    lines += [_line(operation, granularity, rows) for operation, granularity in pairs]
    lines += ["", "| call on 1,000 elements | µs | goal |", "|---|--:|--:|"]
    for row in result["calls"]:
        goal = CALL_MICROSECONDS[row["call"]]
        lines.append(f"| `{row['call']}` | {_marked(row['median_us'], goal)} | ≤ {goal:g} |")
    return "\n".join(lines)


def _line(operation: str, granularity: str, rows: dict) -> str:
    """Render one row: time / fastest copy at both sizes, and time of other tools / time of detent at 2^20."""
    ours = {size: rows.get((operation, granularity, size, "detent")) for size in SIZES}
    goal = TIMES_COPY.get(operation)
    ratios = [_marked(ours[size]["times_copy"], goal) if ours[size] else "" for size in SIZES]
    speed = f"{ours[SIZES[1]]['gb_per_s']:.1f}" if ours[SIZES[1]] else ""
    others = []
    for tool in OTHER_TOOLS:
        theirs, our = rows.get((operation, granularity, TORCH_SIZE, tool)), ours[TORCH_SIZE]
        factor = theirs["median_us"] / our["median_us"] if theirs and our else None
        least = TORCH_FACTOR if tool == "torch eager" and operation in TORCH_OPERATIONS else None
        not_met = factor is not None and least is not None and factor < least
        others.append("" if factor is None else f"{factor:.1f}x{' (not met)' if not_met else ''}")
    cells = [operation, granularity, *ratios, f"≤ {goal:g}" if goal else "", speed, *others]
    return "| " + " | ".join(cells) + " |"


def _marked(value: float, goal: float | None) -> str:
    """Format a number, and mark it if it does not meet its goal."""
    return f"{value:.2f}" + (" (not met)" if goal is not None and value > goal else "")


def placed(text: str, section: str) -> str:
    """Insert the section between its markers."""
    return page.placed(text, {"bench": section})


def main() -> int:
    """Update the page, or print whether it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    new = placed(old, rendered(json.loads(RESULT.read_text(encoding="utf-8"))))
    if "--check" in sys.argv[1:]:
        print("up to date" if new == old else "docs/benchmarks.md: the kernel table is stale, run benchmarks/render.py")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
