"""Activation ranges: what the activation quantizers of a model observe, and which range each of them gets.

``qt.quantize`` observes every batch once. Each quantizer keeps a min-max range, a histogram for the MSE-optimal range,
the bounds of each batch and, for equalization, the range of each channel. Held-out batches are observed separately. The
final ranges include all batches.

The search compares the noise at the outputs of the model. Samples of each part have the ranges of the other part:

- Margins around min-max ranges, in standard deviations of the batches' bounds: new data have larger values than the
  calibration data. One margin serves for all quantizers: the smallest one whose noise is close to the least.
- The MSE-optimal range, which clips the largest values; ``search_subset`` decides for which quantizers.

A quantizer whose rule sets an observer gets the range of this observer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.checks import refuse_nan
from detent.errors import NotCalibratedError
from detent.granularity import PerAxis, PerTensor
from detent.observers import MSE, MinMax, Observer
from detent.params import QuantParams
from detent.rule import ObserverSpec
from detent.scale_mode import PerBatch
from detent.subset_search import search_subset
from detent.tables import counted
from detent.torch.arrays import on_cpu, to_array
from detent.torch.calibration import passing
from detent.torch.preparation import quantizers_of, weight_layers
from detent.torch.quantizer import FakeQuantize

__all__ = ["ActivationRanges", "Part", "RangeChoice", "check_seen", "search_ranges", "watching_inputs"]

Array = NDArray[Any]
Part = Literal["fitted", "held-out", "all"]
PARTS: tuple[Part, ...] = get_args(Part)
MARGINS = (0.5, 1.0, 1.5, 2.0, 3.0)  # in standard deviations
MAX_EXCESS_NOISE = 1.26  # times the least noise of all margins (1 dB); the smallest margin below it is chosen
MAX_CLIPPED_NOISE = 0.9  # with clipped ranges, relative to min-max ranges (0.5 dB)
MIN_BOUNDS = 4  # batches; with fewer, the deviation of their bounds is unreliable


class RangeChoice(NamedTuple):
    """Choice of ranges.

    Attributes:
        margin: margin around min-max ranges, in standard deviations.
        clipped: names of the quantizers with the MSE-optimal range.
        factors: equalization factors of the channels, by name of the quantizer.
    """

    margin: float = 0.0
    clipped: Collection[str] = ()
    factors: Mapping[str, Array] = {}


@dataclass
class _Observed:
    """Observers of one quantizer; the fixed observer of a rule replaces the min-max range and the histogram."""

    minmax: Observer
    search: Observer | None
    channels: Observer | None
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def observe(self, x: Array) -> None:
        if self.search is not None:
            batch = MinMax().observe(x)
            if batch.count > batch.nonfinite:
                lo, hi = batch.range()
                self.bounds.append((float(lo), float(hi)))
            self.search.observe(x)
        self.minmax.observe(x)
        if self.channels is not None:
            self.channels.observe(x)

    def channel_range(self) -> tuple[Array, Array, int]:
        """Return the bounds of each channel, and the number of values per channel; empty arrays without data."""
        if self.channels is None or not self.channels.count:
            return np.zeros(0), np.zeros(0), 0
        lo, hi = (each.ravel() for each in self.channels.range())
        return lo, hi, self.channels.count // max(1, lo.size)

    def merge(self, other: "_Observed") -> None:
        self.minmax.merge(other.minmax)
        for one, two in ((self.search, other.search), (self.channels, other.channels)):
            if one is not None and two is not None:
                one.merge(two)
        self.bounds += other.bounds


class ActivationRanges:
    """Observed ranges of a prepared model's activation quantizers; quantizers of mode PerBatch need none.

    Args:
        model: a prepared model.
        observer: observer for quantizers whose rule sets none; None searches the best range.
        channel_axes: for equalization, the channel axis of a quantizer's input, by name.
    """

    def __init__(
        self, model: nn.Module, observer: ObserverSpec | None = None, channel_axes: Mapping[str, int] | None = None
    ) -> None:
        weights = {quantizer for *_, quantizer in weight_layers(model)}
        self._model = model
        self.quantizers = {
            name: quantizer
            for name, quantizer in quantizers_of(model).items()
            if quantizer not in weights and not isinstance(quantizer.mode, PerBatch)
        }
        axes = {} if channel_axes is None else channel_axes
        self._parts: dict[Part, dict[str, _Observed]] = {
            part: {name: _observers(each, observer, axes.get(name)) for name, each in self.quantizers.items()}
            for part in PARTS
        }

    @contextmanager
    def observing(self) -> Iterator[Callable[[bool], None]]:
        """Let forward passes run in float, and observe them.

        Yields a function that says whether the next forward passes are held out.
        """
        part: Part = "fitted"

        def choose_part(is_held_out: bool) -> None:
            nonlocal part
            part = "held-out" if is_held_out else "fitted"

        def observe(name: str, quantizer: FakeQuantize, x: Tensor) -> None:
            array, observed = to_array(on_cpu(x)), self._parts[part][name]
            observed.observe(array)
            if observed.minmax.nonfinite:
                refuse_nan(f"{quantizer.label}: x", array, "check the data, and the layers before this quantizer")

        with passing(self._model), watching_inputs(self.quantizers, observe):
            yield choose_part
        for name, observed in self._parts["all"].items():
            observed.merge(self._parts["fitted"][name])
            observed.merge(self._parts["held-out"][name])

    @property
    def unseen(self) -> list[str]:
        """Names of the quantizers that observed nothing."""
        return [name for name, each in self._parts["all"].items() if not each.minmax.count]

    @property
    def searched(self) -> list[str]:
        """Names of the quantizers whose range is searched: per-tensor scales, and no observer set by the user."""
        return [name for name, each in self._parts["all"].items() if each.search is not None and each.minmax.count]

    def channel_range(self, name: str) -> tuple[Array, Array, int]:
        """Return the bounds of each channel in the fitted part, and the number of values per channel."""
        return self._parts["fitted"][name].channel_range()

    def set_params(self, choice: RangeChoice, part: Part = "all") -> None:
        """Set the parameters of all quantizers that observed data, from all batches or from a part of them."""
        for name, quantizer in self.quantizers.items():
            if self._parts["all"][name].minmax.count:
                quantizer.set_params(self.params(name, choice, part))

    def params(self, name: str, choice: RangeChoice, part: Part = "all") -> QuantParams:
        """Compute the parameters of a quantizer; if it observed nothing in this part, those of all batches."""
        spec, everything = self.quantizers[name].spec, self._parts["all"][name]
        observed = self._parts[part][name] if self._parts[part][name].minmax.count else everything
        if observed.search is None:
            return observed.minmax.params(spec)
        if name in choice.clipped and name not in choice.factors:
            return observed.search.params(spec)
        lo, hi = map(float, observed.minmax.range())
        below, above = _deviations(everything.bounds)
        if name in choice.factors:  # equalization changes the deviations like the bounds
            low, high, _ = observed.channel_range()
            new = float((low / choice.factors[name]).min()), float((high / choice.factors[name]).max())
            below, above = below * _ratio(new[0], lo), above * _ratio(new[1], hi)
            lo, hi = new
        dtype = observed.minmax.params(spec).scale.dtype
        return QuantParams.from_range(spec, lo - choice.margin * below, hi + choice.margin * above, dtype=dtype)


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0


def _deviations(bounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the standard deviations of lower and upper bounds.

    Every range includes 0. So a tensor without negative values, such as the output of a ReLU, gets no lower margin.
    """
    if len(bounds) < MIN_BOUNDS:
        return 0.0, 0.0
    lo, hi = np.asarray(bounds).T
    return float(np.minimum(lo, 0).std()), float(np.maximum(hi, 0).std())


def _observers(quantizer: FakeQuantize, default: ObserverSpec | None, axis: int | None) -> _Observed:
    named, granularity = quantizer.observer or default, quantizer.spec.granularity
    channels = None if axis is None else MinMax(PerAxis(axis))
    if named is not None:
        return _Observed(named.make(granularity), None, channels)
    search = MSE() if isinstance(granularity, PerTensor) else None
    return _Observed(MinMax(granularity), search, channels)


@contextmanager
def watching_inputs(
    quantizers: Mapping[str, FakeQuantize], watch: Callable[[str, FakeQuantize, Tensor], None]
) -> Iterator[None]:
    """Call ``watch(name, quantizer, x)`` for each input x of the quantizers that is not empty."""

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, FakeQuantize) and module.enabled and args[0].numel():
                watch(name, module, args[0].detach())

        return hook

    handles = [quantizer.register_forward_pre_hook(hook_for(name)) for name, quantizer in quantizers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def search_ranges(
    ranges: ActivationRanges, noise: Callable[[Part], float], factors: Mapping[str, Array]
) -> tuple[RangeChoice, list[str]]:
    """Choose a margin and the clipped quantizers; return the choice, and a description of it.

    ``noise(part)`` measures the noise at the outputs with the current parameters of the quantizers, on the held-out or
    on the fitted samples. Each part is measured with the ranges of the other part.
    """

    def measure(choice: RangeChoice) -> float:
        ranges.set_params(choice, "fitted")
        held_out_noise = noise("held-out")
        ranges.set_params(choice, "held-out")
        return held_out_noise + noise("fitted")

    plain = RangeChoice(factors=factors)
    names = [name for name in ranges.searched if name not in factors]
    noises = {0.0: measure(plain)}
    if not np.isfinite(noises[0.0]) or not noises[0.0] or not ranges.searched:
        return plain, []
    noises |= {margin: measure(plain._replace(margin=margin)) for margin in MARGINS}
    limit = MAX_EXCESS_NOISE * min(noises.values())
    margin = next(margin for margin, each in noises.items() if each <= limit)
    if margin:  # values beyond those of the calibration data matter, so nothing is clipped
        choice = plain._replace(margin=margin)
        return choice, [f"ranges: min-max with a margin of {margin:g} standard deviations"]
    clipped, remaining = search_subset(names, lambda changes, _: measure(plain._replace(clipped=changes)), noises[0.0])
    if not clipped or remaining > MAX_CLIPPED_NOISE * noises[0.0]:
        return plain, ["ranges: min-max"]
    text = f"ranges: MSE-optimal for {len(clipped)} of {counted(len(ranges.searched), 'quantizer')}, min-max for others"
    return plain._replace(clipped=frozenset(clipped)), [text]


def check_seen(ranges: ActivationRanges) -> None:
    """Raise NotCalibratedError if all data were too few to reach any quantizer."""
    if ranges.quantizers and len(ranges.unseen) == len(ranges.quantizers):
        raise NotCalibratedError(
            "no data reached a quantizer, expected batches with at least one sample: pass batches that are not empty"
        )
