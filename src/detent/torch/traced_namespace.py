"""Array namespace for traced tensors: torch's functions, with casts and selections that compilers do not change.

A compiler may drop the rounding to float16 or bfloat16 between two operators that it fuses, and may treat -0.0 as 0.0.
Compilers do not change integer arithmetic. So float16 and bfloat16 values are cast through their bits, and selections
and signs work on bits.
"""

# ruff: noqa: F401 - the imported names are part of the namespace

import builtins
from typing import Any

import torch
from array_api_compat.torch import (
    arange,
    concat,
    finfo,
    full,
    max,  # noqa: A004 - the array API's name
    maximum,
    min,  # noqa: A004 - the array API's name
    minimum,
    permute_dims,
    reshape,
    round,  # noqa: A004 - the array API's name
    take,
    zeros,
)
from torch import (
    Tensor,
    abs,  # noqa: A004 - the array API's name
    bool,  # noqa: A004 - the array API's name
    clip,
    float32,
    float64,
    floor,
    full_like,
    int32,
    int64,
    isfinite,
    isnan,
    ones_like,
    tanh,
    zeros_like,
)

__all__ = ["asarray", "astype", "searchsorted", "signbit", "where"]

_NARROW = (torch.float16, torch.bfloat16)


def searchsorted(bounds: Tensor, values: Tensor, side: str) -> Tensor:
    """Compute the array API's ``searchsorted`` for values in any memory order."""
    return torch.searchsorted(bounds, values.contiguous(), side=side)


def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x to ``dtype``; x and the result are rounded to their dtypes even in fused code."""
    return _rounded(_rounded(x).to(dtype)) if x.dtype != dtype else x


def asarray(
    value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    copy: builtins.bool | None = None,
) -> Tensor:
    """Convert a value to a tensor; a tensor is rounded to its dtype even in fused code."""
    if isinstance(value, Tensor):
        return _rounded(value.clone() if copy else value)
    return torch.tensor(value, dtype=dtype, device=device)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Select elements of x or y by their bits, which keeps the sign of zero."""
    if not x.dtype.is_floating_point:
        return torch.where(condition, x, y)
    return torch.where(condition, _bits(x), _bits(y)).view(x.dtype)


def signbit(x: Tensor) -> Tensor:
    """Return whether the sign bit is set; True for -0.0."""
    return _bits(x) < 0


def _bits(x: Tensor) -> Tensor:
    return x.view((torch.int16, torch.int32, torch.int64)[x.dtype.itemsize // 4])


def _rounded(x: Tensor) -> Tensor:
    """Return x, rounded to its dtype even in fused code.

    The integer operation ``bits | 0`` forces a compiler to round float16 and bfloat16 values first.
    """
    return (_bits(x) | 0).view(x.dtype) if x.dtype in _NARROW else x
