"""One row per mistake: what is called, the error it gets, and the words that make its message useful."""

import pytest

import detent as dt

__all__ = ["check", "row", "table"]


def row(name, call, error, *words):
    """A row of a table; ``words`` name what was given, what was expected and how to repair it."""
    return pytest.param(call, error, words, id=name)


def table(*rows):
    """Run the test once per row."""
    return pytest.mark.parametrize(("call", "error", "words"), rows)


def check(call, error, words):
    """The call raises exactly that DetentError, and its message holds every word."""
    with pytest.raises(dt.DetentError) as caught:
        call()
    assert type(caught.value) is error, caught.value
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
