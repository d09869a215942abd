"""Weights: the codes, scales and zero points of a file beside those of its source; level 1, without any data.

Tally: codes counted, and the first one that differs.

Activations: every QuantizeLinear of a file, fed what ONNX Runtime saw; level 1.

The tensor that a node got is quantized once more by detent, with the *source's* parameters, and the codes are compared.
A node with another scale or zero point than the source's has other codes throughout, even where their numbers agree.

Decoding: what a file's codes mean, whatever its source; the part of level 1 that needs no data and no source.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from detent.checks import first_index
from detent.errors import DetentError
from detent.granularity import PerAxis, PerGroup
from detent.onnx_model import Quantization, get_target, make_session
from detent.onnx_model.graph import attribute_of
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode, WeightCodes
from detent.onnx_model.sessions import refusals
from detent.ops import dequantize, quantize
from detent.params import QuantParams
from detent.tensor import QuantizedTensor
from detent.verification.probe import Reading
from detent.verification.source import Source
from detent.verification.verify_report import Difference

__all__ = [
    "ActivationCheck",
    "Place",
    "Tally",
    "check_biases",
    "check_decoding",
    "check_limit",
    "compare_weight",
    "place_in_file",
    "place_of",
    "spread",
    "steps_between",
    "ulps_between",
]

Array = NDArray[Any]


class Tally:
    """How many codes were compared, how many differ, and the first of them.

    >>> tally = Tally()
    >>> tally.count(10, 1)
    >>> tally.note(Difference("Q", "q", (0,), 1, 2, None, None, None, "another code"))
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
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return int(np.ceil(np.nanmax(distance, initial=0.0)))


@dataclass(frozen=True)
class Place:
    """Where scales lie in data: along which axis, in blocks of how many.

    >>> str(Place(0, 32))
    'axis 0 in blocks of 32'
    """

    axis: int | None
    block: int = 0

    def __str__(self) -> str:
        if self.axis is None:
            return "one for all"
        return f"axis {self.axis}" + (f" in blocks of {self.block}" if self.block else "")


def place_of(how: Quantization | QuantParams, rank: int) -> Place:
    """Where the scales of a file's quantizer, or of parameters, lie in data of that rank.

    >>> str(place_of(QuantParams.int8_symmetric(), 2))
    'one for all'
    """
    if isinstance(how, Quantization):
        return Place(how.axis % rank, how.block) if how.scale.ndim else Place(None)
    kept = how.spec.granularity
    if isinstance(kept, PerGroup):
        return Place(kept.axis % rank, kept.size)
    return Place(kept.axis % rank) if isinstance(kept, PerAxis) else Place(None)


def spread(values: Array, place: Place, shape: tuple[int, ...]) -> Array | None:
    """One value per element; None where the values do not fit the shape.

    >>> spread(np.array([1, 2]), place_of(QuantParams("int8/axis1", np.ones(2)), 2), (1, 2))
    array([[1, 2]])
    """
    if place.axis is None:
        return np.broadcast_to(values.reshape(()), shape) if values.size == 1 else None
    length = shape[place.axis]
    if place.block:
        if values.ndim != len(shape):
            return None
        cut = tuple(slice(length) if axis == place.axis else slice(None) for axis in range(len(shape)))
        found = np.repeat(values, place.block, axis=place.axis)[cut]
        return found if found.shape == shape else None
    if values.size != length:
        return None
    return np.broadcast_to(values.reshape([-1 if i == place.axis else 1 for i in range(len(shape))]), shape)


def _set_index(index: tuple[int, ...], place: Place) -> tuple[int, ...]:
    if place.axis is None:
        return ()
    if not place.block:
        return (index[place.axis],)
    return tuple(i // place.block if axis == place.axis else i for axis, i in enumerate(index))


def ulps_between(a: float, b: float) -> int:
    """How many float32 numbers lie between two positive ones, the second included.

    >>> ulps_between(1.0, float(np.nextafter(np.float32(1), np.float32(2))))
    1
    """
    first, second = (int(np.float32(value).view(np.int32)) for value in (a, b))
    return abs(first - second)


def compare_weight(artifact: QuantizedGraph, weight: WeightCodes, source: QuantizedTensor, tally: Tally) -> bool:
    """Count the codes of a weight that are not the source's: by number, scale or zero point.

    Args:
        artifact: the file.
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
    >>> compare_weight(artifact, artifact.weights[0], source, tally)
    False
    >>> print(tally.differing, tally.first)
    1 DequantizeLinear_v: another code, w[1] is 4, expected 5 (scale 0.5, zero point 0)
    """
    codes = weight.codes
    options = [_Compared(artifact, weight, codes, each) for each in _orientations(codes.shape, source)]
    if not options:
        tally.count(source.size, source.size)
        name = weight.node_name
        cause = "another shape"
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
    place: Place


def _orientations(shape: tuple[int, ...], source: QuantizedTensor) -> list[_Oriented]:
    params, place = source.params, place_of(source.params, len(source.shape))
    found = []
    if shape == source.shape:
        found.append(_Oriented(source.codes, params.scale, params.zero_point, place))
    if len(shape) == 2 and shape == source.shape[::-1]:
        turned = place if place.axis is None else Place(1 - place.axis, place.block)
        scale, zero = (part.T if place.block else part for part in (params.scale, params.zero_point))
        found.append(_Oriented(source.codes.T, scale, zero, turned))
    return found


class _Compared:
    """A weight of the file beside one way to hold the source's."""

    def __init__(self, artifact: QuantizedGraph, weight: WeightCodes, codes: Array, expected: _Oriented) -> None:
        self.artifact, self.weight, self.codes, self.expected = artifact, weight, codes, expected
        self.place = place_in_file(weight, codes.shape)
        how, shape = weight.qparams, codes.shape
        parts = (expected.scale, expected.zero_point)
        self.scale, self.zero = (np.asarray(spread(part, expected.place, shape)) for part in parts)
        scale, zero = spread(how.scale, self.place, shape), spread(how.zero_point, self.place, shape)
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
        weight, index, place = self.weight, first_index(self.bad), self.place
        scale, zero = float(self.scale[index]), int(self.zero[index])
        known = None if self.file_zero is None else int(self.file_zero[index])
        shift = min((0, _usual_shift(weight.qparams.kind)), key=lambda each: abs(zero + each - (known or 0)))
        zero += shift

        def differ(tensor: str, where: tuple[int, ...], expected: Any, got: Any, cause: str) -> Difference:  # noqa: ANN401
            name = weight.node_name
            return Difference(name, tensor, where, expected, got, None, scale, zero, cause)

        if place != self.expected.place and self.bad_scale.any():
            cause = f"scales lie elsewhere: {place}, expected {self.expected.place}"
            return differ(weight.name, (), self.expected.place.axis, place.axis, cause)
        if self.file_scale is None or known is None:
            cause = f"scales of shape {weight.qparams.scale.shape} do not fit codes of shape {self.codes.shape}"
            return differ(weight.name, (), scale, None, cause)
        own = _set_index(index, place)
        if self.bad_scale[index]:
            got = float(self.file_scale[index])
            return differ(
                weight.constants[0], own, scale, got, f"another scale, {ulps_between(scale, got)} float32 away"
            )
        if zero != known:
            return differ(weight.constants[1], own, zero, known, "another zero point")
        expected = self.expected.codes[index].item()
        expected = expected + shift if self.codes.dtype.kind in "iu" else expected
        return differ(weight.name, index, expected, self.codes[index].item(), "another code")


def _usual_shift(kind: int) -> int:
    name = TensorProto.DataType.Name(kind)
    return 1 << (int(name.removeprefix("UINT")) - 1) if name.startswith("UINT") else 0


def place_in_file(weight: WeightCodes, shape: tuple[int, ...]) -> Place:
    """Where scales lie in the constant itself, of which the node may see a part only.

    >>> qparams = Quantization(np.ones(4, np.float32), np.zeros(4), TensorProto.INT8, axis=-1)
    >>> str(place_in_file(WeightCodes("w", TensorProto(), NodeProto(), qparams, path=("Gather",)), (9, 4)))
    'axis 1'
    """
    place = place_of(weight.qparams, len(shape))
    if weight.direct or place.axis is None or place.block:
        return place
    return Place(len(shape) - 1 if weight.qparams.axis != 0 or weight.qparams.scale.size != shape[0] else 0)


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
    QuantizeLinear_q: another code, q[1] is 7, expected 6 (x 1.5, scale 0.5, zero point 3)
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
        def take(arrays: Mapping[str, Array]) -> None:
            x, got = arrays[name], arrays[site.codes]
            try:
                own = site.qparams.params(x.shape) if params is None else params
                codes = quantize(x, own, nan="qmin").codes
            except DetentError as error:
                self._tally.count(got.size, got.size)
                self._note(site, (), None, None, (None, None, None), f"unsound parameters: {error}")
                return
            self._compare(site, x, got, codes, own, shift)

        return take

    def _compare(self, site: QuantizeNode, x: Array, got: Array, codes: Array, params: QuantParams, shift: int) -> None:
        if codes.dtype.kind in "iu":
            bad = got.astype(np.int64) != codes.astype(np.int64) + shift
        else:  # small floats, which are read as float32; what is no number is so in both
            wide = codes.astype(np.float32)
            bad = ~((got == wide) | (np.isnan(got) & np.isnan(wide)))
        wrong = self._wrong_sets(site, params, shift, x.shape)
        everything = bad if wrong is None else bad | wrong
        differing = int(np.count_nonzero(everything))
        self._tally.count(got.size, differing)
        if bad.any() and site.node not in self._noted:
            index = first_index(bad)
            place = place_of(params, max(x.ndim, 1))
            scale, zero = (
                np.asarray(spread(part, place, x.shape))[index] for part in (params.scale, params.zero_point)
            )
            expected = codes[index].item() + (shift if codes.dtype.kind in "iu" else 0)
            about = float(x[index]), float(scale), int(zero) + shift
            self._note(site, index, expected, got[index].item(), about, "another code")

    def _wrong_sets(self, site: QuantizeNode, params: QuantParams, shift: int, shape: tuple[int, ...]) -> Array | None:
        """Which elements have another scale or zero point in the file than in the source; None for none of them."""
        rank = max(len(shape), 1)
        here, there = place_of(site.qparams, rank), place_of(params, rank)
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
            cause = f"another scale, {ulps_between(scale, got)} float32 away"
            self._note(site, index, scale, got, about, cause, site.scale)
        else:
            self._note(
                site, index, zero, int(site.qparams.zero_point[index]), about, "another zero point", site.zero_point
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


def check_decoding(artifact: QuantizedGraph, weight: WeightCodes, tally: Tally, *, count: bool) -> None:
    """Check that ONNX Runtime makes the same numbers of a weight's codes as detent, and that its parameters are sound.

    Args:
        artifact: the file.
        weight: of the file.
        tally: where codes are counted.
        count: whether codes are counted as compared; not where they were counted before.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {-0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> tally = Tally()
    >>> check_decoding(artifact, artifact.weights[0], tally, count=True)
    >>> tally.differing, tally.first.cause
    (2, 'unsound parameters: scale must be positive, got -0.5')
    """
    codes = weight.codes
    if count:
        tally.count(codes.size, 0)
    name = weight.node_name
    try:
        expected = _decoded(codes, weight)
    except DetentError as error:
        tally.count(0, codes.size)
        cause = f"unsound parameters: {error}"
        tally.note(Difference(name, weight.constants[0], (), None, None, None, None, None, cause))
        return
    if not weight.direct or weight.node.op_type != "DequantizeLinear":
        return
    with refusals():
        got = _decoded_by_runtime(artifact, weight)
    bad = got.view(np.uint32) != expected.view(np.uint32)
    if bad.any():
        index = first_index(bad)
        tally.count(0, int(np.count_nonzero(bad)))
        values = float(expected[index]), float(got[index])
        cause = "ONNX Runtime makes another number of a code"
        tally.note(Difference(name, weight.node.output[0], index, *values, None, None, None, cause))


def _decoded(codes: Array, weight: WeightCodes) -> Array:
    if not weight.is_bias:
        place = place_in_file(weight, codes.shape)
        how = weight.qparams
        moved = Quantization(
            how.scale, how.zero_point, how.kind, 1 if place.axis is None else place.axis, how.block, how.low, how.high
        )
        return dequantize(codes, moved.params(codes.shape))
    QuantParams(
        "int8" if not weight.qparams.scale.ndim else "int8/axis0", weight.qparams.scale
    )  # its scales must be sound
    scale = spread(weight.qparams.scale, place_of(weight.qparams, codes.ndim), codes.shape)
    return codes.astype(np.float32) * np.asarray(scale, np.float32)


def _decoded_by_runtime(artifact: QuantizedGraph, weight: WeightCodes) -> Array:
    """What ONNX Runtime's DequantizeLinear makes of the codes, in a model of its own."""
    node, constants = weight.node, artifact.graph.constants
    needed = [constants[name] for name in dict.fromkeys(node.input) if name]
    graph = helper.make_graph([node], "decoding", [], [ValueInfoProto(name=node.output[0])], needed)
    model = helper.make_model(graph, opset_imports=artifact.model.opset_import, ir_version=artifact.model.ir_version)
    found: Array = make_session(model, optimise=False).run(None, {})[0]
    return found


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
                    name, bias.name, index, int(wanted[index]), int(codes[index]), *about, "another code of a bias"
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
    groups = int(attribute_of(node, "group", 1))
    return not (shape is not None and 1 < groups == shape[0] and shape[1] == 1)
