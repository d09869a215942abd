"""Post-training quantization of ONNX files with detent and other tools: quality of the files, and time and memory.

::

    python benchmarks/onnx_ptq.py [--quick] [--models A B] [--tools A B] [--output FILE]

Models and batches come from the zoo: 16 calibration batches, and held-out batches for evaluation. Every tool quantizes
every model in a separate process (``onnx_worker``); then this process evaluates the files (``onnx_evaluation``). A tool
that fails gets a row with the error. Progress goes to stderr.

``make bench-tools`` installs the other tools.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onnx_errors import first_line, shortened
from onnx_evaluation import evaluate, in_openvino, outputs, time_in_turns
from onnx_worker import CALIBRATION_BATCHES, OUT_OF_MEMORY, ZOO_FILES, Feed
from run import environment
from timing import await_quiet
from tools.file_quantizers import TOOLS

from zoo import ZOO, ZooModel

WORKER = Path(__file__).with_name("onnx_worker.py")
FILES = Path(__file__).parent / ".cache" / "onnx"
MODELS = tuple(name for name in ZOO if name != "smart-turn")  # smart-turn is already quantized
PACKAGES = ("nncf", "openvino", "onnxscript")
# Held-out batches. On 8 batches of one sample, a single wrong decision can change the SQNR of a model by 10 dB.
HELD_OUT_BATCHES = {"magika": 128, "minilm": 16}
DEFAULT_HELD_OUT_BATCHES = 64
FEW_BATCHES = 8  # for measurements that need no more: run time, and results in OpenVINO
ROUNDS, QUICK_ROUNDS = 25, 5
MANY_BATCHES, MEMORY_MODEL = 256, "layout"  # to check that memory does not grow with the number of batches
TIMED_OUT = "not finished after"
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")


def log(start: float, text: str) -> None:
    """Print a line of progress."""
    print(f"{time.monotonic() - start:6.0f} s  {text}", file=sys.stderr, flush=True)


def quantize(model: str, tool: str, output: Path, limit: float, batches: int = CALIBRATION_BATCHES) -> dict:
    """Run the attempts of a tool until one works, each in a separate process; return its cost, or the first error."""
    reasons = []
    for attempt in range(len(TOOLS[tool].attempts)):
        options = ["--attempt", str(attempt), "--batches", str(batches)]
        result = run_worker([str(WORKER), model, tool, str(output), *options], output, limit)
        if "failed" not in result:
            return result | {"failed_attempts": reasons}
        reasons.append(result["failed"])
        if OUT_OF_MEMORY in reasons[-1] or TIMED_OUT in reasons[-1]:
            break
    return {"failed": reasons[0]}


def run_worker(arguments: list[str], output: Path, limit: float) -> dict:
    """Run a script that writes ``output`` and prints JSON in its last line; return the JSON, or the error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    try:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"{TIMED_OUT} {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"failed": shortened(f"its process exited with code {done.returncode}: {last}")}
    return json.loads(done.stdout.splitlines()[-1])


def evaluate_model(name: str, rows: dict[str, dict], files: dict[str, Path], rounds: int) -> dict:
    """Add to every row the evaluation of its file; return the result of OpenVINO for the float model."""
    model = ZOO[name]
    source, feeds = model.write(ZOO_FILES), held_out_feeds(name, model)
    plain = outputs(source, feeds)
    written = {tool: files[tool] for tool, row in rows.items() if "failed" not in row}
    for tool, path in list(written.items()):
        try:
            quantized = outputs(path, feeds)
            evaluation = evaluate(model, plain, quantized)
        except Exception as error:  # noqa: BLE001 - a file that fails on some batch is a row of the table
            rows[tool]["failed"] = first_line(error)
            del written[tool]
            continue
        size = path.stat().st_size
        rows[tool] |= {"bytes": size, "size_ratio": round(size / source.stat().st_size, 4)} | evaluation
        few = slice(FEW_BATCHES)
        rows[tool]["openvino"] = in_openvino(path, feeds[few], plain[few], quantized[few])
    for tool, times in time_in_turns(source, written, feeds[:FEW_BATCHES], rounds).items():
        rows[tool] |= times
    return in_openvino(source, feeds[:2], plain[:2], plain[:2])


def held_out_feeds(name: str, model: ZooModel) -> list[Feed]:
    """Return batches that calibration does not use."""
    return list(model.feeds(CALIBRATION_BATCHES + HELD_OUT_BATCHES.get(name, DEFAULT_HELD_OUT_BATCHES)))[
        CALIBRATION_BATCHES:
    ]


def memory_rows(limit: float, start: float) -> list[dict]:
    """Measure the memory growth of a process that runs detent, with few batches and with many."""
    rows = []
    for batches in (CALIBRATION_BATCHES, MANY_BATCHES):
        log(start, f"{MEMORY_MODEL}, detent, memory with {batches} batches")
        result = quantize(MEMORY_MODEL, "detent", FILES / "memory.onnx", limit, batches)
        rows.append({"model": MEMORY_MODEL, "tool": "detent", "batches": batches} | result)
    return rows


def tools_for(model: str, chosen: Sequence[str]) -> list[str]:
    """Return the tools for models of a kind."""
    kinds = {name: TOOLS[name].kinds for name in chosen}
    return [name for name in chosen if not kinds[name] or ZOO[model].kind in kinds[name]]


def measure(arguments: argparse.Namespace) -> dict:
    """Run the benchmark; return the results."""
    start, patience = time.monotonic(), arguments.patience
    result = environment() | {
        "quick": arguments.quick,
        "calibration_batches": CALIBRATION_BATCHES,
        "models": {},
        "rows": [],
    }
    result["versions"] |= {package: installed(package) for package in PACKAGES}
    result["machine"]["instructions"] = instructions()
    for name in arguments.models:
        source = ZOO[name].write(ZOO_FILES)
        batches = HELD_OUT_BATCHES.get(name, DEFAULT_HELD_OUT_BATCHES)
        result["models"][name] = {"kind": ZOO[name].kind, "bytes": source.stat().st_size, "test_batches": batches}
        rows, files = {}, {}
        for tool in tools_for(name, arguments.tools):
            log(start, f"{name}, {tool}")
            patience = await_quiet(patience)
            files[tool] = FILES / f"{name}.{tool.replace(', ', '-').replace(' ', '-')}.onnx"
            rows[tool] = {"model": name, "tool": tool} | quantize(name, tool, files[tool], arguments.limit)
        log(start, f"{name}, evaluating {len(files)} files")
        patience = await_quiet(patience)
        result["models"][name]["openvino"] = evaluate_model(
            name, rows, files, QUICK_ROUNDS if arguments.quick else ROUNDS
        )
        result["rows"] += rows.values()
        print(table(rows.values()), flush=True)
    with_memory = not arguments.quick and MEMORY_MODEL in arguments.models and "detent" in arguments.tools
    result["memory"] = memory_rows(arguments.limit, start) if with_memory else []
    return result


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def instructions() -> list[str]:
    """Return the instruction sets of this CPU that int8 matmuls use. Speed and saturation depend on them."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return [word for word in INSTRUCTIONS if word in words]


def table(rows: Sequence[dict]) -> str:
    """Format rows for the terminal."""
    lines = []
    for row in rows:
        head = f"{row['model']:<15}{row['tool']:<20}"
        if "failed" in row:
            lines.append(f"{head}failed: {row['failed']}")
            continue
        openvino = row["openvino"].get("failed") or f"OpenVINO {row['openvino']['mean_sqnr_db']:.1f} dB"
        lines.append(
            f"{head}{row['sqnr_db']:>7.2f} dB{row['mean_sqnr_db']:>7.2f} mean{row['agreement']:>8.3f}"
            f"{row['ratio']:>7.2f} x time{row['size_ratio']:>7.3f} x size{row['seconds']:>8.1f} s"
            f"{row['growth'] / 1e6:>7.0f} MB  {openvino}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Compare tools that quantize ONNX files.")
    parser.add_argument("--quick", action="store_true", help="few rounds, no memory measurement")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS, metavar="NAME")
    parser.add_argument("--limit", type=float, default=3600.0, help="timeout in seconds per tool and model")
    parser.add_argument("--patience", type=float, default=0.0, help="total seconds to wait for an idle machine")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
