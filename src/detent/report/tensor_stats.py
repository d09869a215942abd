"""Statistics of weights and activations: ranges, clipping, SQNR, code usage, histograms.

Weights are read from the file. Activations are measured in one pass over some batches. The quantized model runs without
optimizations, so that each tensor is exactly the input of its quantizer. The float model runs on the same batches.
Statistics of quantizers use all elements. Layer outputs are compared on evenly spaced elements of each batch.

The range of a histogram is known only after the last batch. Bins are ``[k w, (k + 1) w)`` for integers k and a width w
that is a power of two. If the data need more bins than available, w doubles and pairs of bins are merged. So no count
is lost, and the bins do not depend on the order of batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import ceil, floor, frexp, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from detent.errors import DetentError
from detent.metrics import OutputComparison, SignalNoise, sqnr_db
from detent.onnx_model import Graph, QdqParams
from detent.onnx_model.graph import BITS, attribute_of
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode, WeightCodes
from detent.onnx_model.sessions import Probe, Reading
from detent.report.document import BINS, Histogram, Size, Tensor, short
from detent.report.file_layers import FileLayer
from detent.spec import QuantSpec
from detent.verification.codes import layout_in_file, layout_of, spread

__all__ = [
    "ActivationStats",
    "Distribution",
    "FloatWeights",
    "QuantizerStats",
    "code_histogram",
    "is_same_weight",
    "measure_activations",
    "measure_weight",
    "size_parts",
    "stored_nbytes",
]

Array = NDArray[Any]
Feed = Mapping[str, Array]
FINE_BINS = 2048  # bins used while counting; they are merged into the few bins of a report
FLOAT_NBYTES = 4
MIN_ROUNDED_SHARE = 0.995  # a weight counts as rounded if at least this share of its elements is rounded or clipped
ROUNDING_SLACK = 1e-3  # tolerance for a rounded element, relative to the scale
WIDE_TYPE_RATIO = 4  # if a type's range is over 4 times that of the codes, the codes have fewer bits
MAX_OUTPUT_ELEMENTS = 1 << 17  # at most this many elements of a layer's output are compared per batch
MAX_CODES_COUNTED = 1 << 16  # as many codes as 16-bit formats have
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


class Distribution:
    """Histogram, minimum and maximum of values, updated batch by batch."""

    def __init__(self) -> None:
        self.minimum, self.maximum = np.inf, -np.inf
        self.count = self.not_finite = 0
        self._exponent: int | None = None
        self._first = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, values: Array) -> None:
        """Add a batch. NaN and infinite values are counted, but do not enter the histogram."""
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
        # Division by a power of two is exact, except for subnormal quotients, which are in bin 0 or -1 anyway.
        bins = np.floor(flat.astype(np.float64) / width).astype(np.int64)
        first, last = floor(self.minimum / width), floor(self.maximum / width)
        counts = np.zeros(last - first + 1, np.int64)
        if self._counts.size:
            counts[self._first - first : self._first - first + self._counts.size] = self._counts
        counts += np.bincount(bins - first, minlength=counts.size)
        self._first, self._counts = first, counts

    def _width(self) -> float:
        return float(2.0 ** (self._exponent or 0))

    def _widen(self) -> None:
        """Double the width of the bins until ``FINE_BINS`` bins cover the range."""
        extent = max(self.maximum - self.minimum, abs(self.maximum) * 1e-6, abs(self.minimum) * 1e-6, 1e-30)
        needed = max(frexp(min(extent, 1e300) / (FINE_BINS - 2))[1], -100)
        if self._exponent is None:
            self._exponent = needed
        while self._exponent < needed:
            self._exponent += 1
            odd = self._first % 2
            padded = np.pad(self._counts, (odd, (self._counts.size + odd) % 2))
            self._counts = padded.reshape(-1, 2).sum(axis=1)
            self._first = (self._first - odd) // 2

    def histogram(self, bins: int = 48) -> Histogram | None:
        """Return a histogram with at most ``bins`` bins, or None if nothing was counted."""
        if not self._counts.size:
            return None
        per_bin = max(1, ceil(self._counts.size / bins))
        padded = np.pad(self._counts, (0, -self._counts.size % per_bin))
        counts = padded.reshape(-1, per_bin).sum(axis=1)
        width = self._width()
        low = self._first * width
        return Histogram(low, width * per_bin, tuple(counts.tolist())) if isfinite(low) else None


def code_histogram(counts: Array, low: float) -> Histogram | None:
    """Return a histogram of codes with at most 64 bins; ``low`` is the code that ``counts[0]`` counts.

    Every bin covers the same number of codes.
    """
    if not counts.size:
        return None
    per_bin = max(1, ceil(counts.size / BINS))
    padded = np.pad(counts, (0, -counts.size % per_bin))
    merged = padded.reshape(-1, per_bin).sum(axis=1)
    return Histogram(low - 0.5, float(per_bin), tuple(merged.tolist()), "codes")


class FloatWeights:
    """Weights of the float model, found by name and type of the node that reads the weight."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {(graph.node_name(node), node.op_type): node for node in reversed(graph.nodes)}

    def of(self, name: str, op_type: str) -> Array | None:
        """Return the weight of the first node with this name and type, or None if there is no such float weight."""
        node, graph = self._nodes.get((name, op_type)), self._graph
        constants = [] if node is None else [each for each in node.input[:2] if each in graph.constants]
        return graph.array(constants[0]) if constants and graph.kind(constants[0]) == TensorProto.FLOAT else None


def is_same_weight(expected: Array, codes: Array, decoded: Array, scale: Array) -> bool:
    """Return whether the codes are the rounded or clipped elements of the float weight ``expected``.

    The result is False if equalization, folding or training changed the weight before quantization.
    """
    if expected.shape != decoded.shape or not expected.size:
        return False
    is_rounded = np.abs(expected - decoded) <= (0.5 + ROUNDING_SLACK) * scale
    if codes.dtype.kind in "iu":  # a clipped element has an extreme code, and its float value is beyond it
        is_extreme = (codes == codes.min()) | (codes == codes.max())
        is_rounded |= is_extreme & (np.abs(expected) > np.abs(decoded)) & (np.sign(expected) == np.sign(decoded))
    return float(np.mean(is_rounded)) >= MIN_ROUNDED_SHARE


def measure_weight(
    weight: WeightCodes, expected: Array | None = None, spec: QuantSpec | None = None
) -> tuple[Tensor, bool]:
    """Return the statistics of a weight, and whether its codes are the rounded elements of ``expected``.

    ``expected`` is the float weight. ``spec`` is the spec from the recipe, or None if it is unknown.
    """
    codes = weight.codes
    layout = layout_in_file(weight, codes.shape)
    scale, zero = (spread(part, layout, codes.shape) for part in (weight.qparams.scale, weight.qparams.zero_point))
    name = _weight_spec_text(weight, codes.shape) if spec is None else str(spec)
    base = Tensor(weight.name, name, codes.shape, int(codes.size), scales=int(weight.qparams.scale.size))
    if scale is None or zero is None or not codes.size:
        return replace(base, note="the scales do not fit the codes"), False
    decoded = ((codes.astype(np.float32) - zero.astype(np.float32)) * scale).astype(np.float32)
    lo, hi = short(float(decoded.min())), short(float(decoded.max()))
    base = replace(base, minimum=lo, maximum=hi, digest=_digest(codes, weight))
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
    except DetentError:  # a type without a format in detent, or an axis that the weight does not have
        return str(TensorProto.DataType.Name(weight.qparams.kind)).lower()


def _count(base: Tensor, codes: Array, zero: Array, weight: WeightCodes, spec: QuantSpec | None) -> Tensor:
    whole = codes.astype(np.int64)
    first, last = int(whole.min()), int(whole.max())
    counts = np.bincount((whole - first).ravel(), minlength=last - first + 1)
    used = int(np.count_nonzero(counts))
    shift = int(zero.flat[0]) if np.all(zero == zero.flat[0]) else 0
    base = replace(base, code_low=first - shift, code_high=last - shift)
    low, high = int(weight.qparams.low) - shift, int(weight.qparams.high) - shift
    if spec is not None and spec.format.is_integer and spec.qmin <= first - shift and last - shift <= spec.qmax:
        low, high = int(spec.qmin), int(spec.qmax)
    elif high - low > WIDE_TYPE_RATIO * (last - first):  # few bits; the clipping range is unknown
        histogram = code_histogram(counts, first - shift)
        return replace(base, codes_used=used, codes_available=high - low + 1, histogram=histogram)
    padded = np.pad(counts, (first - shift - low, high - (last - shift)))
    return replace(
        base,
        codes_used=used,
        codes_available=high - low + 1,
        clip_low=float(low),
        clip_high=float(high),
        histogram=code_histogram(padded, low),
    )


def stored_nbytes(artifact: QuantizedGraph, layer: FileLayer) -> tuple[int | None, int | None]:
    """Return two sizes of a layer's weight in bytes: in float32, and in the file including scales and zero points.

    Both are None if the layer has no weight.
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
    """Return the sizes of the parts of a file; all bytes that are not constants count as graph and metadata."""
    graph = artifact.graph
    names: dict[str, str] = {}
    for weight in artifact.weights:
        names[weight.name] = "int32 biases" if weight.is_bias else "codes of weights"
        names |= dict.fromkeys((name for name in weight.constants if name), "scales and zero points")
    for each in artifact.quantize_nodes:
        names |= dict.fromkeys((name for name in (each.scale, each.zero_point) if name), "scales and zero points")
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


class QuantizerStats:
    """Statistics of one quantizer's input, over all batches."""

    def __init__(self, artifact: QuantizedGraph, quantizer: QuantizeNode) -> None:
        self._quantizer, self._qparams = quantizer, quantizer.qparams
        self._x = quantizer.unclipped if artifact.has_own_clip(quantizer) else quantizer.x
        if self._x != quantizer.x:
            self._qparams = _narrowed(artifact, quantizer)
        self._seen, self._noise = Distribution(), SignalNoise()
        self._clipped = self._elements = 0
        self._counts: Array | None = None

    def reading(self) -> Reading:
        """Return a ``Reading``, which updates the statistics with the quantizer's input and codes of each batch."""
        return Reading((self._x, self._quantizer.codes), self._take)

    def _take(self, arrays: Mapping[str, Array]) -> None:
        x, codes = arrays[self._x], arrays[self._quantizer.codes]
        if not x.size or x.dtype.kind != "f":
            return
        layout = layout_of(self._qparams, max(x.ndim, 1))
        scale, zero = (spread(part, layout, x.shape) for part in (self._qparams.scale, self._qparams.zero_point))
        if scale is None or zero is None:
            return
        self._seen.add(x)
        self._elements += x.size
        if not self._qparams.scale.ndim:  # scalars are faster than one value per element
            scale, zero = self._qparams.scale, self._qparams.zero_point
        decoded = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
        self._noise.add(x.astype(np.float32), decoded.astype(np.float32))
        if codes.dtype.kind == "f" and not self._qparams.format.is_integer:
            return
        # An element is clipped if its rounded code is out of range.
        limits = self._qparams.low - 0.5, self._qparams.high + 0.5
        low, high = ((limit - zero).astype(np.float32) * scale for limit in limits)
        self._clipped += int(np.count_nonzero((x < low) | (x > high)))
        self._count(codes)

    def _count(self, codes: Array) -> None:
        low, size = int(self._qparams.low), int(self._qparams.high - self._qparams.low) + 1
        if size > MAX_CODES_COUNTED:
            return
        whole = np.clip(codes.astype(np.int64).ravel() - low, 0, size - 1)
        counts = np.bincount(whole, minlength=size)
        self._counts = counts if self._counts is None else self._counts + counts

    def result(self) -> Tensor:
        """Return the statistics; without data, only those that follow from the file."""
        qparams, seen = self._qparams, self._seen
        base = Tensor(
            self._x, _activation_spec_text(self._quantizer), elements=self._elements, scales=int(qparams.scale.size)
        )
        is_integer = _is_integer(self._quantizer)
        if is_integer and not qparams.scale.ndim:
            scale, zero = float(qparams.scale), float(qparams.zero_point)
            lo, hi = (short((limit - zero) * scale) for limit in (qparams.low, qparams.high))
            base = replace(base, clip_low=lo, clip_high=hi)
        if is_integer:
            base = replace(base, codes_available=int(qparams.high - qparams.low) + 1)
        if not self._elements:
            return base
        if seen.not_finite:
            base = replace(base, note=f"NaN or infinite values: {seen.not_finite:,}")
        if seen.count:
            base = replace(base, minimum=short(seen.minimum), maximum=short(seen.maximum), histogram=seen.histogram())
        if is_integer:
            used = None if self._counts is None else int(np.count_nonzero(self._counts))
            base = replace(base, clip_fraction=short(self._clipped / self._elements), codes_used=used)
        return replace(base, sqnr_db=short(self._noise.sqnr_db))


def _narrowed(artifact: QuantizedGraph, quantizer: QuantizeNode) -> QdqParams:
    """Return the quantizer's parameters, with the range of codes reduced by the Clip before the quantizer."""
    node, graph = artifact.graph.producer(quantizer.x), artifact.graph
    names = [] if node is None else list(node.input[1:3])
    if len(names) != 2 or not all(name in graph.constants for name in names) or quantizer.qparams.scale.ndim:
        return quantizer.qparams
    scale, zero = float(quantizer.qparams.scale), int(quantizer.qparams.zero_point)
    low, high = (round(float(graph.array(name).reshape(-1)[0]) / scale) + zero for name in names)
    low, high = max(low, int(quantizer.qparams.low)), min(high, int(quantizer.qparams.high))
    return replace(quantizer.qparams, low=low, high=high) if low < high else quantizer.qparams


def _is_integer(quantizer: QuantizeNode) -> bool:
    try:
        return quantizer.qparams.format.is_integer
    except DetentError:
        return False


def _activation_spec_text(quantizer: QuantizeNode) -> str:
    try:
        name = quantizer.qparams.format.name
    except DetentError:
        name = f"type {quantizer.qparams.kind}"
    if quantizer.qparams.block:
        return f"{name}/group{quantizer.qparams.block}"
    return f"{name}/axis{quantizer.qparams.axis}" if quantizer.qparams.scale.ndim else f"{name}/tensor"


@dataclass(frozen=True)
class ActivationStats:
    """Statistics of activations, over all batches."""

    tensors: Mapping[str, Tensor]  # maps names of QuantizeLinear nodes to statistics
    results: Mapping[str, float]  # SQNR in dB of layer outputs that both models have
    outputs: Mapping[str, float]  # SQNR in dB of the model's outputs
    agreement: float | None
    batches: int
    notes: tuple[str, ...]


def measure_activations(
    artifact: QuantizedGraph, feeds: Iterable[Feed], reference: ModelProto | None = None, results: Sequence[str] = ()
) -> ActivationStats:
    """Run the quantized model and the float model ``reference``, and measure activations.

    The SQNR is measured for outputs, and for the tensors in ``results`` that both models have.
    """
    quantizers = {each.node: QuantizerStats(artifact, each) for each in artifact.quantize_nodes}
    readings = [each.reading() for each in quantizers.values()]
    floats = None if reference is None else _FloatModel(artifact, reference, results)
    if floats is not None:
        readings += floats.readings()
    probe = Probe(artifact.model, readings, kinds=artifact.kinds)
    batches = 0
    for feed in feeds:
        if floats is not None:
            floats.run(feed)
        probe.run(feed)
        batches += 1
    tensors = {name: each.result() for name, each in quantizers.items()}
    if floats is None:
        return ActivationStats(tensors, {}, {}, None, batches, ())
    outputs = {name: short(db) for name, db in floats.comparison.sqnr_db.items()}
    noise = {name: short(each.sqnr_db) for name, each in floats.noise.items()}
    notes = (*floats.notes, *floats.comparison.notes)
    return ActivationStats(tensors, noise, outputs, floats.comparison.agreement, batches, notes)


class _FloatModel:
    """The float model, which keeps the tensors of a batch until the quantized model has run on this batch."""

    def __init__(self, artifact: QuantizedGraph, reference: ModelProto, results: Sequence[str]) -> None:
        graph = Graph(reference)
        self.notes: dict[str, None] = {}
        self.noise: dict[str, SignalNoise] = {}
        self.inputs, self.outputs = graph.inputs, artifact.graph.outputs
        self.comparison = OutputComparison(self.outputs)
        computed = {name for node in graph.nodes for name in node.output if name}
        own = {name for node in artifact.graph.nodes for name in node.output if name}
        self.results = [name for name in dict.fromkeys(results) if name in computed & own]
        self.fits = set(self.inputs) <= set(artifact.graph.inputs)
        self.has_outputs = set(self.outputs) <= computed
        if not self.fits:
            self.notes["not compared with the float model: its inputs differ from the file's inputs"] = None
            self.results = []
        elif not self.has_outputs:
            self.notes["outputs not compared: the float model and the file have different outputs"] = None
        self._kept: dict[str, Array] = {}
        self._expected: list[Array] = []
        self._probe = Probe(reference, self._readings(self._keep, self._keep_outputs))

    def _readings(self, take: Callable[[str, Feed], None], take_outputs: Callable[[Feed], None]) -> list[Reading]:
        readings = [Reading((name,), partial(take, name)) for name in self.results]
        return [*readings, Reading(tuple(self.outputs), take_outputs)] if self.has_outputs else readings

    def run(self, feed: Feed) -> None:
        self._kept, self._expected = {}, []
        if self.fits:
            self._probe.run({name: feed[name] for name in self.inputs})

    def readings(self) -> list[Reading]:
        return self._readings(self._compare, self._compare_outputs) if self.fits else []

    def _keep(self, name: str, arrays: Feed) -> None:
        self._kept[name] = _subset(arrays[name])

    def _keep_outputs(self, arrays: Feed) -> None:
        self._expected = [np.asarray(arrays[name]) for name in self.outputs]

    def _compare(self, name: str, arrays: Feed) -> None:
        expected, got = self._kept.pop(name), _subset(arrays[name])
        if expected.shape == got.shape and expected.dtype.kind == got.dtype.kind == "f":
            noise = self.noise.setdefault(name, SignalNoise())
            noise.add(expected.astype(np.float32), got.astype(np.float32))

    def _compare_outputs(self, arrays: Feed) -> None:
        self.comparison.add(self._expected, [np.asarray(arrays[name]) for name in self.outputs])


def _subset(values: Array) -> Array:
    """Return at most ``MAX_OUTPUT_ELEMENTS`` evenly spaced elements of ``values``.

    The step is odd, so that the elements of a channels-last tensor are not always from the same channels.
    """
    flat = np.asarray(values).ravel()
    step = -(-flat.size // MAX_OUTPUT_ELEMENTS)
    return flat.copy() if step <= 1 else flat[:: step | 1].copy()
