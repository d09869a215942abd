"""Weights: the codes, scales and zero points of a file beside those of its source; level 1, without any data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from detent.granularity import PerAxis, PerGroup
from detent.onnx_model import Quantization
from detent.params import QuantParams
from detent.proof.artifact import Artifact, FileWeight
from detent.proof.report import Difference
from detent.proof.tally import Tally, first_index
from detent.tensor import QuantizedTensor

__all__ = ["Place", "compare_weight", "place_in_file", "place_of", "spread", "ulps_between"]

Array = NDArray[Any]


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


def compare_weight(artifact: Artifact, weight: FileWeight, source: QuantizedTensor, tally: Tally) -> bool:
    """Count the codes of a weight that are not the source's: by number, scale or zero point.

    Args:
        artifact: the file.
        weight: of the file.
        source: what it should be; the file may hold a matrix transposed.
        tally: where codes are counted.

    Returns:
        Whether all of them are the source's.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> tally, source = Tally(), QuantizedTensor.from_codes([3, 5], QuantParams("int8", 0.5))
    >>> compare_weight(artifact, artifact.weights[0], source, tally)
    False
    >>> print(tally.differing, tally.first)
    1 DequantizeLinear_v: another code, w[1] is 4, expected 5 (scale 0.5, zero point 0)
    """
    codes = artifact.graph.array(weight.name)
    options = [_Compared(artifact, weight, codes, each) for each in _orientations(codes.shape, source)]
    if not options:
        tally.count(source.size, source.size)
        name = artifact.name_of(weight)
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

    def __init__(self, artifact: Artifact, weight: FileWeight, codes: Array, expected: _Oriented) -> None:
        self.artifact, self.weight, self.codes, self.expected = artifact, weight, codes, expected
        self.place = place_in_file(weight, codes.shape)
        how, shape = weight.how, codes.shape
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
        shift = min((0, _usual_shift(weight.how.kind)), key=lambda each: abs(zero + each - (known or 0)))
        zero += shift

        def differ(tensor: str, where: tuple[int, ...], expected: Any, got: Any, cause: str) -> Difference:  # noqa: ANN401
            name = self.artifact.name_of(weight)
            return Difference(name, tensor, where, expected, got, None, scale, zero, cause)

        if place != self.expected.place and self.bad_scale.any():
            cause = f"scales lie elsewhere: {place}, expected {self.expected.place}"
            return differ(weight.name, (), self.expected.place.axis, place.axis, cause)
        if self.file_scale is None or known is None:
            cause = f"scales of shape {weight.how.scale.shape} do not fit codes of shape {self.codes.shape}"
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


def place_in_file(weight: FileWeight, shape: tuple[int, ...]) -> Place:
    """Where scales lie in the constant itself, of which the node may see a part only.

    >>> from onnx import NodeProto
    >>> how = Quantization(np.ones(4, np.float32), np.zeros(4), TensorProto.INT8, axis=-1)
    >>> str(place_in_file(FileWeight("w", NodeProto(), how, direct=False), (9, 4)))
    'axis 1'
    """
    place = place_of(weight.how, len(shape))
    if weight.direct or place.axis is None or place.block:
        return place
    return Place(len(shape) - 1 if weight.how.axis != 0 or weight.how.scale.size != shape[0] else 0)
