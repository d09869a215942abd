"""Mutated checkpoint files give an error or a valid result, within a second and 200 MB."""

import resource

import pytest

from tests.tools import fuzz_checkpoints

QUICK, MANY = 150, 10_000


@pytest.mark.parametrize("form", fuzz_checkpoints.FORMATS)
def test_mutated_files_give_an_error_or_a_valid_result(form):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    valid, errors, slowest = fuzz_checkpoints.fuzz(form, QUICK, seed=1)
    assert valid + errors == QUICK
    assert errors > QUICK // 10
    assert slowest < fuzz_checkpoints.MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < fuzz_checkpoints.MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("form", fuzz_checkpoints.FORMATS)
def test_many_mutated_files(form):
    valid, errors, slowest = fuzz_checkpoints.fuzz(form, MANY, seed=2)
    assert valid + errors == MANY
    assert slowest < fuzz_checkpoints.MAX_SECONDS
