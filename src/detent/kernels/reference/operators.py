"""Operators: quantize, dequantize, fake-quantize and their gradients (docs/numerics.md, sections 2 to 5).

``scale`` and ``zero_point`` have the tiling's scale shape. Codes of float formats are bit patterns in uint8.
``fill`` is the code that replaces NaN. If it is None, ``quantize`` needs data without NaN; ``fake_quantize`` keeps NaN.

Masks select gradients instead of multiplying them, because a gradient may be infinite. The gradient of a NaN in x is 0
for every estimator except Identity.
"""

from math import sqrt
from typing import Any, Literal

from array_api_compat import array_namespace

from detent.checks import compute_type
from detent.errors import UnsupportedError
from detent.granularity import Tiling
from detent.kernels.reference.elements import code_values, encode, in_range, level_values, ratio, unclamped
from detent.kernels.reference.sets import counts, sum_sets
from detent.spec import QuantSpec
from detent.ste import Clipped, Estimator, HardTanh, Identity, Tanh

__all__ = [
    "NaNFill",
    "dequantize",
    "dequantize_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "fake_quantize_masked",
    "masked_backward",
    "quantize",
    "quantize_backward",
]

NaNFill = Literal["zero_point", "qmin"]


def _spread_params(xp: Any, x: Any, scale: Any, zero_point: Any, tiling: Tiling) -> tuple[Any, Any]:
    """Return scale and zero point in the compute type, broadcastable against x."""
    dtype = compute_type(x.dtype, xp)
    return tiling.spread(xp.astype(scale, dtype), xp), tiling.spread(xp.astype(zero_point, dtype), xp)


def quantize(
    x: Any, scale: Any, zero_point: Any, *, spec: QuantSpec, tiling: Tiling, fill: NaNFill | None = None, step: int = 0
) -> Any:
    """Return the code of each element in the format's storage type (for float formats, bit patterns in uint8)."""
    xp = array_namespace(x)
    s, z = _spread_params(xp, x, scale, zero_point, tiling)
    x = xp.astype(x, s.dtype)
    if not spec.format.is_integer:
        fill_value = spec.qmin if fill == "qmin" else 0.0
        t = ratio(xp, spec, x, s)
        t = xp.where(xp.isnan(t), xp.asarray(fill_value, dtype=t.dtype, device=t.device), t)
        return xp.astype(encode(xp, spec.format, t), xp.uint8)
    u = unclamped(xp, spec, x, s, z, step)
    qmin = xp.full_like(u, spec.qmin)
    code = xp.minimum(xp.maximum(u, qmin), xp.full_like(u, spec.qmax))
    code = xp.where(xp.isnan(code), qmin if fill == "qmin" else z, code)
    return xp.astype(code, getattr(xp, spec.format.storage))


def dequantize(codes: Any, scale: Any, zero_point: Any, *, spec: QuantSpec, tiling: Tiling, dtype: Any) -> Any:
    """Return the value of each code: ``fl((q - z) * s)`` in the compute type, then rounded to ``dtype``."""
    xp = array_namespace(codes)
    compute = compute_type(dtype, xp)
    s = tiling.spread(xp.astype(scale, compute), xp)
    if spec.format.is_integer:
        z = tiling.spread(xp.astype(zero_point, compute), xp)
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
    """Return ``dequantize(quantize(x))`` in x's dtype, equal bit for bit. If ``fill`` is None, NaN stays NaN."""
    xp = array_namespace(x) if xp is None else xp
    s, z = _spread_params(xp, x, scale, zero_point, tiling)
    value = code_values(xp, spec, xp.astype(x, s.dtype), s, z, step)
    if fill is not None:
        fill_value = xp.full_like(value, spec.qmin) - z if fill == "qmin" else xp.zeros_like(value)
        value = xp.where(xp.isnan(value), fill_value, value)
    return _finish(xp, spec, xp.multiply(value, s), x.dtype)


def _finish(xp: Any, spec: QuantSpec, y: Any, dtype: Any) -> Any:
    """Round to the output type. -0.0, for example from a tiny negative value, becomes +0.0, except in float formats."""
    y = xp.astype(y, dtype)
    return y if spec.format.kind == "float" else xp.where(y == 0, xp.zeros_like(y), y)


def fake_quantize_backward(
    g: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    *,
    spec: QuantSpec,
    tiling: Tiling,
    ste: Estimator,
    step: int = 0,
    xp: Any = None,
) -> Any:
    """Return the gradient of x, in x's dtype."""
    xp = array_namespace(g, x) if xp is None else xp
    if isinstance(ste, Identity):
        return xp.asarray(g, copy=True)
    s, z = _spread_params(xp, x, scale, zero_point, tiling)
    wide = xp.astype(x, s.dtype)
    if isinstance(ste, Clipped):
        return xp.where(_clip_mask(xp, spec, ste, wide, s, z, step), g, xp.zeros_like(g))
    slope = _slope(xp, spec, ste, wide, scale, zero_point, tiling)
    # Where the slope is 0, the gradient is 0 even if g is infinite.
    product = xp.multiply(xp.astype(g, slope.dtype), slope)
    return xp.astype(xp.where(slope == 0, xp.zeros_like(slope), product), x.dtype)


def fake_quantize_masked(
    x: Any, scale: Any, zero_point: Any, *, spec: QuantSpec, tiling: Tiling, ste: Estimator, step: int = 0
) -> tuple[Any, Any]:
    """Return fake-quantized x, and a mask of the elements whose gradient passes; ``ste`` is Identity or Clipped."""
    xp = array_namespace(x)
    y = fake_quantize(x, scale, zero_point, spec=spec, tiling=tiling, step=step)
    if not isinstance(ste, Clipped):
        return y, xp.ones(x.shape, dtype=xp.bool, device=x.device)
    s, z = _spread_params(xp, x, scale, zero_point, tiling)
    return y, _clip_mask(xp, spec, ste, xp.astype(x, s.dtype), s, z, step)


def masked_backward(g: Any, mask: Any) -> Any:
    """Return the gradient of x: g where the mask of the forward pass is set, else 0."""
    xp = array_namespace(g)
    return xp.where(mask, g, xp.zeros_like(g))


def quantize_backward(
    g: Any, x: Any, scale: Any, zero_point: Any, *, spec: QuantSpec, tiling: Tiling, ste: Estimator, step: int = 0
) -> Any:
    """Return the gradient of x from the gradient g of the codes: the STE's gradient divided by the scale."""
    xp = array_namespace(g, x)
    compute = compute_type(x.dtype, xp)
    wide = xp.astype(g, compute), xp.astype(x, compute)
    through = fake_quantize_backward(*wide, scale, zero_point, spec=spec, tiling=tiling, ste=ste, step=step)
    return xp.astype(xp.divide(through, tiling.spread(xp.astype(scale, compute), xp)), x.dtype)


def dequantize_backward(g: Any, scale: Any, *, tiling: Tiling) -> Any:
    """Return the gradient of the codes, ``g * s``, in g's dtype."""
    xp = array_namespace(g)
    s = tiling.spread(xp.astype(scale, compute_type(g.dtype, xp)), xp)
    return xp.astype(xp.astype(g, s.dtype) * s, g.dtype)


def fake_quantize_learned_backward(  # noqa: PLR0913 - the operation's own arguments, and xp
    g: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    *,
    spec: QuantSpec,
    tiling: Tiling,
    ste: Estimator,
    grad_scale: float | None = None,
    step: int = 0,
    xp: Any = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of x, scale and zero point (LSQ, LSQ+); the last two have the scale's shape and dtype."""
    xp = array_namespace(g, x) if xp is None else xp
    gx = fake_quantize_backward(g, x, scale, zero_point, spec=spec, tiling=tiling, ste=ste, step=step, xp=xp)
    s, z = _spread_params(xp, x, scale, zero_point, tiling)
    wide = xp.astype(x, s.dtype)
    inside = _clip_mask(xp, spec, Clipped(), wide, s, z, step)
    value = xp.astype(code_values(xp, spec, wide, s, z, step), xp.float64)
    t = xp.astype(ratio(xp, spec, wide, s), xp.float64)
    g64, zero = xp.astype(g, xp.float64), xp.zeros(g.shape, dtype=xp.float64, device=g.device)
    missing = xp.isnan(wide)
    scale_terms = xp.where(missing, zero, xp.multiply(g64, xp.where(inside, value - t, value)))
    factor = gradient_factor(xp, spec, tiling, grad_scale, scale)
    gs = xp.multiply(sum_sets(xp, scale_terms, tiling), factor)
    if not spec.format.is_integer:
        return gx, xp.astype(gs, scale.dtype), xp.zeros_like(scale)
    zero_point_terms = xp.where(missing | inside, zero, xp.multiply(-xp.astype(s, xp.float64), g64))
    gz = xp.multiply(sum_sets(xp, zero_point_terms, tiling), factor)
    return gx, xp.astype(gs, scale.dtype), xp.astype(gz, scale.dtype)


def gradient_factor(xp: Any, spec: QuantSpec, tiling: Tiling, grad_scale: float | None, like: Any) -> Any:
    """Return ``grad_scale``, or the factor of LSQ for each parameter set if ``grad_scale`` is None.

    The factor is ``1 / sqrt(N * max(|qmax|, 1))``, where N is the number of elements that share the parameter set.
    """
    if grad_scale is not None:
        return xp.asarray(grad_scale, dtype=xp.float64, device=like.device)
    weight = max(abs(spec.qmax), 1)
    # Use Python's square root, because that of some array libraries is off by one ulp.
    factors = [1.0 / sqrt(max(count, 1) * weight) for count in counts(tiling)]
    if len(set(factors)) == 1:  # no list that a GPU would have to copy
        return xp.asarray(factors[0], dtype=xp.float64, device=like.device)
    return xp.reshape(xp.asarray(factors, dtype=xp.float64, device=like.device), tiling.scale_shape)


def _clip_mask(xp: Any, spec: QuantSpec, ste: Clipped, x: Any, s: Any, z: Any, step: int) -> Any:
    exclusive = ste.bounds == "exclusive"
    if not spec.format.is_integer:
        return in_range(spec, ratio(xp, spec, x, s), exclusive=exclusive)
    if ste.on == "code":
        return in_range(spec, unclamped(xp, spec, x, s, z, step), exclusive=exclusive)
    low, high = (spec.qmin - z) * s, (spec.qmax - z) * s
    return (x > low) & (x < high) if exclusive else (x >= low) & (x <= high)


def _slope(xp: Any, spec: QuantSpec, ste: Estimator, wide: Any, scale: Any, zero_point: Any, tiling: Tiling) -> Any:
    """Return the factor by which a smooth estimator multiplies g; 0 where x is NaN or the range overflows."""
    if isinstance(ste, Tanh) and ste.unit == "step":
        v = xp.divide(wide, tiling.spread(xp.astype(scale, wide.dtype), xp))
    else:
        s64 = tiling.spread(xp.astype(scale, xp.float64), xp)
        z64 = tiling.spread(xp.astype(zero_point, xp.float64), xp)
        center = xp.astype(xp.multiply((spec.qmin + spec.qmax) / 2 - z64, s64), wide.dtype)
        half = xp.astype((spec.qmax - spec.qmin) / 2 * s64, wide.dtype)
        v = xp.divide(wide - center, half)
    if isinstance(ste, HardTanh):
        slope = xp.maximum(1.0 - xp.abs(v), xp.zeros_like(v))
    elif isinstance(ste, Tanh):
        curve = xp.tanh(v)
        slope = 1.0 - curve * curve
    else:
        raise UnsupportedError(
            f"kernels do not support the estimator {ste!r}: pass a built-in estimator, or use a Plan for a callable"
        )
    return xp.where(xp.isnan(slope), xp.zeros_like(slope), slope)
