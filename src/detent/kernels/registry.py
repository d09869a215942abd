"""The registry: which kernel runs a problem, and on how many threads.

Native kernels run where they exist, reference kernels elsewhere; ``capabilities`` says which and why. Both give the
same bits, so that the choice is a matter of speed alone.
"""

from detent.checks import as_integer
from detent.env import MAX_THREADS, default_threads
from detent.errors import UnsupportedError
from detent.kernels import native
from detent.kernels.native_kernel import NativeKernel
from detent.kernels.problem import Kernel, Problem
from detent.kernels.reference_kernel import REFERENCE, ReferenceKernel

__all__ = ["OPERATIONS", "check_operation", "find_kernel", "get_num_threads", "set_num_threads"]

OPERATIONS: tuple[str, ...] = tuple(sorted(REFERENCE))


def find_kernel(problem: Problem, choice: str = "auto") -> Kernel:
    """The kernel that runs the problem.

    Raises:
        UnsupportedError: there is no such operation, or no native kernel where one is asked for.

    >>> from detent.granularity import PerTensor
    >>> from detent.spec import QuantSpec
    >>> problem = Problem("quantize", PerTensor().tiling((4,)), "float32", QuantSpec("int8"), None, "raise")
    >>> find_kernel(problem, "reference").backend
    'reference'
    """
    check_operation(problem.operation)
    why_not = "the reference kernels were asked for" if choice == "reference" else native.refusal(problem)
    if why_not is None:
        return NativeKernel(problem)
    if choice == "native":
        raise UnsupportedError(f"{why_not}: use_kernels('auto') runs the reference kernel instead")
    return ReferenceKernel(problem)


def check_operation(operation: str) -> None:
    """Raise unless the operation exists.

    >>> check_operation("quantize")
    """
    if operation not in OPERATIONS:
        raise UnsupportedError(f"no kernel for operation {operation!r}: expected one of {', '.join(OPERATIONS)}")


class _Threads:
    """The number of threads kernels may use; it never changes a result."""

    count = 0


def set_num_threads(count: int) -> None:
    """Let kernels use up to ``count`` threads. Results do not depend on it; the reference kernels use one.

    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    """
    wanted = as_integer("the number of threads", count, at_least=1, at_most=MAX_THREADS)
    native.set_num_threads(wanted)
    _Threads.count = wanted


def get_num_threads() -> int:
    """How many threads kernels may use.

    >>> get_num_threads() >= 1
    True
    """
    return _Threads.count


set_num_threads(default_threads())
