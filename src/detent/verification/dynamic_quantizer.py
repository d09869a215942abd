"""DynamicQuantizeLinear: its scale, zero point and codes, recomputed by detent.

ONNX Runtime computes scale and zero point from the range of the input, in float32::

    lo = min(x, 0),  hi = max(x, 0)                NaN is ignored
    s  = fl(fl(hi - lo) / 255)                     1 if lo = hi
    z  = clamp(round_half_even(fl(0 - fl(lo / s))))

``QuantParams.from_data`` computes the same scale in float64 and rounds once, so the two may differ by 1 ulp. Their zero
points are equal. Codes are those of ``dt.quantize`` with this scale and zero point.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checks import first_index
from detent.onnx_model.qdq_reader import DynamicQuantizer
from detent.ops import quantize
from detent.params import QuantParams
from detent.verification.tally import Tally

__all__ = ["compare_dynamic", "dynamic_params"]

Array = NDArray[Any]
MAX_CODE = np.float32(255)


def dynamic_params(x: Array) -> QuantParams | None:
    """Compute the parameters of an array as DynamicQuantizeLinear does.

    Returns None if the scale is infinite or not a normal float32: the codes of such an array mean nothing.

    >>> dynamic_params(np.float32([-1.0, 50.0]))
    dt.QuantParams('uint8/tensor/affine', scale=0.2, zero_point=5)
    """
    with np.errstate(over="ignore"):
        lo, hi = (np.float32(each.reduce(x, axis=None, initial=0)) for each in (np.fmin, np.fmax))
        scale = np.float32(1) if lo == hi else (hi - lo) / MAX_CODE
    if not np.isfinite(scale) or scale < np.finfo(np.float32).smallest_normal:
        return None
    zero_point = int(np.rint(np.clip(np.float32(0) - lo / scale, np.float32(0), MAX_CODE)))
    return QuantParams("uint8", scale, zero_point)


def compare_dynamic(
    tally: Tally,
    quantizer: DynamicQuantizer,
    x: Array,
    got: tuple[Array, Array, Array],
    cause: Callable[[], str] = lambda: "wrong code",
) -> None:
    """Quantize x dynamically, and compare the result with ``got``: the node's codes, scale and zero point."""
    params = dynamic_params(x)
    if params is None:
        return
    codes, scale, zero = got[0], float(got[1].reshape(())), int(got[2].reshape(()))
    own_scale, own_zero = float(params.scale), int(params.zero_point)
    if own_scale != scale:
        cause_text, name, values = "wrong scale of dynamic quantization", quantizer.scale, (own_scale, scale)
    elif own_zero != zero:
        cause_text, name, values = "wrong zero point of dynamic quantization", quantizer.zero_point, (own_zero, zero)
    else:
        _compare_codes(tally, quantizer, x, codes, params, cause)
        return
    tally.count(codes.size, codes.size)
    tally.note(cause_text, quantizer.node, name, (), *values, None, own_scale, own_zero)


def _compare_codes(
    tally: Tally, quantizer: DynamicQuantizer, x: Array, got: Array, params: QuantParams, cause: Callable[[], str]
) -> None:
    codes = quantize(x, params, nan="qmin").codes
    if codes.shape != got.shape:
        tally.count(got.size, got.size)
        tally.note(cause(), quantizer.node, quantizer.codes, (), str(codes.shape), str(got.shape))
        return
    wrong = codes != got
    tally.count(got.size, np.count_nonzero(wrong))
    if wrong.any():
        index = first_index(np.atleast_1d(wrong))[: x.ndim]
        values = codes[index].item(), got[index].item(), float(x[index])
        tally.note(
            cause(), quantizer.node, quantizer.codes, index, *values, float(params.scale), int(params.zero_point)
        )
