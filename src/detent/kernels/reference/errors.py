"""Sums over one or two arrays, for metrics: terms in float64, added in the contract's order."""

from math import ldexp
from typing import Any, Literal

from array_api_compat import array_namespace

from detent.kernels.reference.sets import tree_sum

__all__ = ["ONE", "Factor", "Term", "error_sum", "largest_error", "power_of_two"]

Term = Literal["value", "square", "squared_error", "absolute_error", "product"]
Factor = tuple[float, float]  # a power of two as a product, because it may be beyond a float
ONE: Factor = (1.0, 1.0)
SAFE_EXPONENT = 1000


def power_of_two(exponent: int) -> Factor:
    """``2**exponent``; multiplying by one part after the other rounds at most once.

    >>> power_of_two(-3), power_of_two(1002)[1]
    ((0.125, 1.0), 4.0)
    """
    first = min(exponent, SAFE_EXPONENT)
    return ldexp(1.0, first), ldexp(1.0, exponent - first)


def error_sum(term: Term, x: Any, y: Any, factor: Factor = ONE, second_factor: Factor = ONE) -> Any:
    """The sum of ``x``, ``x^2``, ``(x - y)^2``, ``|x - y|`` or ``x y`` over all elements.

    Squares and products are of values times their factor, a power of two: of x or the error, and of y.

    >>> import numpy as np
    >>> float(error_sum("squared_error", np.array([1.0, 2.0]), np.array([1.0, 4.0]), (0.5, 1.0)))
    1.0
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
    """The largest magnitude of x ("value") or of the error; NaN where there is one, 0 where there is nothing.

    >>> import numpy as np
    >>> float(largest_error("absolute_error", np.array([1.0, 2.0]), np.array([1.0, 4.0])))
    2.0
    """
    xp = array_namespace(x, y)
    a, b = xp.astype(x, xp.float64), xp.astype(y, xp.float64)
    sizes = xp.reshape(xp.abs(a if term == "value" else a - b), (-1,))
    return xp.max(sizes) if sizes.shape[0] else xp.asarray(0.0, dtype=xp.float64)
