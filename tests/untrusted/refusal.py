"""Tables of invalid calls: one row per call, with the expected error and words of its message."""

import pytest

import detent as dt

__all__ = ["check", "row", "table"]


def row(name, call, error, *words):
    """A row of a table; ``words`` cover what was given, what was expected and how to repair it."""
    return pytest.param(call, error, words, id=name)


def table(*rows):
    """Parametrize a test by rows."""
    return pytest.mark.parametrize(("call", "error", "words"), rows)


def check(call, error, words):
    """Check that the call raises exactly that DetentError and that its message contains every word."""
    with pytest.raises(dt.DetentError) as caught:
        call()
    assert type(caught.value) is error, caught.value
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
