"""Granularity: which elements of an array share one (scale, zero point) pair, called a parameter set.

Every granularity tiles the array with equal blocks. A block spans ``block[i]`` indices of axis ``i``; the last block of
an axis may be shorter. In ``PerAxis``, ``axis`` is the channel axis: each of its indices has a scale. In ``PerGroup``,
``axis`` is the axis that is divided into groups.

============================ ====================================== ================================================
value                        scale shape for x of shape (d0..dn)    string
============================ ====================================== ================================================
PerTensor()                  ()                                     tensor
PerAxis(a), PerChannel(a)    (d_a,)                                 axis0, axis-1; in rules also channel
PerToken()                   (d0, ..., d(n-1)); 1-D gives ()        token
PerGroup(g, axis=-1)         x.shape, but ceil(d_axis / g) on axis  group128, group32@0 (along axis 0)
PerBlock(b0, ..., bk)        ceil(d_i / b_i) on the trailing axes   block128x128
============================ ====================================== ================================================
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any, ClassVar

import numpy as np

from detent.checks import as_integer, as_shape
from detent.codec import table
from detent.errors import DtypeError, ShapeError, SpecError, closest

__all__ = [
    "Granularity",
    "PerAxis",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Tiling",
    "get_granularity",
    "granularity_from_dict",
]

MAX_AXES = 64  # the largest number of axes in NumPy and PyTorch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """Division of arrays of one shape into parameter sets.

    Attributes:
        block: for each axis, the number of indices that a parameter set spans, at least 1.
        grid: number of parameter sets along each axis.
        scale_shape: shape of scales and zero points; ``prod(grid) == prod(scale_shape)``.

    >>> PerGroup(4).tiling((2, 10))
    Tiling(shape=(2, 10), block=(1, 4), grid=(2, 3), scale_shape=(2, 3))
    """

    shape: Shape
    block: Shape
    grid: Shape
    scale_shape: Shape

    def __hash__(self) -> int:
        """Return a cached hash, because every quantization looks up its kernel with the tiling as a key."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.block, self.grid, self.scale_shape))

    @property
    def sets(self) -> int:
        """The number of parameter sets, equal to the number of scales."""
        return prod(self.grid)

    def spread(self, values: Any, xp: Any = np) -> Any:  # noqa: ANN401 - arrays of any library
        """Expand one value per parameter set to an array that broadcasts to the data's shape.

        ``xp`` is the array library, such as NumPy.

        >>> PerGroup(2).tiling((3,)).spread(np.array([1, 2]))
        array([1, 1, 2])
        """
        values = xp.reshape(values, self.grid)
        for axis, (size, block, grid) in enumerate(zip(self.shape, self.block, self.grid, strict=True)):
            if block > 1 and grid != 1:
                index = xp.arange(size, dtype=xp.int64, device=values.device) // block
                values = xp.take(values, index, axis=axis)
        return values

    def merged(self) -> "Tiling":
        """Merge adjacent axes, without changing which element (in C order) belongs to which parameter set.

        Two adjacent axes are merged if a parameter set spans both entirely, or if each pair of indices has its own set.

        >>> PerAxis(1).tiling((2, 3, 4, 5)).merged().shape
        (2, 3, 20)
        """
        axes: list[tuple[int, int, int]] = []
        for size, block, grid in zip(self.shape, self.block, self.grid, strict=True):
            if size == grid == 1:
                continue
            whole = grid == 1
            axis = (size, max(size, 1) if whole else block, grid)
            if axes and whole and axes[-1][2] == 1:
                span = axes[-1][0] * size
                axis = (span, max(span, 1), 1)
                axes.pop()
            elif axes and block == axes[-1][1] == 1:
                axis = (axes[-1][0] * size, 1, axes[-1][2] * grid)
                axes.pop()
            axes.append(axis)
        shape, blocks, grids = zip(*axes, strict=True) if axes else ((), (), ())
        return Tiling(shape, blocks, grids, self.scale_shape)


@dataclass(frozen=True)
class Granularity(ABC):
    """Base class of granularities: the assignment of elements to parameter sets."""

    kind: ClassVar[str]

    @property
    def set_size(self) -> int | None:
        """The number of elements in a full parameter set, or None if it depends on the data's shape."""
        return None

    def tiling(self, shape: Shape) -> Tiling:
        """Divide an array of this shape into parameter sets.

        Raises:
            ShapeError: the argument is not a shape, or has too few axes.
        """
        return _tiling(self, as_shape(shape))

    @abstractmethod
    def _tiling(self, shape: Shape) -> Tiling:
        """Compute ``tiling`` for a checked shape, without the cache."""

    def __str__(self) -> str:
        return self.kind

    def to_dict(self) -> dict[str, object]:
        """Return kind and fields as JSON-ready data."""
        return {"kind": self.kind, **{field.name: getattr(self, field.name) for field in fields(self)}}


@lru_cache(maxsize=1024)
def _tiling(granularity: Granularity, shape: Shape) -> Tiling:
    return granularity._tiling(shape)


@dataclass(frozen=True)
class PerTensor(Granularity):
    """Per-tensor granularity: one parameter set for the whole array.

    >>> PerTensor().tiling((2, 3)).scale_shape
    ()
    """

    kind = "tensor"

    def _tiling(self, shape: Shape) -> Tiling:
        return Tiling(shape, _whole(shape), (1,) * len(shape), ())


@dataclass(frozen=True)
class PerAxis(Granularity):
    """Per-channel granularity: one parameter set per index of ``axis``; negative axes count from the end.

    >>> PerAxis(-1).tiling((2, 3)).scale_shape
    (3,)
    """

    kind = "axis"
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _as_axis("PerAxis axis", self.axis))

    def _tiling(self, shape: Shape) -> Tiling:
        axis = _resolve_axis(self, self.axis, shape)
        size = shape[axis]
        return Tiling(shape, _put(_whole(shape), axis, 1), _put((1,) * len(shape), axis, size), (size,))

    def __str__(self) -> str:
        return f"axis{self.axis}"


PerChannel = PerAxis  # the name that most people search for


@dataclass(frozen=True)
class PerToken(Granularity):
    """Per-token granularity: one parameter set per vector along the last axis.

    >>> PerToken().tiling((2, 3, 4)).scale_shape
    (2, 3)
    """

    kind = "token"

    def _tiling(self, shape: Shape) -> Tiling:
        _resolve_axis(self, -1, shape)
        kept = shape[:-1]
        return Tiling(shape, (1,) * len(kept) + _whole(shape[-1:]), (*kept, 1), kept)


@dataclass(frozen=True)
class PerGroup(Granularity):
    """Per-group granularity: one parameter set per ``size`` elements along ``axis``; the last group may be shorter.

    >>> PerGroup(128).tiling((4, 300)).scale_shape
    (4, 3)
    """

    kind = "group"
    size: int
    axis: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", as_integer("PerGroup size", self.size, at_least=1))
        object.__setattr__(self, "axis", _as_axis("PerGroup axis", self.axis))

    @property
    def set_size(self) -> int:
        """The group size."""
        return self.size

    def _tiling(self, shape: Shape) -> Tiling:
        axis = _resolve_axis(self, self.axis, shape)
        grid = _put(shape, axis, _ceil_div(shape[axis], self.size))
        return Tiling(shape, _put((1,) * len(shape), axis, self.size), grid, grid)

    def __str__(self) -> str:
        return f"group{self.size}" if self.axis == -1 else f"group{self.size}@{self.axis}"


@dataclass(frozen=True, init=False, repr=False)
class PerBlock(Granularity):
    """Per-block granularity: one parameter set per block of the trailing axes and per index of the leading axes.

    >>> PerBlock(128, 128).tiling((3, 300, 128)).scale_shape
    (3, 3, 1)
    """

    kind = "block"
    sizes: tuple[int, ...]

    def __init__(self, *sizes: int) -> None:
        if not sizes:
            raise SpecError("PerBlock() got no sizes, expected at least one: for example PerBlock(128, 128)")
        object.__setattr__(self, "sizes", tuple(as_integer("PerBlock size", size, at_least=1) for size in sizes))

    @property
    def set_size(self) -> int:
        """The product of the block's sizes."""
        return prod(self.sizes)

    def _tiling(self, shape: Shape) -> Tiling:
        leading = len(shape) - len(self.sizes)
        if leading < 0:
            raise ShapeError(
                f"got an array of shape {shape} for {self}, expected a rank of at least {len(self.sizes)}: pass fewer "
                "block sizes, or reshape the array"
            )
        block = (1,) * leading + self.sizes
        grid = tuple(_ceil_div(d, b) for d, b in zip(shape, block, strict=True))
        return Tiling(shape, block, grid, grid)

    def __str__(self) -> str:
        return "block" + "x".join(map(str, self.sizes))

    def __repr__(self) -> str:
        return f"PerBlock({', '.join(map(str, self.sizes))})"

    def to_dict(self) -> dict[str, object]:
        """Return kind and sizes as JSON-ready data."""
        return {"kind": self.kind, "sizes": list(self.sizes)}


_INTEGER = r"(-?[0-9]{1,18})"
_PATTERNS = (
    (re.compile("tensor"), PerTensor),
    (re.compile(f"axis{_INTEGER}"), lambda axis: PerAxis(int(axis))),
    (re.compile("token"), PerToken),
    (re.compile(f"group{_INTEGER}"), lambda size: PerGroup(int(size))),
    (re.compile(f"group{_INTEGER}@{_INTEGER}"), lambda size, axis: PerGroup(int(size), int(axis))),
    (re.compile(r"block([0-9]{1,18}(?:x[0-9]{1,18})*)"), lambda sizes: PerBlock(*map(int, sizes.split("x")))),
)
_EXAMPLES = ("tensor", "axis0", "token", "group128", "block128x128")
CHANNEL = "channel"


def get_granularity(value: Granularity | str) -> Granularity:
    """Parse a granularity from its string; return a Granularity unchanged.

    Raises:
        SpecError: the string is not a granularity; the message suggests the closest valid form.

    >>> get_granularity("block8x16"), get_granularity("group32@0")
    (PerBlock(8, 16), PerGroup(size=32, axis=0))
    """
    if isinstance(value, Granularity):
        return value
    if not isinstance(value, str):
        raise DtypeError(f"got {value!r} as granularity, expected e.g. dt.PerAxis(0) or the string 'axis0'")
    for pattern, make in _PATTERNS:
        match = pattern.fullmatch(value)
        if match:
            return make(*match.groups())
    if value == CHANNEL:
        raise SpecError(
            "got the granularity 'channel', which is valid only for the weight of a dt.Rule: name the axis, for "
            "example 'axis0'"
        )
    raise SpecError(
        f"unknown granularity {value!r}{closest(value, _EXAMPLES)} expected tensor, axisN, token, groupN, "
        "groupN@AXIS or blockNxM"
    )


_KINDS: Mapping[str, type[Granularity]] = {cls.kind: cls for cls in (PerTensor, PerAxis, PerToken, PerGroup, PerBlock)}


def granularity_from_dict(data: Mapping[str, object]) -> Granularity:
    """Make a granularity from the data of ``to_dict``; missing and unknown keys are errors.

    >>> granularity_from_dict({"kind": "block", "sizes": [8, 16]})
    PerBlock(8, 16)
    """
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SpecError(f"got {data!r} as granularity, expected e.g. {PerGroup(128).to_dict()!r}")
    names = [field.name for field in fields(_KINDS[kind])]
    entries = table(data, f"a granularity of kind {kind!r}", ("kind", *names), error=SpecError)
    if kind != "block":
        return _KINDS[kind](*(entries[name] for name in names))
    if not isinstance(entries["sizes"], list):
        raise SpecError(f"got {entries['sizes']!r} as block sizes, expected a list of integers")
    return PerBlock(*entries["sizes"])


def _as_axis(what: str, value: object) -> int:
    return as_integer(what, value, at_least=-MAX_AXES, at_most=MAX_AXES - 1)


def _resolve_axis(granularity: Granularity, axis: int, shape: Shape) -> int:
    rank = len(shape)
    if rank == 0:
        raise ShapeError(f"got a 0-d array for {granularity}, expected at least 1 axis: use PerTensor()")
    if not -rank <= axis < rank:
        raise ShapeError(
            f"got {granularity} for an array of shape {shape}, expected an axis from {-rank} to {rank - 1}"
        )
    return axis % rank


def _whole(shape: Shape) -> Shape:
    return tuple(max(size, 1) for size in shape)


def _put(values: Shape, index: int, value: int) -> Shape:
    return (*values[:index], value, *values[index + 1 :])


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
