"""The sample covers all pairs."""

from itertools import combinations, product

import pytest

from .pairwise import pairwise

FACTORS = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(4)}


@pytest.mark.parametrize(("one", "other"), list(combinations(FACTORS, 2)))
def test_every_pair_occurs(one, other):
    seen = {(row[one], row[other]) for row in pairwise(FACTORS)}
    assert seen == set(product(FACTORS[one], FACTORS[other]))


def test_the_sample_is_smaller_than_the_product():
    assert len(pairwise(FACTORS)) < 40


def test_the_sample_is_fixed():
    assert pairwise(FACTORS) == pairwise(FACTORS)
