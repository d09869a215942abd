"""The process that runs OpenVINO for ``openvino``: it answers each line of its input by a line."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__: list[str] = []


def _answer(compiled: Any, folder: Path, names: list[str]) -> None:  # noqa: ANN401 - a model of OpenVINO
    with np.load(folder / "inputs.npz") as inputs:
        feeds = {name: inputs[f"arr_{i}"] for i, name in enumerate(names)}
    results = compiled(feeds)
    np.savez(folder / "outputs.npz", *(results[i] for i in range(len(compiled.outputs))))


def _serve(folder: Path) -> None:
    import openvino  # noqa: PLC0415 - where it fails, the other process is told

    names: list[str] = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(folder / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    print("ready", flush=True)  # noqa: T201 - the other process reads it
    for _ in sys.stdin:
        _answer(compiled, folder, names)
        print("done", flush=True)  # noqa: T201 - the same


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other process says it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"error: {lines[-1] if lines else type(error).__name__}", flush=True)  # noqa: T201 - the same
