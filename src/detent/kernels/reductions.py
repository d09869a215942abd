"""Reductions: bounds and sums of arrays, on native kernels where they exist and on the reference elsewhere."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import UnsupportedError
from detent.granularity import Tiling
from detent.kernels import native, reference
from detent.kernels.choice import current_kernels
from detent.kernels.problem import Problem
from detent.kernels.reference import ONE, Factor, Term
from detent.spec import QuantSpec

__all__ = ["derive", "error_sum", "largest_error", "minmax", "observe", "tree_sum"]

Array = NDArray[Any]


def minmax(x: Array, tiling: Tiling) -> tuple[Array, Array, int]:
    """The smallest and largest finite element of each set in the compute type, and how many elements are not finite.

    >>> import numpy as np
    >>> from detent.granularity import PerTensor
    >>> minmax(np.array([1.0, -2.0, np.nan]), PerTensor().tiling((3,)))
    (array(-2.), array(1.), 1)
    """
    choice = current_kernels()
    found = None if choice == "reference" else native.minmax(x, tiling)
    if found is not None:
        return found
    _refuse_if(choice == "native", f"minmax of {x.dtype} data")
    with np.errstate(all="ignore"):  # some small floats warn of signalling NaN
        lo, hi = reference.minmax(x, tiling)
        return np.asarray(lo), np.asarray(hi), int(np.count_nonzero(~np.isfinite(x)))


def error_sum(term: Term, x: Array, y: Array, factor: Factor = ONE, second_factor: Factor = ONE) -> float:
    """The sum of ``x``, ``x^2``, ``(x - y)^2``, ``|x - y|`` or ``x y`` over all elements, in float64.

    Squares and products are of values times their factor: of x or the error, and of y.

    >>> import numpy as np
    >>> error_sum("squared_error", np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    4.0
    """
    choice = current_kernels()
    found = None if choice == "reference" else native.error_sum(term, x, y, factor, second_factor)
    if found is not None:
        return found
    _refuse_if(choice == "native", f"the {term} sum of {x.dtype} and {y.dtype} data")
    with np.errstate(all="ignore"):
        return float(reference.error_sum(term, x, y, factor, second_factor))


def largest_error(term: Term, x: Array, y: Array) -> float:
    """The largest magnitude of x ("value") or of the error; NaN where there is one, 0 where there is nothing.

    >>> import numpy as np
    >>> largest_error("absolute_error", np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    2.0
    """
    choice = current_kernels()
    found = None if choice == "reference" else native.largest_error(term, x, y)
    if found is not None:
        return found
    _refuse_if(choice == "native", f"the largest error of {x.dtype} and {y.dtype} data")
    with np.errstate(all="ignore"):
        return float(reference.largest_error(term, x, y))


def tree_sum(terms: NDArray[np.float64]) -> float:
    """The sum of all elements in the contract's order.

    >>> import numpy as np
    >>> tree_sum(np.ones(3))
    3.0
    """
    return error_sum("value", terms, terms)


def observe(problem: Problem, x: Array, out: Array) -> tuple[Array, Array, Array, Array, int] | None:
    """Fake quantize x into ``out`` by its own range: lo, hi, scale, zero point, and how many elements are not finite.

    None where only the steps one by one can do it: on the reference kernels, for scales of a special format, and where
    a range gives no parameters.

    >>> from detent.granularity import PerTensor
    >>> problem = Problem("fake_quantize", PerTensor().tiling((2,)), "float32", QuantSpec("int8"), None, "propagate")
    >>> x, y = np.array([0.6, 127.0], np.float32), np.empty(2, np.float32)
    >>> observe(problem, x, y) is None or y.tolist() == [1.0, 127.0]
    True
    """
    return None if current_kernels() == "reference" else native.observe(problem, x, out)


def derive(spec: QuantSpec, lo: Array, hi: Array, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
    """Scale and zero point of each range of float64 bounds by a native kernel; None where only the scale rule can.

    >>> found = derive(QuantSpec("uint8"), np.array(-1.0), np.array(4.0), np.dtype("float32"))
    >>> found is None or float(found[1]) == 51.0
    True
    """
    return None if current_kernels() == "reference" else native.derive(spec, lo, hi, dtype)


def _refuse_if(refused: bool, what: str) -> None:
    if refused:
        raise UnsupportedError(f"{what} has no native kernel: use_kernels('auto') runs the reference")
