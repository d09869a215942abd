"""The innermost layer or tensor of an error is stored in the error, also if another process raised it."""

import pickle

import pytest

from detent.error_places import at, place_of
from detent.errors import UnsupportedError


def fail(error):
    with at("tensor", "x"):
        with at("layer", "conv1"):
            pass
        with at("layer", "conv2"):
            raise error


def raised(error):
    with pytest.raises(type(error)) as caught:
        fail(error)
    return caught.value


def test_the_innermost_place_counts():
    assert place_of(raised(KeyError("a"))) == "layer 'conv2'"


def test_an_error_without_a_place():
    assert place_of(KeyError("a")) == ""


@pytest.mark.parametrize("error", [KeyError("a"), UnsupportedError("b")])
def test_places_are_pickled(error):
    assert place_of(pickle.loads(pickle.dumps(raised(error)))) == "layer 'conv2'"
