"""Cache: the quantized weight of a layer, kept where it is used more than once and never when it is out of date.

In evaluation it is kept. In training weights change with every step, and a copy would take as much memory as they do:
it is kept only where the same weight comes twice, as in gradient accumulation, and then as long as that goes on.

A tensor's version does not tell of every change: not of writes through ``.data``, nor of trainers that refill sharded
weights in place. So what is kept has a checksum of the weight it was made from, which costs a fraction of making it.
"""

from collections.abc import Callable

from torch import Tensor

from detent.kernels import checksum
from detent.spec import QuantSpec
from detent.torch.arrays import order_of, to_array
from detent.torch.products import Weight

__all__ = ["WeightCache"]

_ANY_ORDER = QuantSpec("int8")


class WeightCache:
    """At most one quantized weight.

    >>> import torch
    >>> cache, weight = WeightCache(), torch.ones(2)
    >>> made = Weight(None, None, torch.ones(2))
    >>> cache.find("key", weight, lambda keep: made, training=False).keep
    True
    >>> cache.find("key", weight, lambda keep: 1 / 0, training=False) is not None
    True
    """

    def __init__(self) -> None:
        self._key: object = None  # of the last weight asked for
        self._sum = 0
        self._known: Weight | None = None  # and what was made of it, where that is kept
        self._repeats = False  # whether the same weight came twice, before it changed last

    def find(self, key: object, weight: Tensor, make: Callable[[bool], Weight], *, training: bool) -> Weight:
        """The weight kept under that key, or a new one.

        Args:
            key: what the quantized weight depends on, as far as it can be told without reading it.
            weight: what it is made from.
            make: makes it, in memory of its own if it is told that it will be kept.
            training: weights are expected to change.
        """
        again, known = key == self._key, self._known
        if again:
            self._repeats = True
            if known is not None and self._sum == _sum(weight):
                return known
        keep = not training or self._repeats
        self._repeats, self._key, self._known = again, key, None  # nothing is kept if making it fails
        made = make(keep)
        if keep:
            made, self._sum = made._replace(keep=True), _sum(weight)
            self._known = made
        return made


def _sum(weight: Tensor) -> int:
    return checksum(to_array(order_of(weight, _ANY_ORDER).lay(weight.detach())))
