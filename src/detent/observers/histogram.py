"""BinnedObserver: the base class of observers that keep a histogram.

The bin of a value is given by the leading bits of the value as float32: sign, exponent and some bits of the mantissa.
Bins do not depend on the data, so nothing is rescaled when a range grows. Counts are integers, and merging is addition.
So the result has the same bits for any order and size of batches, and any number of processes.

A row consists of the bins of one sign and exponent; only rows that occur are stored. Below the smallest normal float32,
bins are equally wide. Bins are the same for every dtype; values beyond the range of float32 are rejected. The outermost
bins end at the exact smallest and largest value. The mass of a bin is treated as evenly spread over the bin.
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

__all__ = ["BinnedObserver", "Bins", "SearchObserver"]

Counts = NDArray[np.int64]
Float64 = NDArray[np.float64]
ROWS, FINITE_ROWS = 512, 510  # one row per sign and exponent; the two rows of infinity and NaN stay empty
MAX_PRECISION = 10  # mantissa bits; with 10, the histogram of a parameter set needs up to 4 MiB
WEIGHT_BITS = 24  # fractional bits of a fixed-point weight; float32 has as many mantissa bits
FLOAT32_LIMIT = 2.0**128
MASS_LIMIT = 2.0**62  # the sum of all bins must be smaller, so that sums fit in 64-bit integers


class Bins(NamedTuple):
    """Histograms of all parameter sets.

    Attributes:
        lower: lower edges of the bins, in ascending order; the same for all parameter sets.
        upper: upper edges of the bins, in ascending order; the same for all parameter sets.
        mass: number of elements or sum of their weights, for each parameter set and bin.
        lo: smallest value of each parameter set.
        hi: largest value of each parameter set.
    """

    lower: Float64
    upper: Float64
    mass: Float64
    lo: Float64
    hi: Float64


class BinnedObserver(Observer):
    """Base class of observers that keep a histogram of each parameter set: ``Percentile``, ``MSE`` and ``Entropy``.

    Attributes:
        precision: mantissa bits that select a bin. With 5 bits, the width of a bin is 1.6 to 3.1 % of its values. A
            parameter set needs about 10 KiB; 128 KiB if every exponent of float32 occurs.
        weighted: whether any batch was observed with weights.
    """

    array_names: ClassVar[tuple[str, ...]] = ("lo", "hi", "rows", "counts")

    def __init__(self, granularity: Granularity | str = PerTensor(), precision: int = 5) -> None:
        self.precision = as_integer("precision", precision, at_least=1, at_most=MAX_PRECISION)
        super().__init__(granularity)

    @exclusive
    def reset(self) -> Self:
        """Discard everything observed."""
        self.weighted = False
        self._rows = np.empty(0, np.int64)
        self._counts: Counts = np.zeros((0, 0, 2**self.precision), np.int64)
        return super().reset()

    def _batch_bounds(self, data: Array, tiling: Tiling, weight: ArrayLike | None) -> tuple[Bounds, Bounds, int]:
        if data.dtype == np.float64:
            low, high, _ = minmax(data, tiling)
            if (((np.abs(low) >= FLOAT32_LIMIT) | (np.abs(high) >= FLOAT32_LIMIT)) & (low <= high)).any():
                raise RangeError(
                    f"got values from {low.min()} to {high.max()}, expected values in the range of float32 for "
                    f"{self!r}: rescale the data or use MinMax"
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
        missed, _, bounds = histogram(data, tiling, self.precision, _row_indices(self._rows), self._counts, units)
        if missed.any():
            new_rows = np.flatnonzero(missed)
            new_counts = np.zeros((new_rows.size, tiling.sets, 2**self.precision), np.int64)
            histogram(data, tiling, self.precision, _row_indices(new_rows), new_counts, units)
            self._add_rows(new_rows, new_counts)
        return bounds

    def _with_room_for(self, added: Counts) -> Counts:
        """Return the counts as fixed-point weights; raise if their sum plus ``added`` does not fit int64."""
        counts = self._counts if self.weighted else _as_units(self._counts)
        total = float(counts.sum(dtype=np.float64)) + float(added.sum(dtype=np.float64))
        if total >= MASS_LIMIT:
            raise RangeError(
                f"the weights of the elements sum to {total / 2**WEIGHT_BITS:.3g}, too large for 64-bit fixed point "
                f"with {WEIGHT_BITS} fractional bits: divide the weights by their mean"
            )
        return counts

    def _add_rows(self, rows: NDArray[np.int64], counts: Counts) -> None:
        """Add counts to the stored rows, and store rows that are new; rows stay sorted."""
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
        """Merge another observer of the same class and settings. Merging is commutative and associative."""
        with self._merging(other):
            if other._lo is not None and other._hi is not None:
                counts = other._counts
                if self.weighted or other.weighted:
                    counts = counts if other.weighted else _as_units(counts)
                    self._counts, self.weighted = self._with_room_for(counts), True
                self._add_rows(other._rows, counts.copy())
                self._lo, self._hi = self._updated_bounds(other._lo, other._hi)
            self._absorb_counts(other)
        return self

    @exclusive
    def bins(self) -> Bins:
        """Return the histogram of each parameter set.

        Raises:
            NotCalibratedError: nothing was observed, or some parameter set has no finite value.

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
                f"{self!r} has observed only weights below 2^-{WEIGHT_BITS} in {int(massless.sum())} of "
                f"{massless.size} parameter sets: pass larger weights, or omit weight="
            )
        occur = mass.any(axis=0)
        order = np.argsort(lower[occur], kind="stable")
        unit = 2.0**-WEIGHT_BITS if self.weighted else 1.0
        lo, hi = (np.asarray(bound, np.float64).ravel() for bound in bounds)
        weights = mass[:, occur][:, order].astype(np.float64) * unit
        return Bins(lower[occur][order], upper[occur][order], weights, lo, hi)

    def max_nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the largest size of the state, in bytes: 128 KiB per parameter set with precision 5."""
        sets = self.granularity.tiling(shape).sets
        return super().max_nbytes(shape) + FINITE_ROWS * sets * (8 << self.precision) + ROWS // 8

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "precision": self.precision}

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
            raise StateError(
                f"the state's rows are {packed.dtype} of shape {packed.shape}, expected uint8 of shape "
                f"({ROWS // 8},): pass the result of state_dict()"
            )
        rows = np.flatnonzero(np.unpackbits(packed))
        shape = (rows.size, bounds[0].size, 2**self.precision)
        if counts.dtype != np.int64 or counts.shape != shape:
            raise StateError(
                f"the state's counts are {counts.dtype} of shape {counts.shape}, expected int64 of shape {shape}: pass "
                "the result of state_dict()"
            )
        if (rows % 256 == ROWS // 2 - 1).any() or (counts < 0).any() or counts.sum(dtype=np.float64) >= MASS_LIMIT:
            raise StateError(
                "got a damaged histogram state, expected bins of finite values, and counts >= 0 with a sum below "
                "2^62: pass the result of state_dict()"
            )
        total = int(counts.sum(dtype=object))
        if not counters["weighted"] and total != counters["count"]:
            raise StateError(
                f"the state's counts sum to {total}, expected {counters['count']}, the number of elements in the "
                "state: pass the result of state_dict()"
            )
        self._lo, self._hi = bounds
        self._rows, self._counts = rows, counts.copy()


class SearchObserver(BinnedObserver):
    """Base class of observers that search their histogram for the best range for a spec: ``MSE`` and ``Entropy``."""

    @exclusive
    def range(self, spec: QuantSpec | Format | str = "int8") -> Range:
        """Return the best range for the spec in each parameter set; the spec's granularity is ignored."""
        return self._range_for(replace(get_spec(spec), granularity=self.granularity))

    def _range_for(self, spec: QuantSpec) -> Range:
        shape = Observer.range(self).lo.shape
        return Range(*(bound.reshape(shape) for bound in self._search(spec, self.bins())))

    @abstractmethod
    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[Float64, Float64]:
        """Return the lower and upper bound of the best range for each parameter set."""


def _row_indices(rows: NDArray[np.int64]) -> NDArray[np.int16]:
    """Map each of the 512 possible rows to its index in ``rows``, or to -1 if the row does not occur."""
    indices = np.full(ROWS, -1, np.int16)
    indices[rows] = np.arange(rows.size)
    return indices


def _as_units(counts: Counts) -> Counts:
    if counts.size and int(counts.max()) >= 1 << (62 - WEIGHT_BITS):
        raise RangeError(
            f"one bin counts {int(counts.max()):,} elements without weights, too many to also count weighted elements: "
            "use a new observer for weighted elements"
        )
    units: Counts = np.left_shift(counts, WEIGHT_BITS)
    return units


def _fixed_point(weight: ArrayLike, data: Array) -> Counts:
    """Convert weights of elements to integers in units of 2^-24, and broadcast them to the data."""
    try:
        weights: NDArray[Any] = np.asarray(weight).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise DtypeError(f"weights must be real numbers, got {weight!r}: {error}") from error
    try:
        broadcast = np.broadcast_to(weights, data.shape)
    except ValueError as error:
        raise ShapeError(
            f"weights of shape {weights.shape} do not broadcast to x of shape {data.shape}: pass one weight per element"
        ) from error
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise RangeError(
            "got infinite, NaN or negative weights, expected finite weights >= 0: replace these weights, e.g. by 0"
        )
    if weights.size and float(weights.max()) >= 2.0 ** (62 - WEIGHT_BITS):
        raise RangeError(
            f"got a weight of {weights.max()}, expected weights below 2^{62 - WEIGHT_BITS}: divide the weights by "
            "their mean"
        )
    fixed: Counts = np.rint(np.ldexp(broadcast, WEIGHT_BITS)).astype(np.int64)
    return fixed
