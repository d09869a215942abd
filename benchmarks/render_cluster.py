"""Render the tables of docs/howto/cluster.md from the committed results.

::

    python benchmarks/render_cluster.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page import placed, table_row

from detent.tables import bytes_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "howto" / "cluster.md"
RESULT = ROOT / "benchmarks" / "results" / "cluster.json"
CORES = 2
NETWORK = 1e9  # bytes per second, an assumption
NODES, NODE_WORKERS = 64, 8  # the predicted cluster
CHECKPOINT_PARAMETERS, CHECKPOINT_TENSORS = 400e9, 20_000
PARAMETERS_PER_SECOND = 50e6  # one thread that quantizes to 4 bits, an assumption
PARAMETER_BYTES = 2.5  # read as bfloat16, written with 4 bits
ITEM_BYTES = 2_000  # description and result of a tensor: paths, offsets, sizes, digests
ITEM_OVERHEAD = 1e-3  # seconds of the driver per item, an assumption
FILE_SYSTEM = 10e9  # bytes per second of a shared file system, an assumption


def predicted(result: Mapping[str, Any], workers: int) -> float:
    """Predict the seconds of a job: the driver's own work, and that of the workers on two cores or the merge."""
    merge = result["items"] * (result["merge_seconds"] + _moved(result) / NETWORK)
    return result["serial_seconds"] + max(result["work_seconds"] / min(workers, CORES), merge)


def _moved(result: Mapping[str, Any]) -> int:
    return result["sent_bytes"] + result["received_bytes"]


def rendered(result: Mapping[str, Any]) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {"cluster-scaling": _scaling(result), "cluster-model": _model(result)}


def _scaling(result: Mapping[str, Any]) -> str:
    one = result["seconds"]["1"]
    header = table_row("workers", "items per second, relative to one worker", "seconds, relative to the prediction")
    lines = [header, "|--:|--:|--:|"]
    for workers, seconds in result["seconds"].items():
        lines.append(table_row(workers, f"{one / seconds:.2f}", f"{seconds / predicted(result, int(workers)):.2f}"))
    few, many = sorted(map(int, result["driver_bytes"]))
    ratio = result["driver_bytes"][str(many)] / result["driver_bytes"][str(few)]
    return "\n".join(
        [
            *lines,
            "",
            f"Calibration of CenterFace on two cores, one thread per worker, {result['items']} items of "
            f"{result['item_batches']} batches, {result['item_seconds']:.1f} s each. The peak memory of the driver "
            f"with {many} batches is {ratio:.2f} times that with {few}.",
        ]
    )


def _model(result: Mapping[str, Any]) -> str:
    item = result["item_seconds"]
    limit = item / (result["merge_seconds"] + _moved(result) / NETWORK)
    seconds = CHECKPOINT_PARAMETERS / (NODES * NODE_WORKERS * PARAMETERS_PER_SECOND)
    largest = CHECKPOINT_PARAMETERS / CHECKPOINT_TENSORS / PARAMETERS_PER_SECOND
    moved, overhead = CHECKPOINT_TENSORS * ITEM_BYTES, CHECKPOINT_TENSORS * ITEM_OVERHEAD
    speed = CHECKPOINT_PARAMETERS * PARAMETER_BYTES / seconds / 1e9
    stored = CHECKPOINT_PARAMETERS * PARAMETER_BYTES / (FILE_SYSTEM * 60)
    return (
        "**The model of the cost.** A job takes `serial + max(work / workers, items * (merge + bytes / bandwidth))`. "
        f"Measured in one process: the driver's own work takes {result['serial_seconds']:.1f} s, all items take "
        f"{result['work_seconds']:.1f} s on one thread. Of an item, {bytes_text(result['sent_bytes'])} are sent, "
        f"{bytes_text(result['received_bytes'])} come back (the observers of all tensors), and merging takes "
        f"{1e3 * result['merge_seconds']:.0f} ms. The last column of the table compares the formula with the measured "
        f"times. With {NETWORK / 1e9:.0f} GB/s, the driver keeps {limit:.0f} workers busy with such items; larger "
        "items raise this number.\n\n"
        f"**What it predicts, not measured:** a checkpoint of {CHECKPOINT_PARAMETERS / 1e9:.0f} billion parameters in "
        f"{CHECKPOINT_TENSORS:,} tensors, one item per tensor, on {NODES} nodes with {NODE_WORKERS} workers each. "
        f"Assumed: one worker quantizes {PARAMETERS_PER_SECOND / 1e6:.0f} million parameters per second; workers read "
        f"the tensors (2 bytes per parameter) and write them (0.5 bytes) themselves; {ITEM_BYTES:,} bytes and "
        f"{1e3 * ITEM_OVERHEAD:.0f} ms of the driver per item. Then the workers need {seconds:.0f} s, the driver needs "
        f"{overhead:.0f} s (less if several tensors share an item) and moves {bytes_text(moved)}, and the last tensor "
        f"adds at most {largest:.1f} s. Reading and writing in that time need {speed:.0f} GB/s from the shared file "
        f"system, which will be the limit: at {FILE_SYSTEM / 1e9:.0f} GB/s the job takes {stored:.0f} minutes."
    )


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
