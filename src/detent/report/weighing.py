"""Weighing: what the file itself tells of its weights and its size; no data are needed."""

from dataclasses import dataclass, replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from detent.errors import DetentError
from detent.metrics import sqnr_db
from detent.onnx_model import Graph
from detent.onnx_model.files import tensors_of
from detent.onnx_model.graph import BITS, attribute_of
from detent.proof.artifact import Artifact, FileWeight, is_bias
from detent.proof.weights import place_in_file, spread
from detent.report.anatomy import FoundLayer
from detent.report.distributions import code_histogram, short
from detent.report.parts import Size, Tensor
from detent.spec import QuantSpec

__all__ = ["FloatWeights", "file_nbytes", "is_same_weight", "size_parts", "stored_nbytes", "weigh"]

Array = NDArray[Any]
FLOAT_NBYTES = 4
SAME = 0.995  # of all elements lie within half a step of the weight that was rounded, or were clipped
SLACK = 1e-3
FEW = 4
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def file_nbytes(path: str | PathLike[str]) -> int:
    """The bytes of a model's file and of all files that hold its data.

    Args:
        path: of a model that ``load`` has checked, so that its data lie beside it.

    >>> import tempfile
    >>> from onnx import parser
    >>> from detent.onnx_model import save
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(made, f"{folder}/a.onnx") == file_nbytes(f"{folder}/a.onnx")
    True
    """
    source = Path(path)
    lean = onnx.load(source, load_external_data=False)
    outside = {
        entry.value
        for tensor in tensors_of(lean)
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return source.stat().st_size + sum(Path(source.parent, name).stat().st_size for name in sorted(outside))


@dataclass(frozen=True, eq=False)
class FloatWeights:
    """The weights of the float model, found by the nodes that read them.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> FloatWeights(graph).of("fc", "MatMul")
    array([[3.]], dtype=float32)
    """

    graph: Graph

    def of(self, node: str, op_type: str) -> Array | None:
        """The weight of a node of that name and type; None where it has none."""
        for each in self.graph.nodes:
            if self.graph.node_name(each) == node and each.op_type == op_type:
                names = [name for name in each.input[:2] if name in self.graph.constants]
                return self.graph.array(names[0]) if names and self._is_float(names[0]) else None
        return None

    def _is_float(self, name: str) -> bool:
        return self.graph.kind(name) == TensorProto.FLOAT


def is_same_weight(expected: Array, codes: Array, found: Array, scale: Array) -> bool:
    """Whether codes are those of a weight, rounded; and not of one that was scaled, folded or trained before.

    >>> scale = np.broadcast_to(np.float32(0.5), 2)
    >>> is_same_weight(np.float32([1.1, 9.0]), np.int8([2, 127]), np.float32([1.0, 63.5]), scale)
    False
    >>> is_same_weight(np.float32([1.1, 9.0]), np.int8([2, 18]), np.float32([1.0, 9.0]), scale)
    True
    """
    if expected.shape != found.shape or not expected.size:
        return False
    near = np.abs(expected - found) <= (0.5 + SLACK) * scale
    if codes.dtype.kind in "iu":  # those beyond the range have the outermost code, and go further out
        ends = (codes == codes.min()) | (codes == codes.max())
        near |= ends & (np.abs(expected) > np.abs(found)) & (np.sign(expected) == np.sign(found))
    return float(np.mean(near)) >= SAME


def weigh(
    artifact: Artifact, weight: FileWeight, expected: Array | None = None, spec: QuantSpec | None = None
) -> tuple[Tensor, bool]:
    """What is known of a weight, and whether it is the expected one.

    Args:
        artifact: the file.
        weight: of the file.
        expected: what the float model has in its place.
        spec: what the recipe says of it; the file knows the type of its codes only.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> found, same = weigh(artifact, artifact.weights[0], np.float32([1.5, 2.1]))
    >>> found.spec, found.codes_used, found.maximum, round(found.sqnr_db, 1), same
    ('int8/tensor', 2, 2.0, 28.2, True)
    """
    codes = artifact.graph.array(weight.name)
    place = place_in_file(weight, codes.shape)
    scale, zero = (spread(part, place, codes.shape) for part in (weight.how.scale, weight.how.zero_point))
    name = _spec_text(weight, codes.shape) if spec is None else str(spec)
    base = Tensor(weight.name, name, codes.shape, int(codes.size), scales=int(weight.how.scale.size))
    if scale is None or zero is None or not codes.size:
        return replace(base, note="its scales do not fit its codes"), False
    decoded = ((codes.astype(np.float32) - zero.astype(np.float32)) * scale).astype(np.float32)
    ends = short(float(decoded.min())), short(float(decoded.max()))
    base = replace(base, minimum=ends[0], maximum=ends[1], digest=_digest(codes, weight))
    if codes.dtype.kind in "iu":
        base = _count(base, codes, zero, weight, spec)
    expected = _oriented(expected, codes.shape)
    if expected is None or not is_same_weight(expected, codes, decoded, scale):
        return base, False
    return replace(base, sqnr_db=short(float(sqnr_db(expected, decoded)))), True


def _digest(codes: Array, weight: FileWeight) -> str:
    parts = (codes, weight.how.scale, weight.how.zero_point)
    return sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def _oriented(expected: Array | None, shape: tuple[int, ...]) -> Array | None:
    if expected is None or expected.shape == shape:
        return expected
    return expected.T if len(shape) == 2 and expected.shape == shape[::-1] else None


def _spec_text(weight: FileWeight, shape: tuple[int, ...]) -> str:
    try:
        return f"{weight.how.format.name}/{weight.how.granularity(shape)}"
    except DetentError:  # a type that has no format here, or an axis that the data have not
        return str(TensorProto.DataType.Name(weight.how.kind)).lower()


def _count(base: Tensor, codes: Array, zero: Array, weight: FileWeight, spec: QuantSpec | None) -> Tensor:
    whole = codes.astype(np.int64)
    first, last = int(whole.min()), int(whole.max())
    counts = np.bincount((whole - first).ravel(), minlength=last - first + 1)
    used = int(np.count_nonzero(counts))
    shift = int(zero.flat[0]) if np.all(zero == zero.flat[0]) else 0
    base = replace(base, code_low=first - shift, code_high=last - shift)
    low, high = int(weight.how.low) - shift, int(weight.how.high) - shift
    if spec is not None and spec.format.is_integer and _fits(spec, first - shift, last - shift):
        low, high = int(spec.qmin), int(spec.qmax)
    elif high - low > FEW * (last - first):  # codes of few bits in a wide type: its ends say nothing of their range
        available = high - low + 1
        return replace(
            base, codes_used=used, codes_available=available, histogram=code_histogram(counts, first - shift)
        )
    padded = np.pad(counts, (first - shift - low, high - (last - shift)))
    return replace(
        base,
        codes_used=used,
        codes_available=high - low + 1,
        clip_low=float(low),
        clip_high=float(high),
        histogram=code_histogram(padded, low),
    )


def _fits(spec: QuantSpec, first: int, last: int) -> bool:
    return bool(spec.qmin <= first and last <= spec.qmax)


def stored_nbytes(artifact: Artifact, layer: FoundLayer) -> tuple[int | None, int | None]:
    """The bytes of a layer's weight in float32, and in the file with scales and zero points; None where it has none.

    >>> from onnx import parser
    >>> from detent.report.anatomy import find_layers
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1,2] x) => (float[1,1] y) <float s = {0.5}, int8[2,1] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) [fc] y = MatMul(x, v) }'''))
    >>> stored_nbytes(artifact, find_layers(artifact)[0])
    (8, 7)
    """
    graph = artifact.graph
    if layer.weight is not None:
        names = {name for name in (layer.weight.name, *layer.weight.constants) if name in graph.constants}
        return FLOAT_NBYTES * _elements(graph, layer.weight.name), sum(_nbytes(graph, name) for name in names)
    if layer.float_weight in graph.constants:
        return FLOAT_NBYTES * _elements(graph, layer.float_weight), _nbytes(graph, layer.float_weight)
    return None, None


def _elements(graph: Graph, name: str) -> int:
    return int(np.prod(list(graph.constants[name].dims), dtype=np.int64))


def _nbytes(graph: Graph, name: str) -> int:
    return -(-_elements(graph, name) * BITS.get(graph.constants[name].data_type, 8) // 8)


def size_parts(artifact: Artifact, total: int) -> tuple[Size, ...]:
    """What the bytes of a file are; what is left is the graph and its metadata.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> [(part.name, part.nbytes) for part in size_parts(artifact, 100)]
    [('codes of weights', 2), ('scales and zero points', 5), ('graph and metadata', 93)]
    """
    graph = artifact.graph
    names: dict[str, str] = {}
    for weight in artifact.weights:
        names[weight.name] = "int32 biases" if is_bias(weight) else "codes of weights"
        names |= dict.fromkeys((name for name in weight.constants if name), "scales and zero points")
    for site in artifact.sites:
        names |= dict.fromkeys((name for name in (site.scale, site.zero_point) if name), "scales and zero points")
    sums = dict.fromkeys(
        ("codes of weights", "scales and zero points", "int32 biases", "float constants", "other constants"), 0
    )
    for name in graph.constants:
        kind = "float constants" if graph.kind(name) in _FLOATS else "other constants"
        sums[names.get(name, kind)] += _nbytes(graph, name)
    for node in graph.nodes:
        value = attribute_of(node, "value") if node.op_type == "Constant" else None
        if isinstance(value, TensorProto):
            kind = "float constants" if value.data_type in _FLOATS else "other constants"
            sums[kind] += len(value.raw_data)
    parts = [Size(name, nbytes) for name, nbytes in sums.items() if nbytes]
    rest = total - sum(part.nbytes for part in parts)
    return (*parts, Size("graph and metadata", rest)) if rest > 0 else tuple(parts)
