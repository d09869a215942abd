"""Kernels: the arithmetic behind every operation, on plain arrays and vocabulary values.

Guarantees: the same input bits give the same output bits for any thread count, CPU level, memory layout and array
library; every fast kernel has a slow twin in ``reference`` and equals it bit for bit.
"""

from detent.kernels.problem import Kernel, Problem, Result
from detent.kernels.registry import (
    Capabilities,
    capabilities,
    check_operation,
    current_kernels,
    find_kernel,
    get_num_threads,
    minmax,
    set_num_threads,
    tree_sum,
    use_kernels,
)

__all__ = [
    "Capabilities",
    "Kernel",
    "Problem",
    "Result",
    "capabilities",
    "check_operation",
    "current_kernels",
    "find_kernel",
    "get_num_threads",
    "minmax",
    "set_num_threads",
    "tree_sum",
    "use_kernels",
]
