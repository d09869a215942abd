"""Everything detent raises on purpose.

::

    DetentError
    ├── SpecError           (ValueError)           a format, granularity, convention or spec that cannot exist
    ├── ParamsError         (ValueError)           a scale or zero point that breaks the contract
    ├── RangeError          (ValueError)           bounds that give no parameters: lo > hi, NaN, infinite, empty
    ├── ShapeError          (ValueError)           shapes that do not fit each other
    ├── DtypeError          (TypeError)            an array or value of the wrong type
    ├── OutError            (ValueError)           an ``out`` array that cannot take the result
    ├── NaNError            (ValueError)           NaN where the policy forbids it
    ├── NotCalibratedError  (RuntimeError)         used before it has parameters
    ├── StateError          (ValueError)           saved state that does not fit
    ├── FileFormatError     (ValueError)           a file that is not what it claims to be
    ├── UnsupportedError    (NotImplementedError)  a combination that no kernel implements
    └── VerificationError   (AssertionError)       a file that does not compute what its source computes

A message says what was given, what was expected and how to repair it.
"""

import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

__all__ = [
    "DetentError",
    "DtypeError",
    "FileFormatError",
    "NaNError",
    "NotCalibratedError",
    "OutError",
    "ParamsError",
    "RangeError",
    "ShapeError",
    "SpecError",
    "StateError",
    "UnsupportedError",
    "VerificationError",
]

# The library logs under "detent" and prints nothing by default. This module is part of every import of detent.
logging.getLogger("detent").addHandler(logging.NullHandler())


class DetentError(Exception):
    """The root of the tree: ``except detent.DetentError`` catches every deliberate failure.

    >>> import detent as dt
    >>> try:
    ...     dt.QuantSpec.parse("int44")
    ... except dt.DetentError as error:
    ...     print(error)
    unknown format 'int44': did you mean 'int4'? Known formats: int1..int16, uint1..uint16, float8_e4m3fn, \
float8_e5m2, float4_e2m1fn, nf4, and the specs mxfp4, mxfp8, mxfp8_e5m2, nvfp4
    """


class SpecError(DetentError, ValueError):
    """A format, granularity, rounding, convention, estimator or spec that cannot exist."""


class ParamsError(DetentError, ValueError):
    """A scale that is not a positive normal number, or a zero point outside the codes' range."""


class RangeError(DetentError, ValueError):
    """Bounds from which no parameters can be made."""


class ShapeError(DetentError, ValueError):
    """Shapes that do not fit each other, or an axis that does not exist."""


class DtypeError(DetentError, TypeError):
    """An array or value of the wrong type, integers where floats are expected among them."""


class OutError(DetentError, ValueError):
    """An ``out`` array of the wrong dtype or shape, read-only, or overlapping an input."""


class NaNError(DetentError, ValueError):
    """NaN in data that must not hold any: ``count`` elements, of which ``first_index`` is the first in C order.

    >>> import detent as dt, numpy as np
    >>> dt.quantize(np.array([1.0, np.nan], np.float32), dt.QuantParams.int8_symmetric())
    Traceback (most recent call last):
    ...
    detent.errors.NaNError: x contains 1 NaN in 2 elements, first at (1,): clean the data, or pass nan='zero_point' \
or nan='qmin'
    """

    def __init__(self, message: str, count: int, first_index: tuple[int, ...]) -> None:
        super().__init__(message)
        self.count = count
        self.first_index = first_index

    def __reduce__(self) -> tuple[type["NaNError"], tuple[str, int, tuple[int, ...]]]:
        return type(self), (str(self), self.count, self.first_index)


class NotCalibratedError(DetentError, RuntimeError):
    """A quantizer or observer was asked for parameters before it saw any data."""


class StateError(DetentError, ValueError):
    """Saved state that does not belong to the object it is loaded into."""


class FileFormatError(DetentError, ValueError):
    """A file or byte string that is truncated, oversized, foreign or contradicts itself."""


class UnsupportedError(DetentError, NotImplementedError):
    """A combination that the contract defines but no kernel implements."""


class VerificationError(DetentError, AssertionError):
    """A file that does not compute what its source computes; ``report`` is the ``VerifyReport``."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type["VerificationError"], tuple[str, object]]:
        return type(self), (str(self), self.report)


def closest(given: str, known: Iterable[str]) -> str:
    """``: did you mean 'x'?`` for the closest known name, or a colon if none is close."""
    matches = get_close_matches(given[:200], list(known), n=1, cutoff=0.5)  # longer texts are close to no name
    return f": did you mean {matches[0]!r}?" if matches else ":"


# Packages that are not installed with detent itself, and the extra that brings each.
EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "typer": "cli",
        "rich": "cli",
        "onnx": "onnx",
        "onnxruntime": "onnx",
        "onnxscript": "onnx",
        "torch": "torch",
        "jinja2": "report",
    }
)
INSTALL = "pip install 'detent["
NOTHING_QUANTIZED = (
    "no layer was quantized"  # how that message begins, which commands answer with an exit code of its own
)


def install_hint(package: str) -> str:
    """The command that installs a package of an extra, or all extras."""
    return f"{INSTALL}{EXTRAS.get(package, package)}]'"
