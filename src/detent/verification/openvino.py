"""OpenVINO as a second consumer of a file, where it is installed.

It runs in a process of its own: there are files and CPUs with which it ends the process that it runs in.
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
    """Whether OpenVINO is there."""
    return find_spec("openvino") is not None


class OpenVino:
    """A model in OpenVINO on the CPU, with float32 where it is not quantized."""

    def __init__(self, model: ModelProto) -> None:
        self._names = Graph(model).inputs
        self._scratch = tempfile.TemporaryDirectory()
        self._folder = Path(self._scratch.name)
        save(model, self._folder / "model.onnx")
        (self._folder / "inputs.json").write_text(json.dumps(self._names), encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603 - this Python, with a file of ours
            [sys.executable, "-P", fspath(WORKER), fspath(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._is_loaded = False  # the other process loads the model while this one goes on

    def start(self, feeds: Mapping[str, Array]) -> None:
        """Hand a batch to the other process, which runs it while this one goes on, and ``outputs`` waits for it."""
        np.savez(self._folder / "inputs.npz", *(feeds[name] for name in self._names))
        try:
            if self._process.stdin is not None:
                self._process.stdin.write("run\n")
                self._process.stdin.flush()
        except OSError:  # it is gone: its answer, or the lack of one, says so
            pass

    def outputs(self) -> list[Array]:
        """The outputs for the batch; raises UnsupportedError if OpenVINO does not load or run the model, or died."""
        if not self._is_loaded:
            self._wait("take")
            self._is_loaded = True
        self._wait("run")
        with np.load(self._folder / "outputs.npz") as outputs:
            return [outputs[f"arr_{i}"] for i in range(len(outputs.files))]

    def _wait(self, what: str) -> None:
        answer = ""
        for line in self._process.stdout or ():
            answer = line.strip()
            if answer in {"ready", "done"}:
                return
            if answer.startswith(FAILED):
                break
            answer = ""  # OpenVINO's own output
        if not answer:
            self._process.wait()  # its output ended: so does it, with a code
        self.close()
        why = answer.removeprefix(FAILED) or f"its process ended with code {self._process.returncode}"
        raise UnsupportedError(f"OpenVINO does not {what} the model: {why}")

    def close(self) -> None:
        """End its process; once is enough."""
        self._process.kill()  # it holds nothing that it would have to write
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:  # of a process that is gone
                    continue
        self._process.wait()
        self._scratch.cleanup()
