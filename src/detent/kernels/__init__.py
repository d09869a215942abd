"""Kernels: the arithmetic behind every operation, on plain arrays and vocabulary values.

Guarantees: the same input bits give the same output bits for any thread count, memory layout and array library; every
fast kernel has a slow twin in ``reference`` and equals it bit for bit.
"""

from detent.kernels.registry import (
    Capabilities,
    Kernel,
    capabilities,
    find_kernel,
    find_reduction,
    get_num_threads,
    set_num_threads,
)

__all__ = [
    "Capabilities",
    "Kernel",
    "capabilities",
    "find_kernel",
    "find_reduction",
    "get_num_threads",
    "set_num_threads",
]
