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
    """A model in OpenVINO on the CPU, with float32 where it is not quantized.

    Args:
        model: an ONNX model.

    Raises:
        UnsupportedError: OpenVINO does not take it; its reason is in the message.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    >>> if is_installed():
    ...     second = OpenVino(made)
    ...     assert second.run({"x": np.float32([-2])})[0].item() == 2.0
    ...     second.close()
    """

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
        self._wait("take")

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs for a batch.

        Raises:
            UnsupportedError: OpenVINO does not run the model, or died.
        """
        np.savez(self._folder / "inputs.npz", *(feeds[name] for name in self._names))
        try:
            if self._process.stdin is not None:
                self._process.stdin.write("run\n")
                self._process.stdin.flush()
        except OSError:  # it is gone: its answer, or the lack of one, says so
            pass
        self._wait("run")
        with np.load(self._folder / "outputs.npz") as found:
            return [found[f"arr_{i}"] for i in range(len(found.files))]

    def _wait(self, what: str) -> None:
        said = ""
        for line in self._process.stdout or ():
            said = line.strip()
            if said in {"ready", "done"}:
                return
            if said.startswith(FAILED):
                break
            said = ""  # OpenVINO's own words
        self.close()
        why = said.removeprefix(FAILED) or f"its process ended with code {self._process.returncode}"
        raise UnsupportedError(f"OpenVINO does not {what} the model: {why}")

    def close(self) -> None:
        """End its process; once is enough."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:  # of a process that is gone
                    continue
        self._process.wait()
        self._scratch.cleanup()
