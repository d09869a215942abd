"""If the extension module is not built, every test in this directory is skipped."""

import pytest

from detent.kernels import native


@pytest.fixture(autouse=True)
def built():
    if native.WHY_NOT is not None:
        pytest.skip(native.WHY_NOT)
