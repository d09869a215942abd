"""The registry: which kernel runs a problem, and what this installation can do.

Native kernels run where they exist, reference kernels elsewhere; ``capabilities`` says which and why. Both give the
same bits, so that the choice is a matter of speed alone.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from detent._checks import as_integer
from detent.env import KERNEL_CHOICES, default_kernels, default_threads
from detent.errors import SpecError, UnsupportedError, closest
from detent.granularity import PerTensor
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
    "find_reduction",
    "get_num_threads",
    "set_num_threads",
    "use_kernels",
]

OPERATIONS: tuple[str, ...] = tuple(sorted(REFERENCE))
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {"minmax": reference.minmax, "tree_sum": reference.tree_sum}
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

    >>> from detent.granularity import PerTensor
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


def find_reduction(name: str) -> Callable[..., Any]:
    """The kernel of a reduction, which needs no plan: "minmax" or "tree_sum".

    >>> import numpy as np
    >>> float(find_reduction("tree_sum")(np.ones(3)))
    3.0
    """
    return _REDUCTIONS[name]


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
    backends |= dict.fromkeys(_REDUCTIONS, "reference")
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
