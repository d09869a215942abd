"""MinMax and EMAMinMax: the smallest and largest finite value of each set, over all batches or as a moving average.

``MinMax`` is exact, and the same for any order and partition of the data. ``EMAMinMax`` averages the batches' ranges,
per set and bound in float32: ``fl(fl(d * old) + fl((1 - d) * new))``, the first batch is copied. ``decay`` d is the
part kept. The average depends on the order and size of batches by definition.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from detent.granularity import Granularity, PerTensor
from detent.observers.observer import Bounds, Observer
from detent.scale_mode import EMA

__all__ = ["EMAMinMax", "MinMax", "mix_ranges"]


class MinMax(Observer):
    """The smallest and largest finite value of each set.

    >>> import detent as dt, numpy as np
    >>> a = dt.observers.MinMax().observe(np.array([1.0, 2.0], np.float32))
    >>> b = dt.observers.MinMax().observe(np.array([-3.0], np.float32))
    >>> a.merge(b).range()
    Range(lo=array(-3.), hi=array(2.))
    """

    def _blended(self, lo: Bounds, hi: Bounds) -> tuple[Bounds, Bounds]:
        if self._lo is None or self._hi is None:
            return lo, hi
        return np.asarray(np.minimum(self._lo, lo)), np.asarray(np.maximum(self._hi, hi))

    def merge(self, other: Self) -> Self:
        """Take in what another MinMax has seen; commutative and associative."""
        self._check_same_kind(other)
        if other._lo is not None and other._hi is not None:
            self._lo, self._hi = self._blended(other._lo, other._hi)
        self._absorb_counts(other)
        return self


class EMAMinMax(Observer):
    """A moving average of the batches' smallest and largest finite values.

    Attributes:
        decay: the part of the old value that is kept, in [0, 1).
        batches: how many batches were observed.

    >>> import detent as dt, numpy as np
    >>> ema = dt.observers.EMAMinMax(decay=0.5)
    >>> ema.observe(np.array([0.0, 2.0], np.float32)).observe(np.array([0.0, 4.0], np.float32)).range().hi
    array(3., dtype=float32)
    """

    state_type: ClassVar[str] = "float32"

    def __init__(self, decay: float = 0.99, granularity: Granularity | str = PerTensor()) -> None:
        self.decay = EMA(decay).decay
        super().__init__(granularity)

    def reset(self) -> Self:
        """Forget everything."""
        self.batches = 0
        return super().reset()

    def observe(self, x: ArrayLike, weight: ArrayLike | None = None) -> Self:
        """Take in one batch; a batch without elements counts for nothing."""
        if np.size(x) or weight is not None:
            super().observe(x, weight)
            self.batches += 1
        return self

    def _blended(self, lo: Bounds, hi: Bounds) -> tuple[Bounds, Bounds]:
        return self._mixed(lo, hi, self.decay)

    def _mixed(self, lo: Bounds, hi: Bounds, decay: float) -> tuple[Bounds, Bounds]:
        if self._lo is None or self._hi is None:
            return lo, hi
        return mix_ranges((self._lo, self._hi), (lo, hi), decay)

    def merge(self, other: Self) -> Self:
        """Take in another average as if it were the mean of its ``n`` batches, which come after: ``decay**n`` is kept.

        Neither commutative nor associative.

        >>> import numpy as np
        >>> one = EMAMinMax(0.5).observe(np.array([2.0]))
        >>> one.merge(EMAMinMax(0.5).observe(np.array([4.0]))).range().hi
        array(3., dtype=float32)
        """
        self._check_same_kind(other)
        if other._lo is not None and other._hi is not None:
            self._lo, self._hi = self._mixed(other._lo, other._hi, self.decay**other.batches)
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

    def __repr__(self) -> str:
        return f"EMAMinMax(decay={self.decay}, granularity={self.granularity!r})"


def mix_ranges(old: tuple[Bounds, Bounds], new: tuple[Bounds, Bounds], decay: float) -> tuple[Bounds, Bounds]:
    """The kept part of the old range plus the new part; sets that one side has not seen take the other's range."""
    kept, added = np.float32(decay), np.float32(1.0 - decay)
    if (old[0] <= old[1]).all() and (new[0] <= new[1]).all():
        lo, hi = (kept * before + added * after.astype(np.float32) for before, after in zip(old, new, strict=True))
        return np.asarray(lo), np.asarray(hi)
    unseen, missing = old[0] > old[1], new[0] > new[1]
    with np.errstate(all="ignore"):  # inf - inf of sets without values, not selected
        ends = [kept * before + added * after.astype(np.float32) for before, after in zip(old, new, strict=True)]
        parts = zip(old, new, ends, strict=True)
        ends = [np.where(unseen, after, np.where(missing, before, mixed)) for before, after, mixed in parts]
    return np.asarray(ends[0], np.float32), np.asarray(ends[1], np.float32)
