"""Files of unseen models in the cache: the float model, its inputs, and facts. Reading them does not need PyTorch.

``write_files`` trains or extracts a model once. Processes that quantize only read these files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]
FILES = Path(__file__).resolve().parent / ".cache" / "networks"
CALIBRATION, HELD_OUT = "calibration", "held-out"


def float_file(name: str) -> Path:
    """Return the path of a float model."""
    return FILES / f"{name}.onnx"


def facts(name: str) -> dict[str, Any]:
    """Read the facts of a model: its kind, the size of its file, and the number of samples."""
    return json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))


def feeds(name: str, part: str) -> list[Feed]:
    """Read the inputs of all runs of a part; the part is CALIBRATION or HELD_OUT."""
    with np.load(FILES / f"{name}.{part}.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    runs: dict[int, Feed] = {}
    for key, array in arrays.items():
        number, _, tensor = key.partition("/")
        runs.setdefault(int(number), {})[tensor] = array
    return [runs[number] for number in sorted(runs)]


def write_files(name: str) -> dict[str, Any]:
    """Train or extract a model and write its files, unless they exist; return the facts."""
    if not (FILES / f"{name}.json").is_file():
        from unseen_models import ALL_UNSEEN  # noqa: PLC0415 - needs torch

        model = ALL_UNSEEN[name]
        source = model.write(float_file(name))
        _write_feeds(name, CALIBRATION, model.calibration_feeds())
        _write_feeds(name, HELD_OUT, model.held_out_feeds())
        content = {"kind": model.kind, "bytes": source.stat().st_size, "held_out_runs": len(model.held_out_feeds())}
        (FILES / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return facts(name)


def _write_feeds(name: str, part: str, runs: list[Feed]) -> None:
    # Keys contain the number of the run. Without it, savez would confuse some tensor names with its own arguments.
    arrays = {f"{i}/{tensor}": array for i, run in enumerate(runs) for tensor, array in run.items()}
    np.savez(FILES / f"{name}.{part}.npz", **arrays)
