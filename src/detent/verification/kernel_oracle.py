"""Level 3: compares ONNX Runtime's integer kernels on this machine with exact integer arithmetic.

Expected results, for any number of summands::

    sum = sum_k (x_k - z_x) (w_k - z_w) + b
    y   = clamp(round_half_even(fl(sum) * m) + z_y)         m = fl(fl(s_x * s_w) / s_y)

x, w and y are codes, z are zero points, s are scales, and b is the int32 bias; fl rounds to float32. If the input is
quantized dynamically, the output is float, and so is the bias: ``y = fl(fl(sum) * fl(s_x * s_w)) + b``.

Sums are computed in floating point. They are exact in any accumulation order if they are at most 2**24 (float32) or
2**53 (float64). Usually float32 is enough, and ONNX Runtime's float convolution is used. Otherwise a convolution is
computed as one float64 matmul per position in the kernel, which needs little memory.

A CPU with AVX2 and without VNNI adds two products of an unsigned and a signed byte in an int16 accumulator. The
accumulator can saturate if signed weights exceed 64 in magnitude. The codes are then far off, and no error is raised.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from detent.checks import first_index
from detent.errors import UnsupportedError
from detent.onnx_model.graph import CODE_OPERATORS
from detent.onnx_model.sessions import Reading, make_session, ort_errors
from detent.ops import quantize
from detent.params import QuantParams
from detent.tables import counted
from detent.verification.dynamic_quantizer import dynamic_params
from detent.verification.verify_report import Difference, Kernel

__all__ = [
    "ORACLES",
    "KernelCheck",
    "Prediction",
    "compare_kernel",
    "conv_sums",
    "dynamic_matmul",
    "is_integer_kernel",
    "matmul_sums",
    "requantize",
]

Array = NDArray[Any]
Attributes = Mapping[str, Any]
Inputs = Sequence[Array | None]
MAX_EXACT_FLOAT32 = 1 << 24  # float32 represents all integers up to this number
MAX_SESSIONS = 64  # limit on cached sessions; there is one per combination of convolution attributes
MATRIX_RANK = 2


@dataclass(frozen=True, eq=False)
class Prediction:
    """Expected output of a kernel.

    Attributes:
        values: expected codes or floats.
        tolerance: function that returns the rounding error allowed for each float, or None for codes.
        step: float value of one unit of the integer sum, or None for codes.
        axis: channel axis of the output.
    """

    values: Array
    tolerance: Callable[[], Array] | None = None
    step: Array | None = None
    axis: int = -1


def _max_abs(x: Array) -> int:
    return max(-int(x.min(initial=0)), int(x.max(initial=0)))


def _float_type(x: Array, w: Array, axes: tuple[int, ...]) -> type[np.float32] | type[np.float64]:
    """Return float32 if it holds sums of products over the ``axes`` of w exactly, in any order; else float64."""
    largest_sum = int(np.abs(w).sum(axis=axes, dtype=np.float64).max(initial=0))
    return np.float32 if _max_abs(x) * largest_sum <= MAX_EXACT_FLOAT32 else np.float64


def matmul_sums(a: Array, b: Array) -> Array:
    """Compute the matmul of integers exactly, and return the result as floats."""
    dtype = _float_type(a, b, (-2,)) if b.ndim > 1 else np.float64
    if b.ndim == MATRIX_RANK:  # one matmul for all samples
        flat = a.reshape(-1, a.shape[-1]).astype(dtype, copy=False)
        sums: Array = np.matmul(flat, b.astype(dtype, copy=False))
        return sums.reshape(*a.shape[:-1], b.shape[-1])
    return np.asarray(np.matmul(a.astype(dtype, copy=False), b.astype(dtype, copy=False)))


def conv_sums(
    x: Array, w: Array, *, strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int], group: int = 1
) -> Array:
    """Convolve integers exactly, and return the sums as floats.

    x has the shape (N, C, ...), and w the shape (M, C / group, ...). Zero points must already be subtracted from
    both. ``pads`` is ordered as in ONNX: the starts of all spatial axes, then the
    ends.
    """
    spatial, kernel = x.ndim - 2, w.shape[2:]
    borders = [(0, 0), (0, 0), *zip(pads[:spatial], pads[spatial:], strict=True)]
    dtype = _float_type(x, w, tuple(range(1, w.ndim)))
    if dtype is np.float32:
        return _float_conv(x, w, strides=strides, dilations=dilations, pads=pads, group=group)
    padded = np.pad(x.astype(dtype), borders)
    extents = _kernel_extents(kernel, dilations)
    sizes = [(n - extent) // s + 1 for n, extent, s in zip(padded.shape[2:], extents, strides, strict=True)]
    samples, group_channels = x.shape[0], w.shape[1]
    weights = w.astype(dtype).reshape(group, w.shape[0] // group, group_channels, *kernel)
    total = np.zeros((samples, group, w.shape[0] // group, int(np.prod(sizes))), dtype)
    products = np.empty_like(total)
    for tap in np.ndindex(*kernel):
        starts = [i * d for i, d in zip(tap, dilations, strict=True)]
        cut = tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, sizes, strides, strict=True))
        window = padded[(slice(None), slice(None), *cut)].reshape(samples, group, group_channels, -1)
        multiply = np.multiply if group_channels == 1 else np.matmul
        total += multiply(weights[(..., *tap)], window, out=products)
    return np.asarray(total.reshape(samples, w.shape[0], *sizes))


def _float_conv(x: Array, w: Array, **attributes: Any) -> Array:
    """Convolve integers in float32 with ONNX Runtime; the sums must be exact in float32."""
    session = _conv_session(**{key: tuple(value) if key != "group" else value for key, value in attributes.items()})
    feeds = {"x": x.astype(np.float32, copy=False), "w": w.astype(np.float32, copy=False)}
    with ort_errors():
        return np.asarray(session.run(None, feeds)[0])


@lru_cache(maxsize=MAX_SESSIONS)
def _conv_session(**attributes: Any) -> Any:  # noqa: ANN401 - ONNX Runtime has no type annotations
    """Create a session that convolves its two inputs."""
    values = [ValueInfoProto(name=name) for name in ("x", "w", "y")]
    for value in values:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    graph = helper.make_graph([node], "sums", values[:2], values[2:])
    return make_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8))


def _with_bias(sums: Array, bias: Array | None) -> Array:
    """Add an integer bias to sums, exactly."""
    if bias is None:
        return sums
    if _max_abs(sums) + _max_abs(bias) > MAX_EXACT_FLOAT32:
        sums = sums.astype(np.float64)
    return np.asarray(sums + bias.astype(sums.dtype))


def _kernel_extents(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Return the size of a dilated kernel along each axis."""
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def requantize(sums: Array, multiplier: Array, zero_point: Array | int, kind: np.dtype[Any]) -> Array:
    """Convert integer sums to codes: multiply in float32, round half to even, add the zero point, clamp."""
    limits = np.iinfo(kind)
    scaled = sums.astype(np.float32, copy=False) * np.asarray(multiplier, np.float32)
    rounded = np.rint(scaled, out=np.asarray(scaled))
    rounded += np.asarray(zero_point, np.float32)  # exact below 2**24; larger values are clamped anyway
    return np.clip(rounded, limits.min, limits.max, out=rounded).astype(kind)


def _shifted(x: Array, zero_point: Array | None, axis: int | None = None) -> Array:
    """Subtract the zero point from integers; the result is an exact float."""
    zero = np.zeros(()) if zero_point is None else np.asarray(zero_point)
    if zero.size == 1:
        zero = zero.reshape(())
    dtype = np.float32 if x.itemsize <= 2 else np.float64  # exact for integers of this size
    return np.asarray(np.subtract(x, zero if axis is None else _along(zero, x.ndim, axis), dtype=dtype))


def _flat(values: Array | None) -> Array:
    """Reshape a scale of one element to a scalar."""
    scale = np.asarray(values, np.float32)
    return scale.reshape(()) if scale.size == 1 else scale


def _multiplier(x_scale: Array | None, w_scale: Array | None, y_scale: Array | None) -> Array:
    return np.asarray((_flat(x_scale) * _flat(w_scale)) / _flat(y_scale))


def _along(values: Array, rank: int, axis: int) -> Array:
    """Reshape per-channel values so that they broadcast along ``axis`` of an array with ``rank`` axes."""
    return values if not values.ndim else values.reshape([-1 if i == axis else 1 for i in range(rank)])


def _pads(attributes: Attributes, sizes: Sequence[int], extents: Sequence[int], strides: Sequence[int]) -> list[int]:
    auto_pad = attributes.get("auto_pad", b"NOTSET")
    auto_pad = auto_pad.decode() if isinstance(auto_pad, bytes) else auto_pad
    if auto_pad == "NOTSET":
        return list(attributes.get("pads") or [0] * (2 * len(sizes)))
    if auto_pad == "VALID":
        return [0] * (2 * len(sizes))
    needed = [max((-(-n // s) - 1) * s + e - n, 0) for n, s, e in zip(sizes, strides, extents, strict=True)]
    small, large = [each // 2 for each in needed], [each - each // 2 for each in needed]
    return [*small, *large] if auto_pad == "SAME_UPPER" else [*large, *small]


def _conv(x: Array, w: Array, attributes: Attributes) -> Array:
    rank = w.ndim - 2
    strides = list(attributes.get("strides") or [1] * rank)
    dilations = list(attributes.get("dilations") or [1] * rank)
    pads = _pads(attributes, x.shape[2:], _kernel_extents(w.shape[2:], dilations), strides)
    return conv_sums(x, w, strides=strides, dilations=dilations, pads=pads, group=int(attributes.get("group", 1)))


def _present(*inputs: Array | None) -> list[Array]:
    present = [each for each in inputs if each is not None]
    if len(present) < len(inputs):
        raise UnsupportedError("level 3 does not support kernels with an omitted input")
    return present


def _qlinear_conv(inputs: Inputs, attributes: Attributes) -> Prediction:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (*inputs, None)[:9]
    x, w, y_zero = _present(x, w, y_zero)
    channels_last = bool(attributes.get("channels_last", 0))
    channels_first = np.moveaxis(x, -1, 1) if channels_last else x
    sums = _conv(_shifted(channels_first, x_zero), _shifted(w, w_zero, 0), attributes)
    sums = _with_bias(sums, None if bias is None else _along(bias, sums.ndim, 1))
    multiplier = _along(_multiplier(x_scale, w_scale, y_scale), sums.ndim, 1)
    codes = requantize(sums, multiplier, int(y_zero.reshape(())), y_zero.dtype)
    return Prediction(np.moveaxis(codes, 1, -1), axis=codes.ndim - 1) if channels_last else Prediction(codes, axis=1)


def _qlinear_matmul(inputs: Inputs, _: Attributes) -> Prediction:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs[:8]
    a, b, y_zero = _present(a, b, y_zero)
    sums = matmul_sums(_shifted(a, a_zero), _shifted(b, b_zero))
    codes = requantize(sums, _multiplier(a_scale, b_scale, y_scale), int(y_zero.reshape(())), y_zero.dtype)
    return Prediction(codes)


def _floats(sums: Array, scale: Array, bias: Array | None) -> Prediction:
    """Convert integer sums to floats: multiply by the scale, and add the bias if there is one.

    The tolerance allows for kernels that multiply and add without rounding in between.
    """
    scaled = sums.astype(np.float32, copy=False) * scale
    values = scaled if bias is None else scaled + np.asarray(bias, np.float32)

    def tolerance() -> Array:
        magnitude = np.abs(scaled) + (0 if bias is None else np.abs(np.asarray(bias, np.float32)))
        return np.asarray(magnitude * np.float32(2.0**-22))

    return Prediction(values, tolerance, scale)


def _qgemm(inputs: Inputs, attributes: Attributes) -> Prediction:
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = (*inputs, None, None, None)[:9]
    if a is None or b is None or float(attributes.get("alpha", 1.0)) != 1.0:
        raise UnsupportedError("level 3 does not support kernels with an omitted input, or with an alpha other than 1")
    left, right = _shifted(a, a_zero), _shifted(b, b_zero, 0 if attributes.get("transB", 0) else 1)
    left = left.T if attributes.get("transA", 0) else left
    right = right.T if attributes.get("transB", 0) else right
    sums = _with_bias(matmul_sums(left, right), bias)
    if y_scale is None or y_zero is None:
        return _floats(sums, _flat(a_scale) * _flat(b_scale), None)
    codes = requantize(sums, _multiplier(a_scale, b_scale, y_scale), int(y_zero.reshape(())), y_zero.dtype)
    return Prediction(codes)


def _matmul_to_float(inputs: Inputs, _: Attributes) -> Prediction:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = (*inputs, None, None, None)[:7]
    a, b = _present(a, b)
    sums = matmul_sums(_shifted(a, a_zero), _shifted(b, b_zero))
    return _floats(sums, _flat(a_scale) * _flat(b_scale), bias)


def _matmul_integer(inputs: Inputs, _: Attributes) -> Prediction:
    a, b, a_zero, b_zero = (*inputs, None, None)[:4]
    a, b = _present(a, b)
    rows = None if a_zero is None or a_zero.size == 1 else a.ndim - 2
    return Prediction(matmul_sums(_shifted(a, a_zero, rows), _shifted(b, b_zero)).astype(np.int32))


def _conv_integer(inputs: Inputs, attributes: Attributes) -> Prediction:
    x, w, x_zero, w_zero = (*inputs, None, None)[:4]
    x, w = _present(x, w)
    sums = _conv(_shifted(x, x_zero), _shifted(w, w_zero, 0), attributes)
    return Prediction(sums.astype(np.int32), axis=1)


def dynamic_matmul(x: tuple[Array, Array, Array], weight: Array, params: QuantParams, bias: Array | None) -> Array:
    """Compute the output of a layer whose input is quantized dynamically, as the file computes it.

    ``x`` are the input's codes, scale and zero point. ``weight`` are the weight's codes, with the parameters
    ``params``.
    """
    codes, scale, zero = x
    sums = matmul_sums(_shifted(codes, zero), _shifted(weight, params.zero_point, 1)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # float32 overflows here as in ONNX Runtime
        values = np.asarray(sums * (_flat(scale) * _flat(params.scale)))
        return values if bias is None else np.asarray(values + bias)


def _dynamic_codes(x: Array | None) -> tuple[Array, QuantParams]:
    (x,) = _present(x)
    params = dynamic_params(x)
    if params is None:
        raise UnsupportedError("the range of its input is infinite or close to 0")
    return quantize(x, params, nan="qmin").codes, params


def _dynamic_quantize(inputs: Inputs, _: Attributes) -> Prediction:
    return Prediction(_dynamic_codes(inputs[0])[0])


def _dynamic_quantize_matmul(inputs: Inputs, _: Attributes) -> Prediction:
    a, b, b_scale, b_zero, bias = (*inputs, None, None)[:5]
    (b,) = _present(b)
    codes, params = _dynamic_codes(a)
    sums = matmul_sums(_shifted(codes, params.zero_point), _shifted(b, b_zero))
    return _floats(sums, _flat(params.scale) * _flat(b_scale), bias)


ORACLES: Mapping[str, Callable[[Inputs, Attributes], Prediction]] = MappingProxyType(
    {
        "ConvInteger": _conv_integer,
        "DynamicQuantizeLinear": _dynamic_quantize,
        "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
        "MatMulInteger": _matmul_integer,
        "MatMulIntegerToFloat": _matmul_to_float,
        "QGemm": _qgemm,
        "QLinearConv": _qlinear_conv,
        "QLinearMatMul": _qlinear_matmul,
    }
)
MAX_SAFE_WEIGHT = 64  # up to this weight, the sum of two products with unsigned bytes fits int16: 255 * 64 * 2 < 2**15
_WEIGHT_INPUTS = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3, "MatMulIntegerToFloat": 1, "MatMulInteger": 1}
_ZERO_POINT_INPUTS = {"QLinearConv": 7, "QLinearMatMul": 7, "QGemm": 8}


def is_integer_kernel(node: NodeProto) -> bool:
    """Return whether a node of an optimized graph is an integer kernel."""
    return node.op_type.startswith(CODE_OPERATORS)


def compare_kernel(node: NodeProto, inputs: list[Array | None], got: Array) -> tuple[Kernel, Difference | None]:
    """Compare a kernel's output with exact arithmetic.

    Args:
        node: the node of the optimized graph.
        inputs: arrays that the node reads; an omitted input is None.
        got: array that the node computed.

    Returns:
        The result of the comparison, and the largest mismatch if the accumulator saturates (otherwise None).

    Raises:
        UnsupportedError: the comparison does not support this variant of the operator.
    """
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    expected = ORACLES[node.op_type](inputs, attributes)
    name, size = _name(node), int(expected.values.size)
    if expected.values.shape != got.shape:
        raise UnsupportedError(f"the kernel's result has shape {got.shape}, expected {expected.values.shape}")
    if _is_equal(expected, got):
        return Kernel(name, node.op_type, size, 0, 0, saturated=False), None
    distances = _distances(expected, got)
    differing = int(np.count_nonzero(distances))
    if not differing:
        return Kernel(name, node.op_type, size, 0, 0, saturated=False), None
    largest = int(distances.max())
    can_saturate = _can_saturate(node, inputs)
    saturated = can_saturate or largest > 1
    row = Kernel(name, node.op_type, size, differing, largest, saturated)
    if not saturated:
        return row, None
    return row, _describe(node, inputs, expected, got, distances, can_saturate=can_saturate)


def _is_equal(expected: Prediction, got: Array) -> bool:
    """Return whether all codes are equal, or all floats differ by at most a quarter unit of the integer sum."""
    if expected.step is None:
        return np.array_equal(expected.values, got)
    distance = np.subtract(expected.values, got)
    return bool((np.abs(distance, out=distance) <= np.float32(0.25) * expected.step).all())


def _distances(expected: Prediction, got: Array) -> Array:
    """Return the difference between each code and the expected code; for floats, in units of the integer sum."""
    distance = np.abs(got.astype(np.float64) - expected.values.astype(np.float64))
    if expected.tolerance is None or expected.step is None:
        return distance.astype(np.int64)
    beyond = distance > expected.tolerance() + 0.5 * expected.step.astype(np.float64)
    return np.where(beyond, np.ceil(distance / expected.step.astype(np.float64)), 0).astype(np.int64)


def _can_saturate(node: NodeProto, inputs: list[Array | None]) -> bool:
    weights = inputs[_WEIGHT_INPUTS.get(node.op_type, 1)]
    return weights is not None and weights.dtype == np.int8 and _max_abs(weights) > MAX_SAFE_WEIGHT


def _describe(
    node: NodeProto,
    inputs: list[Array | None],
    expected: Prediction,
    got: Array,
    distances: Array,
    *,
    can_saturate: bool,
) -> Difference:
    index = first_index(distances == distances.max())
    channel = index[expected.axis]
    count = int(np.count_nonzero(np.moveaxis(distances, expected.axis, 0)[channel]))
    reason = "the kernel's sums are wrong"
    weights = inputs[_WEIGHT_INPUTS.get(node.op_type, 1)]
    if can_saturate and weights is not None:
        reason = (
            f"the int16 accumulator saturates, because int8 weights reach {_max_abs(weights)}: "
            "quantize for target 'onnxruntime' or 'onnxruntime-avx2'"
        )
    position = _ZERO_POINT_INPUTS.get(node.op_type, len(inputs))
    scale, zero = inputs[position - 1 : position + 1] if position < len(inputs) else (None, None)
    return Difference(
        _name(node),
        node.output[0],
        index,
        expected.values[index].item(),
        got[index].item(),
        None,
        None if scale is None else float(scale.reshape(-1)[0]),
        None if zero is None else int(zero.reshape(-1)[0]),
        f"saturation in channel {channel}: {counted(count, 'wrong code')}, off by up to {int(distances.max())}; "
        f"{reason}",
    )


class KernelCheck:
    """Level 3: comparison of every integer kernel of an optimized graph with exact arithmetic."""

    def __init__(self, model: ModelProto) -> None:
        self._nodes = [node for node in model.graph.node if is_integer_kernel(node)]
        rows = ((node.output[0], Kernel(_name(node), node.op_type, 0, 0, 0, saturated=False)) for node in self._nodes)
        self._rows = dict(rows)
        self._worst: dict[str, Difference] = {}
        self.notes: dict[str, None] = {}

    def readings(self) -> list[Reading]:
        """Return one reading per kernel that has a formula in ``ORACLES``: its inputs and its output."""
        return [
            Reading((*dict.fromkeys(filter(None, node.input)), node.output[0]), partial(self._take, node))
            for node in self._nodes
            if node.op_type in ORACLES
        ]

    def _take(self, node: NodeProto, arrays: Mapping[str, Array]) -> None:
        output = node.output[0]
        row = self._rows[output]
        try:
            new, difference = compare_kernel(
                node, [arrays[name] if name else None for name in node.input], arrays[output]
            )
        except UnsupportedError as error:
            self.notes[f"{row.node} ({row.kernel}) was not compared: {error}"] = None
            return
        if difference is not None and (output not in self._worst or new.max_steps > row.max_steps):
            self._worst[output] = difference
        compared, differing = row.compared + new.compared, row.differing + new.differing
        distance, saturated = max(row.max_steps, new.max_steps), row.saturated or new.saturated
        self._rows[output] = Kernel(row.node, row.kernel, compared, differing, distance, saturated)

    def rows(self) -> tuple[Kernel, ...]:
        """Return one row per kernel, in the order of the graph."""
        return tuple(self._rows[node.output[0]] for node in self._nodes)

    def saturation(self) -> Difference | None:
        """Return the largest mismatch of the first kernel with a saturated accumulator, or None without saturation."""
        return next((self._worst[output] for output in self._rows if output in self._worst), None)


def _name(node: NodeProto) -> str:
    return node.name or node.output[0]
