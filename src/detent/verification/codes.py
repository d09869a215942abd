"""Level 1: codes, scales and zero points of a file, compared with its source and with ONNX Runtime.

``WeightCheck`` needs no data. It checks four things for each weight:

- the codes equal the codes of the source, as stored or transposed;
- ONNX Runtime dequantizes the codes to the same values as detent;
- the bias scale is the input scale times the weight scale;
- no code exceeds the limit of the target.

``ActivationCheck`` quantizes the input of each QuantizeLinear node with the *source's* parameters and compares the
codes. It also quantizes the input of each DynamicQuantizeLinear node, and compares codes, scale and zero point.

A code counts as wrong if its integer, its scale or its zero point is wrong. So if the only scale of a node is wrong,
all its codes count as wrong. ``Tally`` counts the codes and keeps the first mismatch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from detent.checks import first_index
from detent.errors import DetentError, FileFormatError
from detent.granularity import PerAxis, PerGroup
from detent.onnx_model import TARGETS, QdqParams, get_target, make_session
from detent.onnx_model.graph import attribute_of, element_range, is_depthwise
from detent.onnx_model.qdq_reader import DynamicQuantizer, QuantizedGraph, QuantizeNode, WeightCodes
from detent.onnx_model.sessions import Reading, ort_errors
from detent.ops import dequantize, quantize
from detent.params import QuantParams
from detent.tensor import QuantizedTensor
from detent.verification.dynamic_quantizer import compare_dynamic
from detent.verification.source import Source
from detent.verification.tally import Tally

__all__ = [
    "ActivationCheck",
    "WeightCheck",
    "code_distance",
    "compare_codes",
    "layout_in_file",
    "layout_of",
    "shift_of",
    "spread",
]

Array = NDArray[Any]
FLOAT_NBYTES = 4
MAX_DECODED_NBYTES = 1 << 29  # if dequantized weights take more memory than this, several sessions run in turn


def code_distance(a: Array, b: Array) -> int:
    """Return the largest difference between a code in ``a`` and the code at the same index in ``b``.

    For float8 and float4, the values of the codes are compared.
    """
    nbytes = max(a.itemsize, b.itemsize)
    if a.dtype.kind in "iu" and b.dtype.kind in "iu" and nbytes < 8:
        distance = np.subtract(a, b, dtype=np.int16 if nbytes == 1 else np.int64)
        return max(-int(distance.min(initial=0)), int(distance.max(initial=0)))
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return int(np.ceil(np.nanmax(distance, initial=0.0)))


# Layout of scales


def shift_of(params: QuantParams, kind: int) -> int:
    """Return the offset that a file adds to store signed codes in the unsigned type ``kind``; 0 without an offset."""
    format = params.spec.format
    if not format.is_integer or not format.signed:
        return 0
    low, high = element_range(kind)
    return (high + 1) // 2 if low == 0 else 0


@dataclass(frozen=True)
class ScaleLayout:
    """Layout of a tensor's scales: their axis (None if per-tensor), and the group size (0 without groups)."""

    axis: int | None
    block: int = 0

    def __str__(self) -> str:
        if self.axis is None:
            return "per-tensor"
        return f"axis {self.axis}" + (f" in groups of {self.block}" if self.block else "")


def layout_of(params: QdqParams | QuantParams, rank: int) -> ScaleLayout:
    """Return the layout of the scales in ``params``, for data with ``rank`` axes."""
    if isinstance(params, QdqParams):
        return ScaleLayout(params.axis_in(rank), params.block) if params.scale.ndim else ScaleLayout(None)
    granularity = params.spec.granularity
    if isinstance(granularity, PerGroup):
        return ScaleLayout(granularity.axis % rank, granularity.size)
    return ScaleLayout(granularity.axis % rank) if isinstance(granularity, PerAxis) else ScaleLayout(None)


def layout_in_file(weight: WeightCodes, shape: tuple[int, ...]) -> ScaleLayout:
    """Return the layout of scales for the stored constant, even if DequantizeLinear reads only some of its rows."""
    layout = layout_of(weight.qparams, len(shape))
    if weight.direct or layout.axis is None or layout.block:
        return layout
    return ScaleLayout(len(shape) - 1 if weight.qparams.axis != 0 or weight.qparams.scale.size != shape[0] else 0)


def spread(values: Array, layout: ScaleLayout, shape: tuple[int, ...]) -> Array | None:
    """Broadcast scales or zero points to one value per element; return None if the values do not fit the shape."""
    if layout.axis is None:
        return np.broadcast_to(values.reshape(()), shape) if values.size == 1 else None
    length = shape[layout.axis]
    if layout.block:
        if values.ndim != len(shape):
            return None
        cut = tuple(slice(length) if axis == layout.axis else slice(None) for axis in range(len(shape)))
        repeated = np.repeat(values, layout.block, axis=layout.axis)[cut]
        return repeated if repeated.shape == shape else None
    if values.size != length:
        return None
    return np.broadcast_to(values.reshape([-1 if i == layout.axis else 1 for i in range(len(shape))]), shape)


def _scale_index(index: tuple[int, ...], layout: ScaleLayout) -> tuple[int, ...]:
    """Return the index of the scale that belongs to the element at ``index``."""
    if layout.axis is None:
        return ()
    if not layout.block:
        return (index[layout.axis],)
    return tuple(i // layout.block if axis == layout.axis else i for axis, i in enumerate(index))


def _wrong_scale(expected: float, got: float) -> str:
    first, second = (int(np.float32(value).view(np.int32)) for value in (expected, got))
    return f"wrong scale, off by {abs(first - second)} ulp"


# Weights of the file and of the source


def _compare_weight(weight: WeightCodes, source: QuantizedTensor, tally: Tally) -> bool:
    """Count codes whose integer, scale or zero point differs from the source; return True if none differs."""
    candidates = [_Comparison(weight, each) for each in _orientations(weight.codes.shape, source)]
    if not candidates:
        tally.count(source.size, source.size)
        shapes = str(source.shape), str(weight.codes.shape)
        tally.note("wrong shape", weight.node_name, weight.name, (), *shapes)
        return False
    # Choose the orientation by the integers, because scales may be wrong in both orientations.
    best = min(candidates, key=lambda each: each.wrong_codes)
    tally.count(weight.codes.size, best.differing)
    if best.differing and tally.first is None:
        best.note(tally)
    return not best.differing


class _Oriented(NamedTuple):
    """The source's weight, as stored or transposed."""

    codes: Array
    scale: Array
    zero_point: Array
    layout: ScaleLayout


def _orientations(shape: tuple[int, ...], source: QuantizedTensor) -> list[_Oriented]:
    params, layout = source.params, layout_of(source.params, len(source.shape))
    orientations = []
    if shape == source.shape:
        orientations.append(_Oriented(source.codes, params.scale, params.zero_point, layout))
    if len(shape) == 2 and shape == source.shape[::-1]:
        transposed = layout if layout.axis is None else ScaleLayout(1 - layout.axis, layout.block)
        scale, zero = (part.T if layout.block else part for part in (params.scale, params.zero_point))
        orientations.append(_Oriented(source.codes.T, scale, zero, transposed))
    return orientations


class _Comparison:
    """Comparison of a weight in the file with the source's weight in one orientation: as stored, or transposed."""

    def __init__(self, weight: WeightCodes, expected: _Oriented) -> None:
        self.weight, self.expected = weight, expected
        qparams, shape = weight.qparams, weight.codes.shape
        self.layout = layout_in_file(weight, shape)
        parts = expected.scale, expected.zero_point
        self.scale, self.zero = (np.asarray(spread(part, expected.layout, shape)) for part in parts)
        parts = qparams.scale, qparams.zero_point
        self.file_scale, self.file_zero = (spread(part, self.layout, shape) for part in parts)
        if self.file_scale is None or self.file_zero is None:
            self.file_scale = self.file_zero = None
            self.wrong_scale = self.wrong = np.ones(shape, bool)
            self.wrong_codes = self.wrong.size
        else:
            self.wrong_scale = self.file_scale.astype(np.float64) != self.scale.astype(np.float64)
            wrong = self._wrong_codes(weight.codes, self.file_zero)
            self.wrong, self.wrong_codes = self.wrong_scale | wrong, int(np.count_nonzero(wrong))
        self.differing = int(np.count_nonzero(self.wrong))

    def _wrong_codes(self, codes: Array, zero: Array) -> Array:
        if codes.dtype.kind not in "iu":  # float8 and float4: compare bits
            bits = [np.ascontiguousarray(part).view(np.uint8) for part in (codes, self.expected.codes)]
            return np.asarray(bits[0] != bits[1])
        return np.asarray(codes.astype(np.int64) - zero != self.expected.codes.astype(np.int64) - self.zero)

    def note(self, tally: Tally) -> None:
        """Record the first wrong element in ``tally``."""
        weight, codes, layout, index = self.weight, self.weight.codes, self.layout, first_index(self.wrong)
        scale, zero = float(self.scale[index]), int(self.zero[index])
        file_zero = None if self.file_zero is None else int(self.file_zero[index])
        shift = min((0, _usual_shift(weight.qparams.kind)), key=lambda each: abs(zero + each - (file_zero or 0)))
        zero += shift

        def note(cause: str, tensor: str, where: tuple[int, ...], expected: float | None, got: float | None) -> None:
            tally.note(cause, weight.node_name, tensor, where, expected, got, None, scale, zero)

        if layout != self.expected.layout and self.wrong_scale.any():
            cause = f"wrong layout of scales: {layout}, expected {self.expected.layout}"
            note(cause, weight.name, (), self.expected.layout.axis, layout.axis)
        elif self.file_scale is None or file_zero is None:
            cause = f"scales of shape {weight.qparams.scale.shape} do not fit codes of shape {codes.shape}"
            note(cause, weight.name, (), scale, None)
        elif self.wrong_scale[index]:
            got = float(self.file_scale[index])
            note(_wrong_scale(scale, got), weight.constants[0], _scale_index(index, layout), scale, got)
        elif zero != file_zero:
            note("wrong zero point", weight.constants[1], _scale_index(index, layout), zero, file_zero)
        else:
            expected = self.expected.codes[index].item() + (shift if codes.dtype.kind in "iu" else 0)
            note("wrong code", weight.name, index, expected, codes[index].item())


def _usual_shift(kind: int) -> int:
    name = TensorProto.DataType.Name(kind)
    return 1 << (int(name.removeprefix("UINT")) - 1) if name.startswith("UINT") else 0


# Activations


class ActivationCheck:
    """Level 1 for activations: quantizes the input of each QuantizeLinear node again, and compares the codes."""

    def __init__(self, artifact: QuantizedGraph, source: Source, tally: Tally) -> None:
        self._artifact, self._source, self._tally = artifact, source, tally
        self.notes: dict[str, None] = {}  # notes on quantizers that the source does not have

    def readings(self) -> list[Reading]:
        """Return one reading per QuantizeLinear or DynamicQuantizeLinear node: its input and its outputs."""
        dynamic = (
            Reading((each.x, each.codes, each.scale, each.zero_point), partial(self._take_dynamic, each))
            for each in self._artifact.dynamic_quantizers
        )
        return [*(self._reading(quantizer) for quantizer in self._artifact.quantize_nodes), *dynamic]

    def _take_dynamic(self, quantizer: DynamicQuantizer, arrays: Mapping[str, Array]) -> None:
        got = arrays[quantizer.codes], arrays[quantizer.scale], arrays[quantizer.zero_point]
        compare_dynamic(self._tally, quantizer, arrays[quantizer.x], got)

    def _reading(self, quantizer: QuantizeNode) -> Reading:
        expected = self._source.expected(quantizer)
        if expected is not None:
            take = self._taker(quantizer, expected.x, expected.params, expected.shift)
            return Reading((expected.x, quantizer.codes), take)
        if self._source.can_match_weights:
            note = f"the source has no quantizer for {quantizer.node}, so its codes were checked with the file's scales"
            self.notes[note] = None
        return Reading((quantizer.x, quantizer.codes), self._taker(quantizer, quantizer.x, None, 0))

    def _taker(
        self, quantizer: QuantizeNode, name: str, params: QuantParams | None, shift: int
    ) -> Callable[[Mapping[str, Array]], None]:
        file_params = cache(quantizer.qparams.params)

        def take(arrays: Mapping[str, Array]) -> None:
            x, got = arrays[name], arrays[quantizer.codes]
            try:
                own = file_params(x.shape) if params is None else params
            except DetentError as error:
                self._tally.count(got.size, got.size)
                self._tally.note(f"invalid parameters: {error}", quantizer.node, quantizer.codes)
                return
            compare_codes(self._tally, quantizer, x, got, own, shift)

        return take


def compare_codes(
    tally: Tally,
    quantizer: QuantizeNode,
    x: Array,
    got: Array,
    params: QuantParams,
    shift: int,
    cause: Callable[[], str] = lambda: "wrong code",
) -> None:
    """Quantize x with ``params``, add ``shift``, and count the codes in ``got`` that differ from the result.

    ``quantizer`` is the node that computed ``got``. ``cause`` returns the text that
    describes a wrong code.
    """
    try:
        codes = quantize(x, params, nan="qmin").codes
    except DetentError as error:
        tally.count(got.size, got.size)
        tally.note(f"invalid parameters: {error}", quantizer.node, quantizer.codes)
        return
    if codes.shape != got.shape:
        tally.count(got.size, got.size)
        tally.note(cause(), quantizer.node, quantizer.codes, (), str(codes.shape), str(got.shape))
        return
    if codes.dtype == got.dtype and codes.dtype.kind in "iu" and not shift:
        wrong = got != codes
    elif codes.dtype.kind in "iu":
        wrong = got.astype(np.int64) != codes.astype(np.int64) + shift
    else:  # float8 and float4, read as float32; NaN equals NaN
        wide = codes.astype(np.float32)
        wrong = ~((got == wide) | (np.isnan(got) & np.isnan(wide)))
    wrong_params = _wrong_params(tally, quantizer, params, shift, x.shape)
    tally.count(got.size, np.count_nonzero(wrong if wrong_params is None else wrong | wrong_params))
    if tally.first is None and wrong.any():
        index, layout = first_index(np.atleast_1d(wrong))[: x.ndim], layout_of(params, max(x.ndim, 1))
        parts = params.scale, params.zero_point
        scale, zero = (np.asarray(spread(part, layout, x.shape))[index] for part in parts)
        expected = codes[index].item() + (shift if codes.dtype.kind in "iu" else 0)
        values = expected, got[index].item(), float(x[index]), float(scale), int(zero) + shift
        tally.note(cause(), quantizer.node, quantizer.codes, index, *values)


def _wrong_params(
    tally: Tally, quantizer: QuantizeNode, params: QuantParams, shift: int, shape: tuple[int, ...]
) -> Array | None:
    """Return a mask of the elements whose scale or zero point in the file is wrong, or None if nothing is wrong."""
    rank, own = max(len(shape), 1), quantizer.qparams
    layout, expected = layout_of(own, rank), layout_of(params, rank)
    if layout != expected or own.scale.shape != params.scale.shape:
        cause = f"wrong layout of scales: {layout}, expected {expected}"
        tally.note(cause, quantizer.node, quantizer.codes, (), expected.axis, layout.axis)
        return np.ones(shape, bool)
    zeros = params.zero_point.astype(np.int64) + shift
    is_scale_wrong = not np.array_equal(own.scale, params.scale)
    if not is_scale_wrong and np.array_equal(own.zero_point, zeros):
        return None
    wrong = np.asarray(own.scale != params.scale if is_scale_wrong else own.zero_point != zeros)
    index = first_index(np.atleast_1d(wrong))[: params.scale.ndim]
    scale, zero = float(params.scale[index]), int(zeros[index])
    if is_scale_wrong:
        got = float(own.scale[index])
        cause = _wrong_scale(scale, got)
        tally.note(cause, quantizer.node, quantizer.scale, index, scale, got, None, scale, zero)
    else:
        values = zero, int(own.zero_point[index]), None, scale, zero
        tally.note("wrong zero point", quantizer.node, quantizer.zero_point, index, *values)
    return spread(wrong, layout, shape)


# Checks of the file that do not need the source: dequantization, biases, limits of the target


class _Decoded(NamedTuple):
    """A weight and its dequantized values.

    Attributes:
        expected: values computed by detent, or the error if the parameters are invalid.
        got: values computed by ONNX Runtime, or None if DequantizeLinear does not read the constant directly.
    """

    weight: WeightCodes
    expected: Array | DetentError
    got: Array | None


def _decode_weights(artifact: QuantizedGraph) -> Iterator[_Decoded]:
    """Dequantize all weights of a file twice: by detent, and by ONNX Runtime.

    ONNX Runtime uses one session, or several if the weights are very large.
    """
    group: list[tuple[WeightCodes, Array | DetentError]] = []
    nbytes = 0
    for weight in artifact.weights:
        group.append((weight, _dequantized(weight)))
        nbytes += 2 * FLOAT_NBYTES * weight.codes.size
        if nbytes > MAX_DECODED_NBYTES:
            yield from _decode_group(artifact, group)
            group, nbytes = [], 0
    yield from _decode_group(artifact, group)


def _dequantized(weight: WeightCodes) -> Array | DetentError:
    codes, qparams = weight.codes, weight.qparams
    try:
        if not weight.is_bias:
            axis = layout_in_file(weight, codes.shape).axis
            return dequantize(codes, replace(qparams, axis=1 if axis is None else axis).params(codes.shape))
        QuantParams("int8" if not qparams.scale.ndim else "int8/axis0", qparams.scale)  # raises if a scale is invalid
        scale = spread(qparams.scale, layout_of(qparams, codes.ndim), codes.shape)
    except DetentError as error:
        return error
    return codes.astype(np.float32) * np.asarray(scale, np.float32)


def _decode_group(artifact: QuantizedGraph, group: list[tuple[WeightCodes, Array | DetentError]]) -> Iterator[_Decoded]:
    nodes = [
        weight.node
        for weight, expected in group
        if weight.direct and weight.form == "codes" and not isinstance(expected, DetentError)
    ]
    values = _run_dequantize_nodes(artifact, nodes) if nodes else {}
    for weight, expected in group:
        yield _Decoded(weight, expected, values.pop(weight.node.output[0], None))


def _run_dequantize_nodes(artifact: QuantizedGraph, nodes: list[NodeProto]) -> dict[str, Array]:
    """Run DequantizeLinear nodes in a separate model; return a dict from names to outputs."""
    graph, model = artifact.graph, artifact.model
    names = dict.fromkeys(name for node in nodes for name in node.input if name)
    producers = [graph.producer(name) for name in names if name not in graph.constants]
    makers = [node for node in producers if node is not None]  # Constant nodes, and Casts that widen codes
    names |= dict.fromkeys(name for node in makers for name in node.input)
    tensors = [graph.constants[name] for name in names if name in graph.constants]
    outputs = [node.output[0] for node in nodes]
    infos = [ValueInfoProto(name=name) for name in outputs]
    alone = helper.make_graph([*makers, *nodes], "weights", [], infos, tensors)
    alone_model = helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version)
    with ort_errors():
        return dict(zip(outputs, make_session(alone_model, optimize=False).run(outputs, {}), strict=True))


def _check_decoding(decoded: _Decoded, tally: Tally) -> None:
    """Check that a weight's parameters are valid, and that ONNX Runtime dequantizes the weight like detent."""
    weight, expected, got = decoded
    if isinstance(expected, DetentError):
        tally.count(0, weight.codes.size)
        tally.note(f"invalid parameters: {expected}", weight.node_name, weight.constants[0])
    elif got is not None and (wrong := got.view(np.uint32) != expected.view(np.uint32)).any():
        index = first_index(wrong)
        tally.count(0, np.count_nonzero(wrong))
        cause = "ONNX Runtime dequantizes this code to a different value than detent"
        values = float(expected[index]), float(got[index])
        tally.note(cause, weight.node_name, weight.node.output[0], index, *values)


def _check_biases(
    artifact: QuantizedGraph, tally: Tally, biases: Mapping[str, Array], scales: Mapping[str, Array]
) -> None:
    """Check that each bias scale is input scale times weight scale, and that bias codes match the source.

    Args:
        artifact: the file.
        tally: counts compared and wrong codes.
        biases: maps the name of a weight's codes in the file to the float bias of the weight's layer in the source.
        scales: maps the name of codes in the file to the scales of the weight or activation in the source.
    """
    graph = artifact.graph
    by_output = {weight.node.output[0]: weight for weight in artifact.weights}
    for bias in (each for each in artifact.weights if each.is_bias):
        for reader in graph.consumers(bias.node.output[0]):
            if reader.op_type not in {"Conv", "Gemm"} or len(reader.input) < 3:
                continue
            weight, x = by_output.get(reader.input[1]), graph.producer(reader.input[0])
            if weight is None or x is None or x.op_type != "DequantizeLinear" or x.input[1] not in graph.constants:
                continue
            x_scale = np.asarray(scales.get(x.input[0], graph.array(x.input[1])), np.float32)
            w_scale = np.asarray(scales.get(weight.name, weight.qparams.scale), np.float32)
            _check_bias(bias, x_scale.reshape(-1)[:1] * w_scale.reshape(-1), biases.get(weight.name), tally)


def _check_bias(bias: WeightCodes, unit: Array, source: Array | None, tally: Tally) -> None:
    codes = bias.codes
    scale = np.broadcast_to(bias.qparams.scale.reshape(-1), codes.shape)
    expected = np.broadcast_to(unit, codes.shape) if unit.size in {1, codes.size} else scale
    wrong = scale != expected
    if wrong.any():
        index = first_index(wrong)
        cause = "wrong bias scale: it is not input scale times weight scale, so one of the three scales was changed"
        values = float(expected[index]), float(scale[index])
        tally.note(cause, bias.node_name, bias.constants[0], index, *values, None, values[0], 0)
    if source is None or source.shape != codes.shape:
        tally.count(0, np.count_nonzero(wrong))
        return
    expected_codes = np.rint(source.astype(np.float64) / expected)
    wrong_codes = expected_codes != codes
    if wrong_codes.any() and not wrong.any():
        index = first_index(wrong_codes)
        details = int(expected_codes[index]), int(codes[index]), float(source[index]), float(expected[index]), 0
        tally.note("wrong bias code", bias.node_name, bias.name, index, *details)
    tally.count(codes.size, np.count_nonzero(wrong | wrong_codes))


def _check_limit(artifact: QuantizedGraph, weight: WeightCodes, tally: Tally) -> None:
    """Check that no code exceeds the limit of the file's target."""
    provenance = artifact.provenance
    target = "" if provenance is None else provenance.target
    if target and target not in TARGETS:
        raise FileFormatError(
            f"unknown target {target!r:.60} in the file's metadata, expected one of {', '.join(TARGETS)}: quantize the "
            "model again"
        )
    limit = get_target(target).limit if target else None
    if limit is None or weight.qparams.kind != TensorProto.INT8:
        return
    readers = artifact.graph.consumers(weight.node.output[0])
    if weight.form != "integer" and not any(_adds_products(artifact, each) for each in readers):
        return
    codes = weight.codes.astype(np.int64)
    wrong = np.abs(codes) > limit
    if wrong.any():
        index = first_index(wrong)
        tally.count(0, np.count_nonzero(wrong))
        cause = f"code beyond {limit}, the largest magnitude that target {target!r} allows"
        tally.note(cause, weight.node_name, weight.name, index, None, int(codes[index]))


def _adds_products(artifact: QuantizedGraph, node: NodeProto) -> bool:
    """Return whether a node sums products over several channels of quantized data.

    If it does, an int16 accumulator may saturate.
    """
    if node.op_type not in {"Conv", "Gemm", "MatMul"}:
        return False
    x, weight = (artifact.graph.producer(name) for name in node.input[:2])
    if x is None or x.op_type != "DequantizeLinear":
        return False
    shape = artifact.graph.shape(weight.input[0]) if weight is not None else None
    return shape is None or not is_depthwise(attribute_of(node, "group", 1), shape)


class WeightCheck:
    """Level 1 for weights and biases; it needs no data."""

    def __init__(self, artifact: QuantizedGraph, source: Source, tally: Tally) -> None:
        self._artifact, self._source, self._tally = artifact, source, tally
        self._missing: dict[str, QuantizedTensor] = {}
        self.notes: dict[str, None] = {}  # notes on weights that the source does not have

    def run(self) -> None:
        """Compare the weights with the source, and detent's dequantization with ONNX Runtime's; then check biases."""
        source, tally = self._source, self._tally
        source_weights = source.weights()
        self._missing = dict(source_weights)
        biases, scales = dict[str, Array](), self._activation_scales()
        for decoded in _decode_weights(self._artifact):
            weight = decoded.weight
            name = source.names.get(weight.name, "")
            source_weight = source_weights.get(name)
            if source_weight is not None:
                self._missing.pop(name, None)
                scales[weight.name] = source_weight.params.scale
                if not _compare_weight(weight, source_weight, tally):
                    continue
                bias = source.bias(name)
                if bias is not None:
                    biases[weight.name] = bias
            elif not weight.is_bias:
                tally.count(weight.codes.size, 0)
                if source.can_match_weights:
                    self.notes[
                        f"the source has no weight {weight.name}, so only the dequantization of this weight was checked"
                    ] = None
            _check_decoding(decoded, tally)
            _check_limit(self._artifact, weight, tally)
        if self._artifact.provenance is not None:
            _check_biases(self._artifact, tally, biases, scales)

    def count(self) -> None:
        """Count the codes of all weights as compared and equal, after another check has compared these codes."""
        self._tally.count(sum(weight.codes.size for weight in self._artifact.weights if not weight.is_bias), 0)

    def _activation_scales(self) -> dict[str, Array]:
        expected = ((each.codes, self._source.expected(each)) for each in self._artifact.quantize_nodes)
        return {codes: quantizer.params.scale for codes, quantizer in expected if quantizer is not None}

    def count_absent(self) -> None:
        """Count a weight or quantizer as wrong if the source used it and the file lacks it.

        Call this method after the last batch.
        """
        for name, tensor in self._source.absent_weights(self._missing).items():
            self._tally.count(tensor.size, tensor.size)
            cause = "quantized weight of the source is missing in the file"
            self._tally.note(cause, name, name, (), str(tensor.shape))
        for name in self._source.absent_quantizers():
            self._tally.count(1, 1)
            self._tally.note("the source quantizes this tensor, but the file does not", name, name)
