"""Render the tables of docs/onnx-benchmark.md, and their summary in docs/benchmarks.md, from the committed results.

::

    python benchmarks/render_onnx.py
"""

import json
from collections.abc import Callable
from pathlib import Path

from onnx_goals import ENTROPY, FAST, OURS, VNNI, GoalResult, evaluate_goals, is_compared
from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "onnx-benchmark.md"
SUMMARY_PAGE = ROOT / "docs" / "benchmarks.md"
RESULT = ROOT / "benchmarks" / "results" / "onnx_ptq.json"
HELPERS = ROOT / "benchmarks" / "results" / "onnx_helpers.json"
FAILED = "failed"
PACKAGES = ("onnxruntime", "onnx", "nncf", "openvino")


def rendered(result: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {
        "onnx-reading": _reading(evaluate_goals(result)),
        "onnx-machine": _machine(result),
        "onnx-noise": _table(result, "SQNR in dB, first output / mean of all (higher is better)", _noise),
        "onnx-agreement": _table(
            result, "agreement with float (higher is better)", lambda row: f"{row['agreement']:.1%}"
        ),
        "onnx-speed": _table(
            result, "run time / float run time (lower is better)", lambda row: f"{row['ratio']:.2f}", _milliseconds
        ),
        "onnx-size": _table(
            result, "file size / float file size (lower is better)", lambda row: f"{row['size_ratio']:.3f}", _megabytes
        ),
        "onnx-making": _table(result, "seconds to quantize, MB of memory growth (lower is better)", _making),
        "onnx-memory": _memory(result["memory"]),
        "onnx-openvino": _table(
            result,
            "mean SQNR in OpenVINO in dB (higher is better), difference from ONNX Runtime (lower is better)",
            _openvino,
        ),
        "onnx-notes": _notes(result),
    }


def rendered_helpers(result: dict) -> dict[str, str]:
    """Render the table of the accuracy steps as a section of the page."""
    models = result["models"]
    settings = list(next(iter(models.values())))
    lines = [
        table_row("mean SQNR in dB, agreement with float (higher is better)", *models),
        "|---|" + "--:|" * len(models),
    ]
    for setting in settings:
        rows = [facts[setting] for facts in models.values()]
        cells = [f"{_mean(row['sqnr_db']):.1f}, {row['agreement']:.1%}" for row in rows]
        lines.append(table_row(f"**{setting}**" if setting == settings[0] else setting, *cells))
    means = {setting: _mean([_mean(facts[setting]["sqnr_db"]) for facts in models.values()]) for setting in settings}
    losses = [f"{setting} {means[settings[0]] - means[setting]:.1f} dB" for setting in settings[1:]]
    return {
        "onnx-helpers": "\n".join(
            [*lines, "", f"SQNR lost compared with all on, mean of the models: {', '.join(losses)}."]
        )
    }


def rendered_summary(result: dict) -> dict[str, str]:
    """Render the summary table, with a row per model, as a section of the page."""
    rows = {(row["model"], row["tool"]): row for row in result["rows"] if FAILED not in row}
    heads = (
        "SQNR in dB",
        "best other",
        "SQNR, vnni",
        "best other",
        "agreement",
        "size",
        "time",
        "time, avx2",
        "memory",
    )
    lines = [table_row("w8a8", *heads), "|---|" + "--:|" * len(heads)]
    for model in result["models"]:
        ours, fast, entropy = (rows.get((model, tool)) for tool in (OURS, FAST, ENTROPY))
        of_model = {tool: row for (name, tool), row in rows.items() if name == model}
        cells = (
            *_compared(of_model, OURS),
            *_compared(of_model, VNNI),
            f"{ours['agreement']:.1%}",
            f"{ours['size_ratio']:.2f}",
            f"{ours['ratio']:.2f}",
            f"{fast['ratio']:.2f}",
            f"{ours['growth'] / entropy['growth']:.2f}" if entropy else "ORT Entropy failed",
        )
        lines.append(table_row(model, *cells))
    return {"onnx-summary": "\n".join(lines)}


def _compared(rows: dict[str, dict], ours: str) -> tuple[str, str]:
    """Return the SQNR of a file of detent, and that of the best file of other tools; the higher one is bold."""
    row = rows[ours]
    best = max((each for tool, each in rows.items() if is_compared(tool, ours)), key=lambda each: each["mean_sqnr_db"])
    is_best = row["mean_sqnr_db"] >= best["mean_sqnr_db"]
    return (
        _bold_if(is_best, f"{row['mean_sqnr_db']:.1f}"),
        f"{_bold_if(not is_best, format(best['mean_sqnr_db'], '.1f'))} ({best['tool']})",
    )


def _bold_if(is_bold: bool, text: str) -> str:
    return f"**{text}**" if is_bold else text


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _reading(results: list[GoalResult]) -> str:
    words = {True: "met", False: "**not met**", None: "not measured"}
    lines = [f"| goal | {OURS} | result |", "|---|---|---|"]
    lines += [f"| {each.goal} | {words[each.met]} | {each.values} |" for each in results]
    measured = [each.met for each in results if each.met is not None]
    return "\n".join([f"{sum(measured)} of {len(measured)} goals are met.", "", *lines])


def _machine(result: dict) -> str:
    machine, versions = result["machine"], result["versions"]
    tests = ", ".join(f"{name} {facts['test_batches']}" for name, facts in result["models"].items())
    return (
        f"{machine['cpu']} ({', '.join(machine['instructions']) or machine['level']}), load average "
        f"{machine['load_average']:g} at the start, {result['date']}; "
        + ", ".join(f"{name} {versions[name]}" for name in PACKAGES if versions.get(name))
        + f". {result['calibration_batches']} calibration batches; held-out batches to evaluate on: {tests}."
    )


def _table(result: dict, head: str, cell: Callable[[dict], str], plain: Callable[[dict], str] | None = None) -> str:
    """Render a row per tool and a column per model. With ``plain``, the first row has the float models' values."""
    rows_by_tool = {(row["tool"], row["model"]): row for row in result["rows"]}
    models = list(result["models"])
    lines = [table_row(head, *models), "|---|" + "--:|" * len(models)]
    if plain is not None:
        firsts = [_first(result["rows"], model) for model in models]
        lines.append(table_row("float", *("" if row is None else plain(row) for row in firsts)))
    for tool in dict.fromkeys(tool for tool, _ in rows_by_tool):
        rows = [rows_by_tool.get((tool, model)) for model in models]
        cells = ["" if row is None else FAILED if FAILED in row else cell(row) for row in rows]
        lines.append(table_row(f"**{tool}**" if tool.startswith(OURS) else tool, *cells))
    return "\n".join(lines)


def _first(rows: list[dict], model: str) -> dict | None:
    return next((row for row in rows if row["model"] == model and FAILED not in row), None)


def _noise(row: dict) -> str:
    return f"{row['sqnr_db']:.1f} / {row['mean_sqnr_db']:.1f}"


def _milliseconds(row: dict) -> str:
    return f"{row['float_ms']:.3g} ms"


def _megabytes(row: dict) -> str:
    return f"{row['bytes'] / row['size_ratio'] / 1e6:.2f} MB"


def _making(row: dict) -> str:
    return f"{row['seconds']:.1f} s, {row['growth'] / 1e6:.0f} MB"


def _openvino(row: dict) -> str:
    openvino = row["openvino"]
    return FAILED if FAILED in openvino else f"{openvino['mean_sqnr_db']:.1f}, {openvino['largest_difference']:.1%}"


def _memory(rows: list[dict]) -> str:
    if not rows:
        return "Not measured."
    parts = [
        f"{row['batches']} batches: " + (row[FAILED] if FAILED in row else f"{row['growth'] / 1e6:.0f} MB")
        for row in rows
    ]
    return f"Memory growth of the process with {rows[0]['tool']} on {rows[0]['model']}: " + "; ".join(parts) + "."


def _notes(result: dict) -> str:
    """List failures, workarounds and errors of OpenVINO; equal notes share a line."""
    notes: dict[str, list[str]] = {}
    for row in result["rows"]:
        file = f"{row['tool']} on {row['model']}"
        if FAILED in row:
            notes.setdefault(f"failed: `{_plain(row[FAILED])}`", []).append(file)
            continue
        if row["note"]:
            reason = f", after `{_plain(row['failed_attempts'][0])}`" if row.get("failed_attempts") else ""
            notes.setdefault(f"{row['note']}{reason}", []).append(file)
        openvino = row["openvino"]
        if FAILED in openvino:
            notes.setdefault(f"OpenVINO: `{_plain(openvino[FAILED])}`", []).append(file)
        elif openvino["note"]:
            notes.setdefault(f"OpenVINO: {openvino['note']}", []).append(file)
    for model, facts in result["models"].items():
        if FAILED in facts["openvino"]:
            notes.setdefault(f"OpenVINO: `{_plain(facts['openvino'][FAILED])}`", []).append(f"float {model}")
    return "\n".join(f"- {'; '.join(files)}: {note}" for note, files in notes.items()) or "- none"


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("|", "/")


def main() -> None:
    """Rewrite the pages."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    helpers = json.loads(HELPERS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(placed(page, rendered(result) | rendered_helpers(helpers)), encoding="utf-8")
    summary = SUMMARY_PAGE.read_text(encoding="utf-8")
    SUMMARY_PAGE.write_text(placed(summary, rendered_summary(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
