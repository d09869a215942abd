"""OpenVINO as a second runtime for a file, if OpenVINO is installed.

OpenVINO runs in a subprocess, because it crashes on some files and CPUs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from os import fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import UnsupportedError
from detent.onnx_model import Graph, save

__all__ = ["OpenVino", "is_installed"]

Array = NDArray[Any]
FAILED = "error: "
WORKER = Path(__file__).with_name("openvino_worker.py")


def is_installed() -> bool:
    """Return whether OpenVINO is installed."""
    return find_spec("openvino") is not None


class OpenVino:
    """A model in OpenVINO on the CPU; layers that are not quantized run in float32."""

    def __init__(self, model: ModelProto) -> None:
        self._names = Graph(model).inputs
        self._scratch = tempfile.TemporaryDirectory()
        self._directory = Path(self._scratch.name)
        save(model, self._directory / "model.onnx")
        (self._directory / "inputs.json").write_text(json.dumps(self._names), encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603 - runs this Python on a file of this package
            [sys.executable, "-P", fspath(WORKER), fspath(self._directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._is_loaded = False  # the subprocess loads the model in parallel

    def start(self, feeds: Mapping[str, Array]) -> None:
        """Send a batch to the subprocess, which runs it in parallel; ``outputs`` waits for the result."""
        np.savez(self._directory / "inputs.npz", *(feeds[name] for name in self._names))
        try:
            if self._process.stdin is not None:
                self._process.stdin.write("run\n")
                self._process.stdin.flush()
        except OSError:  # the subprocess has ended; outputs() reports why
            pass

    def outputs(self) -> list[Array]:
        """Return the outputs of the batch sent by ``start``.

        Raises:
            UnsupportedError: OpenVINO failed to load or run the model.
        """
        if not self._is_loaded:
            self._wait("load")
            self._is_loaded = True
        self._wait("run")
        with np.load(self._directory / "outputs.npz") as outputs:
            return [outputs[f"arr_{i}"] for i in range(len(outputs.files))]

    def _wait(self, job: str) -> None:
        answer = ""
        for line in self._process.stdout or ():
            answer = line.strip()
            if answer in {"ready", "done"}:
                return
            if answer.startswith(FAILED):
                break
            answer = ""  # a line that OpenVINO itself printed
        if not answer:
            self._process.wait()  # the pipe is closed, so the subprocess is ending
        self.close()
        reason = answer.removeprefix(FAILED) or f"the subprocess ended with exit code {self._process.returncode}"
        raise UnsupportedError(f"OpenVINO failed to {job} the model: {reason}")

    def close(self) -> None:
        """End the subprocess and remove its files."""
        self._process.kill()  # safe, because the subprocess has no unsaved state
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:  # the subprocess has ended
                    continue
        self._process.wait()
        self._scratch.cleanup()
