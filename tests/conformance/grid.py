"""The cells of the oracle tests: convention x rounding x granularity x format, each with tie-adjacent data.

A `Cell` contains an input array, one scale and zero point per parameter set, and the oracle's results. The parameter
set of each element is computed from its index, one element at a time, without the tiling code of detent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from numpy.typing import NDArray

import detent as dt

from . import exact, oracle
from .philox import word
from .ranges import code_range
from .ties import SCALES, neighbors, special_values, zero_points

__all__ = [
    "BITS",
    "FORMATS",
    "GRANULARITIES",
    "ROUNDINGS",
    "SEED",
    "STEP",
    "STORAGE",
    "Cell",
    "Sets",
    "assert_same",
    "cells",
]

BITS = (2, 3, 4, 8, 16)
FORMATS = {f"{prefix}int{bits}": (bits, prefix == "") for prefix in ("", "u") for bits in BITS}
STORAGE = {name: f"{'' if signed else 'u'}int{16 if bits > 8 else 8}" for name, (bits, signed) in FORMATS.items()}
ROUNDINGS = ("half_even", "half_away", "floor", "stochastic")
SEED, STEP = 0x9E37_79B9_7F4A_7C15, 3_000_000_007
"""The seed uses both key words and the step its top bit."""


@dataclass(frozen=True)
class Sets:
    """An array shape and the rule that assigns elements to parameter sets."""

    shape: tuple[int, ...]
    granularity: dt.granularity.Granularity
    scale_shape: tuple[int, ...]
    rule: tuple[object, ...]

    def of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Index in the scale array of the parameter set of element `index`."""
        match self.rule:
            case ("tensor",):
                return ()
            case ("axis", int(axis)):
                return (index[axis],)
            case ("token",):
                return index[:-1]
            case ("group", int(size), int(axis)):
                position = axis % len(index)
                return tuple(i // size if a == position else i for a, i in enumerate(index))
            case ("block", *sizes):
                lead = len(index) - len(sizes)
                return index[:lead] + tuple(i // b for i, b in zip(index[lead:], sizes, strict=True))
        raise ValueError(self.rule)

    @cached_property
    def flat(self) -> list[int]:
        """For each element in C order, the C-order position of its parameter set."""
        place = np.arange(int(np.prod(self.scale_shape))).reshape(self.scale_shape)
        return [int(place[self.of(index)]) for index in np.ndindex(self.shape)]

    @property
    def count(self) -> int:
        """Number of parameter sets."""
        return int(np.prod(self.scale_shape))


GRANULARITIES = {
    "tensor": Sets((3, 4, 3), dt.PerTensor(), (), ("tensor",)),
    "axis0": Sets((7, 3, 4), dt.PerAxis(0), (7,), ("axis", 0)),
    "axis-1": Sets((3, 4, 7), dt.PerAxis(-1), (7,), ("axis", -1)),
    "axis-2": Sets((3, 7, 4), dt.PerAxis(-2), (7,), ("axis", 1)),
    "token": Sets((2, 4, 11), dt.PerToken(), (2, 4), ("token",)),
    "group_ragged": Sets((2, 3, 14), dt.PerGroup(5), (2, 3, 3), ("group", 5, -1)),
    "group_ragged_axis0": Sets((11, 4, 2), dt.PerGroup(4, axis=0), (3, 4, 2), ("group", 4, 0)),
    "block_ragged": Sets((2, 5, 9), dt.PerBlock(2, 4), (2, 3, 3), ("block", 2, 4)),
}


@dataclass(frozen=True, eq=False)
class Cell:
    """One spec, one array, its parameters, and the oracle's results."""

    spec: dt.QuantSpec
    row: oracle.Row
    sets: Sets
    x: NDArray
    scale: NDArray
    zero_point: NDArray[np.int32]
    step: int

    @property
    def params(self) -> dt.QuantParams:
        """Parameters of the cell for detent."""
        return dt.QuantParams(self.spec, scale=self.scale, zero_point=self.zero_point)

    @property
    def fl(self) -> exact.Binary:
        """The compute type."""
        return oracle.compute_type(self.x.dtype.name)

    def elements(self) -> Iterator[tuple[float, float, int, int]]:
        """(x, s, z, random word) of every element in C order; s is rounded to the compute type."""
        values = self.x.astype(np.float64).ravel().tolist()
        scales = [self.fl.round(s) for s in self.scale.astype(np.float64).ravel().tolist()]
        points = self.zero_point.ravel().tolist()
        seed, random = self.spec.rounding.seed, self.spec.rounding.kind == "stochastic"
        for position, (x, owner) in enumerate(zip(values, self.sets.flat, strict=True)):
            yield x, scales[owner], points[owner], word(seed, position, self.step) if random else 0

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """The oracle's codes."""
        low, high, kind = self.spec.qmin, self.spec.qmax, self.spec.rounding.kind
        codes = [oracle.quantize(x, s, z, low, high, self.row, kind, self.fl, w) for x, s, z, w in self.elements()]
        return np.array(codes, dtype=np.int64).reshape(self.x.shape)

    @cached_property
    def values(self) -> NDArray:
        """The oracle's dequantized codes, in x's dtype."""
        out = exact.FORMATS[self.x.dtype.name]
        steps = zip(self.codes.ravel().tolist(), self.elements(), strict=True)
        values = [oracle.dequantize(q - z, s, self.fl, out) for q, (_, s, z, _) in steps]
        return np.array(values, dtype=np.float64).astype(self.x.dtype).reshape(self.x.shape)

    def mask(self, on: str, bounds: str) -> NDArray[np.bool_]:
        """Where the oracle's clipped estimator passes the gradient."""
        low, high, kind = self.spec.qmin, self.spec.qmax, self.spec.rounding.kind
        passes = [
            oracle.mask(x, s, z, low, high, self.row, kind, self.fl, on, bounds, w) for x, s, z, w in self.elements()
        ]
        return np.array(passes).reshape(self.x.shape)


def assert_same(got: NDArray, expected: NDArray, cell: Cell) -> None:
    """Fail with the first few elements that differ in any bit, and the values to reproduce them."""
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape}, expected {expected.shape}")
    if got.dtype.kind in "iu":
        bad = np.flatnonzero(got.astype(np.int64).ravel() != expected.ravel())
    elif got.dtype != expected.dtype:
        raise AssertionError(f"dtype {got.dtype}, expected {expected.dtype}")
    else:
        unsigned = f"uint{8 * got.dtype.itemsize}"
        bad = np.flatnonzero(got.view(unsigned).ravel() != expected.view(unsigned).ravel())
    if not bad.size:
        return
    elements = list(cell.elements())
    lines = [f"{bad.size} of {got.size} differ for {cell.spec!r}"]
    for i in bad[:5]:
        x, s, z, w = elements[i]
        lines.append(f"x={x.hex()} s={s.hex()} z={z} word={w}: got {got.ravel()[i]}, expected {expected.ravel()[i]}")
    raise AssertionError("\n".join(lines))


def _tie_data(
    rng: np.random.Generator, sets: Sets, scale: NDArray, z: NDArray, spec: dt.QuantSpec, dtype: str
) -> NDArray:
    """One point per element: next to a tie of its set, often near qmin, qmax or zero; some special values."""
    size = len(sets.flat)
    s, zero = scale.astype(np.float64).ravel()[sets.flat], z.ravel()[sets.flat].astype(np.int64)
    near_end = rng.choice([spec.qmin - 1, spec.qmin, spec.qmax - 1, spec.qmax], size=size) - zero
    anywhere = rng.integers(spec.qmin - 2, spec.qmax + 2, size=size, endpoint=True) - zero
    near_zero = rng.integers(-3, 3, size=size)
    k = np.select([rng.random(size) < 0.3, rng.random(size) < 0.3], [near_end, near_zero], anywhere)
    with np.errstate(over="ignore"):
        center = ((k + 0.5) * s).astype(dtype)
        x = neighbors(center)[np.arange(size), rng.integers(0, 3, size)]
        special = special_values("float32" if dtype == "bfloat16" else dtype).astype(dtype)
    replaced = rng.random(size) < 0.08
    x[replaced] = rng.choice(special, size=int(replaced.sum()))
    return x.reshape(sets.shape)


@cache
def cells(
    convention: str, rounding: str, granularity: str, fmt: str, dtype: str = "float32", draws: int = 1
) -> tuple[Cell, ...]:
    """Symmetric and affine cells of one combination; three of each if there is a single scale."""
    rng = np.random.default_rng(zlib.crc32(f"{convention}/{rounding}/{granularity}/{fmt}/{dtype}".encode()))
    sets, row = GRANULARITIES[granularity], oracle.ROWS[convention]
    bits, signed = FORMATS[fmt]
    combination = []
    for draw in range(2 * draws * (3 if sets.count == 1 else 1)):
        symmetric = draw % 2 == 0
        qmin, qmax = code_range(bits, signed, symmetric, row.narrow)
        spec = dt.QuantSpec(
            fmt,
            granularity=sets.granularity,
            symmetric=symmetric,
            convention=dt.convention.PRESETS[convention],
            rounding=dt.rounding.stochastic(SEED) if rounding == "stochastic" else dt.rounding.Rounding(rounding),
        )
        assert (spec.qmin, spec.qmax) == (qmin, qmax)
        points = [0 if signed else (qmin + qmax + 1) // 2] if symmetric else zero_points(qmin, qmax)
        scale = rng.choice(SCALES, size=sets.scale_shape).astype("float64" if dtype == "float64" else "float32")
        z = rng.choice(points, size=sets.scale_shape).astype(np.int32)
        scale, z = np.asarray(scale), np.asarray(z)
        combination.append(Cell(spec, row, sets, _tie_data(rng, sets, scale, z, spec, dtype), scale, z, STEP))
    return tuple(combination)
