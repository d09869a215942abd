"""MinMax and EMAMinMax: the min-max range of each parameter set, over all data or as a moving average.

The result of ``MinMax`` is exact and does not depend on the order and the size of batches. ``EMAMinMax`` starts
from the range of the first batch, and averages ranges in float32: ``fl(fl(d * old) + fl((1 - d) * new))`` with decay d.
Its result depends on the order and the size of batches.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from array_api_compat import numpy
from numpy.typing import ArrayLike

from detent.granularity import Granularity, PerTensor
from detent.observers.observer import Bounds, Observer, exclusive
from detent.scale_mode import EMA

__all__ = ["EMAMinMax", "MinMax", "MinMaxObserver", "MovingAverageMinMaxObserver"]

AnyArray: TypeAlias = Any  # an array of any library, or the namespace of the library
Pair: TypeAlias = tuple[AnyArray, AnyArray]


class MinMax(Observer):
    """Range from the smallest to the largest finite value of each parameter set; also named ``MinMaxObserver``.

    >>> import detent as dt, numpy as np
    >>> a = dt.observers.MinMax().observe(np.array([1.0, 2.0], np.float32))
    >>> b = dt.observers.MinMax().observe(np.array([-3.0], np.float32))
    >>> a.merge(b).range()
    Range(lo=array(-3.), hi=array(2.))
    """

    def merge(self, other: Self) -> Self:
        """Merge another ``MinMax`` into this one. Merging is commutative and associative."""
        with self._merging(other):
            if other._lo is not None and other._hi is not None:
                self._lo, self._hi = self._updated_bounds(other._lo, other._hi)
            self._absorb_counts(other)
        return self


class EMAMinMax(Observer):
    """Exponential moving average of the batches' min-max ranges; also named ``MovingAverageMinMaxObserver``.

    Attributes:
        decay: weight of the old average, in [0, 1); PyTorch's ``averaging_constant`` is ``1 - decay``.
        batches: number of batches observed.

    >>> import detent as dt, numpy as np
    >>> ema = dt.observers.EMAMinMax(decay=0.5)
    >>> ema.observe(np.array([0.0, 2.0], np.float32)).observe(np.array([0.0, 4.0], np.float32)).range().hi
    array(3., dtype=float32)
    """

    state_type: ClassVar[str] = "float32"

    def __init__(self, decay: float = 0.99, granularity: Granularity | str = PerTensor()) -> None:
        self.decay = EMA(decay).decay
        super().__init__(granularity)

    @exclusive
    def reset(self) -> Self:
        """Discard everything observed."""
        self.batches = 0
        return super().reset()

    @exclusive
    def observe(self, x: ArrayLike, weight: ArrayLike | None = None) -> Self:
        """Observe one batch; a batch without elements is ignored."""
        if np.size(x) or weight is not None:
            super().observe(x, weight)
            self.batches += 1
        return self

    def _updated_bounds(self, lo: Bounds, hi: Bounds) -> tuple[Bounds, Bounds]:
        return self._averaged(lo, hi, self.decay)

    def _averaged(self, lo: Bounds, hi: Bounds, decay: float) -> tuple[Bounds, Bounds]:
        if self._lo is None or self._hi is None:
            return lo, hi
        return mix_ranges((self._lo, self._hi), (lo, hi), decay)

    def merge(self, other: Self) -> Self:
        """Merge another ``EMAMinMax``, as if its ``n`` batches were observed after the batches of this observer.

        The weight of this observer's average becomes ``decay**n``. Merging is neither commutative nor associative.

        >>> import numpy as np
        >>> one = EMAMinMax(0.5).observe(np.array([2.0]))
        >>> one.merge(EMAMinMax(0.5).observe(np.array([4.0]))).range().hi
        array(3., dtype=float32)
        """
        with self._merging(other):
            if other._lo is not None and other._hi is not None:
                self._lo, self._hi = self._averaged(other._lo, other._hi, self.decay**other.batches)
            self.batches += other.batches
            self._absorb_counts(other)
        return self

    def _settings(self) -> dict[str, object]:
        return {"decay": self.decay, **super()._settings()}

    def _counters(self) -> dict[str, int]:
        return {**super()._counters(), "batches": self.batches}

    def _load_counters(self, state: Mapping[str, int]) -> None:
        super()._load_counters(state)
        self.batches = state["batches"]


MinMaxObserver = MinMax
MovingAverageMinMaxObserver = EMAMinMax


def mix_ranges(old: tuple[Bounds, Bounds], new: tuple[Bounds, Bounds], decay: float) -> tuple[Bounds, Bounds]:
    """Return the weighted average of two ranges; if only one of the ranges has values, return that range."""
    seen = old[0] <= old[1]
    if seen.all() and (new[0] <= new[1]).all():  # the usual case, in which every range has values
        kept, added = np.float32(decay), np.float32(1.0 - decay)
        lo, hi = (kept * before + added * after.astype(np.float32) for before, after in zip(old, new, strict=True))
        return np.asarray(lo), np.asarray(hi)
    with np.errstate(all="ignore"):  # inf - inf where no value was observed; these results are not used
        lo, hi = mix_seen_ranges(numpy, old, new, decay, seen)
    return np.asarray(lo), np.asarray(hi)


def mix_seen_ranges(xp: AnyArray, old: Pair, new: Pair, decay: float, seen: AnyArray) -> Pair:
    """Average two ranges as ``mix_ranges`` does, for arrays of any library; ``seen`` marks old ranges with values."""
    empty = new[0] > new[1]

    def mix(before: AnyArray, after: AnyArray) -> AnyArray:
        before, after = xp.astype(before, xp.float32), xp.astype(after, xp.float32)
        kept, added = xp.full_like(before, decay), xp.full_like(after, 1.0 - decay)
        mixed = xp.multiply(kept, before) + xp.multiply(added, after)
        return xp.where(seen, xp.where(empty, before, mixed), after)

    return mix(old[0], new[0]), mix(old[1], new[1])
