"""Errors: the exceptions that detent raises on purpose.

::

    DetentError
    ├── SpecError           (ValueError)           an invalid format, granularity, convention or spec
    ├── ParamsError         (ValueError)           an invalid scale, zero point or code
    ├── RangeError          (ValueError)           an invalid range: lo > hi, NaN, infinite or empty
    ├── ShapeError          (ValueError)           a wrong shape, or an axis that does not exist
    ├── DtypeError          (TypeError)            an array or value of the wrong type
    ├── OutError            (ValueError)           an ``out`` array that cannot hold the result
    ├── NaNError            (ValueError)           NaN in data that must not contain NaN
    ├── NotCalibratedError  (RuntimeError)         a quantizer or observer without data
    ├── StateError          (ValueError)           saved state of a different object
    ├── FileFormatError     (ValueError)           a damaged or unexpected file
    ├── UnsupportedError    (NotImplementedError)  a combination without an implementation
    ├── VerificationError   (AssertionError)       a file that does not match its source model
    └── WorkerError         (RuntimeError)         a worker that died, or that differs from the driver

A message says what was given, what was expected and how to repair the mistake.
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
    "WorkerError",
]

# The library logs to the logger "detent", which prints nothing by default. Every import of detent imports this module.
logging.getLogger("detent").addHandler(logging.NullHandler())


class DetentError(Exception):
    """Base class: ``except detent.DetentError`` catches every error that detent raises on purpose.

    >>> import detent as dt
    >>> try:
    ...     dt.QuantSpec.parse("int44")
    ... except dt.DetentError as error:
    ...     print(error)
    unknown format 'int44': did you mean 'int4'? expected int1..int16, uint1..uint16, float8_e4m3fn, \
float8_e5m2, float4_e2m1fn, nf4, one of the specs mxfp4, mxfp8, mxfp8_e5m2, nvfp4, or one of the block formats q4_0, \
q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, gguf.mxfp4
    """


class SpecError(DetentError, ValueError):
    """An invalid format, granularity, rounding, convention, estimator or spec."""


class ParamsError(DetentError, ValueError):
    """A scale that is not a positive normal number, or a zero point or code outside the range of codes."""


class RangeError(DetentError, ValueError):
    """A range from which no parameters can be derived: lo > hi, NaN, infinite or empty."""


class ShapeError(DetentError, ValueError):
    """A wrong shape, or an axis that does not exist."""


class DtypeError(DetentError, TypeError):
    """An array or value of the wrong type, for example integers where floats are expected."""


class OutError(DetentError, ValueError):
    """An ``out`` array that has the wrong dtype or shape, is read-only, or overlaps an input."""


class NaNError(DetentError, ValueError):
    """NaN in data that must not contain NaN.

    ``count`` is the number of NaN, and ``first_index`` is the index of the first NaN in C order.

    >>> import detent as dt, numpy as np
    >>> dt.quantize(np.array([1.0, np.nan], np.float32), dt.QuantParams.int8_symmetric())
    Traceback (most recent call last):
    ...
    detent.errors.NaNError: x contains 1 NaN in 2 elements, first at (1,): replace NaN in the data, or pass \
nan='zero_point' or nan='qmin'
    """

    def __init__(self, message: str, count: int, first_index: tuple[int, ...]) -> None:
        super().__init__(message)
        self.count = count
        self.first_index = first_index

    def __reduce__(self) -> tuple[type["NaNError"], tuple[str, int, tuple[int, ...]]]:
        return type(self), (str(self), self.count, self.first_index)


class NotCalibratedError(DetentError, RuntimeError):
    """A quantizer or observer that has no parameters yet, because it has seen no data."""


class StateError(DetentError, ValueError):
    """Saved state that does not match the object it is loaded into."""


class FileFormatError(DetentError, ValueError):
    """A file or byte string that is truncated, oversized, inconsistent or of an unexpected format."""


class UnsupportedError(DetentError, NotImplementedError):
    """A combination of arguments that is not supported."""


class VerificationError(DetentError, AssertionError):
    """A quantized file that does not match its source model; ``report`` is the ``VerifyReport``."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type["VerificationError"], tuple[str, object]]:
        return type(self), (str(self), self.report)


class WorkerError(DetentError, RuntimeError):
    """A worker of an executor that died, runs other software than the driver, or does not see the same files."""


def closest(given: str, names: Iterable[str]) -> str:
    """Format ``: did you mean 'x'?`` for the closest valid name, or ``:`` if no name is close."""
    matches = get_close_matches(given[:200], list(names), n=1, cutoff=0.5)  # difflib is slow, and names are short
    return f": did you mean {matches[0]!r}?" if matches else ":"


# Maps each optional package to the extra of detent that installs it.
EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "typer": "cli",
        "rich": "cli",
        "onnx": "onnx",
        "onnxruntime": "onnx",
        "onnxscript": "onnx",
        "torch": "torch",
        "jinja2": "report",
        "PIL": "images",
        "tokenizers": "text",
        "ray": "ray",
        "gguf": "checkpoint",
        "safetensors": "checkpoint",
    }
)
INSTALL = "pip install 'detent["
NOTHING_QUANTIZED = "no layer was quantized"  # the start of an error message that has its own exit code


def install_hint(package: str) -> str:
    """Format the pip command that installs ``package`` with an extra of detent."""
    return f"{INSTALL}{EXTRAS.get(package, package)}]'"
