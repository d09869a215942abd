"""Formats: the types of codes, and the values that codes represent if the scale is 1.

An integer format is a range from ``qmin`` to ``qmax``. Float formats (of at most 8 bits) and codebooks are tables of
``levels``. Names follow ml_dtypes (``float8_e4m3fn``). Not included: ``fnuz`` variants and 6-bit floats, which no CPU
runtime supports today.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, ldexp, nan
from types import MappingProxyType
from typing import Literal

from detent.errors import DtypeError, SpecError, closest

__all__ = ["FORMATS", "Format", "get_format"]

Kind = Literal["integer", "float", "codebook"]
MAX_BITS = 16
BYTE = 8


@dataclass(frozen=True, repr=False)
class Format:
    """Number format of a code.

    Attributes:
        kind: "integer", "float" (sign, exponent, mantissa) or "codebook" (an index into levels).
        qmin: lowest finite value at scale 1.
        qmax: highest finite value at scale 1.
        storage: NumPy or ml_dtypes dtype of an unpacked code.
        onnx: TensorProto name, or None if ONNX has no such type.
        magnitudes: for floats, the value of each code whose sign bit is 0; for codebooks, the value of each code.
        mantissa: for floats, the number of mantissa bits.

    >>> import detent as dt
    >>> dt.int4, dt.int4.qmin, dt.int4.qmax, dt.int4.storage, dt.int4.onnx
    (dt.int4, -8, 7, 'int8', 'INT4')
    """

    name: str
    kind: Kind
    bits: int
    signed: bool
    qmin: int | float
    qmax: int | float
    storage: str
    onnx: str | None = None
    magnitudes: tuple[float, ...] = field(default=(), compare=False)
    mantissa: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        return f"dt.{self.name}"

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers; only integers have zero points and a choice of rounding."""
        return self.kind == "integer"

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """For float and codebook formats, the value that each code represents at scale 1, ordered by the code's bits.

        >>> import detent as dt
        >>> dt.float4_e2m1fn.levels[:8]
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        """
        if self.kind == "float":
            return self.magnitudes + tuple(-value for value in self.magnitudes)
        return self.magnitudes

    @cached_property
    def finite_levels(self) -> tuple[float, ...]:
        """The finite values at scale 1, in ascending order; for float formats, only zero and the positive values."""
        return tuple(value for value in self.magnitudes if -inf < value < inf)

    @cached_property
    def largest_gap(self) -> float:
        """The widest distance between adjacent values at scale 1; the rounding error is at most half this distance."""
        return 1.0 if self.is_integer else max(high - low for low, high in pairwise(self.finite_levels))


def _integer(bits: int, *, signed: bool) -> Format:
    name = f"int{bits}" if signed else f"uint{bits}"
    qmin, qmax = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    storage = f"{'' if signed else 'u'}int{BYTE if bits <= BYTE else 2 * BYTE}"
    onnx = name.upper() if bits in {2, 4, 8, 16} else None
    return Format(name, "integer", bits, signed, qmin, qmax, storage, onnx)


def _float_format(name: str, *, exponent: int, mantissa: int, specials: tuple[float, ...], onnx: str) -> Format:
    """Make a float format: a sign bit, ``exponent`` bits with bias 2^(exponent-1)-1, ``mantissa`` bits.

    ``specials`` (infinity or NaN) are the values of the codes that follow the code of the largest finite number.
    """
    bias = (1 << (exponent - 1)) - 1
    finite = (1 << (exponent + mantissa)) - len(specials)

    def value(code: int) -> float:
        power, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        implicit = 1 << mantissa if power else 0
        return ldexp(float(implicit + fraction), max(power, 1) - bias - mantissa)

    magnitudes = tuple(value(code) for code in range(finite)) + specials
    top = magnitudes[finite - 1]
    return Format(name, "float", 1 + exponent + mantissa, True, -top, top, name, onnx, magnitudes, mantissa)


_SIGNED = tuple(_integer(bits, signed=True) for bits in range(1, MAX_BITS + 1))
_UNSIGNED = tuple(_integer(bits, signed=False) for bits in range(1, MAX_BITS + 1))
int1, int2, int3, int4, int5, int6, int7, int8, int9, int10, int11, int12, int13, int14, int15, int16 = _SIGNED
uint1, uint2, uint3, uint4, uint5, uint6, uint7, uint8 = _UNSIGNED[:8]
uint9, uint10, uint11, uint12, uint13, uint14, uint15, uint16 = _UNSIGNED[8:]

float8_e4m3fn = _float_format("float8_e4m3fn", exponent=4, mantissa=3, specials=(nan,), onnx="FLOAT8E4M3FN")
float8_e5m2 = _float_format("float8_e5m2", exponent=5, mantissa=2, specials=(inf, nan, nan, nan), onnx="FLOAT8E5M2")
float4_e2m1fn = _float_format("float4_e2m1fn", exponent=2, mantissa=1, specials=(), onnx="FLOAT4E2M1")

# The 16 quantiles of QLoRA (Dettmers et al. 2023, appendix E), each rounded to float32.
# fmt: off
_NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
nf4 = Format("nf4", "codebook", 4, True, -1.0, 1.0, "uint8", None, _NF4_LEVELS)

_OTHERS = (float8_e4m3fn, float8_e5m2, float4_e2m1fn, nf4)

FORMATS: MappingProxyType[str, Format] = MappingProxyType({row.name: row for row in (*_SIGNED, *_UNSIGNED, *_OTHERS)})
FORMAT_NAMES = f"int1..int{MAX_BITS}, uint1..uint{MAX_BITS}, {', '.join(row.name for row in _OTHERS)}"


def get_format(value: Format | str) -> Format:
    """Look up a format by name; return a Format unchanged.

    Raises:
        SpecError: unknown name; the message suggests the closest name.

    >>> get_format("uint4")
    dt.uint4
    """
    if isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise DtypeError(f"got {value!r} as format, expected a dt.Format such as dt.int8, or a name such as 'int8'")
    if value not in FORMATS:
        raise SpecError(f"unknown format {value!r}{closest(value, FORMATS)} expected {FORMAT_NAMES}")
    return FORMATS[value]
