"""Render the results quoted in the README and in how-tos from the committed benchmarks.

::

    python benchmarks/render_readme.py

docs/benchmarks.md has all results, and says how they were measured.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from onnx_goals import FAST, OURS
from page import placed
from render_qat import CONTINUED

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
HOWTO = ROOT / "docs" / "howto"
README_LINK, HOWTO_LINK = "docs/benchmarks.md", "../benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
LARGE_SIZE = 2**24
LEARNED, INTEGER = "detent, learned scales", "detent, integer products"
BITS = (4, 2)
TOOLS = ("brevitas", "torch.ao FX")  # the same benchmark trains with these tools at these bits


def rendered(onnx: dict, accuracy: dict, cost: dict, speed: dict) -> dict[str, str]:
    """Render the section of the README as Markdown, by the name of the section."""
    lines = [_files(onnx), _accuracy(accuracy), _cost(cost), _kernels(speed)]
    lines = [line.replace(HOWTO_LINK, README_LINK) for line in lines]
    runs = {"ONNX files": onnx, "QAT accuracy": accuracy, "QAT cost": cost, "kernels": speed}
    return {"readme-results": "\n".join([*(f"- {line}" for line in lines), "", _machines(runs)])}


def _machines(runs: dict[str, dict]) -> str:
    """Name the CPU and the date of each run; runs on the same CPU and day share them."""
    names: dict[str, list[str]] = {}
    for name, run in runs.items():
        machine = run["machine"]
        names.setdefault(f"{machine['cpu']} ({machine['level']}), {run['date']}", []).append(name)
    if len(names) == 1:
        return f"Measured on {next(iter(names))}."
    parts = []
    for where, (*first, last) in names.items():
        parts.append(f"{', '.join(first)} and {last} on {where}" if first else f"{last} on {where}")
    return f"Measured in several runs: {'; '.join(parts)}."


def quotes(onnx: dict, accuracy: dict, cost: dict) -> dict[Path, dict[str, str]]:
    """Render the lines that how-tos quote, by page and section."""
    return {
        HOWTO / "onnx.md": {"quote-files": _files(onnx)},
        HOWTO / "qat.md": {"quote-accuracy": _accuracy(accuracy), "quote-cost": _cost(cost)},
    }


def _files(result: dict) -> str:
    """Compare SQNR with the best other tool, and run time with float."""
    rows = {(row["model"], row["tool"]): row for row in result["rows"] if "sqnr_db" in row}
    wins = 0
    for model in result["models"]:
        others = [row for (name, tool), row in rows.items() if name == model and not tool.startswith(OURS)]
        wins += rows[model, OURS]["mean_sqnr_db"] > max(row["mean_sqnr_db"] for row in others)
    times = {tool: _span(rows[model, tool]["ratio"] for model in result["models"]) for tool in (OURS, FAST)}
    return (
        f"**ONNX files**: on {wins} of {len(result['models'])} real models, w8a8 with default settings has a higher "
        "SQNR than every quantization method of ONNX Runtime and NNCF. Inference takes "
        f"{times[OURS]} times as long as in float, and {times[FAST]} times with the target `onnxruntime-avx2` "
        "(lower is better). [Table](../benchmarks.md#onnx-files)"
    )


def _accuracy(result: dict) -> str:
    """Compare the accuracy of QAT with the float model trained for as many epochs, and with other tools."""
    accuracies: dict[tuple[str, int | None], list[float]] = {}
    for row in result["rows"]:
        accuracies.setdefault((row["method"], row["bits"]), []).append(row["accuracy"])
    goal = mean(accuracies[CONTINUED, None])
    below = {key: goal - mean(values) for key, values in accuracies.items()}
    ours = " and ".join(f"{below['QAT, learned', bits]:.2f} at {bits} bits" for bits in BITS)
    others = ", ".join(f"{tool} {' and '.join(f'{below[tool, bits]:.2f}' for bits in BITS)}" for tool in TOOLS)
    return (
        f"**QAT accuracy** of a small CNN on Fashion-MNIST, in percentage points below float (lower is better, mean of "
        f"{len(result['seeds'])} seeds): detent {ours}, {others}. [Table](../benchmarks.md#qat-accuracy)"
    )


def _cost(result: dict) -> str:
    """Compare time and memory of a QAT step with the float step."""
    tools = (OURS, LEARNED, INTEGER)
    times = {tool: _span(row["ratio"] for row in result["rows"] if row["tool"] == tool) for tool in tools}
    saved = _span(row["saved_ratio"] for row in result["memory"] if row["tool"] in times)
    return (
        f"**QAT cost** of {len(result['titles'])} models in CPU time, compared with float: a training step takes "
        f"{times[OURS]} times as long with EMA scales, {times[LEARNED]} times with learned scales, and "
        f"{times[INTEGER]} times with EMA scales and integer products (VNNI). "
        f"The memory kept for backward is {saved} times that of float (lower is better). "
        "[Table](../benchmarks.md#qat-cost)"
    )


def _kernels(result: dict) -> str:
    """Compare kernels with the fastest copy of the same array."""
    ratios = {
        row["operation"]: row["times_copy"]
        for row in result["rows"]
        if (row["dtype"], row["size"], row["tool"], row["granularity"]) == ("float32", LARGE_SIZE, OURS, "tensor")
    }
    threads = result["machine"]["threads"]
    return (
        f"**Kernels** on 2^24 float32 values with {threads} threads: `fake_quantize` takes "
        f"{ratios['fake_quantize']:.2f} times as long as a plain copy of the array, and `quantize` to int8 "
        f"{ratios['quantize int8']:.2f} times (lower is better). [Table](../benchmarks.md#kernels)"
    )


def _span(values: Iterable[float]) -> str:
    """Format the smallest and the largest value; only one number if both look the same."""
    ordered = sorted(values)
    lowest, highest = (f"{value:.2f}" for value in (ordered[0], ordered[-1]))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def results() -> tuple[dict, dict, dict, dict]:
    """Load the committed results: ONNX files, QAT accuracy, QAT cost, kernels."""
    names = ("onnx_ptq.json", "qat_accuracy.json", "qat_cost.json", "latest.json")
    onnx, accuracy, cost, speed = (json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in names)
    return onnx, accuracy, cost, speed


def main() -> None:
    """Rewrite the README and the how-tos."""
    measured = results()
    pages = {README: rendered(*measured)} | quotes(*measured[:3])
    for page, sections in pages.items():
        page.write_text(placed(page.read_text(encoding="utf-8"), sections), encoding="utf-8")


if __name__ == "__main__":
    main()
