"""Without a compiled extension there is nothing to compare; every test says so and is skipped."""

import pytest

from detent.kernels import native


@pytest.fixture(autouse=True)
def built():
    if native.WHY_NOT is not None:
        pytest.skip(native.WHY_NOT)
