"""MinMax: the smallest and largest finite value of each set. Exact, and the same for any order and partition."""

from typing import Self

import numpy as np

from detent.observers.observer import Bounds, Observer

__all__ = ["MinMax"]


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
        """Take in what another MinMax has seen; commutative and associative.

        >>> import numpy as np
        >>> MinMax().merge(MinMax().observe(np.array([1.0]))).count
        1
        """
        self._check_same_kind(other)
        if other._lo is not None and other._hi is not None:
            self._lo, self._hi = self._blended(other._lo, other._hi)
        self._absorb_counts(other)
        return self
