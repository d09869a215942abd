"""Layer runners: a model whose layers can be quantized one by one, and the noise at its outputs.

``onnx_bench`` and ``torch_bench`` each make a ``LayerRunner``; the loop over layer groups and options, ``measure_all``,
is the same for both. Bit widths become specs of weights here, whose bytes depend on the storage:

===========  ==========================================================================================
storage      a weight of n elements and s scales at b bits
===========  ==========================================================================================
``onnx``     codes in 4, 8 or 16 bits, the next that holds b (4 for matrix products only); float32
             scales and zero points as wide as the codes
``packed``   n * b bits, float32 scales, zero points of b bits where the spec is affine
===========  ==========================================================================================
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detent.checks import as_integer, plain
from detent.errors import RangeError, SpecError, UnsupportedError
from detent.granularity import PerToken
from detent.observers.passes import reporter
from detent.recipe import Recipe
from detent.sensitivity.layer_noise import OVERFLOW_NOISE, STORAGES, Cost, LayerNoise, Storage
from detent.spec import QuantSpec, spec_text, stored_nbytes

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
FEWEST_BITS, MOST_BITS = 1, 16


def as_widths(widths: Iterable[int | str]) -> dict[str, QuantSpec]:
    """The specs of weights by their labels, which are their short texts.

    Args:
        widths: numbers of bits, which stand for symmetric integers with a scale per output channel, or texts of specs.

    Raises:
        SpecError: no width, one that comes twice, or one that no weight can have.

    >>> list(as_widths([4, 8, "int4/group32"]))
    ['int4/axis0', 'int8/axis0', 'int4/group32']
    """
    if isinstance(widths, str | int) or not isinstance(widths, Iterable):
        raise SpecError(f"widths are a list such as (3, 4, 6, 8) or (4, 'int4/group32'), got {widths!r}")
    found: dict[str, QuantSpec] = {}
    for width in widths:
        spec = _spec(width)
        label = spec_text(spec)
        if label is None:
            raise SpecError(f"the width {width!r} has no short text: use a spec such as 'int4/group32'")
        if label in found:
            raise SpecError(f"the width {width!r} comes twice: each is an option of its own")
        found[label] = spec
    if not found:
        raise SpecError("there are no widths: give some, for example widths=(3, 4, 6, 8), or None for the recipe's")
    return found


def _spec(width: int | str) -> QuantSpec:
    value = plain(width)
    if isinstance(value, str):
        spec = QuantSpec.parse(value)
        if isinstance(spec.granularity, PerToken):
            raise SpecError(f"the width {width!r} has a scale per token, which only activations have")
        return spec
    bits = as_integer("a width", value, at_least=FEWEST_BITS, at_most=MOST_BITS)
    return QuantSpec.parse(f"int{bits}/axis0")


def as_storage(value: str) -> Storage:
    """The storage of that name.

    >>> as_storage("packed")
    'packed'
    """
    if value not in STORAGES:
        raise SpecError(f"storage is one of {', '.join(STORAGES)}, got {value!r}")
    return "onnx" if value == "onnx" else "packed"


def weight_nbytes(spec: QuantSpec, shape: tuple[int, ...], storage: Storage, *, is_product: bool) -> int:
    """The bytes of a weight's codes, scales and zero points.

    Args:
        spec: placed as the layer needs it.
        shape: of the weight.
        storage: see above.
        is_product: whether it is that of a matrix product, whose codes ONNX may store in 4 bits.

    >>> spec = QuantSpec.parse("int3/axis0")
    >>> [weight_nbytes(spec, (8, 64), storage, is_product=True) for storage in STORAGES]
    [292, 224]
    """
    if storage == "packed":
        return stored_nbytes(spec, shape)
    return stored_nbytes(spec, shape, (4, 8, 16) if is_product else (8, 16))


Array = NDArray[Any]
Progress = Callable[[int, int], object] | bool | None


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a weight, or one that shares none: what is quantized at a time.

    Attributes:
        names: of the layers, in order.
        type: of the first.
        elements: of its weights.
        nbytes_float: of its weights in float.
        nbytes: by option.

    >>> LayerGroup(("fc",), "MatMul", 8, 32, {"int8/axis0": 12}).names
    ('fc',)
    """

    names: tuple[str, ...]
    type: str
    elements: int
    nbytes_float: int
    nbytes: Mapping[str, int]


class LayerRunner(Protocol):
    """What the loop needs of a model.

    Attributes:
        groups: what can be quantized.
        options: their labels.
        samples: how many there are.
        names: of the float outputs.
        recipe: what the measured recipe gives each layer; None where options are specs.
    """

    groups: Sequence[LayerGroup]
    options: tuple[str, ...]
    samples: int
    names: Sequence[str]
    recipe: Recipe | None

    def reference(self) -> Iterator[Sequence[Array]]:
        """The float outputs of the float model, batch by batch."""

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Every group at every option it has, in the order that costs least."""

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[Array]]:
        """The same outputs with some groups quantized: their options, by the names of their first layers."""


class OutputNoise:
    """The noise of outputs relative to those of the float model.

    Args:
        names: of the outputs, for messages.
        reference: the float model's outputs, batch by batch; they are kept.

    Raises:
        UnsupportedError: there is no float output.
        RangeError: an output holds NaN or infinity, or nothing but zeros.

    >>> output_noise = OutputNoise(["y"], [[np.float32([3.0, 4.0])]])
    >>> output_noise.noise([[np.float32([3.0, 3.5])]])
    0.01
    """

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
                raise RangeError(f"output {name!r} of the float model holds NaN or infinity on these data: mend them")
        if not self._powers.any():
            raise RangeError("all outputs of the float model are zero on these data: there is no signal to compare")

    def noise(self, outputs: Iterable[Sequence[Array]]) -> float:
        """The mean over the outputs of their noise power by their power; outputs that are all zero are left out."""
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
        found = float(np.mean(noise[has_signal] / self._powers[has_signal]))
        return min(found, OVERFLOW_NOISE) if np.isfinite(found) else OVERFLOW_NOISE


def _power(values: Array) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


def measure_all(
    bench: LayerRunner, announce: Callable[[Cost], object] | None, progress: Progress
) -> tuple[LayerNoise, ...]:
    """The noise of every group at every option, in the model's order."""
    start = time.perf_counter()
    output_noise = OutputNoise(bench.names, bench.reference())
    first = time.perf_counter() - start
    tasks = list(bench.tasks())
    found: dict[tuple[str, ...], dict[str, float]] = {group.names: {} for group in bench.groups}
    if announce is not None:
        start = time.perf_counter()  # once more: the first run reserves memory
        output_noise.noise(bench.reference())
        seconds = min(first, time.perf_counter() - start) * len(tasks)
        announce(Cost(len(bench.groups), len(bench.options), len(tasks), bench.samples, seconds))
    report = reporter(progress, "measuring", "runs")
    for done, (group, option) in enumerate(tasks, 1):
        found[group.names][option] = output_noise.noise(bench.outputs({group.names[0]: option}))
        report(done, len(tasks))
    return tuple(
        LayerNoise(
            group.names[0],
            group.type,
            group.elements,
            group.nbytes_float,
            {option: found[group.names][option] for option in bench.options if option in group.nbytes},
            {option: group.nbytes[option] for option in bench.options if option in group.nbytes},
            group.names[1:],
        )
        for group in bench.groups
    )
