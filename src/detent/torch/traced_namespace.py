"""Array namespace for traced tensors: torch's functions, in a form whose results compilers do not change.

Inductor's code for GPUs is not IEEE arithmetic throughout. So some functions have a second form, which is used only
while torch compiles:

========== ================================================ =======================================================
function   what a compiler may do                           form that it does not change
========== ================================================ =======================================================
divide     approximate, or multiply by a reciprocal         ``addcdiv``, which Inductor 2.13 writes as ``div.rn``
multiply   fuse with an addition of its user (FMA)          a selection after the product
floor      replace subnormal numbers by zero                round half to even, then subtract 1 where that is larger
abs        replace subnormal numbers by zero                clear the sign bit; ``isnan``, ``isfinite``: comparisons
astype     drop the rounding to float16 and bfloat16        casts through bits
where      treat -0.0 as 0.0                                selection of bits (always used)
========== ================================================ =======================================================
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
    bool,  # noqa: A004 - the array API's name
    clip,
    float32,
    float64,
    full_like,
    int32,
    int64,
    ones_like,
    tanh,
    zeros_like,
)

__all__ = [
    "abs",
    "asarray",
    "astype",
    "divide",
    "floor",
    "isfinite",
    "isnan",
    "multiply",
    "searchsorted",
    "signbit",
    "where",
]

_NARROW = (torch.float16, torch.bfloat16)


def searchsorted(bounds: Tensor, values: Tensor, side: str) -> Tensor:
    """Compute the array API's ``searchsorted`` for values in any memory order."""
    return torch.searchsorted(bounds, values.contiguous(), side=side)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, correctly rounded also in compiled code for GPUs."""
    return torch.addcdiv(torch.full_like(a, -0.0), a, b) if torch.compiler.is_compiling() else a / b


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a * b``, rounded before anything is added to it."""
    product = a * b
    if not torch.compiler.is_compiling():
        return product
    bits = _bits(product)  # a zero keeps only its sign bit, which it has already: this changes no bit
    return torch.where(product == 0, bits & torch.iinfo(bits.dtype).min, bits).view(product.dtype)


def floor(x: Tensor) -> Tensor:
    """Return the largest integer up to x; -1 for negative subnormal numbers, also on GPUs."""
    if not torch.compiler.is_compiling():
        return torch.floor(x)
    nearest = torch.round(x)
    return where(nearest > x, nearest - 1.0, nearest)


def abs(x: Tensor) -> Tensor:  # noqa: A001 - the array API's name
    """Return the magnitude of x; subnormal numbers keep their value, also on GPUs."""
    if not torch.compiler.is_compiling():
        return torch.abs(x)
    bits = _bits(x)
    return (bits & torch.iinfo(bits.dtype).max).view(x.dtype)


def isnan(x: Tensor) -> Tensor:
    """Return whether each element is NaN."""
    return x != x  # noqa: PLR0124 - only NaN differs from itself


def isfinite(x: Tensor) -> Tensor:
    """Return whether each element is neither NaN nor infinite."""
    return abs(x) < torch.inf


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
    if isinstance(value, builtins.float | int):  # no copy from host memory, which would wait for a GPU
        return torch.full((), value, dtype=dtype, device=device)
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
    return (_bits(x) | 0).view(x.dtype) if x.dtype in _NARROW and torch.compiler.is_compiling() else x
