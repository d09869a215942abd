"""Reference kernels over the array API; every other kernel must give the same bits.

Reference kernels run unchanged on NumPy, torch and any other array library that ``array_api_compat`` supports. They do
not check their arguments: plans check shapes, dtypes and NaN. Every operation rounds once in the compute type, without
fused multiply-add. Results do not depend on the memory layout.

Functions that torch.compile traces have the argument ``xp``, the namespace of the array library, because torch.compile
cannot trace the lookup of a namespace. If ``xp`` is None, the function looks it up. These functions have no caching
decorators, because torch.compile cannot trace such decorators.
"""

from detent.kernels.reference.bins import bin_edges, grid_errors, histogram
from detent.kernels.reference.operators import (
    dequantize,
    dequantize_backward,
    fake_quantize,
    fake_quantize_backward,
    fake_quantize_learned_backward,
    fake_quantize_masked,
    masked_backward,
    quantize,
    quantize_backward,
)
from detent.kernels.reference.scale_search import best_scales
from detent.kernels.reference.sets import ONE, Factor, Term, error_sum, largest_error, minmax, power_of_two, tree_sum

__all__ = [
    "ONE",
    "Factor",
    "Term",
    "best_scales",
    "bin_edges",
    "dequantize",
    "dequantize_backward",
    "error_sum",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "fake_quantize_masked",
    "grid_errors",
    "histogram",
    "largest_error",
    "masked_backward",
    "minmax",
    "power_of_two",
    "quantize",
    "quantize_backward",
    "tree_sum",
]
