"""Defines ``dt.verify``, which imports ONNX and ONNX Runtime only when it is called."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, overload

from detent.errors import SpecError, VerificationError
from detent.verification.verify_report import VerifyReport

if TYPE_CHECKING:
    from torch import nn

    from detent.checkpoint.conversion import ImportanceLike
    from detent.checkpoint.file_verification import CheckpointVerification
    from detent.checkpoint_files import TensorSource
    from detent.onnx_model.batches import BatchSource
    from detent.onnx_model.files import ModelSource

__all__ = ["verify"]

LEVELS = (1, 2, 3)


# A path may name a file of either kind; for GGUF files, qc.verify has the exact type.
@overload
def verify(
    source: "nn.Module | ModelSource",
    artifact: "ModelSource",
    data: "BatchSource | None" = None,
    *,
    levels: int | Iterable[int] | None = None,
    raise_on_difference: bool = False,
    importance: "ImportanceLike | None" = None,
) -> VerifyReport: ...
@overload
def verify(
    source: "TensorSource",
    artifact: str | os.PathLike[str],
    *,
    raise_on_difference: bool = False,
    importance: "ImportanceLike | None" = None,
) -> "CheckpointVerification": ...
def verify(
    source: "nn.Module | ModelSource | TensorSource",
    artifact: "ModelSource",
    data: "BatchSource | None" = None,
    *,
    levels: int | Iterable[int] | None = None,
    raise_on_difference: bool = False,
    importance: "ImportanceLike | None" = None,
) -> "VerifyReport | CheckpointVerification":
    """Verify a quantized file against its source, and report the first mismatch.

    Of a GGUF file, every tensor is derived again from the checkpoint, and all bytes are compared: ``dt.verify`` calls
    ``qc.verify`` and returns its ``CheckpointVerification``. The rest of this text is about ONNX files.

    Level 1 replays the file: it quantizes the source again with the decisions recorded in the file. Operators,
    attributes, wiring, constants, codes and scales must match bit for bit. With data, level 1 also recomputes the codes
    of every quantizer from the input that ONNX Runtime computed for it.

    Level 2 cuts the source into segments at its quantizers, runs each segment on the file's codes, and compares codes
    and outputs. It also compares source and file end to end; differences there do not fail the verification.

    Level 3 compares the integer kernels of ONNX Runtime on this machine with exact arithmetic. It also checks that
    layers kept in float do not run on integer kernels.

    Args:
        source: model prepared by ``qt.prepare``, or the float ONNX model that was quantized.
        artifact: quantized model, as a path or in memory.
        data: batches, a file or a directory, as for ``qo.quantize``. A batch is a dict of arrays by input name, a tuple
            in the order of the inputs, or a single array. Each batch is read once; at most two are in memory. Without
            data, level 1 does not compare activations, and the other levels cannot run.
        levels: one or several of 1, 2 and 3. None runs all levels if data is passed, otherwise level 1. Levels 1 and 2
            need recorded decisions: for files from other tools, which record no decisions, pass ``levels=3``.
        raise_on_difference: raise an exception if the report is not ok.
        importance: importance matrix that a GGUF file was made with.

    Raises:
        VerificationError: the report is not ok, and ``raise_on_difference`` is set. The exception has the report as its
            attribute ``report``.
        SpecError, ShapeError, DtypeError: the data do not fit the model or are missing, or a level does not exist.
        FileFormatError, UnsupportedError: the file is damaged, has malformed decisions, or has no quantizers.

    >>> import numpy as np, detent as dt, detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N,1] x) => (float[N,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.linspace(-9, 9, 100, dtype=np.float32).reshape(-1, 1)]
    >>> report = dt.verify(model, qo.rewrite(model, qo.decide(model, data)), data, levels=(1,))
    >>> report.ok, report.compared_codes, report.differing_codes
    (True, 101, 0)
    """
    if _is_gguf(artifact):
        if data is not None or levels is not None:
            raise SpecError("got data or levels for a GGUF file, which is verified without them: drop both")
        from detent.checkpoint import verify as verify_checkpoint  # noqa: PLC0415 - loaded only if needed

        result = verify_checkpoint(source, artifact, importance=importance)  # type: ignore[arg-type]  # paths
        if raise_on_difference and not result.ok:
            raise VerificationError(str(result), result)
        return result
    if importance is not None:
        raise SpecError("got importance for an ONNX file, expected it only for GGUF files: drop it")
    requested = ((1,) if data is None else LEVELS) if levels is None else _checked_levels(levels)
    if data is None and set(requested) != {1}:
        raise SpecError(f"got levels {requested} without data, but levels 2 and 3 need data: pass data, or levels=1")
    from detent.verification.levels import run_levels  # noqa: PLC0415 - this import loads ONNX Runtime

    report = run_levels(source, artifact, data, requested)
    if raise_on_difference and not report.ok:
        raise VerificationError(str(report), report)
    return report


def _is_gguf(artifact: object) -> bool:
    if not isinstance(artifact, str | os.PathLike) or not Path(artifact).is_file():
        return False
    from detent.checkpoint_files.gguf_reader import is_gguf  # noqa: PLC0415 - loaded only if needed

    return is_gguf(Path(artifact))


def _checked_levels(levels: int | Iterable[int]) -> tuple[int, ...]:
    """Check the levels, and return a sorted tuple without duplicates."""
    numbers = list(levels) if isinstance(levels, Iterable) else [levels]
    if not numbers or any(each not in LEVELS for each in numbers):
        raise SpecError(
            f"got levels={levels if isinstance(levels, str) else numbers}, expected one or more of {LEVELS}"
        )
    return tuple(level for level in LEVELS if level in numbers)
