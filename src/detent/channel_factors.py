"""Channel factors: how much cross-layer equalization divides each channel of an activation.

See Nagel et al. 2019 and Meller et al. 2019. For the largest magnitude ``m`` of each channel and a strength ``a``::

    factor = m ** a / max(m ** a)        not below 1 / 1000; 1 for channels that are always zero

With strength 1, all channels have the same range after the division. Both frontends apply these factors: ``onnx`` to
the weights of a graph, ``torch`` to the parameters of modules.

Factors, also those of SmoothQuant, are rounded to bfloat16, which halves their size in files. A factor near the best
one is as good, because the layers that read a tensor are multiplied by the same factor that the tensor is divided by.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_REMAINING_NOISE", "MIN_CHANNEL_VALUES", "STRENGTHS", "equalization_factors", "rounded_factors"]

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
MAX_FACTOR_RATIO = 1e3  # limit on the ratio of the largest to the smallest factor of a tensor
MAX_REMAINING_NOISE = 0.9  # equalization must remove at least 10 % of the noise
MIN_CHANNEL_VALUES = 256  # with fewer values per channel, the channel maximum is unreliable


def equalization_factors(largest: NDArray[Any], strength: float) -> NDArray[Any]:
    """Compute the factor of each channel from its largest magnitude, as float32 rounded to bfloat16.

    >>> equalization_factors(np.array([4.0, 1.0, 0.0]), 0.5).tolist()
    [1.0, 0.5, 1.0]
    """
    usable = largest > 0
    factors = np.ones(len(largest))
    factors[usable] = largest[usable] ** strength
    factors[usable] /= factors[usable].max(initial=0.0)  # no channel may be usable
    return rounded_factors(factors, 1 / MAX_FACTOR_RATIO, 1.0)


def rounded_factors(factors: NDArray[Any], lowest: float | np.float32, highest: float | np.float32) -> NDArray[Any]:
    """Round positive factors to bfloat16, ties to even, and return them as float32 within the limits.

    A limit that bfloat16 does not represent is replaced by the nearest bfloat16 number within the limits.

    >>> rounded_factors(np.array([1e-9, 0.7, 1.0]), 1e-3, 1.0).tolist()
    [0.001007080078125, 0.69921875, 1.0]
    """
    limits = np.array([lowest, highest], np.float32)
    limited = np.clip(factors, *limits).astype(np.float32)
    # The bits of positive floats have the same order as the floats; a bfloat16 number ends with 16 zeros.
    first, last = ((limits.view(np.uint32) + np.array([0xFFFF, 0], np.uint32)) & np.uint32(0xFFFF0000)).view(np.float32)
    rounded: NDArray[Any] = np.clip(limited.astype(ml_dtypes.bfloat16).astype(np.float32), first, last)
    return rounded
