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
    """A format, granularity, rounding, convention, estimator or spec that cannot exist.

    >>> import detent as dt
    >>> dt.PerGroup(0)
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: PerGroup size must be an integer of at least 1, got 0
    """


class ParamsError(DetentError, ValueError):
    """A scale that is not a positive normal number, or a zero point outside the codes' range.

    >>> import detent as dt
    >>> dt.QuantParams(dt.QuantSpec(dt.int8), scale=-1.0)
    Traceback (most recent call last):
    ...
    detent.errors.ParamsError: scale must be positive, got -1.0
    """


class RangeError(DetentError, ValueError):
    """Bounds from which no parameters can be made.

    >>> import detent as dt
    >>> dt.QuantParams.from_range(dt.QuantSpec(dt.int8), 1.0, -1.0)
    Traceback (most recent call last):
    ...
    detent.errors.RangeError: lo must not exceed hi, got lo 1.0 > hi -1.0; swap them if they were exchanged
    """


class ShapeError(DetentError, ValueError):
    """Shapes that do not fit each other, or an axis that does not exist.

    >>> import detent as dt
    >>> dt.PerAxis(2).tiling((4, 5))
    Traceback (most recent call last):
    ...
    detent.errors.ShapeError: axis2 does not exist in an array of shape (4, 5): expected an axis in -2..1
    """


class DtypeError(DetentError, TypeError):
    """An array or value of the wrong type, integers where floats are expected among them.

    >>> import detent as dt, numpy as np
    >>> dt.fake_quantize(np.array([1, 2]), dt.QuantParams.int8_symmetric())
    Traceback (most recent call last):
    ...
    detent.errors.DtypeError: x has dtype int64, expected float16, bfloat16, float32 or float64: \
convert it first, for example x.astype('float32')
    """


class OutError(DetentError, ValueError):
    """An ``out`` array of the wrong dtype or shape, read-only, or overlapping an input.

    >>> import detent as dt, numpy as np
    >>> x = np.zeros(3, np.float32)
    >>> dt.fake_quantize(x, dt.QuantParams.int8_symmetric(), out=x)
    Traceback (most recent call last):
    ...
    detent.errors.OutError: out overlaps x in memory: give it an array of its own
    """


class NaNError(DetentError, ValueError):
    """NaN in data that must not hold any.

    Attributes:
        count: how many elements are NaN.
        first_index: the index of the first one in C order.

    >>> import detent as dt, numpy as np
    >>> dt.quantize(np.array([1.0, np.nan], np.float32), dt.QuantParams.int8_symmetric())
    Traceback (most recent call last):
    ...
    detent.errors.NaNError: x holds 1 NaN of 2 elements, the first at index (1,): mend the data or choose \
nan='zero_point' or nan='qmin'
    """

    def __init__(self, message: str, count: int, first_index: tuple[int, ...]) -> None:
        super().__init__(message)
        self.count = count
        self.first_index = first_index

    def __reduce__(self) -> tuple[type["NaNError"], tuple[str, int, tuple[int, ...]]]:
        return type(self), (str(self), self.count, self.first_index)


class NotCalibratedError(DetentError, RuntimeError):
    """A quantizer or observer was asked for parameters before it saw any data.

    >>> import detent as dt
    >>> dt.FakeQuantize.q8().scale
    Traceback (most recent call last):
    ...
    detent.errors.NotCalibratedError: FakeQuantize has no parameters yet: call calibrate(x), \
forward_with_calibration(x) or update_params(scale, zero_point) first
    """


class StateError(DetentError, ValueError):
    """Saved state that does not belong to the object it is loaded into.

    >>> import detent as dt
    >>> dt.FakeQuantize.q8().load_state_dict({"scale": 1.0})
    Traceback (most recent call last):
    ...
    detent.errors.StateError: state holds the keys ['scale'], missing ['initialized', 'spec', 'step', 'version']: \
expected what state_dict() returned
    """


class FileFormatError(DetentError, ValueError):
    """A file or byte string that is truncated, oversized, foreign or contradicts itself.

    >>> import detent as dt
    >>> dt.observers.MinMax.from_bytes(b"junk")
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: not a safetensors file: 4 bytes are fewer than the 8 of its length field
    """


class UnsupportedError(DetentError, NotImplementedError):
    """A combination that the contract defines but no kernel implements.

    >>> import detent as dt
    >>> dt.Plan.select("transpose", shape=(2,), dtype="float32", spec="int8")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    detent.errors.UnsupportedError: no kernel for operation 'transpose': expected one of dequantize, ...
    """


class VerificationError(DetentError, AssertionError):
    """A file that does not compute what its source computes.

    Attributes:
        report: the ``VerifyReport`` that says where.

    >>> error = VerificationError("one code differs", "its report")
    >>> error.report
    'its report'
    """

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type["VerificationError"], tuple[str, object]]:
        return type(self), (str(self), self.report)


def closest(given: str, known: Iterable[str]) -> str:
    """The words ``: did you mean 'x'?`` for the nearest known name, or a colon where nothing is near.

    >>> closest("grup128", ["group128", "tensor"])
    ": did you mean 'group128'?"
    """
    matches = get_close_matches(given, list(known), n=1, cutoff=0.5)
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


def install_hint(package: str) -> str:
    """The command that installs a package of an extra, or all extras.

    >>> install_hint("onnxruntime"), install_hint("all")
    ("pip install 'detent[onnx]'", "pip install 'detent[all]'")
    """
    return f"{INSTALL}{EXTRAS.get(package, package)}]'"
