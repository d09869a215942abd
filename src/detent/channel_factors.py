"""Channel factors: how much cross-layer equalization divides each channel of an activation.

See Nagel et al. 2019 and Meller et al. 2019. For the largest magnitude ``m`` of each channel and a strength ``a``::

    factor = m ** a / max(m ** a)        not below 1 / 1000; 1 for channels that are always zero

With strength 1, all channels have the same range after the division. Both frontends apply these factors: ``onnx`` to
the weights of a graph, ``torch`` to the parameters of modules.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_REMAINING_NOISE", "MIN_CHANNEL_VALUES", "STRENGTHS", "equalization_factors"]

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
MAX_FACTOR_RATIO = 1e3  # limit on the ratio of the largest to the smallest factor of a tensor
MAX_REMAINING_NOISE = 0.9  # equalization must remove at least 10 % of the noise
MIN_CHANNEL_VALUES = 256  # with fewer values per channel, the channel maximum is unreliable


def equalization_factors(largest: NDArray[Any], strength: float) -> NDArray[Any]:
    """Compute the factor of each channel from the largest magnitude of each channel, as float32.

    >>> equalization_factors(np.array([4.0, 1.0, 0.0]), 0.5).tolist()
    [1.0, 0.5, 1.0]
    """
    usable = largest > 0
    factors = np.ones(len(largest))
    factors[usable] = largest[usable] ** strength
    factors[usable] /= factors[usable].max(initial=0.0)  # no channel may be usable
    limited: NDArray[Any] = np.maximum(factors, 1 / MAX_FACTOR_RATIO).astype(np.float32)
    return limited
