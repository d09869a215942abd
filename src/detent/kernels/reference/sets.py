"""Sets: reductions of each parameter set to one value.

Sums have the same accumulation order on every backend. Terms are in float64. The elements of a parameter set are in C
order, padded with +0.0 to a multiple of 1024. In each block of 1024, the upper half is added to the lower half, until
one value is left. The block sums are padded to a power of two and added in the same way. Metrics are sums of this kind
over whole arrays.
"""

from collections.abc import Callable
from math import ldexp, prod
from typing import Any, Literal

from array_api_compat import array_namespace

from detent.checks import compute_type
from detent.granularity import Tiling

__all__ = ["ONE", "Factor", "Term", "error_sum", "largest_error", "minmax", "power_of_two", "tree_sum"]

BLOCK = 1024  # elements; part of the accumulation order, so it never changes


def reduce_sets(xp: Any, values: Any, tiling: Tiling, reduce: Callable[[Any], Any]) -> Any:
    """Reduce each parameter set to one value with ``reduce``, which reduces the last axis of an array.

    The result has the scale's shape.
    """
    if 0 in tiling.shape:
        empty = xp.zeros((*tiling.grid, 0), dtype=values.dtype, device=values.device)
        return xp.reshape(reduce(empty), tiling.scale_shape)
    merged = tiling.merged()
    return xp.reshape(_reduce_from(xp, xp.reshape(values, merged.shape), merged.block, reduce), tiling.scale_shape)


def _reduce_from(xp: Any, values: Any, block: tuple[int, ...], reduce: Callable[[Any], Any]) -> Any:
    """Reduce the incomplete last block of an axis separately, so that all other blocks have equal sizes."""
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
    """Return the number of elements of each parameter set; the parameter sets are in C order."""
    sizes = [1]
    for size, block, grid in zip(tiling.shape, tiling.block, tiling.grid, strict=True):
        along = [min(block, size - index * block) for index in range(grid)]
        sizes = [left * right for left in sizes for right in along]
    return sizes


def tree_sum(terms: Any, xp: Any = None) -> Any:
    """Sum the last axis of a float64 array in the fixed accumulation order."""
    xp = array_namespace(terms) if xp is None else xp
    lead = tuple(terms.shape[:-1])
    blocks = -(-terms.shape[-1] // BLOCK)
    terms = xp.reshape(_pad(xp, terms, blocks * BLOCK), (*lead, blocks, BLOCK))
    return tree_sum_of_blocks(_fold(xp, terms, BLOCK), xp)


def tree_sum_of_blocks(sums: Any, xp: Any) -> Any:
    """Sum the last axis, whose elements are the sums of blocks, in the fixed accumulation order."""
    width = 1
    while width < sums.shape[-1]:
        width *= 2
    return _fold(xp, _pad(xp, sums, width), width)


def sum_sets(xp: Any, terms: Any, tiling: Tiling) -> Any:
    """Sum the float64 terms of each parameter set in the fixed accumulation order."""
    return reduce_sets(xp, terms, tiling, lambda part: tree_sum(part, xp))


def minmax(x: Any, tiling: Tiling, xp: Any = None) -> tuple[Any, Any]:
    """Return the range of each parameter set's finite elements, or (inf, -inf) if no element is finite.

    A bound of -0.0 becomes 0.0.
    """
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
Factor = tuple[float, float]  # a power of two as two factors, because it may overflow a float
ONE: Factor = (1.0, 1.0)
SAFE_EXPONENT = 1000  # below the largest exponent of float64, 1023


def power_of_two(exponent: int) -> Factor:
    """Return ``2**exponent`` as two factors; multiplying by both factors in turn rounds at most once."""
    first = min(exponent, SAFE_EXPONENT)
    return ldexp(1.0, first), ldexp(1.0, exponent - first)


def error_sum(term: Term, x: Any, y: Any, factor: Factor = ONE, second_factor: Factor = ONE) -> Any:
    """Return the sum of a term over all elements.

    Before squaring, x or the error is multiplied by ``factor``. In products, x is multiplied by ``factor``, and y by
    ``second_factor``.
    """
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
    """Return the largest magnitude of x if ``term`` is "value", otherwise of the error x - y.

    The result is NaN if any element is NaN, and 0 if x is empty.
    """
    xp = array_namespace(x, y)
    a, b = xp.astype(x, xp.float64), xp.astype(y, xp.float64)
    sizes = xp.reshape(xp.abs(a if term == "value" else a - b), (-1,))
    return xp.max(sizes) if sizes.shape[0] else xp.asarray(0.0, dtype=xp.float64)
