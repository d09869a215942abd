"""Helpers for users' own tests: an assertion about exported files, and arrays on which quantizers go wrong.

``assert_same_codes`` verifies an exported file against its model. ``nasty_arrays`` gives inputs by name:

============================ ==============================================================================
what                         what it finds
============================ ==============================================================================
ties, and one ulp beside     rules of rounding, ``x / s`` against ``x * (1 / s)``, sums of zero points too early
empty, 0-d, one, odd lengths shapes that loops and vector code forget
NaN, infinities              casts that are undefined, ranges that never recover
zeros of both signs          ``-0.0`` that becomes a code of its own; scales of 0
subnormal, tiny, huge        scales that underflow, quotients that overflow
constant, one-sided, outlier ranges without width, without zero, and with one element that eats all codes
memory                       strides, order, offset, byte order and write protection
============================ ==============================================================================

What depends on a spec (every code of a format, groups that do not divide an axis) is for tests of that spec.
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
REACH, WIDEST = 300, 17  # ties: all of those of 8 bits, and those beside powers of two up to 16 bits
ODD = (3, 7, 5)


def nasty_arrays(dtype: DTypeLike = "float32", *, scale: float = 0.1, finite_only: bool = False) -> dict[str, Array]:
    """Arrays that break quantizers, by names that fit into the ids of tests.

    They are made anew by each call and always the same. Some cannot be written to, as their ``flags`` say.

    Args:
        dtype: float16, bfloat16, float32 or float64.
        scale: that of the quantizer under test; ties are at (k + 1/2) * scale.
        finite_only: leave out arrays with NaN and infinities, which have no range.

    Raises:
        DtypeError: another dtype.
        ParamsError: a scale that is not finite and positive.

    >>> import detent as dt
    >>> arrays = nasty_arrays(scale=0.1)
    >>> arrays["empty"].size, arrays["0-d"].shape, arrays["misaligned"].flags.aligned
    (0, (), False)
    >>> params = dt.QuantParams(dt.QuantSpec("int8"), 0.1)
    >>> all(dt.fake_quantize(x, params).shape == x.shape for x in arrays.values())
    True
    >>> sorted(set(arrays) - set(nasty_arrays(finite_only=True)))
    ['inf', 'nan', 'nan among numbers']
    """
    kind = float_dtype(dtype, "dtype")
    if not (isinstance(scale, float | int) and isfinite(scale) and scale > 0):
        raise ParamsError(f"scale is {scale!r}, expected a finite number above 0")
    made = _shapes(kind) | _ties(kind, float(scale)) | _magnitudes(kind) | _ranges(kind) | _memory(kind)
    if not finite_only:
        made |= _not_finite(kind)
    return made


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
        "odd shape": _normal(kind, *ODD),
        "many axes": _normal(kind, 2, 1, 3, 1, 2, 1, 3),
    }


def _ties(kind: np.dtype[Any], scale: float) -> dict[str, Array]:
    powers = np.exp2(np.arange(WIDEST))
    k = np.unique(np.concatenate([np.arange(-REACH, REACH), powers - 1, -powers]))
    with np.errstate(over="ignore", under="ignore"):
        ties = ((k + 0.5) * scale).astype(kind)
        ties = ties[np.isfinite(ties)]
        made = {
            "ties": ties,
            "just below ties": np.nextafter(ties, kind.type(-np.inf)),
            "just above ties": np.nextafter(ties, kind.type(np.inf)),
        }
    return {name: each[np.isfinite(each)] for name, each in made.items()}


def _both_signs(values: list[Any], kind: np.dtype[Any]) -> Array:
    return np.array([sign * float(value) for value in values for sign in (1.0, -1.0)]).astype(kind)


def _magnitudes(kind: np.dtype[Any]) -> dict[str, Array]:
    info = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]  # of ml_dtypes
    least, normal, most = (float(each) for each in (info.smallest_subnormal, info.smallest_normal, info.max))
    return {
        "zeros of both signs": _both_signs([0.0, 0.0], kind),
        "negative zero": np.full(5, -0.0, kind),
        "subnormal": _both_signs([least, 3 * least, normal / 2, normal - least], kind),
        "tiny": _both_signs([normal, 1.5 * normal, 4 * normal], kind),
        "huge": _both_signs([most, most / 2, most / 4], kind),
        "all magnitudes": _both_signs([0.0, least, normal, float(info.eps), 1.0, 1.0 + float(info.eps), most], kind),
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
    made = {
        "every other": wide.copy()[::2, ::2],
        "reversed": wide.copy()[::-1, ::-1],
        "Fortran order": np.asfortranarray(wide),
        "transposed": _normal(kind, *ODD).transpose(2, 0, 1),
        "inner part": wide.copy()[1:-1, 2:-3],
        "one element repeated": np.broadcast_to(wide[0, 0], (6, 7)),
        "read-only": fixed,
        "misaligned": misaligned,
    }
    if kind.isbuiltin == 1:  # bfloat16, of ml_dtypes, has no byte order
        made["other byte order"] = wide.astype(kind.newbyteorder())
    return made


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
