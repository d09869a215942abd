"""Same codes: one line for a test suite that proves an exported file equal to its model."""

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from detent.verification import VerifyReport, verify

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

__all__ = ["assert_same_codes"]


def assert_same_codes(
    model: "nn.Module | ModelProto | str | PathLike[str]",
    artifact: "ModelProto | str | PathLike[str]",
    data: Iterable[Any] | str | PathLike[str],
) -> VerifyReport:
    """Fail where a quantized ONNX file has another code, scale or zero point than what it was made from.

    The same as ``dt.verify(model, artifact, data, levels=(1,), raise_on_difference=True)``: weights are compared code
    by code, and every quantizer is fed what ONNX Runtime saw. The order of sums has no part in it, so that the
    assertion needs no tolerance and holds on every machine.

    Args:
        model: a prepared ``detent.torch`` model, or the ONNX model that the file was made from.
        artifact: the quantized model, a path or in memory.
        data: batches, or a file or folder of them, as ``dt.verify`` takes them; a few are enough.

    Returns:
        The report, whose ``compared_codes`` says on how much the assertion rests.

    Raises:
        VerificationError: an AssertionError that names the first difference, with node, index, value and scale.
        DetentError: what cannot be compared: damaged files, files without quantizers, data that do not fit.

    >>> import numpy as np
    >>> from onnx import parser
    >>> text = '''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''
    >>> data = [np.linspace(-9, 9, 100, dtype=np.float32)]
    >>> assert_same_codes(parser.parse_model(text), parser.parse_model(text), data).compared_codes
    100
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    return verify(model, artifact, data, levels=(1,), raise_on_difference=True)
