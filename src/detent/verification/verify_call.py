"""``dt.verify``. ONNX Runtime and PyTorch are imported when it is called, not before."""

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from detent.errors import SpecError, VerificationError
from detent.verification.verify_report import VerifyReport

if TYPE_CHECKING:
    from torch import nn

    from detent.onnx_model.files import ModelSource

__all__ = ["verify"]

LEVELS = (1, 2, 3)


def verify(
    source: "nn.Module | ModelSource",
    artifact: "ModelSource",
    data: Iterable[Any] | str | PathLike[str] | None = None,
    *,
    levels: int | Iterable[int] | None = None,
    raise_on_difference: bool = False,
) -> VerifyReport:
    """Verify a quantized ONNX file against its source, and report the first mismatch.

    Level 1 replays the file: it quantizes the source again with the decisions recorded in the file. Operators,
    attributes, wiring, constants, codes and scales must match bit for bit. With data, level 1 also recomputes the codes
    of every quantizer from the input it had in ONNX Runtime. Level 2 runs each segment of the source between quantizers
    on the file's codes and compares codes and outputs. It also compares both models end to end, for information.
    Level 3 compares the integer kernels of ONNX Runtime on this machine with exact arithmetic, and checks that the file
    asks for them.

    Args:
        source: prepared ``detent.torch`` model, or the float ONNX model that was quantized.
        artifact: quantized model, as a path or in memory.
        data: batches: dicts of arrays by input name, tuples in the inputs' order, or single arrays; or a file or
            directory, as for ``qo.quantize``. Batches are read once, one ahead. None runs the replay of level 1 only.
        levels: one or several of 1, 2 and 3; None runs 1 without data and all with data. Files from other tools record
            no decisions, which levels 1 and 2 need: pass ``levels=3`` for them.
        raise_on_difference: raise if the report is not ok.

    Raises:
        VerificationError: the report is not ok, with ``raise_on_difference``; the exception has it as ``report``.
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
    requested = ((1,) if data is None else LEVELS) if levels is None else _checked_levels(levels)
    if data is None and set(requested) != {1}:
        raise SpecError(f"got levels {requested} without data, levels 2 and 3 need data: pass data, or levels=1")
    from detent.verification.levels import run_levels  # noqa: PLC0415 - it loads ONNX Runtime

    report = run_levels(source, artifact, data, requested)
    if raise_on_difference and not report.ok:
        raise VerificationError(str(report), report)
    return report


def _checked_levels(levels: int | Iterable[int]) -> tuple[int, ...]:
    """Check levels, and return each once, in order."""
    numbers = list(levels) if isinstance(levels, Iterable) else [levels]
    if not numbers or any(each not in LEVELS for each in numbers):
        raise SpecError(f"levels={levels if isinstance(levels, str) else numbers}: expected numbers among {LEVELS}")
    return tuple(level for level in LEVELS if level in numbers)
