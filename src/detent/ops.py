"""Operators: quantize, dequantize, fake-quantize and their gradients, on NumPy arrays.

Each operator looks up a plan for its arguments, checks the arguments and runs the plan. Data are float16, bfloat16,
float32 or float64 arrays of any shape and strides; ``out`` avoids the allocation of the result. Operators with an
argument x accept a spec instead of params; they then derive params from the min-max range of x. ``quantize``,
``dequantize``, ``fake_quantize`` and ``fake_quantize_backward`` also accept a block format. For formulas and
guarantees, see docs/numerics.md.
"""

from typing import Any, cast, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent.block_format import BlockFormat
from detent.block_tensor import BlockTensor, ScalePolicy, fake_quantize_blocks, quantize_blocks
from detent.checks import compute_dtype, float_array
from detent.convention import Convention
from detent.errors import DtypeError, RangeError, ShapeError, SpecError
from detent.formats import Format
from detent.gguf import find_block_format
from detent.kernels import Problem, dtype_name, minmax, observe
from detent.params import ParamsLike, QuantParams, get_params
from detent.plan import NaNPolicy, Plan, as_factor, check_is_params, check_out, check_step, find_plan
from detent.scale_rule import Parameters
from detent.spec import QuantSpec, code_dtype, get_spec
from detent.ste import EstimatorLike, Identity, get_estimator
from detent.tensor import QuantizedTensor

__all__ = [
    "dequantize",
    "dequantize_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_dynamic",
    "fake_quantize_learned_backward",
    "fake_quantize_masked",
    "fake_quantize_masked_backward",
    "quantize",
    "quantize_backward",
]

Array = NDArray[Any]


@overload
def quantize(
    x: ArrayLike,
    params: BlockFormat,
    *,
    out: Array | None = None,
    nan: NaNPolicy = "raise",
    step: int = 0,
    importance: ArrayLike | None = None,
    scales: ScalePolicy = "raise",
) -> BlockTensor: ...


@overload
def quantize(
    x: ArrayLike,
    params: ParamsLike,
    *,
    out: Array | None = None,
    nan: NaNPolicy = "raise",
    step: int = 0,
    importance: ArrayLike | None = None,
    scales: ScalePolicy = "raise",
) -> QuantizedTensor: ...


def quantize(
    x: ArrayLike,
    params: ParamsLike | BlockFormat,
    *,
    out: Array | None = None,
    nan: NaNPolicy = "raise",
    step: int = 0,
    importance: ArrayLike | None = None,
    scales: ScalePolicy = "raise",
) -> QuantizedTensor | BlockTensor:
    """Quantize each element to its code, ``clamp(round(x / scale) + zero_point)``.

    Args:
        x: float data.
        params: a QuantParams that fits x's shape; or a spec, to derive params from the min-max range of x; or a block
            format such as ``dt.gguf.q4_k`` or its name, for a ``BlockTensor``.
        out: array for the codes, of x's shape and the format's storage type, or a 1-D uint8 buffer of the packed size.
            The returned tensor shares memory with ``out``.
        nan: "raise", or the code that replaces NaN: "zero_point" or "qmin". Infinities saturate. Block formats support
            only "raise", which also rejects infinities.
        step: counter for stochastic rounding; each step has its own random numbers.
        importance: for block formats, one weight per column: errors in columns with a larger weight count more.
        scales: for block formats, what to do with blocks whose scales become 0 or infinite in float16: "raise", or
            "keep" to store them as they are.

    Raises:
        NaNError: x contains NaN; the contents of ``out`` are then undefined.
        RangeError: params is a spec, and x is empty or contains NaN or infinities.
        ParamsError: float16 cannot represent the scales of a block.
        ShapeError, DtypeError, OutError: an argument has the wrong shape or type.

    >>> import detent as dt, numpy as np
    >>> dt.quantize(np.array([0.5, 1.5, -9.0], np.float32), dt.QuantParams.int4_symmetric()).codes
    array([ 0,  2, -7], dtype=int8)
    >>> dt.quantize(np.array([[0.5, 1.0], [-8.0, 4.0]], np.float32), "int8/axis0").codes
    array([[  64,  127],
           [-127,   64]], dtype=int8)
    >>> dt.quantize(np.linspace(-1, 1, 256, dtype=np.float32), "q4_k")
    BlockTensor(shape=(256,), dtype=float32, format=q4_k, 144 bytes, 7.1x smaller)
    """
    form = find_block_format(params)
    if form is not None:
        return quantize_blocks(x, form, importance=importance, out=out, nan=nan, scales=scales)
    _refuse_importance(importance)
    data = float_array(x, "x")
    params = get_params(cast("ParamsLike", params), data)
    plan = _plan("quantize", data, params, nan=nan)
    plan.check(data, params, out)
    codes = cast("Array", plan.run(data, params, out=out, step=check_step(step)))
    packed = out is not None and (out.shape != data.shape or out.dtype != code_dtype(params.spec))
    return QuantizedTensor.trusted(codes, params, data.shape, data.dtype, packed=packed, shared=out is not None)


def dequantize(
    q: QuantizedTensor | BlockTensor | ArrayLike,
    params: QuantParams | None = None,
    *,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
) -> Array:
    """Dequantize codes to the values ``(q - zero_point) * scale``.

    Args:
        q: a QuantizedTensor or BlockTensor, or an array of codes if ``params`` is passed, too.
        params: the params that the codes were made with. A spec is rejected, because it contains no scale.
        dtype: dtype of the result. Default: the dtype of the data that the QuantizedTensor was made from; for an array
            of codes, float32.
        out: array for the result.

    >>> import detent as dt
    >>> dt.dequantize([3, -4], dt.QuantParams.int8_symmetric())
    array([ 3., -4.], dtype=float32)
    """
    if isinstance(q, QuantizedTensor | BlockTensor):
        if params is not None:
            own = "params" if isinstance(q, QuantizedTensor) else "scales"
            raise DtypeError(f"got params for a {type(q).__name__}, which has its own {own}: leave params out")
        return q.dequantize(dtype, out)
    if params is None:
        raise DtypeError(f"got {type(q).__name__} without params, but codes need params: use dequantize(codes, params)")
    if isinstance(params, QuantSpec | Format | str):
        raise DtypeError(
            f"got the spec {str(params)!r} as params, expected the QuantParams that the codes were made with: pass "
            "quantize(x, spec).params, or dequantize the QuantizedTensor"
        )
    tensor = QuantizedTensor.from_codes(q, params, "float32" if dtype is None else dtype)
    return tensor.dequantize(out=out)


def fake_quantize(
    x: ArrayLike,
    params: ParamsLike | BlockFormat,
    *,
    out: Array | None = None,
    nan: NaNPolicy = "propagate",
    step: int = 0,
    importance: ArrayLike | None = None,
) -> Array:
    """Fake-quantize x; the result equals ``dequantize(quantize(x))`` in every bit and has x's dtype.

    Args:
        x: float data.
        params: a QuantParams that fits x's shape; or a spec, to derive params from the min-max range of x; or a block
            format such as ``dt.gguf.q4_k`` or its name.
        out: array for the result; it must not overlap x.
        nan: "propagate" keeps NaN, and "raise" raises a NaNError. "zero_point" and "qmin" replace NaN by the value of
            that code. With a block format, "propagate" makes every element of a block NaN if one of them is NaN or
            infinite, and the other two are not supported.
        step: counter for stochastic rounding; each step has its own random numbers.
        importance: for block formats, one weight per column: errors in columns with a larger weight count more.

    Raises:
        RangeError: params is a spec, and x is empty or contains NaN or infinities.
        ShapeError, DtypeError, OutError: an argument has the wrong shape or type.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize(np.array([0.3, 0.9, np.nan]), dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5))
    array([0.5, 1. , nan])
    >>> dt.fake_quantize(np.array([7.0, 2.4, -7.0, 0.1, 0.35, 0.7]), "int4/group3")
    array([ 7. ,  2. , -7. ,  0.1,  0.4,  0.7])
    """
    form = find_block_format(params)
    if form is not None:
        return fake_quantize_blocks(x, form, importance=importance, out=out, nan=nan)
    _refuse_importance(importance)
    data = float_array(x, "x")
    params = get_params(cast("ParamsLike", params), data)
    plan = _plan("fake_quantize", data, params, nan=nan)
    plan.check(data, params, out)
    return cast("Array", plan.run(data, params, out=out, step=check_step(step)))


def fake_quantize_backward(
    g: ArrayLike,
    x: ArrayLike,
    params: ParamsLike | BlockFormat,
    *,
    ste: EstimatorLike = None,
    out: Array | None = None,
    step: int = 0,
) -> Array:
    """Return the gradient of x, given the gradient g of ``fake_quantize(x, params)``.

    Pass the same ``params`` and ``step`` as to the forward pass. If ``params`` is a spec, the params are derived from
    the min-max range of x. ``ste`` is the straight-through estimator; None means the mask of the params' convention. A
    block format clips nothing on purpose, so its only estimator is ``Identity``.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize_backward(np.ones(3), np.array([1.0, 127.4, 127.6]), dt.QuantParams.int8_symmetric())
    array([1., 1., 0.])
    """
    form = find_block_format(params)
    if form is not None:
        return _block_backward(g, x, form, ste, out)
    return _backward("fake_quantize_backward", g, x, cast("ParamsLike", params), ste, out, step)


def fake_quantize_masked(
    x: ArrayLike, params: ParamsLike, *, ste: EstimatorLike = None, out: Array | None = None, step: int = 0
) -> tuple[Array, Array]:
    """Fake-quantize x, and also return a mask with one bit per element: 1 where the gradient passes.

    Args:
        x: float data.
        params: a QuantParams that fits x's shape; or a spec, to derive params from the min-max range of x.
        ste: straight-through estimator, Identity or Clipped; None means the mask of the params' convention.
        out: array for the values.
        step: counter for stochastic rounding; each step has its own random numbers.

    Returns:
        The values, and the mask as bytes: element 0 in the lowest bit of byte 0.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize_masked(np.array([1.2, 900.0, -3.0]), dt.QuantParams.int8_symmetric())
    (array([  1., 127.,  -3.]), array([5], dtype=uint8))
    """
    data = float_array(x, "x")
    params = get_params(params, data)
    plan = _plan("fake_quantize_masked", data, params, ste=ste)
    plan.check(data, params, out)
    return cast("tuple[Array, Array]", plan.run(data, params, out=out, step=check_step(step)))


def fake_quantize_masked_backward(g: ArrayLike, mask: Array, params: QuantParams, *, out: Array | None = None) -> Array:
    """Return the gradient of x from the mask of ``fake_quantize_masked``.

    The result equals the result of ``fake_quantize_backward`` bit for bit. Pass the QuantParams of the forward pass. A
    spec is rejected, because params cannot be derived without x.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize_masked_backward(np.ones(3), np.array([6], np.uint8), dt.QuantParams.int8_symmetric())
    array([0., 1., 1.])
    """
    gradient = float_array(g, "g")
    check_is_params(params)
    plan = _plan("fake_quantize_masked_backward", gradient, params)
    plan.check(gradient, mask, params, out)
    return cast("Array", plan.run(gradient, mask, params, out=out))


def quantize_backward(
    g: ArrayLike,
    x: ArrayLike,
    params: ParamsLike,
    *,
    ste: EstimatorLike = None,
    out: Array | None = None,
    step: int = 0,
) -> Array:
    """Return the gradient of x, given the gradient g of the codes: the STE's gradient divided by the scale.

    >>> import detent as dt, numpy as np
    >>> dt.quantize_backward(np.ones(2), np.array([1.0, 900.0]), dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5))
    array([2., 0.])
    """
    return _backward("quantize_backward", g, x, params, ste, out, step)


def dequantize_backward(g: ArrayLike, params: QuantParams, *, out: Array | None = None) -> Array:
    """Return the gradient of the codes, given the gradient g of the values: ``g * scale``.

    >>> import detent as dt, numpy as np
    >>> dt.dequantize_backward(np.ones(2), dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5))
    array([0.5, 0.5])
    """
    gradient = float_array(g, "g")
    check_is_params(params)
    plan = _plan("dequantize_backward", gradient, params)
    plan.check(gradient, params, out)
    return cast("Array", plan.run(gradient, params, out=out))


def fake_quantize_learned_backward(
    g: ArrayLike,
    x: ArrayLike,
    params: ParamsLike,
    *,
    ste: EstimatorLike = None,
    grad_scale: float | None = None,
    step: int = 0,
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, of the scale and of the zero point (LSQ, LSQ+).

    Args:
        g: gradient of the result, of x's shape and dtype.
        x: float data.
        params: QuantParams of the forward pass; or a spec, to derive params from the min-max range of x.
        ste: straight-through estimator for the gradient of x; the other two gradients always use ``Clipped()``.
        grad_scale: factor for the gradients of scale and zero point; None means ``1 / sqrt(N * max(|qmax|, 1))`` with N
            elements per parameter set.
        step: step of the forward pass, for stochastic rounding.

    >>> import detent as dt, numpy as np
    >>> params = dt.QuantParams.int8_symmetric()
    >>> gx, gs, gz = dt.fake_quantize_learned_backward(np.ones(2), np.array([1.25, 200.0]), params, grad_scale=1.0)
    >>> gx, float(gs), float(gz)
    (array([1., 0.]), 126.75, -1.0)
    """
    gradient, data = float_array(g, "g"), float_array(x, "x")
    params = get_params(params, data)
    plan = _plan("fake_quantize_learned_backward", data, params, ste=ste)
    plan.check(gradient, data, params)
    result = plan.run(gradient, data, params, step=check_step(step), grad_scale=as_factor(grad_scale))
    return cast("tuple[Array, Array, Array]", result)


def fake_quantize_dynamic(
    x: ArrayLike, spec: QuantSpec | Format | str, *, out: Array | None = None
) -> tuple[Array, QuantParams]:
    """Fake-quantize x with params from its own range (dynamic quantization), and return values and params.

    For finite x, the result equals ``fake_quantize(x, QuantParams.from_data(spec, x))`` bit for bit. The range ignores
    NaN and infinities, for which ``from_data`` raises an error. x is read from memory only once if its parameter sets
    fit into the CPU cache.

    Raises:
        RangeError: x is empty, or a parameter set has no finite value; the contents of ``out`` are then undefined.

    >>> import detent as dt, numpy as np
    >>> y, params = dt.fake_quantize_dynamic(np.array([[127.0, 0.6], [1.0, -0.25]]), "int8/token")
    >>> y[0], params.scale * 127
    (array([127.,   1.]), array([127.,   1.]))
    """
    spec = get_spec(spec)
    data = float_array(x)
    tiling = spec.granularity.tiling(data.shape)
    if not data.size:
        raise RangeError(f"x of shape {data.shape} is empty, so it has no range: pass data with at least one element")
    if out is not None:
        check_out(out, [(data.dtype, data.shape)], {"x": data})
    target = np.empty_like(data, order="C") if out is None else out
    problem = Problem("fake_quantize", tiling, dtype_name(data.dtype), spec, None, "propagate")
    observed = observe(problem, data, target)
    if observed is not None:
        low, high, scale, zero_point, _ = observed
        return target, QuantParams.trusted(spec, Parameters(scale, zero_point.astype(np.int32)), low, high)
    low, high, nonfinite = minmax(data, tiling)
    if (low > high).any():
        raise RangeError(
            f"x is not finite in {nonfinite} of {data.size} elements, which leaves {int((low > high).sum())} of "
            f"{low.size} parameter sets without a finite element: replace NaN and infinities, or use a coarser "
            "granularity"
        )
    params = QuantParams.from_range(spec, low, high, dtype=compute_dtype(data.dtype))
    plan = find_plan("fake_quantize", data.shape, data.dtype, spec)
    return cast("Array", plan.run(data, params, out=target)), params


def _refuse_importance(importance: ArrayLike | None) -> None:
    if importance is not None:
        raise SpecError("got importance=, which only block formats such as 'q4_k' support: omit it")


def _block_backward(g: ArrayLike, x: ArrayLike, form: BlockFormat, ste: EstimatorLike, out: Array | None) -> Array:
    """Return a copy of g: the gradient of ``Identity``."""
    if not (ste is None or isinstance(get_estimator(ste, Convention.onnx), Identity)):
        raise SpecError(f"got ste={ste!r} for the block format {form}, expected Identity or None")
    gradient, data = float_array(g, "g"), float_array(x, "x")
    form.check_shape(data.shape)
    if gradient.shape != data.shape or gradient.dtype != data.dtype:
        raise ShapeError(
            f"got g of dtype {gradient.dtype} and shape {gradient.shape}, expected those of x: {data.dtype} and "
            f"{data.shape}"
        )
    if out is None:
        return gradient.copy()
    check_out(out, [(data.dtype, data.shape)], {})
    np.copyto(out, gradient)
    return out


def _backward(
    operation: str, g: ArrayLike, x: ArrayLike, params: ParamsLike, ste: EstimatorLike, out: Array | None, step: int
) -> Array:
    gradient, data = float_array(g, "g"), float_array(x, "x")
    params = get_params(params, data)
    plan = _plan(operation, data, params, ste=ste)
    plan.check(gradient, data, params, out)
    return cast("Array", plan.run(gradient, data, params, out=out, step=check_step(step)))


def _plan(
    operation: str, data: Array, params: QuantParams, *, ste: EstimatorLike = None, nan: NaNPolicy | None = None
) -> Plan:
    return find_plan(operation, data.shape, data.dtype, params.spec, ste, nan)
