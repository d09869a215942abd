"""What every test shares: the repository's root and how hard Hypothesis works.

DETENT_HYPOTHESIS_PROFILE chooses the profile: "quick" (the default) draws the same few examples every time,
so that a red run is a changed program and not bad luck; "thorough" draws many, new ones on each run.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("quick", max_examples=50, derandomize=True, **SHARED)
settings.register_profile("thorough", max_examples=1000, print_blob=True, **SHARED)
settings.load_profile(os.environ.get("DETENT_HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]
