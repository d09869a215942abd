"""Networks converted to float16 with the converter of ONNX Runtime, for the benchmark of kinds of graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from networks import Network
from numpy.typing import NDArray
from onnx import version_converter
from onnxruntime.transformers.float16 import convert_float_to_float16

Array = NDArray[Any]
Feed = dict[str, Array]
OPSET = 21  # ONNX Runtime's quantizers write float16 scales, which need at least opset 19


@dataclass(frozen=True)
class Float16Network:
    """A network with float16 weights, activations, inputs and outputs."""

    network: Network

    @property
    def decide(self) -> Callable[[Sequence[Array]], Array] | None:
        """Function that turns the outputs of a run into decisions."""
        return self.network.decide

    def write(self, path: Path) -> Path:
        """Write the float16 model, unless the file exists; return its path."""
        if not path.is_file():
            model = onnx.load(self.network.write(path.with_suffix(".float32.onnx")))
            model = convert_float_to_float16(version_converter.convert_version(model, OPSET))
            onnx.save(model, path)
        return path

    def calibration_feeds(self) -> list[Feed]:
        """Return the calibration samples in float16."""
        return [_half(feed) for feed in self.network.calibration_feeds()]

    def held_out_feeds(self) -> list[Feed]:
        """Return held-out samples in float16."""
        return [_half(feed) for feed in self.network.held_out_feeds()]


def _half(feed: Feed) -> Feed:
    return {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feed.items()}
