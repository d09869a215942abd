"""Philox4x32-10: the counted random words of stochastic rounding (Salmon et al., SC 2011).

The arithmetic is on int64 arrays with values below 2**49, because not every array library has uint64; products of
32-bit words are split at 16 bits.
"""

from typing import Any

__all__ = ["random_words"]

_WORD = 0xFFFFFFFF
_HALF = 0xFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def random_words(xp: Any, index: Any, seed: int, step: int) -> Any:
    """The first output word for each int64 ``index``, with key = seed and counter = (index low, index high, step, 0).

    >>> import numpy as np
    >>> hex(int(random_words(np, np.asarray([0]), seed=0, step=0)[0]))
    '0x6627e8d5'
    """
    zero = xp.zeros_like(index)
    counter = (index & _WORD, index >> 32, zero + step, zero)
    key = (seed & _WORD, seed >> 32)
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(counter[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = (high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0)
        key = ((key[0] + _WEYL[0]) & _WORD, (key[1] + _WEYL[1]) & _WORD)
    return counter[0]


def _multiply(word: Any, factor: int) -> tuple[Any, Any]:
    """The high and low words of a 32 x 32 bit product."""
    low = (word & _HALF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & _HALF) << 16) | (low & _HALF)
