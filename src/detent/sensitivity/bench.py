"""Layer runners: a model whose layers can be quantized one by one, and the noise at its outputs.

``onnx_bench`` and ``torch_bench`` each have a ``LayerRunner``; the loop over layer groups and options, ``measure_all``,
is the same for both. Bit widths become specs of weights here; their bytes depend on the storage:

===========  ==========================================================================================
storage      a weight of n elements and s scales at b bits
===========  ==========================================================================================
``onnx``     codes in 4, 8 or 16 bits, the next that holds b (4 only for matmuls); float32
             scales and zero points as wide as the codes
``packed``   n * b bits, float32 scales, zero points of b bits where the spec is affine
===========  ==========================================================================================
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from detent.checks import as_integer, plain
from detent.errors import RangeError, SpecError, UnsupportedError
from detent.granularity import PerToken
from detent.observers.passes import reporter
from detent.recipe import Recipe
from detent.rule import get_weight_spec
from detent.sensitivity.layer_noise import OVERFLOW_NOISE, STORAGES, Cost, LayerNoise, Storage
from detent.spec import QuantSpec, onnx_widths, spec_text, stored_nbytes

__all__ = [
    "LayerGroup",
    "LayerRunner",
    "OutputNoise",
    "Progress",
    "as_storage",
    "as_widths",
    "measure_all",
    "weight_nbytes",
]

Array = NDArray[Any]
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], object] | bool | None
MIN_BITS, MAX_BITS = 1, 16


def as_widths(widths: Iterable[int | str]) -> dict[str, QuantSpec]:
    """Specs of weights by their labels, their short texts; a number of bits stands for ``int{bits}/axis0``."""
    if isinstance(widths, str | int) or not isinstance(widths, Iterable):
        raise SpecError(f"widths are a list such as (3, 4, 6, 8) or (4, 'int4/group32'), got {widths!r}")
    specs: dict[str, QuantSpec] = {}
    for width in widths:
        spec = _spec(width)
        label = spec_text(spec)
        if label is None:
            raise SpecError(f"the width {width!r} has no short text: use a spec such as 'int4/group32'")
        if label in specs:
            raise SpecError(f"the width {width!r} comes twice: each is an option of its own")
        specs[label] = spec
    if not specs:
        raise SpecError("there are no widths: give some, for example widths=(3, 4, 6, 8), or None for the recipe's")
    return specs


def _spec(width: int | str) -> QuantSpec:
    value = plain(width)
    if isinstance(value, str):
        spec = get_weight_spec(value)
        if isinstance(spec.granularity, PerToken):
            raise SpecError(f"the width {width!r} has a scale per token, which only activations have")
        return spec
    bits = as_integer("a width", value, at_least=MIN_BITS, at_most=MAX_BITS)
    return QuantSpec.parse(f"int{bits}/axis0")


def as_storage(value: str) -> Storage:
    """The storage of that name, checked."""
    if value not in STORAGES:
        raise SpecError(f"storage is one of {', '.join(STORAGES)}, got {value!r}")
    return "onnx" if value == "onnx" else "packed"


def weight_nbytes(spec: QuantSpec, shape: tuple[int, ...], storage: Storage, *, is_product: bool) -> int:
    """The bytes of a weight's codes, scales and zero points; ``is_product``: a matmul, which ONNX stores in 4 bits."""
    return stored_nbytes(spec, shape, onnx_widths(is_matmul=is_product) if storage == "onnx" else ())


@dataclass(frozen=True)
class LayerGroup:
    """A layer, or all layers that share a weight: they are quantized together."""

    names: tuple[str, ...]
    type: str  # of the first layer
    elements: int  # of the weights
    nbytes_float: int
    nbytes: Mapping[str, int]  # by option


class LayerRunner(Protocol):
    """A model whose layer groups can be quantized one by one."""

    groups: Sequence[LayerGroup]
    options: tuple[str, ...]  # all labels
    samples: int
    names: Sequence[str]  # of the float outputs
    recipe: Recipe | None  # one rule per layer of the measured recipe; None if options are specs
    workers: int  # how many runs go side by side

    def reference(self) -> Iterator[Sequence[Array]]:
        """The float outputs of the float model, batch by batch."""

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Every group at every option it has, in the order that costs least."""

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[Array]]:
        """The outputs with some groups quantized: their options, by the names of their first layers."""


class OutputNoise:
    """The noise of outputs relative to ``reference``, the outputs of the float model, which are kept."""

    def __init__(self, names: Sequence[str], reference: Iterable[Sequence[Array]]) -> None:
        self._names = list(names)
        if not self._names:
            raise UnsupportedError("the model has no float output, whose noise could be measured")
        self._reference = [list(batch) for batch in reference]
        self._powers = np.zeros(len(self._names))
        for batch in self._reference:
            self._powers += [_power(each) for each in batch]
        for name, power in zip(self._names, self._powers, strict=True):
            if not np.isfinite(power):
                raise RangeError(f"output {name!r} of the float model holds NaN or infinity on these data: clean them")
        if not self._powers.any():
            raise RangeError("all outputs of the float model are zero on these data: there is no signal to compare")

    @property
    def batches(self) -> int:
        """How many batches the reference has."""
        return len(self._reference)

    def noise(self, outputs: Iterable[Sequence[Array]]) -> float:
        """The mean of noise power / power over the outputs; outputs that are all zero are left out."""
        noise = np.zeros(len(self._names))
        for old, new in zip(self._reference, outputs, strict=True):
            for at, (before, after) in enumerate(zip(old, new, strict=True)):
                if before.shape != after.shape:
                    raise UnsupportedError(
                        f"output {self._names[at]!r} has shape {after.shape} once a layer is quantized, {before.shape} "
                        "in float: its noise cannot be told"
                    )
                with np.errstate(over="ignore", invalid="ignore"):  # layers of few bits may overflow
                    noise[at] += _power(np.subtract(after, before, dtype=np.float64))
        has_signal = self._powers > 0
        mean = float(np.mean(noise[has_signal] / self._powers[has_signal]))
        return min(mean, OVERFLOW_NOISE) if np.isfinite(mean) else OVERFLOW_NOISE


def _power(values: Array) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


def _side_by_side(call: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """The results of calls in the order of the items; an interrupt cancels those that have not begun."""
    if workers == 1:
        yield from map(call, items)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(call, items)
    finally:
        pool.shutdown(cancel_futures=True)


def measure_all(
    runner: LayerRunner, announce: Callable[[Cost], object] | None, progress: Progress
) -> tuple[LayerNoise, ...]:
    """Measure the noise of every group at every option, in the model's order."""
    start = time.perf_counter()
    output_noise = OutputNoise(runner.names, runner.reference())
    first = time.perf_counter() - start
    tasks = list(runner.tasks())
    if announce is not None:
        start = time.perf_counter()  # one batch once more: the first run reserves memory
        next(iter(runner.reference()))
        seconds = min(first, (time.perf_counter() - start) * output_noise.batches) * len(tasks) / runner.workers
        announce(Cost(len(runner.groups), len(runner.options), len(tasks), runner.samples, seconds))
    report = reporter(progress, "measuring", "runs")
    measured: dict[tuple[str, str], float] = {}
    keys = [(group.names[0], option) for group, option in tasks]
    noises = _side_by_side(lambda key: output_noise.noise(runner.outputs(dict([key]))), keys, runner.workers)
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
