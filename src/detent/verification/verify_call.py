"""``verify``, which loads what it needs only when it is called."""

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
    """Verify that a quantized ONNX file is what its source and its decisions make it, or name the first difference.

    Level 1 replays the file: the source is quantized again by the decisions that the file carries, and everything in
    the file has to be equal to the bit: operators, attributes, wiring, constants, codes, scales. With data, every
    quantizer, fed what ONNX Runtime saw, has to give the codes that ONNX Runtime gave. Level 2 runs the source's own
    operators between quantizers, each part fed the file's codes: codes and outputs have to be the file's. It also shows
    both models from end to end. Level 3 compares the integer kernels that ONNX Runtime runs on this machine with exact
    integer arithmetic, and with what the file asks for.

    Args:
        source: a prepared ``detent.torch`` model, or the ONNX model that the file was made from.
        artifact: the quantized model, a path or in memory.
        data: batches, each a dict of arrays by input name, a tuple in the inputs' order, or one array; or a file or
            directory of them, as ``detent.onnx`` takes it. They are read once, one ahead. None replays alone.
        levels: some of 1, 2 and 3, or one of them; None for all that the data allow. ``report.ok`` needs every one of
            them. Files of other tools carry no decisions: leave 1 and 2 out for them.
        raise_on_difference: raise where the report is not ok.

    Raises:
        VerificationError: not ok, if asked for; the report is its ``report``.
        SpecError, ShapeError, DtypeError: data that do not fit the model, no data, other levels.
        FileFormatError, UnsupportedError: a damaged file, malformed decisions, or a file without quantizers.

    >>> import numpy as np, detent as dt, detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N,1] x) => (float[N,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.linspace(-9, 9, 100, dtype=np.float32).reshape(-1, 1)]
    >>> report = dt.verify(model, qo.rewrite(model, qo.decide(model, data)), data, levels=(1,))
    >>> report.ok, report.compared_codes, report.differing_codes
    (True, 101, 0)
    """
    chosen = ((1,) if data is None else LEVELS) if levels is None else _chosen(levels)
    if data is None and set(chosen) != {1}:
        raise SpecError(f"levels 2 and 3 run the file and need data, got levels {chosen} without: give data")
    from detent.verification.levels import run_levels  # noqa: PLC0415 - it loads ONNX Runtime

    report = run_levels(source, artifact, data, chosen)
    if raise_on_difference and not report.ok:
        raise VerificationError(str(report), report)
    return report


def _chosen(levels: int | Iterable[int]) -> tuple[int, ...]:
    """The levels that are asked for, each once and in order."""
    given = list(levels) if isinstance(levels, Iterable) else [levels]
    if not given or any(each not in LEVELS for each in given):
        raise SpecError(f"levels are some of {LEVELS}, got {levels if isinstance(levels, str) else given}")
    return tuple(level for level in LEVELS if level in given)
