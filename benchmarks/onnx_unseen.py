"""Post-training quantization of models outside the zoo, with detent, ONNX Runtime and NNCF.

::

    python benchmarks/onnx_unseen.py [--quick] [--fresh] [--models A B] [--tools A B] [--resume] [--output FILE]

Each model has 32 calibration samples and other samples for evaluation (``unseen_models``). Every tool quantizes every
model in a separate process, and one more process evaluates all files of a model in turns (``unseen_worker``). The
table shows the goals (``unseen_goals``) that a file does not meet. Progress goes to stderr. Each model has its own file
of results in the cache, so several runs of this script can share the work. ``--resume`` runs only tools without a
result. ``--fresh`` runs the models that were not used for development, in place of the others. To measure a change of
detent, name its tools: ``--tools detent "detent, vnni"``; results of others stay.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from onnx_ptq import OUT_OF_MEMORY, TIMED_OUT, installed, instructions, log, run_worker
from run import environment
from tools.file_quantizers import UNSEEN_TOOLS
from unseen_goals import summary, table
from unseen_models import ALL_UNSEEN, FRESH, UNSEEN

WORKER = Path(__file__).with_name("unseen_worker.py")
FILES = Path(__file__).parent / ".cache" / "unseen"
QUICK_MODELS = ("mobilenet-v2", "keras-dense", "detector-nms")
FRESH_QUICK_MODELS = ("keras-elu", "keyword-spotter", "fusion")
QUICK_TOOLS = ("detent", "ORT MinMax, reduced")
ROUNDS, QUICK_ROUNDS = 15, 5
NOT_INSTALLED = "not installed"  # begins the error of a tool that is missing
PACKAGES = ("nncf", "openvino", "onnxscript")


def file_of(model: str, tool: str) -> Path:
    """Return the path of the file that a tool writes for a model."""
    return FILES / f"{model}.{tool.replace(', ', '-').replace(' ', '-')}.onnx"


@cache
def import_seconds(tool: str) -> float:
    """Return the CPU time of a new process that imports all modules of a tool."""
    modules = UNSEEN_TOOLS[tool].modules
    code = f"import importlib, time; [importlib.import_module(each) for each in {modules}]; print(time.process_time())"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return round(min(float(run.stdout.split()[-1]) for run in runs), 2)


def quantize(model: str, tool: str, limit: float) -> dict:
    """Run the attempts of a tool until one works; return the cost of that attempt, or the first error."""
    output, reasons = file_of(model, tool), []
    for attempt in range(len(UNSEEN_TOOLS[tool].attempts)):
        command = [str(WORKER), "quantize", model, tool, str(output), "--attempt", str(attempt)]
        result = run_worker(command, output, limit)
        if "failed" not in result:
            return result | {"import_cpu_seconds": import_seconds(tool), "failed_attempts": reasons}
        reasons.append(result["failed"])
        if any(text in reasons[-1] for text in (OUT_OF_MEMORY, TIMED_OUT, NOT_INSTALLED)):
            break
    return {"failed": reasons[0]}


def evaluate(model: str, rows: dict[str, dict], rounds: int, limit: float) -> None:
    """Add to every row of a model the evaluation of its file."""
    files = {tool: file_of(model, tool) for tool, row in rows.items() if "failed" not in row}
    files = {tool: path for tool, path in files.items() if path.is_file()}  # rows of other machines have no files here
    if not files:
        return
    existing = [f"{tool}={path}" for tool, path in files.items()]
    command = [str(WORKER), "evaluate", model, "--rounds", str(rounds), "--files", *existing]
    columns = run_worker(command, FILES / "none", limit)
    for tool in files:
        rows[tool] |= columns.get(tool, columns)


def measure_model(name: str, arguments: argparse.Namespace, start: float) -> None:
    """Quantize and evaluate one model, and write the results to the model's file of results."""
    log(start, f"{name}, float model")
    details = run_worker([str(WORKER), "write", name], FILES / "none", arguments.limit)
    rows = stored_results([name]).get(name, {})
    chosen = [tool for tool in arguments.tools if not arguments.resume or is_missing(rows.get(tool))]
    if "failed" in details or not (chosen or any(is_unevaluated(row) for row in rows.values())):
        log(start, f"{name}: {details.get('failed', 'nothing to do')}")
        return
    for tool in chosen:
        rows[tool] = {"model": name, "tool": tool} | quantize(name, tool, arguments.limit)
        cost = rows[tool].get("failed") or f"{rows[tool]['cpu_seconds']:.1f} s of CPU time without imports"
        log(start, f"{name}, {tool}: {cost}")
        save_json({"model": name} | details | {"rows": list(rows.values())}, FILES / f"{name}.json")
    log(start, f"{name}, evaluating")
    evaluate(name, rows, QUICK_ROUNDS if arguments.quick else ROUNDS, arguments.limit)
    save_json({"model": name} | details | {"rows": list(rows.values())}, FILES / f"{name}.json")
    print(table({name: rows}), flush=True)


def chosen_models(is_quick: bool, is_fresh: bool) -> list[str]:
    """Return the models of a run that names none."""
    quick, models = (FRESH_QUICK_MODELS, FRESH) if is_fresh else (QUICK_MODELS, UNSEEN)
    return list(quick if is_quick else models)


def is_missing(row: dict | None) -> bool:
    """Whether a tool has no row yet, or was not installed."""
    return row is None or NOT_INSTALLED in row.get("failed", "")


def is_unevaluated(row: dict) -> bool:
    """Whether a file was written but not evaluated."""
    return "failed" not in row and "cpu_1" not in row


def stored_results(models: Sequence[str]) -> dict[str, dict[str, dict]]:
    """Read the rows of models that were measured, by model and tool."""
    paths = {name: FILES / f"{name}.json" for name in models}
    contents = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}
    return {name: {row["tool"]: row for row in content["rows"]} for name, content in contents.items()}


def combined(models: Sequence[str]) -> dict:
    """Combine the stored results of models with facts about the machine."""
    result = environment() | {"rows": [row for rows in stored_results(models).values() for row in rows.values()]}
    result["versions"] |= {package: installed(package) for package in PACKAGES}
    result["machine"]["instructions"] = instructions()
    return result


def save_json(result: dict, path: Path) -> None:
    """Write a JSON file; an existing file is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description="Compare tools on models outside the zoo.")
    parser.add_argument("--quick", action="store_true", help="three models, two tools, few rounds")
    parser.add_argument("--fresh", action="store_true", help="the models that were not used for development")
    parser.add_argument("--models", nargs="+", choices=ALL_UNSEEN, metavar="MODEL")
    parser.add_argument("--tools", nargs="+", choices=UNSEEN_TOOLS, metavar="NAME")
    parser.add_argument("--limit", type=float, default=1800.0, help="timeout in seconds per tool and model")
    parser.add_argument("--resume", action="store_true", help="keep earlier results, measure only what is missing")
    parser.add_argument("--show", action="store_true", help="print the table of earlier results, measure nothing")
    parser.add_argument("--output", type=Path, help="JSON file to write, with the results of the chosen models")
    arguments = parser.parse_args()
    arguments.models = arguments.models or chosen_models(arguments.quick, arguments.fresh)
    arguments.tools = arguments.tools or list(QUICK_TOOLS if arguments.quick else UNSEEN_TOOLS)
    start = time.monotonic()
    for number, name in enumerate([] if arguments.show else arguments.models, 1):
        log(start, f"model {number} of {len(arguments.models)}")
        measure_model(name, arguments, start)
    results = stored_results(arguments.models)
    print(f"\n{table(results)}\n\n{summary(results)}", flush=True)
    if arguments.output:
        save_json(combined(arguments.models), arguments.output)


if __name__ == "__main__":
    main()
