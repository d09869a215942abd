"""Quantize or evaluate one unseen model, in this process. The last printed line is the result as JSON.

::

    python benchmarks/unseen_worker.py write MODEL
    python benchmarks/unseen_worker.py quantize MODEL TOOL OUTPUT [--attempt N]
    python benchmarks/unseen_worker.py evaluate MODEL --files TOOL=FILE ... [--rounds N]

The JSON has what ``onnx_worker.work`` measures, whether ``dt.verify`` accepts detent's file, and the SQNR, decisions,
size and CPU time of each file. SQNR is measured for the worst float output over all held-out samples. Runs in which an
output has a different shape than in float are counted, and left out of the SQNR.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from cpu_time import cpu_times_in_turns
from onnx_errors import first_line
from onnx_evaluation import MAX_DB, Outputs, outputs
from onnx_worker import cpu_seconds, work
from tools.file_quantizers import TRANSFORMER, UNSEEN_TOOLS, Attempt, Feed
from unseen_files import CALIBRATION, HELD_OUT, facts, feeds, float_file, write_files

import detent as dt
from detent.evaluate import time_models
from detent.metrics import sqnr_db
from zoo import agreement

VERIFIED_FEEDS, TIMED_FEEDS = 2, 4


def attempts(tool: str, kind: str) -> list[Attempt]:
    """Return the attempts of a tool; for a transformer, attempts for transformers come first."""
    return sorted(UNSEEN_TOOLS[tool].attempts, key=lambda each: (each.note == TRANSFORMER) != (kind == "transformer"))


def quantize(name: str, tool: str, output: Path, attempt: int) -> dict:
    """Quantize a model, and verify the file if the tool is detent; return the cost, or the error."""
    one = UNSEEN_TOOLS[tool]
    try:
        one.load()
    except ImportError as error:
        return {"failed": f"not installed: {first_line(error)}"}
    source, kind = float_file(name), facts(name)["kind"]
    result = work(one, attempts(tool, kind)[attempt], source, output, feeds(name, CALIBRATION))
    if one.is_ours and "failed" not in result:
        held_out = feeds(name, HELD_OUT)
        result |= _verified(source, output, held_out[:VERIFIED_FEEDS])
        result["warnings"] = [*result["warnings"], *_slower(source, output, held_out[:TIMED_FEEDS])]
    return result


def _slower(source: Path, output: Path, runs: Sequence[Feed]) -> list[str]:
    """Return the warning of `detent quantize` about a file that is slower than float, without its advice."""
    timing = time_models(source, output, runs)
    return [f"the quantized model is slower than the float model: {timing}"] if timing.is_slower else []


def _verified(source: Path, output: Path, runs: Sequence[Feed]) -> dict:
    start = cpu_seconds()
    try:
        report = dt.verify(source, output, runs)
    except Exception as error:  # noqa: BLE001 - an error of verify is a finding
        return {"verify_ok": False, "verify_error": first_line(error)}
    result = {"verify_ok": report.ok, "verify_cpu_seconds": round(cpu_seconds() - start, 2)}
    return result if report.ok else result | {"verify_error": str(report).splitlines()[0]}


def evaluate(name: str, files: dict[str, Path], rounds: int) -> dict:
    """Evaluate the files of all tools; return the results by tool."""
    from unseen_models import ALL_UNSEEN  # noqa: PLC0415 - needs torch

    source, runs, decide = float_file(name), feeds(name, HELD_OUT), ALL_UNSEEN[name].decide
    plain = outputs(source, runs)
    columns: dict[str, dict] = {}
    for tool, path in files.items():
        try:
            columns[tool] = _quality(decide, plain, outputs(path, runs))
        except Exception as error:  # noqa: BLE001 - a file that does not run is a row of the table
            columns[tool] = {"failed": first_line(error)}
            continue
        size = path.stat().st_size
        columns[tool] |= {"bytes": size, "size_ratio": round(size / source.stat().st_size, 4)}
    running = {tool: path for tool, path in files.items() if "failed" not in columns[tool]}
    for threads in (1, 2):
        times = cpu_times_in_turns(source, running, runs[:TIMED_FEEDS], rounds, threads)
        for tool, row in times.items():
            columns[tool][f"cpu_{threads}"] = row
    return columns


def _quality(decide: object, plain: list[Outputs], quantized: list[Outputs]) -> dict:
    decibels, skipped = [], 0
    for i, first in enumerate(plain[0]):
        if np.asarray(first).dtype != np.float32:
            continue
        pairs = [(a[i], b[i]) for a, b in zip(plain, quantized, strict=True)]
        equal = [(np.ravel(a), np.ravel(b)) for a, b in pairs if a.shape == b.shape]
        skipped += len(pairs) - len(equal)
        expected, actual = (np.concatenate(part) for part in zip(*equal, strict=True)) if equal else ((), ())
        if len(expected):
            ratio = float(sqnr_db(expected, actual))
            decibels.append(round(float(np.clip(np.nan_to_num(ratio, nan=-MAX_DB), -MAX_DB, MAX_DB)), 2))
    result: dict = {"outputs_sqnr_db": decibels, "sqnr_db": min(decibels, default=None), "skipped_runs": skipped}
    if callable(decide):
        pairs = [_padded(np.ravel(decide(a)), np.ravel(decide(b))) for a, b in zip(plain, quantized, strict=True)]
        expected, actual = (np.concatenate(part) for part in zip(*pairs, strict=True))
        result |= {"agreement": round(agreement(expected, actual), 5), "decisions": len(expected)}
    return result


def _padded(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pad the shorter decisions with -1 or False, which differ from every class."""
    length = max(len(expected), len(actual))
    blank = False if expected.dtype == bool else -1
    return tuple(np.pad(part, (0, length - len(part)), constant_values=blank) for part in (expected, actual))


def main() -> None:
    """Do one job and print the result."""
    parser = argparse.ArgumentParser(description="Quantize or evaluate one unseen model.")
    parser.add_argument("job", choices=("write", "quantize", "evaluate"))
    parser.add_argument("model")
    parser.add_argument("tool", nargs="?")
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--files", nargs="*", default=[], metavar="TOOL=FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with redirect_stdout(sys.stderr):
        if arguments.job == "write":
            result = write_files(arguments.model)
        elif arguments.job == "quantize":
            result = quantize(arguments.model, arguments.tool, arguments.output, arguments.attempt)
        else:
            files = {tool: Path(path) for tool, path in (each.split("=", 1) for each in arguments.files)}
            result = evaluate(arguments.model, files, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
