"""Statistics of weights and activations: ranges, clipping, SQNR, code usage, histograms.

Weights are read from the file. Activations come from one pass over some batches: the file runs as it is written, so
that each tensor is what its quantizer sees, and the float model runs beside it. Of layer outputs, an evenly spread part
of each batch is kept for the comparison; quantizers see everything.

Histograms are of data whose range is not known before all of it was seen. Bins are ``[k w, (k + 1) w)`` for integers k
and a width w that is a power of two. Where data need more bins than there are, w doubles and pairs of bins become one:
no count is lost, and the order of batches does not matter to the bins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import ceil, floor, frexp, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from detent.errors import DetentError, UnsupportedError
from detent.metrics import SignalNoise, sqnr_db
from detent.onnx_model import Graph
from detent.onnx_model.graph import BITS, attribute_of
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode, WeightCodes
from detent.onnx_model.sessions import Probe, Reading, ort_errors
from detent.report.document import BINS, Histogram, Size, Tensor, short
from detent.report.file_layers import FileLayer
from detent.spec import QuantSpec
from detent.verification.codes import layout_in_file, layout_of, spread
from detent.verification.outputs import OutputCheck

__all__ = [
    "ActivationStats",
    "Distribution",
    "FloatWeights",
    "SiteWatch",
    "code_histogram",
    "is_same_weight",
    "size_parts",
    "stored_nbytes",
    "watch",
    "weigh",
]

Array = NDArray[Any]
FINE = 2048  # bins that are kept; what is shown has fewer, each made of whole ones


class Distribution:
    """Values, counted batch by batch.

    >>> seen = Distribution()
    >>> seen.add(np.float32([0.0, 1.0, 1.0, 3.0, np.nan]))
    >>> seen.add(np.float32([-4.0]))
    >>> seen.minimum, seen.maximum, seen.count, seen.not_finite
    (-4.0, 3.0, 5, 1)
    >>> sum(seen.histogram(8).counts)
    5
    """

    def __init__(self) -> None:
        self.minimum, self.maximum = np.inf, -np.inf
        self.count = self.not_finite = 0
        self._exponent: int | None = None
        self._first = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, values: Array) -> None:
        """Count a batch; what is not finite is counted apart."""
        flat = np.asarray(values).ravel()
        finite = np.isfinite(flat)
        if not finite.all():
            self.not_finite += int(flat.size - np.count_nonzero(finite))
            flat = flat[finite]
        if not flat.size:
            return
        self.count += flat.size
        low, high = float(flat.min()), float(flat.max())
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._widen()
        width = self._width()
        # Powers of two scale float32 without error, unless the quotient is subnormal, which belongs to bin 0 or -1.
        places = np.floor(flat.astype(np.float64) / width).astype(np.int64)
        first, last = floor(self.minimum / width), floor(self.maximum / width)
        counts = np.zeros(last - first + 1, np.int64)
        if self._counts.size:
            counts[self._first - first : self._first - first + self._counts.size] = self._counts
        counts += np.bincount(places - first, minlength=counts.size)
        self._first, self._counts = first, counts

    def _width(self) -> float:
        return float(2.0 ** (self._exponent or 0))

    def _widen(self) -> None:
        reach = max(self.maximum - self.minimum, abs(self.maximum) * 1e-6, abs(self.minimum) * 1e-6, 1e-30)
        needed = max(frexp(min(reach, 1e300) / (FINE - 2))[1], -100)
        if self._exponent is None:
            self._exponent = needed
        while self._exponent < needed:
            self._exponent += 1
            odd = self._first % 2
            padded = np.pad(self._counts, (odd, (self._counts.size + odd) % 2))
            self._counts = padded.reshape(-1, 2).sum(axis=1)
            self._first = (self._first - odd) // 2

    def histogram(self, bins: int = 48) -> Histogram | None:
        """At most so many bins; None where nothing was counted."""
        if not self._counts.size:
            return None
        per_bin = max(1, ceil(self._counts.size / bins))
        padded = np.pad(self._counts, (0, -self._counts.size % per_bin))
        counts = padded.reshape(-1, per_bin).sum(axis=1)
        width = self._width()
        low = self._first * width
        return Histogram(low, width * per_bin, tuple(counts.tolist())) if isfinite(low) else None


def code_histogram(counts: Array, low: float) -> Histogram | None:
    """Counts of codes, the first of which is ``low``, in at most 64 bins of whole codes.

    >>> code_histogram(np.array([1, 0, 2]), -1)
    Histogram(low=-1.5, width=1.0, counts=(1, 0, 2), of='codes')
    """
    if not counts.size:
        return None
    per_bin = max(1, ceil(counts.size / BINS))
    padded = np.pad(counts, (0, -counts.size % per_bin))
    merged = padded.reshape(-1, per_bin).sum(axis=1)
    return Histogram(low - 0.5, float(per_bin), tuple(merged.tolist()), "codes")


FLOAT_NBYTES = 4
SAME = 0.995  # of all elements lie within half a step of the weight that was rounded, or were clipped
SLACK = 1e-3
FEW = 4
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


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


def weigh(weight: WeightCodes, expected: Array | None = None, spec: QuantSpec | None = None) -> tuple[Tensor, bool]:
    """What is known of a weight, and whether it is the expected one.

    Args:
        weight: of the file.
        expected: what the float model has in its place.
        spec: what the recipe says of it; the file knows the type of its codes only.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> found, same = weigh(artifact.weights[0], np.float32([1.5, 2.1]))
    >>> found.spec, found.codes_used, found.maximum, round(found.sqnr_db, 1), same
    ('int8/tensor', 2, 2.0, 28.2, True)
    """
    codes = weight.codes
    place = layout_in_file(weight, codes.shape)
    scale, zero = (spread(part, place, codes.shape) for part in (weight.qparams.scale, weight.qparams.zero_point))
    name = _weight_spec_text(weight, codes.shape) if spec is None else str(spec)
    base = Tensor(weight.name, name, codes.shape, int(codes.size), scales=int(weight.qparams.scale.size))
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


def _digest(codes: Array, weight: WeightCodes) -> str:
    parts = (codes, weight.qparams.scale, weight.qparams.zero_point)
    return sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def _oriented(expected: Array | None, shape: tuple[int, ...]) -> Array | None:
    if expected is None or expected.shape == shape:
        return expected
    return expected.T if len(shape) == 2 and expected.shape == shape[::-1] else None


def _weight_spec_text(weight: WeightCodes, shape: tuple[int, ...]) -> str:
    try:
        return f"{weight.qparams.format.name}/{weight.qparams.granularity(shape)}"
    except DetentError:  # a type that has no format here, or an axis that the data have not
        return str(TensorProto.DataType.Name(weight.qparams.kind)).lower()


def _count(base: Tensor, codes: Array, zero: Array, weight: WeightCodes, spec: QuantSpec | None) -> Tensor:
    whole = codes.astype(np.int64)
    first, last = int(whole.min()), int(whole.max())
    counts = np.bincount((whole - first).ravel(), minlength=last - first + 1)
    used = int(np.count_nonzero(counts))
    shift = int(zero.flat[0]) if np.all(zero == zero.flat[0]) else 0
    base = replace(base, code_low=first - shift, code_high=last - shift)
    low, high = int(weight.qparams.low) - shift, int(weight.qparams.high) - shift
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


def stored_nbytes(artifact: QuantizedGraph, layer: FileLayer) -> tuple[int | None, int | None]:
    """The bytes of a layer's weight in float32, and in the file with scales and zero points; None where it has none.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> from detent.report.file_layers import find_layers
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1,2] x) => (float[1,1] y) <float s = {0.5}, int8[2,1] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) [fc] y = MatMul(x, v) }'''))
    >>> stored_nbytes(artifact, find_layers(artifact)[0])
    (8, 7)
    """
    graph = artifact.graph
    if layer.weight is not None:
        names = {name for name in (layer.weight.name, *layer.weight.constants) if name in graph.constants}
        return FLOAT_NBYTES * layer.weight.codes.size, sum(_nbytes(graph, name) for name in names)
    if layer.float_weight in graph.constants:
        return FLOAT_NBYTES * _elements(graph, layer.float_weight), _nbytes(graph, layer.float_weight)
    return None, None


def _elements(graph: Graph, name: str) -> int:
    return int(np.prod(list(graph.constants[name].dims), dtype=np.int64))


def _nbytes(graph: Graph, name: str) -> int:
    return -(-_elements(graph, name) * BITS.get(graph.constants[name].data_type, 8) // 8)


def size_parts(artifact: QuantizedGraph, total: int) -> tuple[Size, ...]:
    """What the bytes of a file are; what is left is the graph and its metadata.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> [(part.name, part.nbytes) for part in size_parts(artifact, 100)]
    [('codes of weights', 2), ('scales and zero points', 5), ('graph and metadata', 93)]
    """
    graph = artifact.graph
    names: dict[str, str] = {}
    for weight in artifact.weights:
        names[weight.name] = "int32 biases" if weight.is_bias else "codes of weights"
        names |= dict.fromkeys((name for name in weight.constants if name), "scales and zero points")
    for site in artifact.quantize_nodes:
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


Feed = Mapping[str, Array]
KEPT = 1 << 17  # elements of one result of one batch
BITS_COUNTED = 1 << 16


class SiteWatch:
    """What goes through one quantizer, summed over batches.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> watched = SiteWatch(artifact, artifact.quantize_nodes[0])
    >>> watched.reading().take({"x": np.float32([0.5, -90.0]), "q": np.uint8([4, 0])})
    >>> found = watched.result()
    >>> found.clip_fraction, found.codes_used, found.clip_low, found.minimum
    (0.5, 2, -1.5, -90.0)
    """

    def __init__(self, artifact: QuantizedGraph, site: QuantizeNode) -> None:
        self._site, self._how = site, site.qparams
        self._x = site.unclipped if artifact.has_own_clip(site) else site.x
        if self._x != site.x:
            self._how = _narrowed(artifact, site)
        self._seen, self._noise = Distribution(), SignalNoise()
        self._clipped = self._elements = 0
        self._counts: Array | None = None

    def reading(self) -> Reading:
        """What has to be looked at."""
        return Reading((self._x, self._site.codes), self._take)

    def _take(self, arrays: Mapping[str, Array]) -> None:
        x, codes = arrays[self._x], arrays[self._site.codes]
        if not x.size or x.dtype.kind != "f":
            return
        place = layout_of(self._how, max(x.ndim, 1))
        scale, zero = (spread(part, place, x.shape) for part in (self._how.scale, self._how.zero_point))
        if scale is None or zero is None:
            return
        self._seen.add(x)
        self._elements += x.size
        if not self._how.scale.ndim:  # one number, not one per element
            scale, zero = self._how.scale, self._how.zero_point
        decoded = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
        self._noise.add(x.astype(np.float32), decoded.astype(np.float32))
        if codes.dtype.kind == "f" and not self._how.format.is_integer:
            return
        # A code is clamped where the nearest whole number lies outside.
        low, high = ((end - zero).astype(np.float32) * scale for end in (self._how.low - 0.5, self._how.high + 0.5))
        self._clipped += int(np.count_nonzero((x < low) | (x > high)))
        self._count(codes)

    def _count(self, codes: Array) -> None:
        low, size = int(self._how.low), int(self._how.high - self._how.low) + 1
        if size > BITS_COUNTED:
            return
        whole = np.clip(codes.astype(np.int64).ravel() - low, 0, size - 1)
        counts = np.bincount(whole, minlength=size)
        self._counts = counts if self._counts is None else self._counts + counts

    def result(self) -> Tensor:
        """What was found; of quantizers that saw nothing, what the file says."""
        how, seen = self._how, self._seen
        base = Tensor(self._x, _activation_spec_text(self._site), elements=self._elements, scales=int(how.scale.size))
        is_integer = _is_integer(self._site)
        if is_integer and not how.scale.ndim:
            scale, zero = float(how.scale), float(how.zero_point)
            base = replace(base, clip_low=short((how.low - zero) * scale), clip_high=short((how.high - zero) * scale))
        if is_integer:
            base = replace(base, codes_available=int(how.high - how.low) + 1)
        if not self._elements:
            return base
        if seen.not_finite:
            base = replace(base, note=f"{seen.not_finite:,} values were infinite or not a number")
        if seen.count:
            base = replace(base, minimum=short(seen.minimum), maximum=short(seen.maximum), histogram=seen.histogram())
        if is_integer:
            used = None if self._counts is None else int(np.count_nonzero(self._counts))
            base = replace(base, clip_fraction=short(self._clipped / self._elements), codes_used=used)
        return replace(base, sqnr_db=short(self._noise.sqnr_db))


def _narrowed(artifact: QuantizedGraph, site: QuantizeNode) -> Any:  # noqa: ANN401 - a QdqParams
    """The parameters with the codes that a Clip before the quantizer leaves."""
    node, graph = artifact.graph.producer(site.x), artifact.graph
    names = [] if node is None else list(node.input[1:3])
    if len(names) != 2 or not all(name in graph.constants for name in names) or site.qparams.scale.ndim:
        return site.qparams
    scale, zero = float(site.qparams.scale), int(site.qparams.zero_point)
    low, high = (round(float(graph.array(name).reshape(-1)[0]) / scale) + zero for name in names)
    low, high = max(low, int(site.qparams.low)), min(high, int(site.qparams.high))
    return replace(site.qparams, low=low, high=high) if low < high else site.qparams


def _is_integer(site: QuantizeNode) -> bool:
    try:
        return site.qparams.format.is_integer
    except DetentError:
        return False


def _activation_spec_text(site: QuantizeNode) -> str:
    try:
        name = site.qparams.format.name
    except DetentError:
        name = f"type {site.qparams.kind}"
    if site.qparams.block:
        return f"{name}/group{site.qparams.block}"
    return f"{name}/axis{site.qparams.axis}" if site.qparams.scale.ndim else f"{name}/tensor"


@dataclass(frozen=True)
class ActivationStats:
    """What was seen.

    Attributes:
        tensors: by the QuantizeLinear node's name.
        results: SQNR of tensors that both models have.
        outputs: SQNR of the model's outputs, and the agreement of their classes.
        agreement: None where there are none.
        batches: how many there were.
        notes: what could not be done.

    >>> ActivationStats({}, {}, {}, None, 0, ()).batches
    0
    """

    tensors: Mapping[str, Tensor]
    results: Mapping[str, float]
    outputs: Mapping[str, float]
    agreement: float | None
    batches: int
    notes: tuple[str, ...]


def watch(
    artifact: QuantizedGraph, feeds: Iterable[Feed], reference: ModelProto | None = None, results: Sequence[str] = ()
) -> ActivationStats:
    """Run the file, and the float model beside it.

    Args:
        artifact: the file.
        feeds: batches.
        reference: the float model, None for none.
        results: tensors whose SQNR is wanted, where both models have them.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> artifact = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> source = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) { y = Identity(x) }''')
    >>> found = watch(artifact, [{"x": np.float32([0.5, 1.75])}], source)
    >>> found.batches, round(found.outputs["y"], 1)
    (1, 17.2)
    """
    watches = {site.node: SiteWatch(artifact, site) for site in artifact.quantize_nodes}
    readings = [each.reading() for each in watches.values()]
    beside = None if reference is None else _Beside(artifact, reference, results)
    if beside is not None:
        readings += beside.readings()
    probe = Probe(artifact.model, readings, kinds=artifact.kinds)
    batches = 0
    for feed in feeds:
        if beside is not None:
            beside.run(feed)
        _run(probe, feed)
        batches += 1
    found = {name: each.result() for name, each in watches.items()}
    if beside is None:
        return ActivationStats(found, {}, {}, None, batches, ())
    ends = beside.ends.result()
    outputs = {name: short(db) for name, db in ends.output_sqnr_db.items()}
    noise = {name: short(each.sqnr_db) for name, each in beside.noise.items()}
    return ActivationStats(found, noise, outputs, ends.agreement, batches, (*beside.notes, *beside.ends.notes))


def _run(probe: Probe, feed: Feed) -> None:
    try:
        with ort_errors():
            probe.run(feed)
    except UnsupportedError as error:  # what is refused before it runs says so itself
        raise (error.__cause__ if isinstance(error.__cause__, DetentError) else error) from None


class _Beside:
    """The float model, whose results are kept until the file's own are there."""

    def __init__(self, artifact: QuantizedGraph, reference: ModelProto, results: Sequence[str]) -> None:
        graph = Graph(reference)
        self.notes: dict[str, None] = {}
        self.noise: dict[str, SignalNoise] = {}
        self.inputs, self.outputs = graph.inputs, artifact.graph.outputs
        self.ends = OutputCheck(self.outputs)
        made = {name for node in graph.nodes for name in node.output if name}
        own = {name for node in artifact.graph.nodes for name in node.output if name}
        self.results = [name for name in dict.fromkeys(results) if name in made & own]
        self.fits = set(self.inputs) <= set(artifact.graph.inputs)
        self.has_outputs = set(self.outputs) <= made
        if not self.fits:
            self.notes["the source has other inputs than the file: results were not compared"] = None
            self.results = []
        elif not self.has_outputs:
            self.notes["the source has other outputs than the file: outputs were not compared"] = None
        self._kept: dict[str, Array] = {}
        self._expected: dict[str, Array] = {}
        wanted = [Reading((name,), self._keeper(name)) for name in self.results]
        if self.has_outputs:
            wanted.append(Reading(tuple(self.outputs), self._expect))
        self._probe = Probe(reference, wanted)

    def run(self, feed: Feed) -> None:
        self._kept, self._expected = {}, {}
        if self.fits:
            _run(self._probe, {name: feed[name] for name in self.inputs})

    def readings(self) -> list[Reading]:
        found = [Reading((name,), self._comparer(name)) for name in self.results]
        return [*found, Reading(tuple(self.outputs), self._compare_ends)] if self.has_outputs and self.fits else found

    def _keeper(self, name: str) -> Any:  # noqa: ANN401 - a function
        def keep(arrays: Mapping[str, Array]) -> None:
            self._kept[name] = _some(arrays[name])

        return keep

    def _expect(self, arrays: Mapping[str, Array]) -> None:
        self._expected = {name: arrays[name] for name in self.outputs}

    def _comparer(self, name: str) -> Any:  # noqa: ANN401 - a function
        def compare(arrays: Mapping[str, Array]) -> None:
            expected, found = self._kept.pop(name), _some(arrays[name])
            if expected.shape == found.shape and expected.dtype.kind == found.dtype.kind == "f":
                noise = self.noise.setdefault(name, SignalNoise())
                noise.add(expected.astype(np.float32), found.astype(np.float32))

        return compare

    def _compare_ends(self, arrays: Mapping[str, Array]) -> None:
        expected = [np.asarray(self._expected[name]) for name in self.outputs]
        self.ends.add_outputs(expected, [np.asarray(arrays[name]) for name in self.outputs])


def _some(values: Array) -> Array:
    """At most so many elements, evenly spread; an odd step meets every channel."""
    flat = np.asarray(values).ravel()
    step = -(-flat.size // KEPT)
    return flat.copy() if step <= 1 else flat[:: step | 1].copy()
