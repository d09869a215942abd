"""NumPy: the formulas of quantization as ufuncs with preallocated outputs."""

from collections.abc import Callable, Iterator

import numpy as np
from case import Array, Case, SkippedError, Tool


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield NumPy for a case."""
    makers = {
        "fake_quantize": _fake_quantize,
        "quantize int8": _quantize,
        "quantize int4": _quantize,
        "dequantize": _dequantize,
        "fake_quantize_backward": _backward,
        "min-max": _minmax,
    }
    if case.operation not in makers:
        raise SkippedError("numpy: not a simple expression")
    run, answer = makers[case.operation](case)
    yield Tool("numpy", run, answer)


Work = tuple[Callable[[], object], Callable[[], list[Array]]]


def grouped_shape(case: Case) -> tuple[int, ...]:
    """Return the shape with an additional axis for the groups, so that scales broadcast."""
    if case.group is None:
        return case.shape
    if case.shape[-1] % case.group:
        raise SkippedError("numpy: incomplete groups")
    return (case.shape[0], case.shape[1] // case.group, case.group)


def broadcast_params(case: Case) -> tuple[Array, Array]:
    """Return scale and zero point in the compute dtype, with shapes that broadcast."""
    compute = np.float64 if case.dtype == "float64" else np.float32
    shape = {"tensor": (), "axis1": (1, -1)}.get(case.granularity, (*grouped_shape(case)[:-1], 1))
    params = case.params()
    return params.scale.astype(compute).reshape(shape), params.zero_point.astype(compute).reshape(shape)


def _codes(case: Case) -> Callable[[], Array]:
    """Return a function that computes the codes as floats and writes them into a buffer."""
    scale, zero = broadcast_params(case)
    x = case.x.reshape(grouped_shape(case))
    buffer = np.empty(x.shape, scale.dtype)
    qmin, qmax = case.spec().qmin, case.spec().qmax

    def run() -> Array:
        np.divide(x, scale, out=buffer, dtype=buffer.dtype)
        np.rint(buffer, out=buffer)
        np.add(buffer, zero, out=buffer)
        return np.clip(buffer, qmin, qmax, out=buffer)

    return run


def _scaled(buffer: Array, scale: Array, out: Array) -> None:
    """Multiply the buffer by the scale, in the dtype of the output."""
    if buffer.dtype == out.dtype:
        np.multiply(buffer, scale, out=out)
    else:
        np.multiply(buffer, scale, out=buffer)
        np.copyto(out, buffer, casting="unsafe")


def _fake_quantize(case: Case) -> Work:
    codes, (scale, zero) = _codes(case), broadcast_params(case)
    out = np.empty(grouped_shape(case), case.real)

    def run() -> None:
        buffer = codes()
        np.subtract(buffer, zero, out=buffer)
        _scaled(buffer, scale, out)

    return run, lambda: [out.reshape(case.shape)]


def _quantize(case: Case) -> Work:
    codes = _codes(case)
    out = np.empty(grouped_shape(case), np.int8)
    if case.bits == 8:
        return lambda: np.copyto(out, codes(), casting="unsafe"), lambda: [out.reshape(case.shape)]
    packed = np.empty(case.size // 2, np.uint8)
    pairs = out.view(np.uint8).reshape(-1, 2)

    def run() -> None:
        np.copyto(out, codes(), casting="unsafe")
        np.left_shift(pairs[:, 1], 4, out=packed)
        np.bitwise_or(packed, pairs[:, 0] & 15, out=packed)

    return run, lambda: [packed]


def _dequantize(case: Case) -> Work:
    scale, zero = broadcast_params(case)
    codes, out = case.codes.reshape(grouped_shape(case)), np.empty(grouped_shape(case), case.real)
    buffer = np.empty(grouped_shape(case), scale.dtype)

    def run() -> None:
        np.subtract(codes, zero, out=buffer, dtype=buffer.dtype)
        _scaled(buffer, scale, out)

    return run, lambda: [out.reshape(case.shape)]


def _backward(case: Case) -> Work:
    scale, zero = broadcast_params(case)
    x, g, out = (a.reshape(grouped_shape(case)) for a in (case.x, case.g, np.empty(case.shape, case.real)))
    buffer, passes, below = np.empty(x.shape, scale.dtype), np.empty(x.shape, bool), np.empty(x.shape, bool)
    qmin, qmax = case.spec().qmin, case.spec().qmax

    def run() -> None:
        np.divide(x, scale, out=buffer, dtype=buffer.dtype)
        np.rint(buffer, out=buffer)
        np.add(buffer, zero, out=buffer)
        np.less_equal(qmin, buffer, out=passes)
        np.less_equal(buffer, qmax, out=below)
        np.logical_and(passes, below, out=passes)
        out.fill(0)
        np.copyto(out, g, where=passes)

    return run, lambda: [out.reshape(case.shape)]


def _minmax(case: Case) -> Work:
    axis = {"tensor": None, "axis1": 0}.get(case.granularity, -1)
    x, last = case.x.reshape(grouped_shape(case)), []

    def run() -> None:
        last[:] = x.min(axis=axis), x.max(axis=axis)

    return run, lambda: [np.asarray(bound) for bound in last]
