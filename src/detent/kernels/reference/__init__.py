"""Reference kernels over the array API: slow, obvious, and the truth that every other kernel is compared with.

They run unchanged on NumPy, torch and any other array that ``array_api_compat`` knows, take plain arrays and vocabulary
values, and check nothing: shapes, dtypes and NaN are the plan's business. Guarantee: one rounding per operation in the
compute type, no fused multiply-add, no dependence on memory layout.
"""

from detent.kernels.reference.backward import (
    dequantize_backward,
    fake_quantize_backward,
    fake_quantize_learned_backward,
    quantize_backward,
)
from detent.kernels.reference.forward import dequantize, fake_quantize, quantize
from detent.kernels.reference.sets import minmax, tree_sum

__all__ = [
    "dequantize",
    "dequantize_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "minmax",
    "quantize",
    "quantize_backward",
    "tree_sum",
]
