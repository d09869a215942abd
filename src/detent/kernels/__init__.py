"""Kernels: the arithmetic of every operation.

Equal input bits give equal output bits for any thread count, instruction set, memory layout and array library. Every
native kernel equals its reference kernel bit for bit.
"""

from detent.kernels.blocks import decode_blocks, encode_blocks
from detent.kernels.native import dtype_name, join_team, layer_step
from detent.kernels.problem import OPERATIONS, Kernel, NaNPolicy, Operation, Problem, Result, find_operation
from detent.kernels.reductions import (
    best_scales,
    checksum,
    derive,
    error_sum,
    grid_errors,
    histogram,
    largest_error,
    minmax,
    observe,
    pack_bits,
    quantize_masked,
    requantize,
    scale_sums,
    tree_sum,
    unpack_bits,
)
from detent.kernels.reference import bin_edges, power_of_two
from detent.kernels.registry import Capabilities, capabilities, find_kernel, register_gpu_report
from detent.kernels.settings import current_kernels, get_num_threads, set_num_threads, use_kernels, uses_gpu_kernels

__all__ = [
    "OPERATIONS",
    "Capabilities",
    "Kernel",
    "NaNPolicy",
    "Operation",
    "Problem",
    "Result",
    "best_scales",
    "bin_edges",
    "capabilities",
    "checksum",
    "current_kernels",
    "decode_blocks",
    "derive",
    "dtype_name",
    "encode_blocks",
    "error_sum",
    "find_kernel",
    "find_operation",
    "get_num_threads",
    "grid_errors",
    "histogram",
    "join_team",
    "largest_error",
    "layer_step",
    "minmax",
    "observe",
    "pack_bits",
    "power_of_two",
    "quantize_masked",
    "register_gpu_report",
    "requantize",
    "scale_sums",
    "set_num_threads",
    "tree_sum",
    "unpack_bits",
    "use_kernels",
    "uses_gpu_kernels",
]
