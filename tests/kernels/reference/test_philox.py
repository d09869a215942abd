"""Philox4x32-10 against the published answer and a transcription in Python integers."""

import numpy as np
import pytest

from detent.kernels.reference.elements import random_words

WORD = 2**32 - 1


def philox(index, seed, step):
    """The first output word, from the paper's description."""
    c = [index & WORD, index >> 32, step, 0]
    k = [seed & WORD, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & WORD, (a >> 32) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c[0]


def test_published_answer():
    """Random123's known-answer test: counter 0, key 0."""
    assert random_words(np, np.array([0]), seed=0, step=0).tolist() == [0x6627E8D5]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0xA4093822299F31D0])
@pytest.mark.parametrize("step", [0, 1, 2**32 - 1])
def test_every_word_of_counter_and_key_counts(seed, step):
    index = np.array([0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**40 + 5, 2**62])
    words = random_words(np, index, seed, step)
    assert words.tolist() == [philox(int(i), seed, step) for i in index]
