"""HistogramObserver: the state of observers that search for a range.

Bins are a float's own bits: its sign, its exponent and the leading bits of its mantissa. They do not depend on the
data, so nothing is rescaled when a range grows: counts are integers, merging is addition, and neither the order of
batches nor their size nor the number of processes changes a bit.

A row is the bins of one sign and exponent; only rows that occur are kept. Below the smallest normal float32, bins are
evenly spaced and the same for every dtype; numbers beyond float32 are rejected. The outermost bins are cut at the exact
smallest and largest value. Inside a bin the mass counts as evenly distributed.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import as_array, as_integer
from detent.errors import DtypeError, NotCalibratedError, RangeError, ShapeError, StateError
from detent.formats import Format
from detent.granularity import Granularity, PerTensor, Tiling
from detent.kernels import bin_edges, histogram, minmax
from detent.observers.observer import Array, Bounds, Observer, Range, exclusive
from detent.spec import QuantSpec, get_spec

__all__ = ["Bins", "HistogramObserver", "SearchObserver"]

Counts = NDArray[np.int64]
Float64 = NDArray[np.float64]
ROWS, USED_ROWS = 512, 510  # signs times exponents; two of them are not finite
COMMON_PRECISION, MOST_PRECISION = 5, 10
WEIGHT_BITS = 24  # of the fraction of a weight
BEYOND = 2.0**128
MOST_MASS = 2.0**62  # of all bins together: sums stay within 64-bit integers


class Bins(NamedTuple):
    """A histogram: edges of the bins in ascending order, mass of each set and bin, bounds of each set."""

    lower: Float64
    upper: Float64
    mass: Float64
    lo: Float64
    hi: Float64


class HistogramObserver(Observer):
    """An observer with a histogram of each set.

    Attributes:
        precision: how many bits of the mantissa a bin has. With 5, a bin is 1.6 to 3.1 % wide and a set takes at most
            128 KiB, where every exponent of float32 occurs; normally a tenth of that.
        weighted: whether weights were given.
    """

    array_names: ClassVar[tuple[str, ...]] = ("lo", "hi", "rows", "counts")

    def __init__(self, granularity: Granularity | str = PerTensor(), precision: int = 5) -> None:
        self.precision = as_integer("precision", precision, at_least=1, at_most=MOST_PRECISION)
        super().__init__(granularity)

    @exclusive
    def reset(self) -> Self:
        """Forget everything."""
        self.weighted = False
        self._rows = np.empty(0, np.int64)
        self._counts: Counts = np.zeros((0, 0, 2**self.precision), np.int64)
        return super().reset()

    def _measured(self, data: Array, tiling: Tiling, weight: ArrayLike | None) -> tuple[Bounds, Bounds, int]:
        if data.dtype == np.float64:
            low, high, _ = minmax(data, tiling)
            if ((np.abs(low) >= BEYOND) & (low <= high)).any() or ((np.abs(high) >= BEYOND) & (low <= high)).any():
                raise RangeError(
                    f"values from {low.min()} to {high.max()} are beyond float32, which {self!r} counts: rescale the "
                    "data or use MinMax"
                )
        units = None if weight is None else _fixed_point(weight, data)
        if self._counts.shape[1] != tiling.sets:
            self._counts = np.zeros((0, tiling.sets, 2**self.precision), np.int64)
        if units is None and self.weighted:
            units = np.full(data.shape, 1 << WEIGHT_BITS, np.int64)
        if units is not None:
            self._counts, self.weighted = self._with_room_for(units), True
        if not data.size:
            return minmax(data, tiling)
        missed, _, bounds = histogram(data, tiling, self.precision, _places(self._rows), self._counts, units)
        if missed.any():
            new = np.flatnonzero(missed)
            fresh = np.zeros((new.size, tiling.sets, 2**self.precision), np.int64)
            histogram(data, tiling, self.precision, _places(new), fresh, units)
            self._take_rows(new, fresh)
        return bounds

    def _with_room_for(self, added: Counts) -> Counts:
        """The counts in units of weights, if 64-bit integers hold the sum with what is added."""
        held = self._counts if self.weighted else _as_units(self._counts)
        total = float(held.sum(dtype=np.float64)) + float(added.sum(dtype=np.float64))
        if total >= MOST_MASS:
            raise RangeError(
                f"the sum of weights reaches {total / 2**WEIGHT_BITS:.3g}, more than 64-bit integers hold at a "
                f"resolution of 2^-{WEIGHT_BITS}: divide the weights by their mean"
            )
        return held

    def _take_rows(self, rows: NDArray[np.int64], counts: Counts) -> None:
        """Add rows, some of which may be there already; rows stay sorted."""
        if not self._rows.size:
            self._rows, self._counts = rows.copy(), counts
            return
        union = np.union1d(self._rows, rows)
        if union.size == self._rows.size:
            self._counts[np.searchsorted(union, rows)] += counts
            return
        merged = np.zeros((union.size, *counts.shape[1:]), np.int64)
        merged[np.searchsorted(union, self._rows)] = self._counts
        merged[np.searchsorted(union, rows)] += counts
        self._rows, self._counts = union, merged

    def merge(self, other: Self) -> Self:
        """Merge what another observer of the same kind has seen into this one; commutative and associative."""
        with self._merging(other):
            if other._lo is not None and other._hi is not None:
                counts = other._counts
                if self.weighted or other.weighted:
                    counts = counts if other.weighted else _as_units(counts)
                    self._counts, self.weighted = self._with_room_for(counts), True
                self._take_rows(other._rows, counts.copy())
                self._lo, self._hi = self._blended(other._lo, other._hi)
            self._absorb_counts(other)
        return self

    @exclusive
    def bins(self) -> Bins:
        """The histogram of each set as numbers.

        Raises:
            NotCalibratedError: nothing observed, or a set without finite values.

        >>> from detent.observers import Percentile
        >>> Percentile().observe([1.0, 1.0, -2.0]).bins().mass
        array([[1., 2.]])
        """
        bounds = Observer.range(self)
        lower, upper = (edges.ravel() for edges in bin_edges(self._rows, self.precision))
        mass = np.moveaxis(self._counts, 1, 0).reshape(self._counts.shape[1], -1)
        massless = ~mass.any(axis=1)
        if massless.any():
            raise NotCalibratedError(
                f"{self!r} has seen only weights of zero, or less than 2^-{WEIGHT_BITS}, in {int(massless.sum())} of "
                f"{massless.size} sets: multiply the weights or leave them out"
            )
        occur = mass.any(axis=0)
        order = np.argsort(lower[occur], kind="stable")
        unit = 2.0**-WEIGHT_BITS if self.weighted else 1.0
        lo, hi = (np.asarray(bound, np.float64).ravel() for bound in bounds)
        held = mass[:, occur][:, order].astype(np.float64) * unit
        return Bins(lower[occur][order], upper[occur][order], held, lo, hi)

    def max_nbytes(self, shape: tuple[int, ...]) -> int:
        """How much memory the state of data of that shape can take at most: 128 KiB per set with precision 5."""
        sets = self.granularity.tiling(shape).sets
        return super().max_nbytes(shape) + USED_ROWS * sets * (8 << self.precision) + ROWS // 8

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "precision": self.precision}

    def _described(self, *settings: str) -> str:
        """The repr; the precision only if it is not the common one."""
        own = [*settings, f"granularity={self.granularity!r}"]
        if self.precision != COMMON_PRECISION:
            own.append(f"precision={self.precision}")
        return f"{type(self).__name__}({', '.join(own)})"

    def __repr__(self) -> str:
        return self._described()

    def _counters(self) -> dict[str, int]:
        return {**super()._counters(), "weighted": int(self.weighted)}

    def _load_counters(self, state: Mapping[str, int]) -> None:
        super()._load_counters(state)
        self.weighted = bool(state["weighted"])

    def _arrays(self) -> dict[str, Array]:
        bounds = super()._arrays()
        if not bounds:
            return {}
        occur = np.zeros(ROWS, np.uint8)
        occur[self._rows] = 1
        return {**bounds, "rows": np.packbits(occur), "counts": self._counts.copy()}

    def _load_arrays(self, arrays: Mapping[str, ArrayLike], counters: Mapping[str, int]) -> None:
        if not arrays:
            self.reset()
            return
        packed, counts = as_array("rows", arrays["rows"]), as_array("counts", arrays["counts"])
        bounds = self._checked_bounds(arrays["lo"], arrays["hi"])
        if packed.dtype != np.uint8 or packed.shape != (ROWS // 8,):
            raise StateError(f"rows are {ROWS} bits in {ROWS // 8} bytes, got {packed.dtype} of {packed.shape}")
        rows = np.flatnonzero(np.unpackbits(packed))
        shape = (rows.size, bounds[0].size, 2**self.precision)
        if counts.dtype != np.int64 or counts.shape != shape:
            raise StateError(f"counts are int64 of shape {shape}, got {counts.dtype} of {counts.shape}")
        if (rows % 256 == ROWS // 2 - 1).any() or (counts < 0).any() or counts.sum(dtype=np.float64) >= MOST_MASS:
            raise StateError("rows are those of finite numbers, and counts are not negative and below 2^62 in all")
        if not counters["weighted"] and int(counts.sum(dtype=object)) != counters["count"]:
            raise StateError(f"the counts of a histogram of {counters['count']} elements do not add up to that")
        self._lo, self._hi = bounds
        self._rows, self._counts = rows, counts.copy()


class SearchObserver(HistogramObserver):
    """An observer that searches its histogram for the range that is best for a spec."""

    @exclusive
    def range(self, spec: QuantSpec | Format | str = "int8") -> Range:
        """The range of each set that is best for the spec."""
        return self._range_for(replace(get_spec(spec), granularity=self.granularity))

    def _range_for(self, spec: QuantSpec) -> Range:
        shape = Observer.range(self).lo.shape
        return Range(*(bound.reshape(shape) for bound in self._search(spec, self.bins())))

    @abstractmethod
    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[Float64, Float64]:
        """The bounds of the best range of each set."""


def _places(rows: NDArray[np.int64]) -> NDArray[np.int16]:
    """Where each of the 512 rows is among these, or -1."""
    places = np.full(ROWS, -1, np.int16)
    places[rows] = np.arange(rows.size)
    return places


def _as_units(counts: Counts) -> Counts:
    if counts.size and int(counts.max()) >= 1 << (62 - WEIGHT_BITS):
        raise RangeError("too many elements were observed without weights to go on with weights")
    units: Counts = np.left_shift(counts, WEIGHT_BITS)
    return units


def _fixed_point(weight: ArrayLike, data: Array) -> Counts:
    """The weights of each element in units of 2^-24; those of elements that are not finite do not count."""
    try:
        given: NDArray[Any] = np.asarray(weight).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise DtypeError(f"weights are real numbers, got {weight!r}: {error}") from error
    try:
        wide = np.broadcast_to(given, data.shape)
    except ValueError as error:
        raise ShapeError(f"weights of shape {given.shape} do not broadcast to x of shape {data.shape}") from error
    if not (np.isfinite(given).all() and (given >= 0).all()):
        raise RangeError("weights are finite and not negative: take absolute values or squares")
    if given.size and float(given.max()) >= 2.0 ** (62 - WEIGHT_BITS):
        raise RangeError(f"a weight of {given.max()} is beyond fixed point: divide the weights by their mean")
    fixed: Counts = np.rint(np.ldexp(wide, WEIGHT_BITS)).astype(np.int64)
    return fixed
