"""MSE: the range that quantization loses least on."""

import numpy as np
from numpy.typing import NDArray

from detent.checks import as_number
from detent.errors import RangeError
from detent.granularity import Granularity, PerTensor
from detent.observers.histogram import Bins, SearchObserver
from detent.observers.search import least_error
from detent.spec import QuantSpec

__all__ = ["MSE"]


class MSE(SearchObserver):
    """The range of each set with the least mean ``|x - quantized x|^norm``, clipping and rounding both.

    Made for sets of some hundred values and more: of fewer, the bins know too little, and a higher ``precision`` or
    ``MinMax`` does better.

    The spec decides the levels, so that ``params(spec)`` and ``range(spec)`` search for it. Weights say how much an
    element's error matters; they are rounded to multiples of 2^-24, so that weighted observers merge exactly too.

    Attributes:
        norm: the power of an error; 2 is the mean squared error.

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    >>> observer = dt.observers.MSE().observe(x)
    >>> [float(observer.range(name).hi.round(1)) for name in ("int2", "int4", "int8")]
    [1.2, 2.5, 3.9]
    """

    def __init__(self, norm: float = 2.0, granularity: Granularity | str = PerTensor(), precision: int = 5) -> None:
        self.norm = as_number("norm", norm)
        if not 0 < self.norm < np.inf:
            raise RangeError(f"a norm is a positive number, got {norm!r}")
        super().__init__(granularity, precision)

    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return least_error(spec, bins, self.norm, self._scale_dtype)

    def _settings(self) -> dict[str, object]:
        return {"norm": self.norm, **super()._settings()}

    def __repr__(self) -> str:
        return self._described(f"norm={self.norm}")
