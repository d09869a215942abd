"""The operators: quantize, dequantize, fake quantize and their gradients, on NumPy arrays.

Each finds a plan for its arguments, checks and runs it. Data are float16, bfloat16, float32 or float64 arrays of any
shape and strides; ``out`` avoids the allocation of the result. Formulas and guarantees: docs/numerics.md.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent.checks import compute_dtype, float_array
from detent.errors import DtypeError, RangeError
from detent.formats import Format
from detent.kernels import Problem, dtype_name, minmax, observe
from detent.params import QuantParams
from detent.plan import NaNPolicy, Plan, as_factor, check_is_params, check_out, check_step, find_plan
from detent.scale_rule import Parameters
from detent.spec import QuantSpec, code_dtype, get_spec
from detent.ste import EstimatorLike
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


def quantize(
    x: ArrayLike, params: QuantParams, *, out: Array | None = None, nan: NaNPolicy = "raise", step: int = 0
) -> QuantizedTensor:
    """The code of every element, ``clamp(round(x / scale) + zero_point)``.

    Args:
        x: float data.
        params: scales and zero points that fit x's shape.
        out: where the codes go: an array of x's shape and the format's storage type, or a 1-D uint8 buffer of the
            packed size. The returned tensor shares its memory and changes with it.
        nan: "raise", or the code NaN gets: "zero_point" or "qmin". Infinities saturate.
        step: the counter of stochastic rounding.

    Raises:
        NaNError: x holds NaN; what is in ``out`` is then undefined.
        ShapeError, DtypeError, OutError: arguments that do not fit.

    >>> import detent as dt, numpy as np
    >>> dt.quantize(np.array([0.5, 1.5, -9.0], np.float32), dt.QuantParams.int4_symmetric()).codes
    array([ 0,  2, -7], dtype=int8)
    """
    data = float_array(x, "x")
    plan = _plan("quantize", data, params, nan=nan)
    plan.check(data, params, out)
    codes = cast("Array", plan.run(data, params, out=out, step=check_step(step)))
    packed = out is not None and (out.shape != data.shape or out.dtype != code_dtype(params.spec))
    return QuantizedTensor.trusted(codes, params, data.shape, data.dtype, packed=packed, shared=out is not None)


def dequantize(
    q: QuantizedTensor | ArrayLike,
    params: QuantParams | None = None,
    *,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
) -> Array:
    """The values ``(q - zero_point) * scale``.

    Args:
        q: a QuantizedTensor, or codes together with ``params``.
        dtype: the result's type; by default the type of the data the tensor was made from, float32 for codes.

    >>> import detent as dt
    >>> dt.dequantize([3, -4], dt.QuantParams.int8_symmetric())
    array([ 3., -4.], dtype=float32)
    """
    if isinstance(q, QuantizedTensor):
        if params is not None:
            raise DtypeError("a QuantizedTensor brings its own params: leave params out")
        return q.dequantize(dtype, out)
    if params is None:
        raise DtypeError(f"codes need params, got {type(q).__name__} alone: dequantize(codes, params)")
    tensor = QuantizedTensor.from_codes(q, params, "float32" if dtype is None else dtype)
    return tensor.dequantize(out=out)


def fake_quantize(
    x: ArrayLike, params: QuantParams, *, out: Array | None = None, nan: NaNPolicy = "propagate", step: int = 0
) -> Array:
    """``dequantize(quantize(x))`` in one call, in x's dtype and bit for bit the same.

    Args:
        x: float data.
        params: scales and zero points that fit x's shape.
        out: where the result goes; it must not overlap x.
        nan: NaN stays NaN ("propagate"), raises, or becomes the value of the code "zero_point" or "qmin".
        step: the counter of stochastic rounding.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize(np.array([0.3, 0.9, np.nan]), dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5))
    array([0.5, 1. , nan])
    """
    data = float_array(x, "x")
    plan = _plan("fake_quantize", data, params, nan=nan)
    plan.check(data, params, out)
    return cast("Array", plan.run(data, params, out=out, step=check_step(step)))


def fake_quantize_backward(
    g: ArrayLike,
    x: ArrayLike,
    params: QuantParams,
    *,
    ste: EstimatorLike = None,
    out: Array | None = None,
    step: int = 0,
) -> Array:
    """The gradient of x, given the gradient g of ``fake_quantize(x, params)``.

    ``params`` and ``step`` are those of the forward pass, ``ste`` is the straight-through estimator; None is the mask
    of the params' convention.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize_backward(np.ones(3), np.array([1.0, 127.4, 127.6]), dt.QuantParams.int8_symmetric())
    array([1., 1., 0.])
    """
    return _backward("fake_quantize_backward", g, x, params, ste, out, step)


def fake_quantize_masked(
    x: ArrayLike, params: QuantParams, *, ste: EstimatorLike = None, out: Array | None = None, step: int = 0
) -> tuple[Array, Array]:
    """``fake_quantize(x, params)``, and the mask of where its gradient passes, 32 times smaller than x in float32.

    Args:
        x: float data.
        params: scales and zero points that fit x's shape.
        ste: the estimator, Identity or Clipped; None is the mask of the params' convention.
        out: where the values go.
        step: the counter of stochastic rounding.

    Returns:
        The values, and the mask as bytes: element 0 in the lowest bit of byte 0.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize_masked(np.array([1.2, 900.0, -3.0]), dt.QuantParams.int8_symmetric())
    (array([  1., 127.,  -3.]), array([5], dtype=uint8))
    """
    data = float_array(x, "x")
    plan = _plan("fake_quantize_masked", data, params, ste=ste)
    plan.check(data, params, out)
    return cast("tuple[Array, Array]", plan.run(data, params, out=out, step=check_step(step)))


def fake_quantize_masked_backward(g: ArrayLike, mask: Array, params: QuantParams, *, out: Array | None = None) -> Array:
    """The gradient of x by the mask that ``fake_quantize_masked`` made; the same bits as ``fake_quantize_backward``.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize_masked_backward(np.ones(3), np.array([6], np.uint8), dt.QuantParams.int8_symmetric())
    array([0., 1., 1.])
    """
    gradient = float_array(g, "g")
    plan = _plan("fake_quantize_masked_backward", gradient, params)
    plan.check(gradient, mask, params, out)
    return cast("Array", plan.run(gradient, mask, params, out=out))


def quantize_backward(
    g: ArrayLike,
    x: ArrayLike,
    params: QuantParams,
    *,
    ste: EstimatorLike = None,
    out: Array | None = None,
    step: int = 0,
) -> Array:
    """The gradient of x, given the gradient g of the codes: the estimator's gradient over the scale.

    >>> import detent as dt, numpy as np
    >>> dt.quantize_backward(np.ones(2), np.array([1.0, 900.0]), dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5))
    array([2., 0.])
    """
    return _backward("quantize_backward", g, x, params, ste, out, step)


def dequantize_backward(g: ArrayLike, params: QuantParams, *, out: Array | None = None) -> Array:
    """The gradient of the codes, given the gradient g of the values: ``g * scale``.

    >>> import detent as dt, numpy as np
    >>> dt.dequantize_backward(np.ones(2), dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5))
    array([0.5, 0.5])
    """
    gradient = float_array(g, "g")
    plan = _plan("dequantize_backward", gradient, params)
    plan.check(gradient, params, out)
    return cast("Array", plan.run(gradient, params, out=out))


def fake_quantize_learned_backward(
    g: ArrayLike,
    x: ArrayLike,
    params: QuantParams,
    *,
    ste: EstimatorLike = None,
    grad_scale: float | None = None,
    step: int = 0,
) -> tuple[Array, Array, Array]:
    """The gradients of x, of the scale and of the zero point (LSQ, LSQ+).

    Args:
        g: the gradient of the result, of x's shape and dtype.
        x: float data.
        params: the parameters of the forward pass.
        ste: the estimator of x's gradient; scale and zero point always use the code mask.
        grad_scale: the factor of the latter two; None is ``1 / sqrt(N * max(|qmax|, 1))`` with N elements in the set.
        step: the forward's counter of stochastic rounding.

    >>> import detent as dt, numpy as np
    >>> params = dt.QuantParams.int8_symmetric()
    >>> gx, gs, gz = dt.fake_quantize_learned_backward(np.ones(2), np.array([1.25, 200.0]), params, grad_scale=1.0)
    >>> gx, float(gs), float(gz)
    (array([1., 0.]), 126.75, -1.0)
    """
    gradient, data = float_array(g, "g"), float_array(x, "x")
    plan = _plan("fake_quantize_learned_backward", data, params, ste=ste)
    plan.check(gradient, data, params)
    result = plan.run(gradient, data, params, step=check_step(step), grad_scale=as_factor(grad_scale))
    return cast("tuple[Array, Array, Array]", result)


def fake_quantize_dynamic(
    x: ArrayLike, spec: QuantSpec | Format | str, *, out: Array | None = None
) -> tuple[Array, QuantParams]:
    """Fake quantize x with the parameters of its own range, and return both.

    The same bits as ``params = QuantParams.from_data(spec, x)`` and ``fake_quantize(x, params)``, except that values
    which are not finite do not count for the range. x is read once if its sets fit a cache.

    Raises:
        RangeError: x is empty, or a set has no finite value; what is in ``out`` is then undefined.

    >>> import detent as dt, numpy as np
    >>> y, params = dt.fake_quantize_dynamic(np.array([[127.0, 0.6], [1.0, -0.25]]), "int8/token")
    >>> y[0], params.scale * 127
    (array([127.,   1.]), array([127.,   1.]))
    """
    spec = get_spec(spec)
    data = float_array(x)
    tiling = spec.granularity.tiling(data.shape)
    if not data.size:
        raise RangeError(f"x of shape {data.shape} is empty: there is no range to take")
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
            f"{int((low > high).sum())} of {low.size} sets of x have no finite value, {nonfinite} non-finite values in "
            "all: clean the data"
        )
    params = QuantParams.from_range(spec, low, high, dtype=compute_dtype(data.dtype))
    plan = find_plan("fake_quantize", data.shape, data.dtype, spec)
    return cast("Array", plan.run(data, params, out=target)), params


def _backward(
    operation: str, g: ArrayLike, x: ArrayLike, params: QuantParams, ste: EstimatorLike, out: Array | None, step: int
) -> Array:
    gradient, data = float_array(g, "g"), float_array(x, "x")
    plan = _plan(operation, data, params, ste=ste)
    plan.check(gradient, data, params, out)
    return cast("Array", plan.run(gradient, data, params, out=out, step=check_step(step)))


def _plan(
    operation: str, data: Array, params: QuantParams, *, ste: EstimatorLike = None, nan: NaNPolicy | None = None
) -> Plan:
    check_is_params(params)
    return find_plan(operation, data.shape, data.dtype, params.spec, ste, nan)
