"""Helpers for your tests: an assertion about exported files, and arrays that reveal bugs in quantizers.

``assert_same_codes`` verifies an exported file against its model. ``nasty_arrays`` returns named inputs:

============================ ================================================================================
arrays                       bugs they reveal
============================ ================================================================================
ties, and one ulp from ties  wrong rounding, ``x * (1 / s)`` instead of ``x / s``, zero point added too early
empty, 0-d, 1 element, odd   shapes that loops and vectorized code mishandle
NaN, infinities              undefined casts, ranges that never recover
zeros of both signs          different codes for ``-0.0`` and ``0.0``; scales of 0
subnormal, tiny, huge        scales that underflow, quotients that overflow
constant, one-sided, outlier ranges that have width zero, exclude zero, or are stretched by one outlier
memory                       wrong use of strides, order, offset, byte order and read-only memory
============================ ================================================================================

Not included: arrays that depend on a spec, such as every code of a format, or groups that do not divide an axis.
"""

from collections.abc import Iterable
from math import isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from detent.checks import float_dtype
from detent.errors import ParamsError
from detent.verification import VerifyReport, verify

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

__all__ = ["assert_same_codes", "nasty_arrays"]

Array = NDArray[Any]
MAX_TIE, MAX_POWER = 300, 17  # all ties of 8-bit codes, and the ties next to powers of two for up to 16 bits
ODD_SHAPE = (3, 7, 5)


def nasty_arrays(dtype: DTypeLike = "float32", *, scale: float = 0.1, finite_only: bool = False) -> dict[str, Array]:
    """Return a dict that maps names (for test ids) to arrays that reveal bugs in quantizers.

    Each call returns new arrays with the same values.

    Args:
        dtype: float16, bfloat16, float32 or float64.
        scale: scale of the quantizer under test; ties are at (k + 1/2) * scale.
        finite_only: whether to leave out arrays that contain NaN or infinities.

    Raises:
        DtypeError: the dtype is not supported.
        ParamsError: the scale is not finite and positive.

    >>> import detent as dt
    >>> params = dt.QuantParams(dt.QuantSpec("int8"), 0.1)
    >>> all(dt.fake_quantize(x, params).shape == x.shape for x in nasty_arrays(scale=0.1).values())
    True
    """
    kind = float_dtype(dtype, "dtype")
    if not (isinstance(scale, float | int) and isfinite(scale) and scale > 0):
        raise ParamsError(f"got scale {scale!r}, expected a positive finite number")
    finite = _shapes(kind) | _ties(kind, float(scale)) | _magnitudes(kind) | _ranges(kind) | _memory(kind)
    return finite if finite_only else finite | _not_finite(kind)


def _normal(kind: np.dtype[Any], *shape: int) -> Array:
    return np.asarray(np.random.default_rng(0).normal(size=shape)).astype(kind)


def _shapes(kind: np.dtype[Any]) -> dict[str, Array]:
    return {
        "empty": np.zeros(0, kind),
        "empty rows": np.zeros((3, 0), kind),
        "empty columns": np.zeros((0, 3), kind),
        "0-d": np.array(-1.7).astype(kind),
        "one": np.array([0.3]).astype(kind),
        "odd length": _normal(kind, 1021),
        "odd shape": _normal(kind, *ODD_SHAPE),
        "many axes": _normal(kind, 2, 1, 3, 1, 2, 1, 3),
    }


def _ties(kind: np.dtype[Any], scale: float) -> dict[str, Array]:
    powers = np.exp2(np.arange(MAX_POWER))
    k = np.unique(np.concatenate([np.arange(-MAX_TIE, MAX_TIE), powers - 1, -powers]))
    with np.errstate(over="ignore", under="ignore"):
        ties = ((k + 0.5) * scale).astype(kind)
        ties = ties[np.isfinite(ties)]
        arrays = {
            "ties": ties,
            "just below ties": np.nextafter(ties, kind.type(-np.inf)),
            "just above ties": np.nextafter(ties, kind.type(np.inf)),
        }
    return {name: each[np.isfinite(each)] for name, each in arrays.items()}


def _both_signs(values: list[Any], kind: np.dtype[Any]) -> Array:
    return np.array([sign * float(value) for value in values for sign in (1.0, -1.0)]).astype(kind)


def _magnitudes(kind: np.dtype[Any]) -> dict[str, Array]:
    info = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]  # of ml_dtypes
    subnormal, normal, largest = (float(each) for each in (info.smallest_subnormal, info.smallest_normal, info.max))
    return {
        "zeros of both signs": _both_signs([0.0, 0.0], kind),
        "negative zero": np.full(5, -0.0, kind),
        "subnormal": _both_signs([subnormal, 3 * subnormal, normal / 2, normal - subnormal], kind),
        "tiny": _both_signs([normal, 1.5 * normal, 4 * normal], kind),
        "huge": _both_signs([largest, largest / 2, largest / 4], kind),
        "all magnitudes": _both_signs(
            [0.0, subnormal, normal, float(info.eps), 1.0, 1.0 + float(info.eps), largest], kind
        ),
    }


def _ranges(kind: np.dtype[Any]) -> dict[str, Array]:
    outlier = _normal(kind, 4, 33)
    outlier[2, 17] = kind.type(1e4)
    return {
        "all zero": np.zeros((4, 5), kind),
        "constant": np.full((4, 5), 0.7, kind),
        "negative constant": np.full((4, 5), -0.7, kind),
        "positive": np.abs(_normal(kind, 4, 9)) + kind.type(3.0),
        "negative": -np.abs(_normal(kind, 4, 9)) - kind.type(3.0),
        "one outlier": outlier,
        "dead channel": _normal(kind, 4, 9) * np.array([[1.0], [0.0], [1.0], [0.0]]).astype(kind),
    }


def _memory(kind: np.dtype[Any]) -> dict[str, Array]:
    wide = _normal(kind, 12, 14)
    fixed = wide.copy()
    fixed.flags.writeable = False
    raw = np.zeros(wide.nbytes + 1, np.uint8)
    misaligned = raw[1:].view(kind).reshape(wide.shape)
    misaligned[...] = wide
    arrays = {
        "every other": wide.copy()[::2, ::2],
        "reversed": wide.copy()[::-1, ::-1],
        "Fortran order": np.asfortranarray(wide),
        "transposed": _normal(kind, *ODD_SHAPE).transpose(2, 0, 1),
        "inner part": wide.copy()[1:-1, 2:-3],
        "one element repeated": np.broadcast_to(wide[0, 0], (6, 7)),
        "read-only": fixed,
        "misaligned": misaligned,
    }
    if kind.isbuiltin == 1:  # the bfloat16 of ml_dtypes has no byte order
        arrays["other byte order"] = wide.astype(kind.newbyteorder())
    return arrays


def _not_finite(kind: np.dtype[Any]) -> dict[str, Array]:
    among = _normal(kind, 3, 17)
    among[0, 0], among[1, 5], among[2, 16] = kind.type(np.nan), kind.type(np.inf), kind.type(-np.inf)
    return {
        "nan": np.array([np.nan, -np.nan]).astype(kind),
        "inf": np.array([np.inf, -np.inf, 1.0]).astype(kind),
        "nan among numbers": among,
    }


def assert_same_codes(
    model: "nn.Module | ModelProto | str | PathLike[str]",
    artifact: "ModelProto | str | PathLike[str]",
    data: Iterable[Any] | str | PathLike[str],
) -> VerifyReport:
    """Raise unless a quantized ONNX file matches its source model and its recorded decisions bit for bit.

    This is ``dt.verify(model, artifact, data, levels=(1,), raise_on_difference=True)``. It quantizes the source again
    with the recorded decisions, and compares the result with the file. It also runs the file in ONNX Runtime, computes
    codes from the input of every quantizer, and compares them with the quantizer's output. The accumulation order has
    no effect, so the assertion needs no tolerance and holds on every machine.

    Args:
        model: a prepared ``detent.torch`` model, or the source ONNX model.
        artifact: the quantized ONNX model, or its path.
        data: batches, or a file or directory of batches, as for ``dt.verify``; a few batches are enough.

    Raises:
        VerificationError: a mismatch; the message shows node, index, value and scale of the first mismatch. The error
            is an AssertionError.
        DetentError: damaged files, files without quantizers, or data that do not match the model's inputs.

    >>> import numpy as np
    >>> from onnx import parser
    >>> text = '''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''
    >>> data = [np.linspace(-9, 9, 100, dtype=np.float32)]
    >>> assert_same_codes(parser.parse_model(text), parser.parse_model(text), data).compared_codes
    100
    """
    __tracebackhide__ = True  # makes pytest show the line of the test
    return verify(model, artifact, data, levels=(1,), raise_on_difference=True)
