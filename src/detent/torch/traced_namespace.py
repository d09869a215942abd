"""The array namespace of traced tensors: torch's, with casts and selections that a compiler leaves alone.

A compiler may drop the rounding to float16 or bfloat16 between two operators that it fuses, and may treat -0.0 as 0.0.
It does neither to integers. So narrow floats go through their bits where they are cast, and selections and signs are
made on bits; both cost nothing where nothing is compiled.
"""

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

__all__ = [
    "abs",
    "arange",
    "asarray",
    "astype",
    "bool",
    "clip",
    "concat",
    "finfo",
    "float32",
    "float64",
    "floor",
    "full",
    "full_like",
    "int32",
    "int64",
    "isfinite",
    "isnan",
    "max",
    "maximum",
    "min",
    "minimum",
    "ones_like",
    "permute_dims",
    "reshape",
    "round",
    "searchsorted",
    "signbit",
    "take",
    "tanh",
    "where",
    "zeros",
    "zeros_like",
]

_NARROW = (torch.float16, torch.bfloat16)


def searchsorted(bounds: Tensor, values: Tensor, side: str) -> Tensor:
    """The array API's, for values in any order of memory.

    >>> searchsorted(torch.tensor([0.0, 1.0]), torch.tensor([0.5]), side="left")
    tensor([1])
    """
    return torch.searchsorted(bounds, values.contiguous(), side=side)


def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast, with narrow floats on either side as they are in memory.

    >>> astype(torch.tensor([1.001], dtype=torch.float64), torch.bfloat16)
    tensor([1.], dtype=torch.bfloat16)
    """
    return _kept(_kept(x).to(dtype)) if x.dtype != dtype else x


def asarray(
    value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    copy: builtins.bool | None = None,
) -> Tensor:
    """A tensor of numbers; of a tensor itself, the tensor as it is in memory.

    >>> asarray([1.0, 2.0], dtype=torch.float64)
    tensor([1., 2.], dtype=torch.float64)
    """
    if isinstance(value, Tensor):
        return _kept(value.clone() if copy else value)
    return torch.tensor(value, dtype=dtype, device=device)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Each element's own bits of x or of y, the sign of zero included.

    >>> where(torch.tensor([True, False]), torch.tensor([1.0, 2.0]), torch.tensor(-0.0))
    tensor([1., -0.])
    """
    if not x.dtype.is_floating_point:
        return torch.where(condition, x, y)
    return torch.where(condition, _bits(x), _bits(y)).view(x.dtype)


def signbit(x: Tensor) -> Tensor:
    """Where the sign is negative, that of zero included.

    >>> signbit(torch.tensor([-1.0, -0.0, 0.0]))
    tensor([ True,  True, False])
    """
    return _bits(x) < 0


def _bits(x: Tensor) -> Tensor:
    return x.view((torch.int16, torch.int32, torch.int64)[x.dtype.itemsize // 4])


def _kept(x: Tensor) -> Tensor:
    """The same bits. Integer arithmetic on them, even of nothing, makes a compiler produce them."""
    return (_bits(x) | 0).view(x.dtype) if x.dtype in _NARROW else x
