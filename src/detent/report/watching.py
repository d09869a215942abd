"""Watching: one pass over some batches, in which every quantizer of the file and every layer's result is looked at.

The file runs as it is written, so that each tensor is what its quantizer sees. The float model runs beside it. Of
results, at most so many elements of each batch are kept until the file's own are there, evenly spread; quantizers see
everything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import DetentError, UnsupportedError
from detent.onnx_model import Graph
from detent.onnx_model.sessions import refusals
from detent.proof.artifact import Artifact, Site
from detent.proof.outputs import Noise, OutputCheck
from detent.proof.probe import Probe, Reading
from detent.proof.weights import place_of, spread
from detent.report.anatomy import own_clip
from detent.report.distributions import Distribution, short
from detent.report.parts import Tensor

__all__ = ["Seen", "SiteWatch", "watch"]

Array = NDArray[Any]
Feed = Mapping[str, Array]
KEPT = 1 << 17  # elements of one result of one batch
BITS_COUNTED = 1 << 16


class SiteWatch:
    """What goes through one quantizer, summed over batches.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> watched = SiteWatch(artifact, artifact.sites[0])
    >>> watched.reading().take({"x": np.float32([0.5, -90.0]), "q": np.uint8([4, 0])})
    >>> found = watched.result()
    >>> found.clip_fraction, found.codes_used, found.clip_low, found.minimum
    (0.5, 2, -1.5, -90.0)
    """

    def __init__(self, artifact: Artifact, site: Site) -> None:
        self._site, self._how = site, site.how
        self._x = site.unclipped if own_clip(artifact, site) else site.x
        if self._x != site.x:
            self._how = _narrowed(artifact, site)
        self._seen, self._noise = Distribution(), Noise()
        self._clipped = self._elements = 0
        self._counts: Array | None = None

    def reading(self) -> Reading:
        """What has to be looked at."""
        return Reading((self._x, self._site.codes), self._take)

    def _take(self, arrays: Mapping[str, Array]) -> None:
        x, codes = arrays[self._x], arrays[self._site.codes]
        if not x.size or x.dtype.kind != "f":
            return
        place = place_of(self._how, max(x.ndim, 1))
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
        base = Tensor(self._x, _spec_text(self._site), elements=self._elements, scales=int(how.scale.size))
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
        return replace(base, sqnr_db=short(self._noise.db))


def _narrowed(artifact: Artifact, site: Site) -> Any:  # noqa: ANN401 - a Quantization
    """The parameters with the codes that a Clip before the quantizer leaves."""
    node, graph = artifact.graph.producer(site.x), artifact.graph
    names = [] if node is None else list(node.input[1:3])
    if len(names) != 2 or not all(name in graph.constants for name in names) or site.how.scale.ndim:
        return site.how
    scale, zero = float(site.how.scale), int(site.how.zero_point)
    low, high = (round(float(graph.array(name).reshape(-1)[0]) / scale) + zero for name in names)
    low, high = max(low, int(site.how.low)), min(high, int(site.how.high))
    return replace(site.how, low=low, high=high) if low < high else site.how


def _is_integer(site: Site) -> bool:
    try:
        return site.how.format.is_integer
    except DetentError:
        return False


def _spec_text(site: Site) -> str:
    try:
        name = site.how.format.name
    except DetentError:
        name = f"type {site.how.kind}"
    if site.how.block:
        return f"{name}/group{site.how.block}"
    return f"{name}/axis{site.how.axis}" if site.how.scale.ndim else f"{name}/tensor"


@dataclass(frozen=True)
class Seen:
    """What was seen.

    Attributes:
        tensors: by the QuantizeLinear node's name.
        results: SQNR of tensors that both models have.
        outputs: SQNR of the model's outputs, and the agreement of their classes.
        agreement: None where there are none.
        batches: how many there were.
        notes: what could not be done.

    >>> Seen({}, {}, {}, None, 0, ()).batches
    0
    """

    tensors: Mapping[str, Tensor]
    results: Mapping[str, float]
    outputs: Mapping[str, float]
    agreement: float | None
    batches: int
    notes: tuple[str, ...]


def watch(
    artifact: Artifact, feeds: Iterable[Feed], reference: ModelProto | None = None, results: Sequence[str] = ()
) -> Seen:
    """Run the file, and the float model beside it.

    Args:
        artifact: the file.
        feeds: batches.
        reference: the float model, None for none.
        results: tensors whose SQNR is wanted, where both models have them.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> source = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) { y = Identity(x) }''')
    >>> found = watch(artifact, [{"x": np.float32([0.5, 1.75])}], source)
    >>> found.batches, round(found.outputs["y"], 1)
    (1, 17.2)
    """
    watches = {site.node: SiteWatch(artifact, site) for site in artifact.sites}
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
        return Seen(found, {}, {}, None, batches, ())
    ends = beside.ends.result()
    outputs = {name: short(db) for name, db in ends.output_sqnr_db.items()}
    noise = {name: short(each.db) for name, each in beside.noise.items()}
    return Seen(found, noise, outputs, ends.agreement, batches, (*beside.notes, *beside.ends.notes))


def _run(probe: Probe, feed: Feed) -> None:
    try:
        with refusals():
            probe.run(feed)
    except UnsupportedError as error:  # what is refused before it runs says so itself
        raise (error.__cause__ if isinstance(error.__cause__, DetentError) else error) from None


class _Beside:
    """The float model, whose results are kept until the file's own are there."""

    def __init__(self, artifact: Artifact, reference: ModelProto, results: Sequence[str]) -> None:
        graph = Graph(reference)
        self.notes: dict[str, None] = {}
        self.noise: dict[str, Noise] = {}
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
                noise = self.noise.setdefault(name, Noise())
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
