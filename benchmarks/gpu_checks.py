"""Add up what ``make test-gpu-all`` compared, and render it into docs/howto/gpu.md.

::

    .venv-gpu/bin/python benchmarks/gpu_checks.py build/gpu-record.jsonl --output benchmarks/results/gpu_checks.json

Each line of the record is one test that passed, with the number of points, 16-bit values or compiled kernels that it
compared (``tests/torch/gpu/conftest.py``). A test that finds a difference fails, and is not in the record. Without a
record, the section is rendered from the committed result.
"""

import argparse
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from page import placed, table_row
from results_file import write_result

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "howto" / "gpu.md"
RESULT = ROOT / "benchmarks" / "results" / "gpu_checks.json"
PACKAGES = ("torch", "triton", "numpy")
GOAL = 10**8


def summed(rows: list[dict]) -> dict:
    """Add up the properties of all tests; kernels by target."""
    kernels: dict[str, int] = {}
    for row in rows:
        if "kernels" in row:
            kernels[row["target"]] = kernels.get(row["target"], 0) + row["kernels"]
    totals = {name: sum(row.get(name, 0) for row in rows) for name in ("points", "values")}
    return {"tests": len(rows), **totals, "kernels": dict(sorted(kernels.items()))}


def rendered(result: dict) -> dict[str, str]:
    """Render the section of the page by its name, as Markdown."""
    versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items())
    goal = "met" if result["points"] >= GOAL else "**not met yet**"
    lines = [
        f"Run on {result['date']} with {versions}:",
        "",
        table_row("check", "compared", "differences"),
        "|---|--:|--:|",
        table_row(f"points next to rounding boundaries (goal: 10^8, {goal})", f"{result['points']:,}", "0"),
    ]
    others = {"all values of 16-bit types": result["values"]}
    others |= {f"compiled kernels for {target}": count for target, count in result["kernels"].items()}
    lines += [table_row(name, f"{count:,}", "0") for name, count in others.items() if count]
    return {"gpu-checks": "\n".join(lines)}


def main() -> None:
    """Read the record, if there is one; write the result and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="the file of DETENT_GPU_RECORD")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.record is not None:
        rows = [json.loads(line) for line in options.record.read_text(encoding="utf-8").splitlines()]
        about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "versions": {name: version(name) for name in PACKAGES}}
        write_result(about | summed(rows), options.output)
    result = json.loads(options.output.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
