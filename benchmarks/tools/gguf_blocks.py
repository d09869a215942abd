"""gguf-py, if installed: dequantize Q8_0 blocks, each of 32 codes and a float16 scale, to float32.

Quantizing with gguf-py is not compared, because it computes its own scales.
"""

from collections.abc import Iterator

import numpy as np
from case import Case, SkippedError, Tool


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield gguf-py for a case."""
    if case.operation != "dequantize Q8_0":
        raise SkippedError("gguf: only Q8_0 blocks")
    try:
        from gguf import GGMLQuantizationType, quants  # noqa: PLC0415 - optional
    except ImportError as error:
        raise SkippedError("gguf: not installed") from error
    scale = case.params().scale.astype(np.float16).reshape(-1, 1).view(np.uint8)
    blocks = np.concatenate([scale, case.codes.reshape(-1, 32).view(np.uint8)], axis=1)
    last: list[np.ndarray] = []

    def run() -> None:
        last[:] = [quants.dequantize(blocks, GGMLQuantizationType.Q8_0)]

    yield Tool("gguf", run, lambda: [last[0].reshape(case.shape)])
