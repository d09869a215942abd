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
    data: Iterable[Any] | str | PathLike[str],
    *,
    levels: Iterable[int] = LEVELS,
    raise_on_difference: bool = False,
) -> VerifyReport:
    """Verify that a quantized ONNX file computes what its source computes, or name the first code that differs.

    Level 1: the file's weights are the source's, code by code and bit by bit of their scales, and every quantizer, fed
    the tensor that ONNX Runtime saw, gives the codes that ONNX Runtime gave. Level 2: both from end to end, with and
    without ONNX Runtime's optimizations; another accumulation order makes differences here, which are not errors. Level
    3: the integer kernels that ONNX Runtime runs on this machine against exact integer arithmetic.

    Args:
        source: a prepared ``detent.torch`` model, or the ONNX model that the file was made from. Of the latter no
            weights are compared, for folding and smoothing change them.
        artifact: the quantized model, a path or in memory.
        data: batches, each a dict of arrays by input name, a tuple in the inputs' order, or one array; or a file or
            directory of them, as ``detent.onnx`` takes it. They are read once, one at a time.
        levels: which of 1, 2 and 3.
        raise_on_difference: raise where the report is not ok.

    Raises:
        VerificationError: differences, if asked for; the report is its ``report``.
        SpecError, ShapeError, DtypeError: data that do not fit the model, no data, other levels.
        FileFormatError, UnsupportedError: a damaged file, or one without quantizers.

    >>> import numpy as np, detent as dt
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }''')
    >>> report = dt.verify(model, model, [np.linspace(-9, 9, 100, dtype=np.float32)], levels=(1,))
    >>> print(report)
    codes that differ: 0 of 100
    level 1: all codes match the source (1 batch)
    """
    levels = tuple(sorted(set(levels)))
    if not levels or not set(levels) <= set(LEVELS):
        raise SpecError(f"levels are some of {LEVELS}, got {levels}")
    from detent.verification.levels import run_levels  # noqa: PLC0415 - it loads ONNX Runtime

    report = run_levels(source, artifact, data, levels)
    if raise_on_difference and not report.ok:
        raise VerificationError(f"the file does not compute what its source computes\n{report}", report)
    return report
