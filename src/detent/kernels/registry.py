"""The registry: which kernel runs a problem, and what this installation can do.

Native kernels run where they exist, reference kernels elsewhere; ``capabilities`` says which and why. Both give the
same bits, so that the choice is a matter of speed alone.
"""

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent._checks import as_integer
from detent.env import KERNEL_CHOICES, default_kernels, default_threads
from detent.errors import SpecError, UnsupportedError, closest
from detent.granularity import PerTensor, Tiling
from detent.kernels import native, reference
from detent.kernels.problem import Kernel, Problem
from detent.kernels.reference_kernel import REFERENCE, ReferenceKernel
from detent.spec import QuantSpec
from detent.ste import EstimatorLike, get_estimator

__all__ = [
    "OPERATIONS",
    "Capabilities",
    "capabilities",
    "current_kernels",
    "find_kernel",
    "get_num_threads",
    "minmax",
    "set_num_threads",
    "tree_sum",
    "use_kernels",
]

OPERATIONS: tuple[str, ...] = tuple(sorted(REFERENCE))
_INT8 = QuantSpec("int8")
_choice: ContextVar[str | None] = ContextVar("detent_kernels", default=None)


def current_kernels() -> str:
    """The kernels asked for: "auto", "native" or "reference".

    >>> current_kernels() in ("auto", "native", "reference")
    True
    """
    return _choice.get() or default_kernels()


@contextmanager
def use_kernels(kernels: str) -> Iterator[None]:
    """Choose the kernels of the operators inside a ``with`` block; "native" raises where there is no native kernel.

    >>> import detent as dt, numpy as np
    >>> with use_kernels("reference"):
    ...     dt.Plan.select("quantize", shape=(4,), dtype="float32", spec="int8").kernel.backend
    'reference'
    """
    if kernels not in KERNEL_CHOICES:
        hint = closest(str(kernels), KERNEL_CHOICES)
        raise SpecError(f"unknown kernels {kernels!r}{hint} expected {', '.join(KERNEL_CHOICES)}")
    token = _choice.set(kernels)
    try:
        yield
    finally:
        _choice.reset(token)


def find_kernel(problem: Problem, choice: str = "auto") -> Kernel:
    """The kernel that runs the problem.

    Raises:
        UnsupportedError: there is no such operation, or no native kernel where one is asked for.

    >>> from detent.granularity import PerTensor, Tiling
    >>> problem = Problem("quantize", PerTensor().tiling((4,)), "float32", QuantSpec("int8"), None, "raise")
    >>> find_kernel(problem, "reference").backend
    'reference'
    """
    check_operation(problem.operation)
    why_not = "the reference kernels were asked for" if choice == "reference" else native.refusal(problem)
    if why_not is None:
        return native.NativeKernel(problem)
    if choice == "native":
        raise UnsupportedError(f"{why_not}: use_kernels('auto') runs the reference kernel instead")
    return ReferenceKernel(problem)


def check_operation(operation: str) -> None:
    """Raise unless the operation exists."""
    if operation not in OPERATIONS:
        raise UnsupportedError(f"no kernel for operation {operation!r}: expected one of {', '.join(OPERATIONS)}")


def minmax(x: NDArray[Any], tiling: Tiling) -> tuple[NDArray[Any], NDArray[Any], int]:
    """The smallest and largest finite element of each set in the compute type, and how many elements are not finite.

    >>> import numpy as np
    >>> from detent.granularity import PerTensor, Tiling
    >>> minmax(np.array([1.0, -2.0, np.nan]), PerTensor().tiling((3,)))
    (array(-2.), array(1.), 1)
    """
    choice = current_kernels()
    found = None if choice == "reference" else native.minmax(x, tiling)
    if found is not None:
        return found
    if choice == "native":
        raise UnsupportedError(f"minmax of {x.dtype} data has no native kernel: use_kernels('auto') runs the reference")
    with np.errstate(all="ignore"):  # some small floats warn of signalling NaN
        lo, hi = reference.minmax(x, tiling)
        return np.asarray(lo), np.asarray(hi), int(np.count_nonzero(~np.isfinite(x)))


def tree_sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum along the last axis in the contract's order.

    >>> import numpy as np
    >>> float(tree_sum(np.ones(3)))
    3.0
    """
    return np.asarray(reference.tree_sum(terms))


class _Threads:
    """The number of threads kernels may use; it never changes a result."""

    count = 0


def set_num_threads(count: int) -> None:
    """Let kernels use up to ``count`` threads. Results do not depend on it; the reference kernels use one.

    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    """
    _Threads.count = as_integer("the number of threads", count, at_least=1)
    native.set_num_threads(_Threads.count)


def get_num_threads() -> int:
    """How many threads kernels may use.

    >>> get_num_threads() >= 1
    True
    """
    return _Threads.count


set_num_threads(default_threads())


@dataclass(frozen=True)
class Capabilities:
    """What this installation can do.

    Attributes:
        machine: the processor family.
        level: the CPU level of the native kernels, "none" without them.
        threads: how many threads kernels may use.
        kernels: the backend that runs each operation on int8 data with the onnx convention.
        limits: what has no native kernel, and why.

    >>> print(capabilities())  # doctest: +ELLIPSIS
    machine  ...
    """

    machine: str
    level: str
    threads: int
    kernels: Mapping[str, str]
    limits: Mapping[str, str]

    def __str__(self) -> str:
        rows = [f"machine  {self.machine}", f"level    {self.level}", f"threads  {self.threads}"]
        rows += [f"{operation:<32}{backend}" for operation, backend in self.kernels.items()]
        rows += [f"{name:<32}reference: {why}" for name, why in self.limits.items()]
        return "\n".join(rows)


def capabilities() -> Capabilities:
    """What this installation can do: processor, threads, the backend of each operation, and what has no fast kernel.

    >>> capabilities().kernels["quantize"] in ("native", "reference")
    True
    """
    choice = current_kernels()
    backends = {
        name: find_kernel(_sample(name), "reference" if choice == "reference" else "auto").backend
        for name in OPERATIONS
    }
    backends |= {"minmax": "reference" if choice == "reference" or not native.levels() else "native"}
    backends |= {"tree_sum": "reference"}
    samples = {
        "stochastic rounding": _sample("quantize", QuantSpec("int8", rounding="stochastic")),
        "float8_e4m3fn": _sample("quantize", QuantSpec("float8_e4m3fn")),
        "nf4": _sample("quantize", QuantSpec("nf4")),
        "Tanh": _sample("fake_quantize_backward", ste="tanh"),
    }
    limits = {name: why for name, problem in samples.items() if (why := native.refusal(problem)) is not None}
    return Capabilities(platform.machine(), native.current_level(), get_num_threads(), backends, limits)


def _sample(operation: str, spec: QuantSpec = _INT8, ste: EstimatorLike = None) -> Problem:
    estimator = get_estimator(ste, spec.convention) if operation.endswith("quantize_backward") else None
    return Problem(operation, PerTensor().tiling((1,)), "float32", spec, estimator, "propagate")
