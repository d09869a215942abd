"""Range search: margins around min-max ranges, and clipped ranges, chosen by cross-validation.

New data may have larger values than the calibration data, and these values saturate. With few samples, saturated
values can cause most of the noise at the outputs: in two ResNets with 32 samples, the SQNR was 44 and 40 dB on the
calibration data, and 20 dB on other data. So the noise is measured on samples that the ranges were not computed from.

The samples are split into folds. Each sample is quantized with ranges that do not depend on it: the ranges of another
fold or, with many calibration samples, of all other folds. A bound of all data that is clearly beyond the left-out
samples does not depend on them, and is kept. Two kinds of ranges are compared with min-max ranges:

- A range with a margin. Its upper bound is ``hi + margin * std``, where ``std`` is the standard deviation of the
  samples' maxima. The lower bound is computed in the same way. A tensor with fixed bounds, such as the output of a
  Sigmoid, has a small deviation, and so almost no margin. All tensors have the same margin: the smallest one whose
  noise is close to the least noise. A margin of 0 must be closer than the others, because few samples show few of the
  values that saturate: in an EfficientNet, it seemed 0.9 dB worse than the best margin, and was 4 dB worse on new data.
- With many calibration samples, the min-max range of all data is the widest range. Rare values make it wider with
  every sample, and the steps coarser: in a Conformer, the SQNR with 256 samples was 0.7 dB below that with 32. So
  ranges are those of at most 32 samples, with a margin, and end at the bounds of all data. An infinite margin stands
  for the range of all data. The largest margin is chosen whose noise is about the least, because values outside of
  the range are known to occur.
- The clipped range of the observer, for tensors that ``choose_clipped`` selects; ``search_subset`` decides for which of
  them, if no margin helps. Clipping is kept only if it removes a tenth of the noise. With many calibration samples, or
  with an SQNR above 30 dB, it must remove half of the noise, because the measured samples contain few of the clipped
  values: in an EfficientNet with 35 dB, clipping that removed a tenth of the noise cost 5 dB on other data. Then a
  search on a few samples comes first, which rarely finds such a gain, and ends the search if it does not.

If layers are skipped, the margin is that of the model with all layers quantized, unless another margin halves the
noise. Otherwise, skipping one more layer could change the ranges of all others: in an EfficientNet, this cost 1.3 dB.

With few calibration samples, ranges of one small fold are tested, because a model sees more data in use than in
calibration: ranges of 8 samples are tested on 32.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.error_places import at
from detent.onnx.calibration import Calibration, activation_params, range_params
from detent.onnx.decisions import QuantizerPlacement
from detent.onnx.float_fallback import NEGLIGIBLE_NOISE, NoiseByLayer
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.samples import MAX_SAMPLES
from detent.onnx_model.sessions import tensor_bounds
from detent.params import QuantParams
from detent.subset_search import search_subset

__all__ = ["MIN_SAMPLES", "ChosenRanges", "SampleBounds", "search_ranges"]

Array = NDArray[Any]
Feed = dict[str, Array]

MARGINS = (0.5, 1.0, 1.5, 2.0, 3.0)  # in standard deviations
MIN_SAMPLES = 4  # with fewer samples, ranges are not searched
MIN_MEASURED = 8  # with noise measured on fewer samples, margins are not searched: large values are rare
FOLDS, MIN_FOLD_SAMPLES = 4, 4  # with fewer samples per fold, there are only two folds
MAX_EXCESS_NOISE = 1.26  # relative to the least noise of all margins (1 dB); the smallest margin below it is chosen
MAX_EXCESS_WITHOUT_MARGIN = 1.05  # the same limit for a margin of 0 (0.2 dB)
MAX_EXCESS_MANY = 1.035  # with many calibration samples, the largest margin below this limit is chosen (0.15 dB)
# The limit for the margin of the model with all layers quantized, if layers are skipped (3 dB).
MAX_EXCESS_PREFERRED = 2.0
MAX_CLIPPED_NOISE = 0.9  # noise with clipped ranges, relative to min-max ranges (0.5 dB)
MAX_CLIPPED_NOISE_SAFE = 0.5  # the same limit with many calibration samples, or with an SQNR above 30 dB (3 dB)
# The first search, on few samples, where clipping must remove half of the noise: how many, and the limit it must meet.
FEW_SAMPLES, MAX_CLIPPED_NOISE_FEW = 8, 0.6
# From this number of runs of the model on, a set of clipped groups is given up if it has not yet lowered the noise.
MIN_RUNS = 8
MANY_SAMPLES = 64  # with more calibration samples, noise is measured only on a small part of them
TOLERANCE = 1e-4  # relative to a bound; recording other tensors may change the last bits of results in ONNX Runtime


class SampleBounds:
    """Smallest and largest value of each observed tensor: in each sample, and in all calibration data.

    >>> samples = {"x": (np.zeros(4), np.float64([1, 2, 4, 2]))}
    >>> bounds = SampleBounds({"x": (-1.0, 4.0)}, samples)
    >>> bounds.folds, bounds.range("x", 0.0), bounds.range("x", 0.0, fold=1)  # fold 1 has samples 1 and 3
    (2, (-1.0, 4.0), (-1.0, 2.0))
    """

    def __init__(
        self,
        ranges: Mapping[str, tuple[float, float]],
        samples: Mapping[str, tuple[Array, Array]],
        *,
        has_many: bool = False,
    ) -> None:
        self._ranges, self._samples, self.has_many = ranges, samples, has_many
        self.min_max = inf if has_many else 0.0  # the margin that stands for the min-max range of all data
        count = max((len(lo) for lo, _ in samples.values()), default=0)
        self.has_enough = not has_many or count >= MAX_SAMPLES  # fewer samples say too little about many
        self.folds = FOLDS if count >= FOLDS * MIN_FOLD_SAMPLES else 2
        # Every range includes 0. So a tensor without negative values, such as a Relu output, gets no lower margin.
        self._deviations = {
            name: (float(np.minimum(lo, 0).std()), float(np.maximum(hi, 0).std())) for name, (lo, hi) in samples.items()
        }

    @classmethod
    def measure(
        cls, plan: GraphPlan, calibration: Calibration, samples: Sequence[Feed], memory_budget: int | None = None
    ) -> "SampleBounds":
        """Run the float model on the samples; ``memory_budget`` limits the bytes of activations in memory."""
        names = list(calibration.observers)
        has_many = calibration.summary.samples > MANY_SAMPLES
        samples = calibration.samples if has_many else samples  # calibration.samples begin with samples
        bounds = tensor_bounds(plan.model, names, samples, memory_budget)
        return cls({name: calibration.range(name) for name in names}, bounds, has_many=has_many)

    def range(self, tensor: str, margin: float, fold: int | None = None) -> tuple[float, float]:
        """Return the range of a tensor in one fold, with a margin; ``fold=None`` uses all samples.

        The range is evaluated on the fold before ``fold``. A bound of all data is kept if it is clearly beyond the
        left-out samples. With many calibration samples, the range is that of all folds except the evaluated one, and
        ends at the bounds of all data; an infinite margin stands for the range of all data.
        """
        least, most = self._ranges[tensor]
        if margin == inf:
            return least, most
        lo, hi = self._samples[tensor]
        number = np.arange(len(lo)) % self.folds
        kept = np.ones(len(lo), bool) if fold is None else number == fold
        below, above = self._deviations[tensor]
        if self.has_many:
            kept = kept if fold is None else number != (fold - 1) % self.folds
            low, high = float(lo[kept].min()) - margin * below, float(hi[kept].max()) + margin * above
            return max(low, least), min(high, most)
        if fold is not None:
            least = least if _is_beyond(-least, -lo[~kept].min()) else float(lo[kept].min())
            most = most if _is_beyond(most, hi[~kept].max()) else float(hi[kept].max())
        return least - margin * below, most + margin * above


def _is_beyond(bound: float, other: float) -> bool:
    """Return whether ``bound`` is larger than ``other`` by more than a rounding error."""
    return bound > other + TOLERANCE * abs(other)


class ChosenRanges(NamedTuple):
    """Ranges of activations.

    Attributes:
        params: scale and zero point by group of tensors.
        clipped: groups with a clipped range; None for all.
        margin: margin of all other ranges, in standard deviations; infinite for the ranges of all data.
        bounds: sample bounds from which ranges with a margin are computed; None without a search.
        is_searched: whether margins were compared.
    """

    params: Mapping[str, QuantParams]
    clipped: frozenset[str] | None
    margin: float = 0.0
    bounds: SampleBounds | None = None
    is_searched: bool = False

    @property
    def steps(self) -> list[str]:
        """The margin as text, for the steps of a report."""
        if self.bounds is None or self.margin == self.bounds.min_max:
            return []
        widened = f"widened by {self.margin:g} standard deviations of per-sample bounds" if self.margin else ""
        if not self.bounds.has_many:
            return [f"ranges {widened}"]
        return [f"ranges of {MAX_SAMPLES} samples{f', {widened}' if widened else ''}: less noise than with all data"]

    def of(self, placements: Iterable[QuantizerPlacement]) -> dict[str, QuantParams]:
        """Return the parameters of the groups of some placements."""
        groups = {each.group for each in placements}
        return {name: each for name, each in self.params.items() if name in groups}

    def updated(self, other: "ChosenRanges") -> "ChosenRanges":
        """Return ``other``, with the ranges of further groups from this value."""
        clipped = (self.clipped or frozenset()) - other.params.keys() | (other.clipped or frozenset())
        return other._replace(params={**self.params, **other.params}, clipped=clipped)

    def with_new(self, placements: Iterable[QuantizerPlacement], calibration: Calibration) -> "ChosenRanges":
        """Add the ranges of new groups; a new range is clipped only if all ranges are clipped."""
        new = {
            each.group: self._new(each, calibration)
            for each in placements
            if each.tensor == each.group and not each.source_tensor and each.group not in self.params
        }
        return self._replace(params={**self.params, **new})

    def _new(self, placement: QuantizerPlacement, calibration: Calibration) -> QuantParams:
        if self.bounds is None:
            return activation_params(placement, calibration, clipped=self.clipped is None)
        return with_margin(placement, calibration, self.bounds, self.margin)


def search_ranges(
    noise: NoiseByLayer,
    placements: Iterable[QuantizerPlacement],
    calibration: Calibration,
    clipped: frozenset[str],
    bounds: SampleBounds,
    first: int,
    fixed: Collection[str] = (),
    preferred: float | None = None,
) -> ChosenRanges:
    """Choose a margin, and the groups of tensors that are clipped.

    ``clipped`` are the groups that may be clipped. ``first`` is the index in ``bounds`` of the first sample
    of ``noise``. Groups in ``fixed`` are not searched: they have no margin, and are clipped if ``clipped`` has them.
    ``preferred`` is a margin that is chosen unless another one halves the noise.
    """
    groups = [each for each in placements if each.group == each.tensor and not each.source_tensor]
    search = _Search(noise, [each for each in groups if each.group not in fixed], calibration, bounds, first)
    is_searched = noise.samples >= MIN_MEASURED and bounds.has_enough
    margin = search.best_margin(preferred) if is_searched else bounds.min_max
    # If a margin helps, values beyond those of the samples matter, so nothing is clipped.
    chosen = set() if is_searched and margin else search.best_clipped(clipped, margin)
    chosen |= clipped & set(fixed)
    params = {
        each.group: activation_params(each, calibration, clipped=True)
        if each.group in chosen
        else with_margin(each, calibration, bounds, bounds.min_max if each.group in fixed else margin)
        for each in groups
    }
    return ChosenRanges(params, frozenset(chosen), margin, bounds, is_searched)


class _Search:
    """Search by the noise at the outputs, for which each sample is quantized with the ranges of the next fold."""

    def __init__(
        self,
        noise: NoiseByLayer,
        placements: Sequence[QuantizerPlacement],
        calibration: Calibration,
        bounds: SampleBounds,
        first: int,
    ) -> None:
        self._noise, self._calibration, self._bounds = noise, calibration, bounds
        self._folds = [(first + i + 1) % bounds.folds for i in range(noise.samples)]
        self._placements = {each.group: each for each in placements}
        self._plain: dict[tuple[float, int | None], list[float]] = {}  # results of _sums without clipped ranges
        self._known_params: dict[tuple[str, float, int | None, bool], QuantParams] = {}

    def best_margin(self, preferred: float | None = None) -> float:
        """Return the smallest margin whose noise is close to the least, or the largest with many calibration samples.

        ``preferred`` is returned if its noise is at most twice the least. If the noise cannot be measured, ranges are
        those of all data.
        """
        if not self._placements:
            return self._bounds.min_max
        noises = {0.0: self._plain_sums(0.0)[-1]}
        for margin in (*MARGINS, *([inf] if self._bounds.has_many else [])):
            max_excess = MAX_EXCESS_PREFERRED if margin == preferred else MAX_EXCESS_NOISE
            noises[margin] = self._sums(margin, (), max_excess * min(noises.values()))[-1]
        least = min(noises.values())
        if preferred is not None and noises.get(preferred, inf) <= MAX_EXCESS_PREFERRED * least:
            return preferred
        if self._bounds.has_many:
            close = (margin for margin, each in reversed(noises.items()) if each <= MAX_EXCESS_MANY * least)
            return next(close, self._bounds.min_max)
        limits = {margin: MAX_EXCESS_NOISE if margin else MAX_EXCESS_WITHOUT_MARGIN for margin in noises}
        close = (margin for margin, each in noises.items() if each <= limits[margin] * least)
        return next(close, self._bounds.min_max)

    def _plain_sums(self, margin: float, samples: int | None = None) -> list[float]:
        """Measure the noise without clipped ranges; the result is kept."""
        if (margin, samples) not in self._plain:
            self._plain[margin, samples] = self._sums(margin, (), samples=samples)
        return self._plain[margin, samples]

    def best_clipped(self, clipped: Collection[str], margin: float) -> set[str]:
        """Choose the groups to clip among ``clipped``; none if clipping removes too little noise.

        All other groups have the margin ``margin``.
        """
        candidates = [each for each in self._placements if each in clipped and self._is_narrower(each)]
        if not candidates:
            return set()
        plain = self._plain_sums(margin)[-1]
        if not np.isfinite(plain) or not plain:  # the noise cannot be measured
            return set()
        is_safe = self._bounds.has_many or self._is_negligible()
        if is_safe and len(self._folds) > FEW_SAMPLES:
            few = self._plain_sums(margin, FEW_SAMPLES)[-1]
            if self._search_clipped(candidates, margin, FEW_SAMPLES)[1] > MAX_CLIPPED_NOISE_FEW * few:
                return set()
        chosen, remaining = self._search_clipped(candidates, margin)
        return chosen if remaining <= (MAX_CLIPPED_NOISE_SAFE if is_safe else MAX_CLIPPED_NOISE) * plain else set()

    def _search_clipped(
        self, candidates: Sequence[str], margin: float, samples: int | None = None
    ) -> tuple[set[str], float]:
        """Search the groups to clip on the first samples; return them and the noise."""
        least = plain = self._plain_sums(margin, samples)

        def measure(clipped: Collection[str], limit: float) -> float:
            nonlocal least
            sums = self._sums(margin, clipped, limit, samples, least if limit < inf else ())
            if sums[-1] < min(limit, least[-1]):
                least = sums
            return sums[-1]

        return search_subset(candidates, measure, plain[-1])

    def _is_negligible(self) -> bool:
        """Whether min-max ranges of all data cause little noise, so that clipping has more to lose than to gain."""
        margin = self._bounds.min_max
        params = {group: self._params(group, margin, None, is_clipped=False) for group in self._placements}
        limit = NEGLIGIBLE_NOISE * self._noise.count
        return self._add_up([], [params] * len(self._folds), limit)[-1] <= limit

    def _is_narrower(self, group: str) -> bool:
        """Whether the clipped range of a group differs from its min-max range."""
        full, clipped = (
            activation_params(self._placements[group], self._calibration, clipped=each) for each in (False, True)
        )
        return full != clipped

    def _sums(
        self,
        margin: float,
        clipped: Collection[str],
        limit: float = inf,
        samples: int | None = None,
        best: Sequence[float] = (),
    ) -> list[float]:
        """Measure the noise with ranges of folds, plus the noise with ranges of all data, on the first samples.

        Groups in ``clipped`` have their clipped range. The result has the sum after each run of the model; the last one
        is the noise. The measurement stops as soon as the noise is above ``limit``, or, after some runs, not below the
        sum of ``best``, an earlier result; the last value is then infinite.
        """
        by_fold = [
            {group: self._params(group, margin, fold, is_clipped=group in clipped) for group in self._placements}
            for fold in (*range(self._bounds.folds), None)
        ]
        folds = self._folds[:samples]
        sums = self._add_up([], [by_fold[fold] for fold in folds], limit, best)
        return sums if sums[-1] == inf else self._add_up(sums, [by_fold[-1]] * len(folds), limit, best)

    def _add_up(
        self,
        sums: list[float],
        params: Sequence[Mapping[str, QuantParams]],
        limit: float,
        best: Sequence[float] = (),
    ) -> list[float]:
        """Continue sums with the noise of each sample, until one of the limits of ``_sums`` is exceeded."""
        sums = list(sums)
        for noise in self._noise.noises_by_sample(params):
            sums.append(noise + (sums[-1] if sums else 0.0))
            if len(sums) >= MIN_RUNS and len(sums) <= len(best) and sums[-1] >= best[len(sums) - 1]:
                return [*sums, inf]
            if sums[-1] > limit:
                return [*sums, inf]
        return sums or [0.0]

    def _params(self, group: str, margin: float, fold: int | None, *, is_clipped: bool) -> QuantParams:
        key = group, margin, fold, is_clipped
        if key not in self._known_params:
            self._known_params[key] = self._compute_params(group, margin, fold, is_clipped=is_clipped)
        return self._known_params[key]

    def _compute_params(self, group: str, margin: float, fold: int | None, *, is_clipped: bool) -> QuantParams:
        """Compute the parameters of a group from the data of a fold; ``fold=None`` uses all calibration data."""
        placement, calibration = self._placements[group], self._calibration
        if not is_clipped:
            return with_margin(placement, calibration, self._bounds, margin, fold)
        # A clipped range depends on many values, so the clipped range of a fold is about that of all data. But it is
        # never wider than the min-max range of the fold.
        clipped = activation_params(placement, calibration, clipped=True)
        full = with_margin(placement, calibration, self._bounds, margin, fold)
        return clipped if clipped.scale < full.scale else full


def with_margin(
    placement: QuantizerPlacement,
    calibration: Calibration,
    bounds: SampleBounds,
    margin: float,
    fold: int | None = None,
) -> QuantParams:
    """Compute the parameters of a group from its range with a margin; ``fold=None`` uses all calibration data."""
    with at("tensor", placement.tensor):
        observed, _ = calibration.source(placement.group)
        return range_params(placement, calibration, bounds.range(observed, margin, fold))
