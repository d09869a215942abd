"""Slicing: which part of the parameters belongs to a part of the data.

An axis may be sliced freely where one set spans all of it or each index has its own set; along a grouped or blocked
axis a slice has step 1 and starts and ends at a boundary.
"""

from dataclasses import replace
from types import EllipsisType
from typing import TypeAlias

from detent.errors import ShapeError
from detent.granularity import Tiling
from detent.params import QuantParams

__all__ = ["complete_slices", "slice_params"]

Slices = tuple[slice, ...]
Index: TypeAlias = slice | EllipsisType | tuple[slice | EllipsisType, ...]


def complete_slices(index: Index, shape: tuple[int, ...]) -> Slices:
    """One slice per axis; an ellipsis or the end stands for whole axes.

    Raises:
        ShapeError: not slices, or too many of them.

    >>> complete_slices((..., slice(1, 3)), (5, 4))
    (slice(None, None, None), slice(1, 3, None))
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, part in enumerate(parts) if isinstance(part, EllipsisType)]
    missing = len(shape) - (len(parts) - len(ellipses))
    if len(ellipses) > 1 or missing < 0:
        raise ShapeError(f"{index!r} has too many parts for shape {shape}")
    at = ellipses[0] if ellipses else len(parts)
    parts[at : at + 1] = [slice(None)] * missing
    slices = tuple(part for part in parts if isinstance(part, slice))
    if len(slices) != len(parts):
        raise ShapeError(f"a QuantizedTensor is sliced by slices, got {index!r}: use i:i+1 instead of i")
    try:
        for part in slices:
            part.indices(1)
    except (TypeError, ValueError) as fault:
        raise ShapeError(f"{index!r} is no slice of an array: {fault}") from fault
    return slices


def slice_params(params: QuantParams, shape: tuple[int, ...], slices: Slices) -> QuantParams:
    """The parameters that belong to those slices of data of that shape.

    Raises:
        ShapeError: a slice would cut a group or block.

    >>> slice_params(QuantParams.channel_wise(4, "int8"), (4, 2), (slice(1, 3), slice(None))).scale.shape
    (2,)
    """
    before = params.spec.granularity.tiling(shape)
    sizes = (len(range(*part.indices(size))) for part, size in zip(slices, shape, strict=True))
    after = params.spec.granularity.tiling(tuple(sizes))
    tiles = tuple(_tile(axis, part, before, after) for axis, part in enumerate(slices))
    changes = {
        name: value.reshape(before.grid)[tiles].reshape(after.scale_shape)
        for name in ("scale", "zero_point", "min_val", "max_val", "block_scale")
        if (value := getattr(params, name)) is not None
    }
    return replace(params, **changes)


def _tile(axis: int, part: slice, before: Tiling, after: Tiling) -> slice:
    """The sets along one axis that a slice of the data keeps."""
    block = before.block[axis]
    grouped = before.scale_shape == before.grid
    if after.grid[axis] == 0:
        return slice(0, 0)
    if before.grid[axis] == 1 and not grouped:
        return slice(0, 1)
    if block == 1:
        return part
    start, stop, step = part.indices(before.shape[axis])
    if step != 1 or start % block or (stop % block and stop != before.shape[axis]):
        raise ShapeError(
            f"slice {start}:{stop}:{step} of axis {axis} cuts groups of {block}: start and end at multiples of {block} "
            "with step 1, or dequantize first"
        )
    return slice(start // block, -(-stop // block))
