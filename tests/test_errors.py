"""Every error is a DetentError and the built-in error that fits."""

import inspect

import pytest

import detent as dt
from detent import errors

BUILT_IN = {
    "SpecError": ValueError,
    "ParamsError": ValueError,
    "RangeError": ValueError,
    "ShapeError": ValueError,
    "DtypeError": TypeError,
    "OutError": ValueError,
    "NaNError": ValueError,
    "NotCalibratedError": RuntimeError,
    "StateError": ValueError,
    "FileFormatError": ValueError,
    "UnsupportedError": NotImplementedError,
    "VerificationError": AssertionError,
    "WorkerError": RuntimeError,
}


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_base_classes(name, built_in):
    assert getattr(errors, name).__bases__ == (dt.DetentError, built_in)


def test_no_error_is_missing_here():
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == {"DetentError", *BUILT_IN}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_tree_in_the_docstring_names_it(name):
    assert f" {name} " in errors.__doc__


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [("int44", ["int4", "uint8"], ": did you mean 'int4'?"), ("zzz", ["int4"], ":"), ("", ["int4"], ":")],
)
def test_closest(given, names, expected):
    assert errors.closest(given, names) == expected
