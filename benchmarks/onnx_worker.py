"""Quantize one model of the zoo with one tool, in this process. The last printed line is the result as JSON.

::

    python benchmarks/onnx_worker.py MODEL TOOL OUTPUT [--attempt N] [--batches N]

Seconds, CPU seconds and memory include everything from loading the model to writing the file. Generating batches and
importing libraries is not included. ``growth`` is in bytes: the largest resident size while quantizing (Linux's VmHWM,
reset through /proc/self/clear_refs) minus the resident size before.
"""

import argparse
import gc
import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import onnxruntime as ort
from onnx_errors import first_line
from tools.file_quantizers import NEW_OPSET, TOOLS, Attempt, Feed, FileQuantizer, with_new_opset

from zoo import ZOO

ZOO_FILES = Path(__file__).parent / ".cache" / "zoo"
CALIBRATION_BATCHES = 16
MAX_MEMORY_SHARE = 0.9  # share of the free memory; a tool that needs more fails, and the machine keeps running
OUT_OF_MEMORY = "needs more than"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMORY = Path("/proc/meminfo")


def resident(field: str) -> int:
    """Return a memory size of this process in bytes; ``field`` is its name in /proc/self/status."""
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the processes that it has waited for."""
    return sum(os.times()[:4])


def limit_memory() -> str:
    """Limit this process to most of the free memory; return the error message for a tool that needs more."""
    line = next(line for line in _MEMORY.read_text(encoding="ascii").splitlines() if line.startswith("MemAvailable"))
    limit = int(int(line.split()[1]) * 1024 * MAX_MEMORY_SHARE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return f"{OUT_OF_MEMORY} {limit / 1e9:.0f} GB"


def work(one: FileQuantizer, attempt: Attempt, source: Path, output: Path, feeds: Sequence[Feed]) -> dict:
    """Quantize a model; return the seconds and the memory growth, or the error."""
    notes = [attempt.note] if attempt.note else []
    if not one.is_ours:
        converted = with_new_opset(source, output.with_suffix(".converted.onnx"))
        notes += [] if converted == source else [f"converted to opset {NEW_OPSET}"]
        source = converted
    out_of_memory = limit_memory()
    gc.collect()
    _CLEAR.write_text("5", encoding="ascii")
    before, start, cpu_start = resident("VmRSS"), time.perf_counter(), cpu_seconds()
    try:
        details = attempt.run(source, output, feeds)
        seconds, growth = time.perf_counter() - start, resident("VmHWM") - before
        used = cpu_seconds() - cpu_start
        _run_once(output, feeds[0])
    except MemoryError as error:
        return {"failed": f"{first_line(error)} ({out_of_memory})"}
    except Exception as error:  # noqa: BLE001 - every error of a tool is a row of the table
        return {"failed": first_line(error)}
    measured = {"seconds": round(seconds, 2), "cpu_seconds": round(used, 2), "growth": max(growth, 0)}
    return measured | {"note": ", ".join(notes)} | (details or {})


def _run_once(path: Path, feed: Feed) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed)


def main() -> None:
    """Quantize and print the result."""
    parser = argparse.ArgumentParser(description="Quantize one model of the zoo.")
    parser.add_argument("model", choices=ZOO)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--batches", type=int, default=CALIBRATION_BATCHES, help="calibration batches; the same 16 repeat"
    )
    parser.add_argument("--attempt", type=int, default=0, help="which of the tool's attempts to run")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    one, model = TOOLS[arguments.tool], ZOO[arguments.model]
    with redirect_stdout(sys.stderr):
        try:
            one.load()
            feeds = list(model.feeds(CALIBRATION_BATCHES))
            source = model.write(ZOO_FILES)
            batches = [feeds[i % CALIBRATION_BATCHES] for i in range(arguments.batches)]
            result = work(one, one.attempts[arguments.attempt], source, arguments.output, batches)
        except ImportError as error:
            result = {"failed": f"not installed: {first_line(error)}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
