"""Kernel benchmark: check that all tools give the same results, then time them in turns in one process.

::

    python benchmarks/run.py [--quick] [--no-compile] [--only WORD] [--output FILE]

Progress goes to stderr, a table with the ``goals`` to stdout, and all values to FILE as JSON. The run fails if a result
is wrong. It does not fail if a goal is not met.
"""

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from case import Q8_0, SHAPES, Array, Case, DifferentError, SkippedError, Tool
from goals import CALL_MICROSECONDS, GOAL_SIZES
from table import table
from timing import Times, await_quiet, time_in_turns
from tools import copies, gguf_blocks, numpy_ufuncs, onnx_runtime, ours, torch_compiled, torch_eager

import detent as dt

OPERATIONS = (
    "fake_quantize",
    "quantize int8",
    "quantize int4",
    "dequantize",
    "fake_quantize_backward",
    "min-max",
    "observe + fake_quantize",
)
GRANULARITIES = ("tensor", "axis0", "axis1", "token", "group32", "group128")
FEW_GRANULARITIES = ("tensor", "axis0", "group32")
OTHER_DTYPES = ("float16", "bfloat16", "float64")
PACKAGES = ("numpy", "ml_dtypes", "torch", "onnxruntime", "onnx", "gguf")
MAX_REFERENCE_SIZE = 2**20  # elements; the reference kernels are slow
QUICK_SECONDS = 45.0


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases to measure."""
    if quick:
        for operation in OPERATIONS:
            yield Case(operation)
        yield from (Case("fake_quantize", granularity) for granularity in GRANULARITIES[1:])
        return
    for size in sorted(SHAPES, key=lambda size: size not in GOAL_SIZES):
        for operation in OPERATIONS:
            chosen = GRANULARITIES if size >= 2**20 else FEW_GRANULARITIES
            yield from (Case(operation, granularity, size) for granularity in chosen)
    yield Case(Q8_0, "group32")
    for dtype in OTHER_DTYPES:
        for operation in OPERATIONS[:-1]:
            yield from (Case(operation, granularity, 2**20, dtype) for granularity in FEW_GRANULARITIES)


def all_tools(case: Case, compiling: bool) -> tuple[list[Tool], list[str]]:
    """Return the tools that support a case, and the reasons why other tools do not."""
    modules = [
        ours,
        copies,
        numpy_ufuncs,
        torch_eager,
        onnx_runtime,
        gguf_blocks,
        *([torch_compiled] if compiling else []),
    ]
    tools, skipped = [], []
    for module in modules:
        try:
            tools += module.tools_for(case)
        except SkippedError as reason:
            skipped.append(str(reason))
    return tools, skipped


def check(case: Case, tools: Iterable[Tool]) -> None:
    """Raise an error unless all results are equal.

    The result of each tool must equal detent's in the same convention, and detent's must equal the reference kernels'.
    """
    expected: dict[str, list[Array]] = {}
    for one in tools:
        if one.answer is None:
            continue
        if one.convention not in expected:
            run, answer = ours.work(case, one.convention)
            run()
            expected[one.convention] = [array.copy() for array in answer()]
        one.prepare()
        one.run()
        _compare(case, one.name, one.answer(), expected[one.convention])
    if case.size <= MAX_REFERENCE_SIZE:
        with dt.use_kernels("reference"):
            run, answer = ours.work(case)
            run()
            _compare(case, "the reference", answer(), expected["onnx"])


def _compare(case: Case, name: str, results: list[Array], expected: list[Array]) -> None:
    for a, b in zip(results, expected, strict=True):
        if a.shape != b.shape or not np.array_equal(a, b):
            differing = int(np.count_nonzero(a != b)) if a.shape == b.shape else f"shapes {a.shape}, {b.shape}:"
            raise DifferentError(f"{case}: {name} and detent differ in {differing} of {b.size} values")


def measure(case: Case, compiling: bool, seconds: float, rounds: tuple[int, int]) -> tuple[list[dict], list[str]]:
    """Check and time one case; return its rows, and the reasons why tools were skipped."""
    tools, skipped = all_tools(case, compiling)
    check(case, tools)
    times = time_in_turns(tools, seconds, rounds)
    by_name = {one.name: taken for one, taken in zip(tools, times, strict=True)}
    return [_row(case, name, taken, by_name) for name, taken in by_name.items()], skipped


def _row(case: Case, name: str, taken: Times, by_name: dict[str, Times]) -> dict:
    """Return the times of one tool, also divided by the time of the fastest copy on at most as many threads."""
    copies_of_case = [by_name[one] for one in by_name if one.startswith("copy")]
    eager = by_name.get("torch eager")
    moved = 2 * case.x.nbytes if name.startswith("copy") else case.bytes
    return {
        "operation": case.operation,
        "granularity": case.granularity,
        "dtype": case.dtype,
        "size": case.size,
        "tool": name,
        "median_us": round(taken.median * 1e6, 3),
        "lower_quartile_us": round(taken.lower * 1e6, 3),
        "upper_quartile_us": round(taken.upper * 1e6, 3),
        "best_us": round(taken.best * 1e6, 3),
        "samples": taken.samples,
        "undisturbed_samples": taken.undisturbed,
        "calls_per_sample": taken.calls,
        "gb_per_s": round(moved / taken.median / 1e9, 2),
        "times_copy": round(taken.median / min(copy.median for copy in copies_of_case), 3),
        "times_copy_best": round(taken.best / min(copy.best for copy in copies_of_case), 3),
        "torch_eager_times_this": round(eager.median / taken.median, 2) if eager else None,
    }


def measure_calls(seconds: float, rounds: tuple[int, int]) -> list[dict]:
    """Time calls on 1,000 elements."""
    case = Case("fake_quantize", "tensor", 1000)
    params, out, x = case.params(), np.empty_like(case.x), case.x
    plan = dt.Plan.select("fake_quantize", shape=case.shape, dtype=case.dtype, spec=case.spec())
    calls: dict[str, Callable[[], object]] = {
        "plan.run": lambda: plan.run(x, params, out=out),
        "dt.fake_quantize": lambda: dt.fake_quantize(x, params, out=out),
    }
    expected = dt.fake_quantize(x, params)
    for name, call in calls.items():
        out.fill(0)
        call()
        _compare(case, name, [out], [expected])
    times = time_in_turns([Tool(name, call) for name, call in calls.items()], seconds, rounds)
    return [
        {"call": name, "median_us": round(t.median * 1e6, 3), "best_us": round(t.best * 1e6, 3)}
        for name, t in zip(CALL_MICROSECONDS, times, strict=True)
    ]


def environment() -> dict:
    """Return date, machine and versions, for the JSON file."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "cpu": _cpu_model(),
            "level": dt.capabilities().level,
            "threads": dt.get_num_threads(),
            "torch_threads": torch.get_num_threads(),
            "load_average": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"detent": dt.__version__, "python": platform.python_version()}
        | {p: _version(p) for p in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Check, then time, detent and other tools.")
    parser.add_argument("--quick", action="store_true", help="run a small selection, within a minute")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--only", default="", help="run only operations whose name contains WORD", metavar="WORD")
    parser.add_argument("--seconds", type=float, help="seconds to time each case")
    parser.add_argument("--patience", type=float, default=0.0, help="total seconds to wait for an idle machine")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
    torch.set_num_threads(ours.THREADS)
    seconds = arguments.seconds or (0.5 if arguments.quick else 1.0)
    rounds = (7, 40) if arguments.quick else (5, 60)
    result = environment() | {"quick": arguments.quick, "skipped": [], "rows": []}
    start, patience = time.monotonic(), arguments.patience
    try:
        result["calls"] = measure_calls(seconds, rounds)
        for case in cases(arguments.quick):
            late = arguments.quick and time.monotonic() - start > QUICK_SECONDS
            if arguments.only not in case.operation or late:
                continue
            label = f"{case.operation} {case.granularity} {case.dtype} {case.size}"
            print(f"{time.monotonic() - start:6.0f} s  {label}", file=sys.stderr, flush=True)
            patience = await_quiet(patience)
            rows, skipped = measure(case, not (arguments.quick or arguments.no_compile), seconds, rounds)
            result["rows"] += rows
            result["skipped"] += [f"{label}: {reason}" for reason in skipped]
    except DifferentError as error:
        print(f"wrong result: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
