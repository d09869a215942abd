"""Sets: the elements of each set reduced to one value.

Sums have one order on every backend: terms in float64, the elements of a set in C order, padded with +0.0 to a
multiple of 1024; inside each block of 1024 the halves are added until one value is left; the block sums are padded to a
power of two and folded the same way. Metrics are such sums over one or two whole arrays.
"""

from collections.abc import Callable
from math import ldexp, prod
from typing import Any, Literal

from array_api_compat import array_namespace

from detent.checks import compute_type
from detent.granularity import Tiling

__all__ = ["ONE", "Factor", "Term", "error_sum", "largest_error", "minmax", "power_of_two", "tree_sum"]

BLOCK = 1024


def reduce_sets(xp: Any, values: Any, tiling: Tiling, reduce: Callable[[Any], Any]) -> Any:
    """One value per set, in the scale's shape; ``reduce`` maps (sets..., elements in C order) to (sets...)."""
    if 0 in tiling.shape:
        nothing = xp.zeros((*tiling.grid, 0), dtype=values.dtype, device=values.device)
        return xp.reshape(reduce(nothing), tiling.scale_shape)
    few = tiling.merged()
    return xp.reshape(_reduce_from(xp, xp.reshape(values, few.shape), few.block, reduce), tiling.scale_shape)


def _reduce_from(xp: Any, values: Any, block: tuple[int, ...], reduce: Callable[[Any], Any]) -> Any:
    """Cut off the ragged tail of the first axis that has one, so that what is left falls into equal blocks."""
    for axis, (size, step) in enumerate(zip(values.shape, block, strict=True)):
        even = size - size % step
        if even and even != size:
            cut = (slice(None),) * axis
            parts = (values[(*cut, slice(0, even), ...)], values[(*cut, slice(even, size), ...)])
            return xp.concat([_reduce_from(xp, part, block, reduce) for part in parts], axis=axis)
    return _reduce_equal(xp, values, block, reduce)


def _reduce_equal(xp: Any, values: Any, block: tuple[int, ...], reduce: Callable[[Any], Any]) -> Any:
    rank = len(block)
    span = tuple(min(step, size) for step, size in zip(block, values.shape, strict=True))
    grid = tuple(size // step for size, step in zip(values.shape, span, strict=True))
    paired = xp.reshape(values, tuple(size for pair in zip(grid, span, strict=True) for size in pair))
    order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    return reduce(xp.reshape(xp.permute_dims(paired, order), (*grid, prod(span))))


def counts(tiling: Tiling) -> list[int]:
    """How many elements each set has, in C order of the sets."""
    sizes = [1]
    for size, block, grid in zip(tiling.shape, tiling.block, tiling.grid, strict=True):
        along = [min(block, size - index * block) for index in range(grid)]
        sizes = [left * right for left in sizes for right in along]
    return sizes


def tree_sum(terms: Any, xp: Any = None) -> Any:
    """Sum the last axis of a float64 array in the contract's order."""
    xp = array_namespace(terms) if xp is None else xp
    lead = tuple(terms.shape[:-1])
    blocks = -(-terms.shape[-1] // BLOCK)
    terms = xp.reshape(_pad(xp, terms, blocks * BLOCK), (*lead, blocks, BLOCK))
    width = 1
    while width < blocks:
        width *= 2
    return _fold(xp, _pad(xp, _fold(xp, terms, BLOCK), width), width)


def sum_sets(xp: Any, terms: Any, tiling: Tiling) -> Any:
    """The sum of each set's float64 terms in the contract's order."""
    return reduce_sets(xp, terms, tiling, lambda part: tree_sum(part, xp))


def minmax(x: Any, tiling: Tiling, xp: Any = None) -> tuple[Any, Any]:
    """The smallest and largest finite element of each set, with zeros as +0.0; (inf, -inf) for sets without any."""
    xp = array_namespace(x) if xp is None else xp
    x = xp.astype(x, compute_type(x.dtype, xp))

    def bound(reduce: Any, empty: float) -> Any:
        def reduce_part(part: Any) -> Any:
            if part.shape[-1] == 0:
                return xp.full(part.shape[:-1], empty, dtype=part.dtype, device=part.device)
            return reduce(part, axis=-1)

        filled = xp.where(xp.isfinite(x), x, xp.asarray(empty, dtype=x.dtype, device=x.device))
        values = reduce_sets(xp, filled, tiling, reduce_part)
        return xp.where(values == 0, xp.zeros_like(values), values)

    return bound(xp.min, float("inf")), bound(xp.max, float("-inf"))


def _pad(xp: Any, terms: Any, size: int) -> Any:
    missing = size - terms.shape[-1]
    if not missing:
        return terms
    zeros = xp.zeros((*terms.shape[:-1], missing), dtype=terms.dtype, device=terms.device)
    return xp.concat([terms, zeros], axis=-1)


def _fold(xp: Any, terms: Any, width: int) -> Any:
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return xp.reshape(terms, terms.shape[:-1])


Term = Literal["value", "square", "squared_error", "absolute_error", "product"]
Factor = tuple[float, float]  # a power of two as a product, because it may be beyond a float
ONE: Factor = (1.0, 1.0)
SAFE_EXPONENT = 1000


def power_of_two(exponent: int) -> Factor:
    """``2**exponent``; multiplying by one part after the other rounds at most once."""
    first = min(exponent, SAFE_EXPONENT)
    return ldexp(1.0, first), ldexp(1.0, exponent - first)


def error_sum(term: Term, x: Any, y: Any, factor: Factor = ONE, second_factor: Factor = ONE) -> Any:
    """The sum of a term over all elements: x or the error times ``factor``, in products y times ``second_factor``."""
    xp = array_namespace(x, y)
    a, b = xp.astype(x, xp.float64), xp.astype(y, xp.float64)
    if term == "value":
        terms = a
    elif term == "absolute_error":
        terms = xp.abs(a - b)
    elif term == "product":
        terms = (a * factor[0] * factor[1]) * (b * second_factor[0] * second_factor[1])
    else:
        base = (a if term == "square" else a - b) * factor[0] * factor[1]
        terms = base * base
    return tree_sum(xp.reshape(terms, (-1,)))


def largest_error(term: Term, x: Any, y: Any) -> Any:
    """The largest magnitude of x ("value") or of the error; NaN if there is any, 0 for empty data."""
    xp = array_namespace(x, y)
    a, b = xp.astype(x, xp.float64), xp.astype(y, xp.float64)
    sizes = xp.reshape(xp.abs(a if term == "value" else a - b), (-1,))
    return xp.max(sizes) if sizes.shape[0] else xp.asarray(0.0, dtype=xp.float64)
