"""Level 1: the codes, scales and zero points of a file, against its source and against ONNX Runtime.

``WeightCheck`` needs no data: the codes of each weight are compared with the source's, which may hold a matrix
transposed; what ONNX Runtime makes of them with detent's values; biases with the product of the scales of input and
weight; codes with the limit of the target. ``ActivationCheck`` takes the tensor that each QuantizeLinear node got,
quantizes it by detent with the *source's* parameters, and compares the codes.

A code differs where its number, its scale or its zero point does: a node with a wrong scale has wrong codes throughout,
even where the numbers agree. ``Tally`` counts them and keeps the first difference.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from detent.checks import first_index
from detent.errors import DetentError
from detent.granularity import PerAxis, PerGroup
from detent.onnx_model import QdqParams, get_target, make_session
from detent.onnx_model.graph import attribute_of, is_depthwise
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode, WeightCodes
from detent.onnx_model.sessions import Reading, ort_errors
from detent.ops import dequantize, quantize
from detent.params import QuantParams
from detent.tensor import QuantizedTensor
from detent.verification.source import Source
from detent.verification.verify_report import Difference

__all__ = [
    "ActivationCheck",
    "Decoded",
    "ScaleLayout",
    "Tally",
    "WeightCheck",
    "check_biases",
    "check_decoding",
    "check_limit",
    "compare_weight",
    "decode_weights",
    "layout_in_file",
    "layout_of",
    "spread",
    "steps_between",
    "ulps_between",
]

Array = NDArray[Any]
FLOAT_NBYTES = 4
DECODING_BUDGET = 1 << 29  # bytes of dequantized weights that are held at once


class Tally:
    """How many codes were compared, how many differ, and the first of them.

    >>> tally = Tally()
    >>> tally.count(10, 1)
    >>> tally.note(Difference("Q", "q", (0,), 1, 2, None, None, None, "wrong code"))
    >>> tally.compared, tally.differing, tally.first.got
    (10, 1, 2)
    """

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0
        self.first: Difference | None = None

    def count(self, compared: int, differing: int) -> None:
        """Add numbers of codes."""
        self.compared += int(compared)
        self.differing += int(differing)

    def note(self, difference: Difference) -> None:
        """Keep a difference, if it is the first."""
        if self.first is None:
            self.first = difference


def steps_between(a: Array, b: Array) -> int:
    """The largest distance of two codes; of small floats, of what they stand for.

    >>> steps_between(np.uint8([0, 9]), np.uint8([255, 9]))
    255
    """
    if a.dtype.kind in "iu" and b.dtype.kind in "iu" and max(a.itemsize, b.itemsize) < np.int64().itemsize:
        distance = np.subtract(a, b, dtype=np.int64 if max(a.itemsize, b.itemsize) > 1 else np.int16)
        return max(-int(distance.min(initial=0)), int(distance.max(initial=0)))
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return int(np.ceil(np.nanmax(distance, initial=0.0)))


@dataclass(frozen=True)
class ScaleLayout:
    """Where scales lie in data: along which axis, in blocks of how many.

    >>> str(ScaleLayout(0, 32))
    'axis 0 in blocks of 32'
    """

    axis: int | None
    block: int = 0

    def __str__(self) -> str:
        if self.axis is None:
            return "one for all"
        return f"axis {self.axis}" + (f" in blocks of {self.block}" if self.block else "")


def layout_of(params: QdqParams | QuantParams, rank: int) -> ScaleLayout:
    """Where the scales of a file's quantizer, or of parameters, lie in data of that rank.

    >>> str(layout_of(QuantParams.int8_symmetric(), 2))
    'one for all'
    """
    if isinstance(params, QdqParams):
        return ScaleLayout(params.axis % rank, params.block) if params.scale.ndim else ScaleLayout(None)
    granularity = params.spec.granularity
    if isinstance(granularity, PerGroup):
        return ScaleLayout(granularity.axis % rank, granularity.size)
    return ScaleLayout(granularity.axis % rank) if isinstance(granularity, PerAxis) else ScaleLayout(None)


def spread(values: Array, layout: ScaleLayout, shape: tuple[int, ...]) -> Array | None:
    """One value per element; None where the values do not fit the shape.

    >>> spread(np.array([1, 2]), layout_of(QuantParams("int8/axis1", np.ones(2)), 2), (1, 2))
    array([[1, 2]])
    """
    if layout.axis is None:
        return np.broadcast_to(values.reshape(()), shape) if values.size == 1 else None
    length = shape[layout.axis]
    if layout.block:
        if values.ndim != len(shape):
            return None
        cut = tuple(slice(length) if axis == layout.axis else slice(None) for axis in range(len(shape)))
        found = np.repeat(values, layout.block, axis=layout.axis)[cut]
        return found if found.shape == shape else None
    if values.size != length:
        return None
    return np.broadcast_to(values.reshape([-1 if i == layout.axis else 1 for i in range(len(shape))]), shape)


def _set_index(index: tuple[int, ...], layout: ScaleLayout) -> tuple[int, ...]:
    if layout.axis is None:
        return ()
    if not layout.block:
        return (index[layout.axis],)
    return tuple(i // layout.block if axis == layout.axis else i for axis, i in enumerate(index))


def ulps_between(a: float, b: float) -> int:
    """How many float32 numbers lie between two positive ones, the second included.

    >>> ulps_between(1.0, float(np.nextafter(np.float32(1), np.float32(2))))
    1
    """
    first, second = (int(np.float32(value).view(np.int32)) for value in (a, b))
    return abs(first - second)


def compare_weight(weight: WeightCodes, source: QuantizedTensor, tally: Tally) -> bool:
    """Count the codes of a weight that are not the source's: by number, scale or zero point.

    Args:
        weight: of the file.
        source: what it should be; the file may hold a matrix transposed.
        tally: where codes are counted.

    Returns:
        Whether all of them are the source's.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> tally, source = Tally(), QuantizedTensor.from_codes([3, 5], QuantParams("int8", 0.5))
    >>> compare_weight(artifact.weights[0], source, tally)
    False
    >>> print(tally.differing, tally.first)
    1 DequantizeLinear_v: wrong code, w[1] is 4, expected 5 (scale 0.5, zero point 0)
    """
    codes = weight.codes
    options = [_Compared(weight, codes, each) for each in _orientations(codes.shape, source)]
    if not options:
        tally.count(source.size, source.size)
        name = weight.node_name
        cause = "wrong shape"
        tally.note(Difference(name, weight.name, (), str(source.shape), str(codes.shape), None, None, None, cause))
        return False
    best = min(options, key=lambda each: each.other_codes)  # scales may be wrong in the right orientation
    tally.count(best.expected.codes.size, best.differing)
    if best.differing:
        tally.note(best.describe())
    return not best.differing


@dataclass(frozen=True)
class _Oriented:
    """The source's weight as the file may hold it."""

    codes: Array
    scale: Array
    zero_point: Array
    layout: ScaleLayout


def _orientations(shape: tuple[int, ...], source: QuantizedTensor) -> list[_Oriented]:
    params, layout = source.params, layout_of(source.params, len(source.shape))
    found = []
    if shape == source.shape:
        found.append(_Oriented(source.codes, params.scale, params.zero_point, layout))
    if len(shape) == 2 and shape == source.shape[::-1]:
        turned = layout if layout.axis is None else ScaleLayout(1 - layout.axis, layout.block)
        scale, zero = (part.T if layout.block else part for part in (params.scale, params.zero_point))
        found.append(_Oriented(source.codes.T, scale, zero, turned))
    return found


class _Compared:
    """A weight of the file beside one way to hold the source's."""

    def __init__(self, weight: WeightCodes, codes: Array, expected: _Oriented) -> None:
        self.weight, self.codes, self.expected = weight, codes, expected
        self.layout = layout_in_file(weight, codes.shape)
        how, shape = weight.qparams, codes.shape
        parts = (expected.scale, expected.zero_point)
        self.scale, self.zero = (np.asarray(spread(part, expected.layout, shape)) for part in parts)
        scale, zero = spread(how.scale, self.layout, shape), spread(how.zero_point, self.layout, shape)
        if scale is None or zero is None:
            self.bad = np.ones(shape, bool)
            self.bad_scale = self.bad
            self.file_scale = self.file_zero = None
            self.other_codes = self.bad.size
        else:
            self.file_scale, self.file_zero = scale, zero
            self.bad_scale = scale.astype(np.float64) != self.scale.astype(np.float64)
            other = self._compare_codes()
            self.bad, self.other_codes = self.bad_scale | other, int(np.count_nonzero(other))
        self.differing = int(np.count_nonzero(self.bad))

    def _compare_codes(self) -> Array:
        if self.codes.dtype.kind not in "iu":  # small floats, by their bits
            bits = [np.ascontiguousarray(part).view(np.uint8) for part in (self.codes, self.expected.codes)]
            return np.asarray(bits[0] != bits[1])
        own = self.codes.astype(np.int64) - np.asarray(self.file_zero)
        return np.asarray(own != self.expected.codes.astype(np.int64) - self.zero)

    def describe(self) -> Difference:
        """The first element that differs."""
        weight, index, layout = self.weight, first_index(self.bad), self.layout
        scale, zero = float(self.scale[index]), int(self.zero[index])
        known = None if self.file_zero is None else int(self.file_zero[index])
        shift = min((0, _usual_shift(weight.qparams.kind)), key=lambda each: abs(zero + each - (known or 0)))
        zero += shift

        def differ(tensor: str, where: tuple[int, ...], expected: Any, got: Any, cause: str) -> Difference:  # noqa: ANN401
            name = weight.node_name
            return Difference(name, tensor, where, expected, got, None, scale, zero, cause)

        if layout != self.expected.layout and self.bad_scale.any():
            cause = f"scales lie elsewhere: {layout}, expected {self.expected.layout}"
            return differ(weight.name, (), self.expected.layout.axis, layout.axis, cause)
        if self.file_scale is None or known is None:
            cause = f"scales of shape {weight.qparams.scale.shape} do not fit codes of shape {self.codes.shape}"
            return differ(weight.name, (), scale, None, cause)
        own = _set_index(index, layout)
        if self.bad_scale[index]:
            got = float(self.file_scale[index])
            return differ(weight.constants[0], own, scale, got, f"wrong scale, off by {ulps_between(scale, got)} ulp")
        if zero != known:
            return differ(weight.constants[1], own, zero, known, "wrong zero point")
        expected = self.expected.codes[index].item()
        expected = expected + shift if self.codes.dtype.kind in "iu" else expected
        return differ(weight.name, index, expected, self.codes[index].item(), "wrong code")


def _usual_shift(kind: int) -> int:
    name = TensorProto.DataType.Name(kind)
    return 1 << (int(name.removeprefix("UINT")) - 1) if name.startswith("UINT") else 0


def layout_in_file(weight: WeightCodes, shape: tuple[int, ...]) -> ScaleLayout:
    """Where scales lie in the constant itself, of which the node may see a part only.

    >>> qparams = QdqParams(np.ones(4, np.float32), np.zeros(4), TensorProto.INT8, axis=-1)
    >>> str(layout_in_file(WeightCodes("w", TensorProto(), NodeProto(), qparams, path=("Gather",)), (9, 4)))
    'axis 1'
    """
    layout = layout_of(weight.qparams, len(shape))
    if weight.direct or layout.axis is None or layout.block:
        return layout
    return ScaleLayout(len(shape) - 1 if weight.qparams.axis != 0 or weight.qparams.scale.size != shape[0] else 0)


class ActivationCheck:
    """Level 1 for activations.

    Args:
        artifact: the file.
        source: what it was made from.
        tally: where codes are counted.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> from detent.verification.source import OnnxSource
    >>> made = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> tally = Tally()
    >>> check = ActivationCheck(made, OnnxSource(made.model, made), tally)
    >>> check.readings()[0].take({"x": np.float32([0.5, 1.5]), "q": np.uint8([4, 7])})
    >>> print(tally.first)
    QuantizeLinear_q: wrong code, q[1] is 7, expected 6 (x 1.5, scale 0.5, zero point 3)
    """

    def __init__(self, artifact: QuantizedGraph, source: Source, tally: Tally) -> None:
        self._artifact, self._source, self._tally = artifact, source, tally
        self._noted: set[str] = set()
        self.notes: dict[str, None] = {}

    def readings(self) -> list[Reading]:
        """What has to be looked at."""
        return [self._reading(site) for site in self._artifact.quantize_nodes]

    def _reading(self, site: QuantizeNode) -> Reading:
        expected = self._source.expected(site)
        if expected is None:
            if self._source.knows_weights:
                self.notes[f"{site.node} is no quantizer of the source: compared with the file's own parameters"] = None
            return Reading((site.x, site.codes), self._taker(site, site.x, None, 0))
        return Reading((expected.x, site.codes), self._taker(site, expected.x, expected.params, expected.shift))

    def _taker(
        self, site: QuantizeNode, name: str, params: QuantParams | None, shift: int
    ) -> Callable[[Mapping[str, Array]], None]:
        file_params = cache(site.qparams.params)

        def take(arrays: Mapping[str, Array]) -> None:
            x, got = arrays[name], arrays[site.codes]
            try:
                own = file_params(x.shape) if params is None else params
                codes = quantize(x, own, nan="qmin").codes
            except DetentError as error:
                self._tally.count(got.size, got.size)
                self._note(site, (), None, None, (None, None, None), f"unsound parameters: {error}")
                return
            self._compare(site, x, got, codes, own, shift)

        return take

    def _compare(self, site: QuantizeNode, x: Array, got: Array, codes: Array, params: QuantParams, shift: int) -> None:
        if codes.dtype == got.dtype and codes.dtype.kind in "iu" and not shift:
            bad = got != codes
        elif codes.dtype.kind in "iu":
            bad = got.astype(np.int64) != codes.astype(np.int64) + shift
        else:  # small floats, which are read as float32; what is no number is so in both
            wide = codes.astype(np.float32)
            bad = ~((got == wide) | (np.isnan(got) & np.isnan(wide)))
        wrong = self._wrong_sets(site, params, shift, x.shape)
        everything = bad if wrong is None else bad | wrong
        differing = int(np.count_nonzero(everything))
        self._tally.count(got.size, differing)
        if differing and bad.any() and site.node not in self._noted:
            index = first_index(bad)
            layout = layout_of(params, max(x.ndim, 1))
            scale, zero = (
                np.asarray(spread(part, layout, x.shape))[index] for part in (params.scale, params.zero_point)
            )
            expected = codes[index].item() + (shift if codes.dtype.kind in "iu" else 0)
            about = float(x[index]), float(scale), int(zero) + shift
            self._note(site, index, expected, got[index].item(), about, "wrong code")

    def _wrong_sets(self, site: QuantizeNode, params: QuantParams, shift: int, shape: tuple[int, ...]) -> Array | None:
        """Which elements have a wrong scale or zero point in the file; None for none of them."""
        rank = max(len(shape), 1)
        here, there = layout_of(site.qparams, rank), layout_of(params, rank)
        how = site.qparams
        if here == there and np.array_equal(how.scale, params.scale):
            zeros = params.zero_point.astype(np.int64) + shift
            if np.array_equal(how.zero_point, zeros):
                return None
            self._note_parameter(site, params, how.zero_point != zeros, shift, is_scale=False)
            return spread(np.asarray(how.zero_point != zeros), here, shape)
        if here != there or how.scale.shape != params.scale.shape:
            cause = f"scales lie elsewhere: {here}, expected {there}"
            self._note(site, (), there.axis, here.axis, (None, None, None), cause)
            return np.ones(shape, bool)
        bad = np.asarray(how.scale != params.scale)
        self._note_parameter(site, params, bad, shift, is_scale=True)
        return spread(bad, here, shape)

    def _note_parameter(
        self, site: QuantizeNode, params: QuantParams, bad: Array, shift: int, *, is_scale: bool
    ) -> None:
        index = first_index(np.atleast_1d(bad))[: params.scale.ndim]
        scale, zero = float(params.scale[index]), int(params.zero_point[index]) + shift
        about = None, scale, zero
        if is_scale:
            got = float(site.qparams.scale[index])
            cause = f"wrong scale, off by {ulps_between(scale, got)} ulp"
            self._note(site, index, scale, got, about, cause, site.scale)
        else:
            self._note(
                site, index, zero, int(site.qparams.zero_point[index]), about, "wrong zero point", site.zero_point
            )

    def _note(
        self,
        site: QuantizeNode,
        index: tuple[int, ...],
        expected: float | None,
        got: float | None,
        about: tuple[float | None, float | None, int | None],
        cause: str,
        tensor: str = "",
    ) -> None:
        self._noted.add(site.node)
        self._tally.note(Difference(site.node, tensor or site.codes, index, expected, got, *about, cause))


class Decoded(NamedTuple):
    """A weight with the numbers that its codes stand for.

    Attributes:
        weight: the codes in the file.
        expected: detent's values, or why its parameters are unsound.
        got: the values of ONNX Runtime's DequantizeLinear; None if that node sees moved or looked-up codes.
    """

    weight: WeightCodes
    expected: Array | DetentError
    got: Array | None


def decode_weights(artifact: QuantizedGraph) -> Iterator[Decoded]:
    """Dequantize all weights of a file, by detent and by ONNX Runtime: one session, unless they are very large.

    Raises:
        UnsupportedError: ONNX Runtime does not run one of the nodes.
    """
    group: list[tuple[WeightCodes, Array | DetentError]] = []
    nbytes = 0
    for weight in artifact.weights:
        group.append((weight, _expected_values(weight)))
        nbytes += 2 * FLOAT_NBYTES * weight.codes.size
        if nbytes > DECODING_BUDGET:
            yield from _decode_group(artifact, group)
            group, nbytes = [], 0
    yield from _decode_group(artifact, group)


def _expected_values(weight: WeightCodes) -> Array | DetentError:
    try:
        return _dequantized(weight)
    except DetentError as error:
        return error


def _dequantized(weight: WeightCodes) -> Array:
    codes, qparams = weight.codes, weight.qparams
    if not weight.is_bias:
        layout = layout_in_file(weight, codes.shape)
        return dequantize(codes, replace(qparams, axis=1 if layout.axis is None else layout.axis).params(codes.shape))
    QuantParams("int8" if not qparams.scale.ndim else "int8/axis0", qparams.scale)  # its scales must be sound
    scale = spread(qparams.scale, layout_of(qparams, codes.ndim), codes.shape)
    return codes.astype(np.float32) * np.asarray(scale, np.float32)


def _decode_group(artifact: QuantizedGraph, group: list[tuple[WeightCodes, Array | DetentError]]) -> Iterator[Decoded]:
    nodes = [
        weight.node
        for weight, expected in group
        if weight.direct and weight.form == "codes" and not isinstance(expected, DetentError)
    ]
    values = _run_dequantize_nodes(artifact, nodes) if nodes else {}
    for weight, expected in group:
        yield Decoded(weight, expected, values.pop(weight.node.output[0], None))


def _run_dequantize_nodes(artifact: QuantizedGraph, nodes: list[NodeProto]) -> dict[str, Array]:
    """The results of DequantizeLinear nodes, in a model of their own."""
    graph, model = artifact.graph, artifact.model
    names = dict.fromkeys(name for node in nodes for name in node.input if name)
    tensors = [graph.constants[name] for name in names if name in graph.constants]
    makers = [graph.producer(name) for name in names if name not in graph.constants]  # Constant nodes
    outputs = [node.output[0] for node in nodes]
    alone = helper.make_graph(
        [*(node for node in makers if node is not None), *nodes],
        "weights",
        [],
        [ValueInfoProto(name=name) for name in outputs],
        tensors,
    )
    with ort_errors():
        session = make_session(
            helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version), optimize=False
        )
        return dict(zip(outputs, session.run(outputs, {}), strict=True))


def check_decoding(decoded: Decoded, tally: Tally, *, count: bool) -> None:
    """Check that ONNX Runtime makes the same numbers of a weight's codes as detent, and that its parameters are sound.

    Args:
        decoded: a weight of the file.
        tally: where codes are counted.
        count: whether codes are counted as compared; not where they were counted before.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {-0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> tally = Tally()
    >>> check_decoding(next(decode_weights(artifact)), tally, count=True)
    >>> tally.differing, tally.first.cause
    (2, 'unsound parameters: scale must be positive, got -0.5')
    """
    weight, expected, got = decoded
    if count:
        tally.count(weight.codes.size, 0)
    if isinstance(expected, DetentError):
        tally.count(0, weight.codes.size)
        cause = f"unsound parameters: {expected}"
        tally.note(Difference(weight.node_name, weight.constants[0], (), None, None, None, None, None, cause))
        return
    if got is None:
        return
    bad = got.view(np.uint32) != expected.view(np.uint32)
    if bad.any():
        index = first_index(bad)
        tally.count(0, int(np.count_nonzero(bad)))
        values = float(expected[index]), float(got[index])
        cause = "ONNX Runtime dequantizes this code differently"
        tally.note(Difference(weight.node_name, weight.node.output[0], index, *values, None, None, None, cause))


def check_biases(
    artifact: QuantizedGraph,
    tally: Tally,
    biases: Mapping[str, Array] | None = None,
    scales: Mapping[str, Array] | None = None,
) -> None:
    """Check that biases lie on the grid of the products that they are added to, and hold the source's numbers.

    Args:
        artifact: a file of detent's.
        tally: where codes are counted.
        biases: what the source has, by the tensor of the codes of the layer's weight.
        scales: those of the source, by the tensor of the codes; the file's where the source has none.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> check_biases(open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }''')), Tally())
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
            known = scales or {}
            left = np.asarray(known.get(x.input[0], graph.array(x.input[1])), np.float32)
            right = np.asarray(known.get(weight.name, weight.qparams.scale), np.float32)
            unit = left.reshape(-1)[:1] * right.reshape(-1)
            _check_bias(bias, unit, (biases or {}).get(weight.name), tally)


def _check_bias(bias: WeightCodes, unit: Array, source: Array | None, tally: Tally) -> None:
    codes, name = bias.codes, bias.node_name
    scale = np.broadcast_to(bias.qparams.scale.reshape(-1), codes.shape)
    expected = np.broadcast_to(unit, codes.shape) if unit.size in {1, codes.size} else scale
    bad = scale != expected
    if bad.any():
        index = first_index(bad)
        cause = "the scale of a bias is not the product of the scales of input and weight: one of the three was changed"
        values = float(expected[index]), float(scale[index])
        tally.note(Difference(name, bias.constants[0], index, *values, None, values[0], 0, cause))
    if source is not None and source.shape == codes.shape:
        wanted = np.rint(source.astype(np.float64) / expected)
        other = wanted != codes
        if other.any() and not bad.any():
            index = first_index(other)
            about = (float(source[index]), float(expected[index]), 0)
            tally.note(
                Difference(
                    name, bias.name, index, int(wanted[index]), int(codes[index]), *about, "wrong code of a bias"
                )
            )
        bad = bad | other
        tally.count(codes.size, int(np.count_nonzero(bad)))
    elif bad.any():
        tally.count(0, int(np.count_nonzero(bad)))


def check_limit(artifact: QuantizedGraph, weight: WeightCodes, tally: Tally) -> None:
    """Check that codes are within what the file's target takes.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> check_limit(artifact, artifact.weights[0], Tally())
    """
    about = artifact.provenance
    limit = None if about is None or not about.target else get_target(about.target).limit
    readers = artifact.graph.consumers(weight.node.output[0])
    if (
        limit is None
        or weight.qparams.kind != TensorProto.INT8
        or not any(_is_dense(artifact, each) for each in readers)
    ):
        return
    codes = weight.codes.astype(np.int64)
    bad = np.abs(codes) > limit
    if bad.any():
        index = first_index(bad)
        tally.count(0, int(np.count_nonzero(bad)))
        cause = f"a code beyond {limit}, the limit of target {about.target!r}" if about else ""
        tally.note(Difference(weight.node_name, weight.name, index, None, int(codes[index]), None, None, None, cause))


def _is_dense(artifact: QuantizedGraph, node: NodeProto) -> bool:
    """Whether a node adds products of several channels of quantized data, which may saturate."""
    if node.op_type not in {"Conv", "Gemm", "MatMul"}:
        return False
    before = artifact.graph.producer(node.input[0])
    if before is None or before.op_type != "DequantizeLinear":
        return False
    made = artifact.graph.producer(node.input[1])
    shape = artifact.graph.shape(made.input[0]) if made is not None else None
    return shape is None or not is_depthwise(attribute_of(node, "group", 1), shape)


class WeightCheck:
    """Level 1 for weights and biases, which needs no data.

    Attributes:
        notes: what was not compared.

    Args:
        artifact: the file.
        source: the model it was made from.
        tally: where codes are counted.
    """

    def __init__(self, artifact: QuantizedGraph, source: Source, tally: Tally) -> None:
        self._artifact, self._source, self._tally = artifact, source, tally
        self._missing: dict[str, QuantizedTensor] = {}
        self.notes: dict[str, None] = {}

    def run(self) -> None:
        """Compare every weight of the file with the source's, its numbers with ONNX Runtime's, and check biases."""
        source_weights, names = self._source.weights(), self._source.names
        compared: set[str] = set()
        biases: dict[str, Array] = {}
        scales = self._activation_scales()
        for decoded in decode_weights(self._artifact):
            weight = decoded.weight
            name = names.get(weight.name, "")
            source_weight = source_weights.get(name)
            if source_weight is not None:
                compared.add(name)
                scales[weight.name] = source_weight.params.scale
                if not compare_weight(weight, source_weight, self._tally):
                    continue
                bias = self._source.bias(name)
                if bias is not None:
                    biases[weight.name] = bias
            elif self._source.knows_weights and not weight.is_bias:
                self.notes[f"{weight.name} is no weight of the source: only its decoding was checked"] = None
            check_decoding(decoded, self._tally, count=source_weight is None and not weight.is_bias)
            check_limit(self._artifact, weight, self._tally)
        if self._artifact.provenance is not None:
            check_biases(self._artifact, self._tally, biases, scales)
        self._missing = {name: tensor for name, tensor in source_weights.items() if name not in compared}

    def _activation_scales(self) -> dict[str, Array]:
        expected = ((each.codes, self._source.expected(each)) for each in self._artifact.quantize_nodes)
        return {codes: quantizer.params.scale for codes, quantizer in expected if quantizer is not None}

    def count_absent(self) -> None:
        """Count what took part in the source's runs and is not in the file; call it after the data."""
        for name, tensor in self._source.absent_weights(self._missing).items():
            self._tally.count(tensor.size, tensor.size)
            cause = "a quantized weight of the source is not in the file"
            self._tally.note(Difference(name, name, (), str(tensor.shape), None, None, None, None, cause))
        for name in self._source.absent_quantizers():
            self._tally.count(1, 1)
            cause = "a quantizer of the source is no node of the file"
            self._tally.note(Difference(name, name, (), None, None, None, None, None, cause))
