"""The registry: which kernel runs an operation, and what this installation can do.

One row per operation and backend. Today every operation has its reference kernel; a faster backend adds rows and
``find_kernel`` prefers them where they apply.
"""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from detent._checks import as_integer
from detent.errors import UnsupportedError
from detent.kernels import reference

__all__ = [
    "OPERATIONS",
    "Capabilities",
    "Kernel",
    "capabilities",
    "find_kernel",
    "get_num_threads",
    "set_num_threads",
]


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operation.

    >>> find_kernel("quantize").backend
    'reference'
    """

    operation: str
    backend: str
    function: Callable[..., Any]


_REFERENCE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "dequantize": reference.dequantize,
        "dequantize_backward": reference.dequantize_backward,
        "fake_quantize": reference.fake_quantize,
        "fake_quantize_backward": reference.fake_quantize_backward,
        "fake_quantize_learned_backward": reference.fake_quantize_learned_backward,
        "minmax": reference.minmax,
        "quantize": reference.quantize,
        "quantize_backward": reference.quantize_backward,
        "tree_sum": reference.tree_sum,
    }
)
_REDUCTIONS = frozenset({"minmax", "tree_sum"})
OPERATIONS: tuple[str, ...] = tuple(name for name in _REFERENCE if name not in _REDUCTIONS)


def find_kernel(operation: str) -> Kernel:
    """The kernel that runs the operation.

    Raises:
        UnsupportedError: there is no such operation.

    >>> find_kernel("fake_quantize").operation
    'fake_quantize'
    """
    if operation not in OPERATIONS:
        raise UnsupportedError(f"no kernel for operation {operation!r}: expected one of {', '.join(OPERATIONS)}")
    return Kernel(operation, "reference", _REFERENCE[operation])


def find_reduction(name: str) -> Callable[..., Any]:
    """The kernel of a reduction, which needs no plan: "minmax" or "tree_sum".

    >>> import numpy as np
    >>> float(find_reduction("tree_sum")(np.ones(3)))
    3.0
    """
    return _REFERENCE[name]


class _Threads:
    """The number of threads kernels may use; it never changes a result."""

    def __init__(self) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        self.count = len(affinity(0)) if affinity else os.cpu_count() or 1


_threads = _Threads()


def set_num_threads(count: int) -> None:
    """Let kernels use up to ``count`` threads. Results do not depend on it; the reference kernels use one.

    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    """
    _threads.count = as_integer("the number of threads", count, at_least=1)


def get_num_threads() -> int:
    """How many threads kernels may use.

    >>> get_num_threads() >= 1
    True
    """
    return _threads.count


@dataclass(frozen=True)
class Capabilities:
    """What this installation can do.

    Attributes:
        machine: the processor family.
        threads: how many threads kernels may use.
        kernels: the backend that runs each operation.

    >>> print(capabilities())  # doctest: +ELLIPSIS
    machine  ...
    threads  ...
    quantize                        reference...
    """

    machine: str
    threads: int
    kernels: Mapping[str, str]

    def __str__(self) -> str:
        rows = [f"machine  {self.machine}", f"threads  {self.threads}"]
        rows += [f"{operation:<32}{backend}" for operation, backend in sorted(self.kernels.items(), key=_forward_first)]
        return "\n".join(rows)


def _forward_first(row: tuple[str, str]) -> tuple[bool, bool, str]:
    return row[0] in _REDUCTIONS, row[0].endswith("backward"), row[0].removeprefix("de").removeprefix("fake_")


def capabilities() -> Capabilities:
    """What this installation can do: processor, threads, and the backend of each operation.

    >>> capabilities().kernels["quantize"]
    'reference'
    """
    backends = dict.fromkeys(_REFERENCE, "reference")
    return Capabilities(platform.machine(), get_num_threads(), backends)
