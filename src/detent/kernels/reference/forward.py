"""Quantize, dequantize and fake quantize: the slow and obvious twins of every kernel.

``scale`` and ``zero_point`` have the tiling's scale shape; codes of small floats are their bit patterns in uint8.
NaN: ``fill`` says what code value NaN gets; None means that the caller has excluded NaN (quantize) or that NaN stays
(fake quantize).
"""

from typing import Any, Literal

from array_api_compat import array_namespace

from detent.granularity import Tiling
from detent.kernels.reference.elements import (
    code_values,
    compute_type,
    encode,
    level_values,
    ratio,
    unclamped,
)
from detent.kernels.reference.sets import spread
from detent.spec import QuantSpec

__all__ = ["NaNFill", "dequantize", "fake_quantize", "quantize", "spread_params"]

NaNFill = Literal["zero_point", "qmin"]


def spread_params(xp: Any, x: Any, scale: Any, zero_point: Any, tiling: Tiling) -> tuple[Any, Any]:
    """Scale and zero point as compute-type arrays that broadcast against x.

    >>> import numpy as np
    >>> from detent.granularity import PerAxis
    >>> x, tiling = np.zeros((2, 3), np.float16), PerAxis(0).tiling((2, 3))
    >>> spread_params(np, x, np.array([1.0, 2.0]), np.array([0, 0]), tiling)[0]
    array([[1.],
           [2.]], dtype=float32)
    """
    dtype = compute_type(xp, x)
    s = spread(xp, xp.astype(scale, dtype), tiling)
    return s, spread(xp, xp.astype(zero_point, dtype), tiling)


def quantize(
    x: Any,
    scale: Any,
    zero_point: Any,
    *,
    spec: QuantSpec,
    tiling: Tiling,
    fill: NaNFill | None = None,
    step: int = 0,
) -> Any:
    """The code of every element, in the format's storage type (uint8 bit patterns for small floats).

    >>> import numpy as np
    >>> spec = QuantSpec("int8")
    >>> quantize(np.array([0.5, 1.5, 9e9]), np.array(1.0), np.array(0), spec=spec, tiling=spec.granularity.tiling((3,)))
    array([  0,   2, 127], dtype=int8)
    """
    xp = array_namespace(x)
    s, z = spread_params(xp, x, scale, zero_point, tiling)
    x = xp.astype(x, s.dtype)
    if not spec.format.is_integer:
        end = spec.qmin if fill == "qmin" else 0.0
        t = ratio(spec, x, s)
        t = xp.where(xp.isnan(t), xp.asarray(end, dtype=t.dtype, device=t.device), t)
        return xp.astype(encode(xp, spec.format, t), xp.uint8)
    u = unclamped(xp, spec, x, s, z, step)
    qmin = xp.full_like(u, spec.qmin)
    code = xp.minimum(xp.maximum(u, qmin), xp.full_like(u, spec.qmax))
    code = xp.where(xp.isnan(code), qmin if fill == "qmin" else z, code)
    return xp.astype(code, getattr(xp, spec.format.storage))


def dequantize(codes: Any, scale: Any, zero_point: Any, *, spec: QuantSpec, tiling: Tiling, dtype: Any) -> Any:
    """The value of every code in ``dtype``: ``fl((q - z) * s)``, then one more rounding where dtype is narrower.

    >>> import numpy as np
    >>> spec = QuantSpec("int8")
    >>> tiling = spec.granularity.tiling((2,))
    >>> dequantize(np.array([3, -4], np.int8), np.array(0.5), np.array(0), spec=spec, tiling=tiling, dtype=np.float32)
    array([ 1.5, -2. ], dtype=float32)
    """
    xp = array_namespace(codes)
    compute = xp.float64 if dtype == xp.float64 else xp.float32
    s = spread(xp, xp.astype(scale, compute), tiling)
    if spec.format.is_integer:
        z = spread(xp, xp.astype(zero_point, compute), tiling)
        return _finish(xp, spec, (xp.astype(codes, compute) - z) * s, dtype)
    return _finish(xp, spec, level_values(xp, spec.format, codes, compute) * s, dtype)


def fake_quantize(
    x: Any,
    scale: Any,
    zero_point: Any,
    *,
    spec: QuantSpec,
    tiling: Tiling,
    fill: NaNFill | None = None,
    step: int = 0,
    xp: Any = None,
) -> Any:
    """``dequantize(quantize(x))`` in x's dtype, bit for bit; NaN stays NaN unless ``fill`` says otherwise.

    >>> import numpy as np
    >>> spec = QuantSpec("int8")
    >>> tiling = spec.granularity.tiling((2,))
    >>> fake_quantize(np.array([0.3, -0.3]), np.array(0.5), np.array(0), spec=spec, tiling=tiling)
    array([ 0.5, -0.5])
    """
    xp = array_namespace(x) if xp is None else xp
    s, z = spread_params(xp, x, scale, zero_point, tiling)
    value = code_values(xp, spec, xp.astype(x, s.dtype), s, z, step)
    if fill is not None:
        end = xp.full_like(value, spec.qmin) - z if fill == "qmin" else xp.zeros_like(value)
        value = xp.where(xp.isnan(value), end, value)
    return _finish(xp, spec, value * s, x.dtype)


def _finish(xp: Any, spec: QuantSpec, y: Any, dtype: Any) -> Any:
    """Round to the output type. Only small floats keep a negative zero; others could get one from a tiny value."""
    y = xp.astype(y, dtype)
    return y if spec.format.kind == "float" else xp.where(y == 0, xp.zeros_like(y), y)
