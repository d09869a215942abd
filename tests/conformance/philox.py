"""Philox4x32-10 in Python integers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The contract's random word for element `index` is the first output word, shifted right by 8, of the counter
(index low, index high, step, 0) under the key (seed low, seed high).
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["philox4x32", "word"]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of the bijection; all words are unsigned 32-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@lru_cache(maxsize=1 << 16)
def word(seed: int, index: int, step: int) -> int:
    """Return the 24-bit random word of one element."""
    counter = (index & _MASK, index >> 32, step, 0)
    return philox4x32(counter, (seed & _MASK, seed >> 32))[0] >> 8
