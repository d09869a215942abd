"""Layer runners, which quantize the layers of a model one by one, and the measurement of noise at the outputs.

``onnx_bench`` and ``torch_bench`` each implement a ``LayerRunner``. ``measure_all`` takes either runner, and loops over
layer groups and candidates. This module also converts bit widths to specs, and counts the bytes of quantized weights.
The number of bytes depends on ``storage``:

===========  ==========================================================================================
storage      contents of a weight of n elements at b bits
===========  ==========================================================================================
``onnx``     codes of 4, 8 or 16 bits, whichever is the smallest that holds b bits (4 only for
             matmuls); float32 scales, and zero points with as many bits as the codes
``packed``   n * b bits, float32 scales, and zero points of b bits if the spec is affine
===========  ==========================================================================================
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.checks import as_integer, plain
from detent.errors import RangeError, SpecError, UnsupportedError
from detent.granularity import PerToken
from detent.observers.passes import reporter
from detent.recipe import Recipe
from detent.rule import get_weight_spec
from detent.sensitivity.layer_noise import OVERFLOW_NOISE, STORAGES, Cost, LayerNoise, Storage
from detent.spec import QuantSpec, onnx_nbytes, spec_text, stored_nbytes
from detent.tables import counted

__all__ = [
    "BatchNoise",
    "LayerGroup",
    "LayerRunner",
    "OutputNoise",
    "Progress",
    "Runs",
    "as_storage",
    "as_widths",
    "measure_all",
    "weight_nbytes",
]

_log = logging.getLogger(__name__)

Array = NDArray[Any]
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], object] | bool | None
MIN_BITS, MAX_BITS = 1, 16
MIN_POWER_SHARE = 1e-12  # an output is ignored if the compared batches have less than this share of its power


def as_widths(widths: Iterable[int | str]) -> dict[str, QuantSpec]:
    """Return a dict from the short text of each weight spec to the spec. A number means ``int{bits}/axis0``."""
    if isinstance(widths, str | int) or not isinstance(widths, Iterable):
        raise SpecError(f"got widths={widths!r}, expected a sequence such as (3, 4, 6, 8) or (4, 'int4/group32')")
    specs: dict[str, QuantSpec] = {}
    for width in widths:
        spec = _spec(width)
        label = spec_text(spec)
        if label is None:
            raise SpecError(f"got {width!r} in widths, expected a spec with a short text, such as 'int4/group32'")
        if label in specs:
            raise SpecError(f"got {width!r} twice in widths: remove one entry")
        specs[label] = spec
    if not specs:
        raise SpecError("widths is empty: pass e.g. widths=(3, 4, 6, 8), or None to measure the recipe")
    return specs


def _spec(width: int | str) -> QuantSpec:
    value = plain(width)
    if isinstance(value, str):
        spec = get_weight_spec(value)
        if not isinstance(spec, QuantSpec):
            raise SpecError(f"{width!r} in widths is a block format, which sensitivity does not measure: use e.g. int4")
        if isinstance(spec.granularity, PerToken):
            raise SpecError(f"{width!r} in widths is per-token, but only activations have tokens: use e.g. int8/axis0")
        return spec
    bits = as_integer("a bit width", value, at_least=MIN_BITS, at_most=MAX_BITS)
    return QuantSpec.parse(f"int{bits}/axis0")


def as_storage(value: str) -> Storage:
    """Check the name of a storage, "onnx" or "packed"."""
    if value not in STORAGES:
        raise SpecError(f"got storage={value!r}, expected one of {', '.join(STORAGES)}")
    return "onnx" if value == "onnx" else "packed"


def weight_nbytes(
    spec: QuantSpec | BlockFormat, shape: tuple[int, ...], storage: Storage, operator: str, input_bits: int = 0
) -> int:
    """Return the bytes of a weight's codes, scales and zero points.

    ``operator`` and ``input_bits`` are those of the layer in an ONNX file (``detent.spec.reads_bytes``).
    """
    return onnx_nbytes(spec, shape, operator, input_bits) if storage == "onnx" else stored_nbytes(spec, shape)


@dataclass(frozen=True)
class LayerGroup:
    """A layer, or all layers that share a weight and are quantized together."""

    names: tuple[str, ...]
    type: str  # type of the first layer
    elements: int  # number of weight elements
    nbytes_float: int
    nbytes: Mapping[str, int]  # maps candidates to the size of the quantized weight in bytes


class LayerRunner(Protocol):
    """A model whose layer groups can be quantized one by one."""

    groups: Sequence[LayerGroup]
    options: tuple[str, ...]  # labels of all candidates
    samples: int
    names: Sequence[str]  # names of the outputs of float type
    recipe: Recipe | None  # the measured recipe, with one rule per layer; None if candidates are weight specs
    workers: int  # number of parallel runs

    def reference(self) -> Iterator[Sequence[Array]]:
        """Yield the float model's outputs of float type, batch by batch."""

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Yield all supported (group, candidate) pairs, in the order that is cheapest to measure."""

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[Array]]:
        """Yield the outputs of float type, batch by batch, with some groups quantized.

        ``options`` maps the name of the first layer of each of these groups to the group's candidate.
        """


class BatchNoise(NamedTuple):
    """Noise of each output in one batch; an output that is left out has its power in ``left_out`` instead."""

    noise: tuple[float, ...]
    left_out: tuple[float, ...]


class OutputNoise:
    """Noise of outputs relative to ``reference``, the outputs of the float model. The reference is kept in memory."""

    def __init__(self, names: Sequence[str], reference: Iterable[Sequence[Array]]) -> None:
        self._names = list(names)
        if not self._names:
            raise UnsupportedError(
                "the model has no float output, but noise is measured only on float outputs: add a float output, "
                "such as the logits"
            )
        self._reference = [list(batch) for batch in reference]
        self._powers = np.zeros(len(self._names))
        for batch in self._reference:
            self._powers += [_power(each) for each in batch]
        for name, power in zip(self._names, self._powers, strict=True):
            if not np.isfinite(power):
                raise RangeError(
                    f"output {name!r} of the float model contains NaN or infinity: pass data with finite outputs"
                )
        if not self._powers.any():
            raise RangeError("all outputs of the float model are zero, so noise cannot be measured: pass other data")

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self._reference)

    def noise(self, outputs: Iterable[Sequence[Array]]) -> float:
        """Return noise power / signal power, as the mean over the outputs; outputs with zero signal are left out.

        An output is left out for a batch if quantization changes its shape, as may happen after NonMaxSuppression. If
        all outputs are left out for all batches, the result is 1, as if the noise were as large as the signal.
        """
        numbered = zip(range(self.batches), outputs, strict=True)
        return self.total(self.of_batch(number, each) for number, each in numbered)

    def of_batch(self, batch: int, outputs: Sequence[Array]) -> BatchNoise:
        """Return the noise of each output in one batch, and the power of outputs that are left out."""
        noise, left_out = [0.0] * len(self._names), [0.0] * len(self._names)
        for at, (before, after) in enumerate(zip(self._reference[batch], outputs, strict=True)):
            if before.shape != after.shape:
                name, shapes = self._names[at], (before.shape, after.shape)
                _log.debug("output %r left out for a batch: shape %s in float, %s quantized", name, *shapes)
                left_out[at] = _power(before)
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # outputs may overflow at few bits
                noise[at] = _power(np.subtract(after, before, dtype=np.float64))
        return BatchNoise(tuple(noise), tuple(left_out))

    def total(self, batches: Iterable[BatchNoise]) -> float:
        """Return the noise of all batches, added up in their order, as ``noise`` does."""
        noise, powers = np.zeros(len(self._names)), self._powers.copy()
        for each in batches:
            noise += each.noise
            powers -= each.left_out
        has_signal = powers > MIN_POWER_SHARE * self._powers  # a difference of sums may not be exactly zero
        if not has_signal.any():
            return 1.0
        mean = float(np.mean(noise[has_signal] / powers[has_signal]))
        return min(mean, OVERFLOW_NOISE) if np.isfinite(mean) else OVERFLOW_NOISE


def _power(values: Array) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


def _parallel_map(call: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Call ``call`` on all items in parallel, and yield the results in the order of the items.

    An interrupt cancels calls that have not started.
    """
    if workers == 1:
        yield from map(call, items)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(call, items)
    finally:
        pool.shutdown(cancel_futures=True)


class Runs(Protocol):
    """Runs of a model with some layers quantized, on the workers of an executor."""

    def noises(self, candidates: Sequence[Mapping[str, str]], output_noise: OutputNoise) -> Iterator[float]:
        """Yield the noise of each candidate, a dict from layers to their options."""


def measure_all(
    runner: LayerRunner, announce: Callable[[Cost], object] | None, progress: Progress, runs: Runs | None = None
) -> tuple[LayerNoise, ...]:
    """Measure the noise of every group with every candidate; the results are in the order of the model's layers.

    With ``runs``, the workers of an executor run the model.
    """
    start = time.perf_counter()
    output_noise = OutputNoise(runner.names, runner.reference())
    first = time.perf_counter() - start
    tasks = list(runner.tasks())
    if announce is not None:
        start = time.perf_counter()  # time another batch: the first run was slower, because it allocates memory
        next(iter(runner.reference()))
        seconds = min(first, (time.perf_counter() - start) * output_noise.batches) * len(tasks) / runner.workers
        announce(Cost(len(runner.groups), len(runner.options), len(tasks), runner.samples, seconds))
    counts = counted(len(runner.groups), "layer"), counted(len(tasks), "run"), counted(runner.samples, "sample")
    _log.info("measuring %s: %s with %s", *counts)
    report = reporter(progress, "measuring", "runs")
    measured: dict[tuple[str, str], float] = {}
    keys = [(group.names[0], option) for group, option in tasks]
    if runs is None:
        noises = _parallel_map(lambda key: output_noise.noise(runner.outputs(dict([key]))), keys, runner.workers)
    else:
        noises = runs.noises([dict([key]) for key in keys], output_noise)
    for done, (key, value) in enumerate(zip(keys, noises, strict=True), 1):
        measured[key] = value
        report(done, len(keys))
    layers = []
    for group in runner.groups:
        name, *tied = group.names
        options = [option for option in runner.options if option in group.nbytes]
        noise = {option: measured[name, option] for option in options}
        nbytes = {option: group.nbytes[option] for option in options}
        layers.append(LayerNoise(name, group.type, group.elements, group.nbytes_float, noise, nbytes, tuple(tied)))
    return tuple(layers)
