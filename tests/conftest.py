"""Fixtures and settings of all tests: the repository's root and the profiles of Hypothesis.

DETENT_HYPOTHESIS_PROFILE chooses the profile: "quick" (the default) draws the same few examples in every run,
so a failure comes from a change and not from chance; "thorough" draws many new examples in each run.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: idle OpenMP threads sleep instead of spinning. Workers of pytest-xdist share the cores, and
# spinning threads of one worker would take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("quick", max_examples=50, derandomize=True, **SHARED)
settings.register_profile("thorough", max_examples=1000, print_blob=True, **SHARED)
settings.load_profile(os.environ.get("DETENT_HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def root() -> Path:
    """Root directory of the repository."""
    return Path(__file__).resolve().parents[1]
