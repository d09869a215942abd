"""Environment variables: all that detent reads, and nothing else reads them. None of them changes a number.

==================== ===============================================================================================
DETENT_KERNELS       "auto" (default), "native" or "reference": which kernels run
DETENT_NUM_THREADS   how many threads kernels may use; without it OMP_NUM_THREADS, else every core of the affinity mask
==================== ===============================================================================================
"""

import os
from functools import cache

from detent.errors import SpecError, closest

__all__ = ["KERNEL_CHOICES", "MAX_THREADS", "default_kernels", "default_threads"]

KERNEL_CHOICES = ("auto", "native", "reference")
MAX_THREADS = 1024


@cache
def default_kernels() -> str:
    """The kernels that DETENT_KERNELS asks for, read once.

    >>> default_kernels() in KERNEL_CHOICES
    True
    """
    value = os.environ.get("DETENT_KERNELS") or "auto"
    if value not in KERNEL_CHOICES:
        hint = closest(value, KERNEL_CHOICES)
        raise SpecError(f"DETENT_KERNELS is {value!r}{hint} expected {', '.join(KERNEL_CHOICES)}")
    return value


def default_threads() -> int:
    """The number of threads from the environment, or the cores this process may run on.

    >>> default_threads() >= 1
    True
    """
    for name in ("DETENT_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "").split(",")[0].strip()
        number = int(text) if text.isascii() and text.isdigit() else 0
        if 1 <= number <= MAX_THREADS:
            return number
        if text and name == "DETENT_NUM_THREADS":  # what others make of their own variable is their business
            raise SpecError(f"{name} is {text!r}, expected an integer from 1 to {MAX_THREADS}")
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_THREADS)
