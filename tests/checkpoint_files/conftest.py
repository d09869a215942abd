"""Fixtures for tests of checkpoint files."""

import pytest

from tests.checkpoint_files.llama_cpp_referee import PYTHON, LlamaCpp


@pytest.fixture(scope="session")
def llama_cpp():
    """llama.cpp, if it is installed."""
    if not PYTHON.exists():
        pytest.skip("llama.cpp is not installed: make test-llama")
    referee = LlamaCpp()
    yield referee
    referee.close()
