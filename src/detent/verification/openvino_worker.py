"""Script of the subprocess that the module ``openvino`` starts.

For each line on stdin, it runs one batch in OpenVINO and writes one line to stdout.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__: list[str] = []


def _run_batch(compiled: Any, directory: Path, names: list[str]) -> None:  # noqa: ANN401 - OpenVINO is untyped
    with np.load(directory / "inputs.npz") as inputs:
        feeds = {name: inputs[f"arr_{i}"] for i, name in enumerate(names)}
    results = compiled(feeds)
    np.savez(directory / "outputs.npz", *(results[i] for i in range(len(compiled.outputs))))


def _serve(directory: Path) -> None:
    import openvino  # noqa: PLC0415 - a failed import is reported to the parent process

    names: list[str] = json.loads((directory / "inputs.json").read_text(encoding="utf-8"))
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(directory / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    print("ready", flush=True)  # noqa: T201 - the parent process reads stdout
    for _ in sys.stdin:
        _run_batch(compiled, directory, names)
        print("done", flush=True)  # noqa: T201 - the parent process reads stdout


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the parent process raises an exception with its text
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"error: {lines[-1] if lines else type(error).__name__}", flush=True)  # noqa: T201 - read by the parent
