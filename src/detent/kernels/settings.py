"""Settings: the choice of kernels and the number of threads. Neither changes a result.

``use_kernels`` selects kernels in a ``with`` block; outside of such a block, DETENT_KERNELS selects the kernels. detent
has three environment variables:

==================== ===============================================================================================
DETENT_KERNELS       "auto" (default), "native" or "reference"
DETENT_NUM_THREADS   number of threads; default: OMP_NUM_THREADS, or all cores that this process may use
DETENT_GPU           "1" (default), or "0" to run torch operations on GPUs instead of Triton kernels
==================== ===============================================================================================
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from detent.checks import as_integer
from detent.errors import SpecError, closest
from detent.kernels import native

__all__ = ["current_kernels", "get_num_threads", "set_num_threads", "use_kernels", "uses_gpu_kernels"]

KERNEL_CHOICES = ("auto", "native", "reference")
MAX_THREADS = 1024  # more than the cores of any CPU; catches typing errors


@cache
def default_kernels() -> str:
    """Return the value of DETENT_KERNELS, which is read only once."""
    value = os.environ.get("DETENT_KERNELS") or "auto"
    if value not in KERNEL_CHOICES:
        hint = closest(value, KERNEL_CHOICES)
        raise SpecError(f"unknown DETENT_KERNELS={value!r}{hint} expected {', '.join(KERNEL_CHOICES)}")
    return value


@cache
def uses_gpu_kernels() -> bool:
    """Return whether DETENT_GPU allows GPU kernels; it is read only once."""
    value = os.environ.get("DETENT_GPU") or "1"
    if value not in ("0", "1"):
        raise SpecError(f"got DETENT_GPU={value!r}, expected 0 (GPU kernels off) or 1")
    return value == "1"


def default_threads() -> int:
    """Return the number of threads that the environment sets, or else the number of cores that this process may use."""
    for name in ("DETENT_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "").split(",")[0].strip()
        number = int(text) if text.isascii() and text.isdigit() else 0
        if 1 <= number <= MAX_THREADS:
            return number
        if text and name == "DETENT_NUM_THREADS":  # OpenMP may accept other values of OMP_NUM_THREADS
            raise SpecError(f"got {name}={text!r}, expected an integer from 1 to {MAX_THREADS}")
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_THREADS)


_choice: ContextVar[str | None] = ContextVar("detent_kernels", default=None)


def current_kernels() -> str:
    """Return the selected kernels: "auto", "native" or "reference"."""
    return _choice.get() or default_kernels()


@contextmanager
def use_kernels(kernels: str) -> Iterator[None]:
    """Select the kernels of operators in a ``with`` block; "native" raises an error where no native kernel exists.

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


class _Threads:
    """The number of threads that kernels may use."""

    count = 0


def set_num_threads(count: int) -> None:
    """Set the number of threads that native kernels may use; results do not depend on this number.

    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    """
    threads = as_integer("the number of threads", count, at_least=1, at_most=MAX_THREADS)
    native.set_num_threads(threads)
    _Threads.count = threads


def get_num_threads() -> int:
    """Return the number of threads that kernels may use."""
    return _Threads.count


set_num_threads(default_threads())
