"""One contestant quantizes one model of the zoo in a process of its own; the last line printed is JSON.

::

    python benchmarks/onnx_worker.py MODEL CONTESTANT OUTPUT [--way N] [--batches N]

Seconds and memory are those from the model's path to the written file. Batches are made and libraries imported before;
the growth is the process's largest resident size during the work (Linux's VmHWM, reset through /proc/self/clear_refs)
less the size before it.
"""

import argparse
import gc
import json
import logging
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import onnxruntime as ort
from onnx_errors import first_line
from peers.file_quantizers import CONTESTANTS, USUAL, Feed, FileQuantizer, Way, modern

from zoo import ZOO

FOLDER = Path(__file__).parent / ".cache" / "zoo"
CALIBRATION = 16
SHARE_OF_MEMORY = 0.9
TOO_MUCH = "needs more than"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MACHINE = Path("/proc/meminfo")


def resident(field: str) -> int:
    """A size of this process in bytes, as Linux says it."""
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def limit_memory() -> str:
    """Make it an error here to need more than nearly all free memory, before others suffer; says how much that is."""
    line = next(line for line in _MACHINE.read_text(encoding="ascii").splitlines() if line.startswith("MemAvailable"))
    limit = int(int(line.split()[1]) * 1024 * SHARE_OF_MEMORY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return f"{TOO_MUCH} {limit / 1e9:.0f} GB"


def work(one: FileQuantizer, way: Way, source: Path, output: Path, feeds: Sequence[Feed]) -> dict:
    """What a way costs, or why it does not work."""
    notes = [way.note] if way.note else []
    if not one.is_ours:
        converted = modern(source, output.with_suffix(".converted.onnx"))
        notes += [] if converted == source else [f"converted to opset {USUAL}"]
        source = converted
    too_much = limit_memory()
    gc.collect()
    _CLEAR.write_text("5", encoding="ascii")
    before, start = resident("VmRSS"), time.perf_counter()
    try:
        way.run(source, output, feeds)
        seconds, growth = time.perf_counter() - start, resident("VmHWM") - before
        _run_once(output, feeds[0])
    except MemoryError as error:
        return {"failed": f"{first_line(error)} ({too_much})"}
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is a row of the table
        return {"failed": first_line(error)}
    return {"seconds": round(seconds, 2), "growth": max(growth, 0), "note": ", ".join(notes)}


def _run_once(path: Path, feed: Feed) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed)


def main() -> None:
    """Quantize and print."""
    parser = argparse.ArgumentParser(description="Quantize one model of the zoo.")
    parser.add_argument("model", choices=ZOO)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batches", type=int, default=CALIBRATION, help="how many, the same 16 again and again")
    parser.add_argument("--way", type=int, default=0, help="which of the contestant's ways")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    one, model = CONTESTANTS[given.contestant], ZOO[given.model]
    with redirect_stdout(sys.stderr):
        try:
            one.load()
            feeds = list(model.feeds(CALIBRATION))
            source = model.write(FOLDER)
            batches = [feeds[i % CALIBRATION] for i in range(given.batches)]
            found = work(one, one.ways[given.way], source, given.output, batches)
        except ImportError as error:
            found = {"failed": f"not installed: {first_line(error)}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
