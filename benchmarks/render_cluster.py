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
ITEM_BYTES = 2_000  # description and result of a tensor: paths, offsets, sizes, digests


def predicted(result: Mapping[str, Any], workers: int) -> float:
    """Predict the seconds of a job: the work is shared by workers on two cores, the merge is not."""
    items = result["items"]
    work = result["seconds"]["1"]
    merge = items * (result["merge_seconds"] + _moved(result) / NETWORK)
    return max(work / min(workers, CORES), merge)


def _moved(result: Mapping[str, Any]) -> int:
    return result["sent_bytes"] + result["received_bytes"]


def rendered(result: Mapping[str, Any]) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    return {"cluster-scaling": _scaling(result), "cluster-model": _model(result)}


def _scaling(result: Mapping[str, Any]) -> str:
    one = result["seconds"]["1"]
    lines = [table_row("workers", "batches per second, relative to one worker", "predicted"), "|--:|--:|--:|"]
    for workers, seconds in result["seconds"].items():
        lines.append(table_row(workers, f"{one / seconds:.2f}", f"{one / predicted(result, int(workers)):.2f}"))
    few, many = sorted(map(int, result["driver_bytes"]))
    ratio = result["driver_bytes"][str(many)] / result["driver_bytes"][str(few)]
    item = one / result["items"]
    return "\n".join(
        [
            *lines,
            "",
            f"{result['items']} items of {result['item_batches']} batches, {item:.1f} s each on one worker. The peak "
            f"memory of the driver with {many} batches is {ratio:.2f} times that with {few}.",
        ]
    )


def _model(result: Mapping[str, Any]) -> str:
    item = result["seconds"]["1"] / result["items"]
    limit = item / (result["merge_seconds"] + _moved(result) / NETWORK)
    seconds = CHECKPOINT_PARAMETERS / (NODES * NODE_WORKERS * PARAMETERS_PER_SECOND)
    largest = CHECKPOINT_PARAMETERS / CHECKPOINT_TENSORS / PARAMETERS_PER_SECOND
    moved = CHECKPOINT_TENSORS * ITEM_BYTES
    return (
        f"**Cost of an item:** {bytes_text(result['sent_bytes'])} are sent, {bytes_text(result['received_bytes'])} "
        f"come back (the observers of all tensors), and merging takes {1e3 * result['merge_seconds']:.0f} ms. A job "
        "takes `max(items * work / workers, items * (merge + bytes / bandwidth))`; the column *predicted* is this "
        f"formula for two cores. With {NETWORK / 1e9:.0f} GB/s, the driver keeps {limit:.0f} workers busy with such "
        "items; larger items raise this number.\n\n"
        f"**What it predicts, not measured:** a checkpoint of {CHECKPOINT_PARAMETERS / 1e9:.0f} billion parameters in "
        f"{CHECKPOINT_TENSORS:,} tensors, one item per tensor, on {NODES} nodes with {NODE_WORKERS} workers each. "
        f"Assumed: one worker quantizes {PARAMETERS_PER_SECOND / 1e6:.0f} million parameters per second, workers read "
        f"and write the tensors themselves, and {ITEM_BYTES:,} bytes per item pass through the driver. Then the work "
        f"takes {seconds:.0f} s, the driver moves {bytes_text(moved)}, and the last tensor adds at most "
        f"{largest:.1f} s; reading and writing need "
        f"{CHECKPOINT_PARAMETERS * 2.5 / seconds / 1e9:.0f} GB/s from the shared file system, which will be the limit."
    )


def main() -> None:
    """Rewrite the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), rendered(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
