"""QuantSpec: format, granularity, symmetry and convention of a quantization.

A spec has no scales; scales are in ``QuantParams``. Defaults are resolved on construction, so two specs with the same
meaning are equal, and JSON contains every field.

A spec can be written as a short string, with its parts in this order:
``format[/tensor|axisN|token|groupN|blockNxM][/symmetric|affine][/convention]``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

from detent.block_format import BlockFormat
from detent.checks import plain
from detent.codec import parse, reading, table
from detent.convention import PRESETS, Convention, get_convention
from detent.errors import SpecError, closest
from detent.formats import FORMAT_NAMES, FORMATS, Format, float4_e2m1fn, float8_e4m3fn, float8_e5m2, get_format
from detent.gguf import BLOCK_FORMATS, find_block_format
from detent.granularity import CHANNEL, Granularity, PerGroup, PerTensor, get_granularity, granularity_from_dict
from detent.rounding import Rounding, get_rounding, half_even

__all__ = ["NAMED_SPECS", "QuantSpec", "code_dtype", "get_spec"]

JSON_VERSION = 1
ScaleFormat = Literal["float", "e8m0", "e4m3"]
_SYMMETRY: Mapping[str, bool] = {"symmetric": True, "affine": False}


@dataclass(frozen=True, init=False, repr=False)
class QuantSpec:
    """Description of a quantization, without scales.

    Args:
        format: number format of the codes, or the name of a format.
        granularity: which elements share a scale, as a granularity or its string.
        symmetric: None means symmetric for signed integers and all non-integer formats, affine for unsigned integers.
        convention: rules for rounding and for scales; by default, the rules of ONNX.
        rounding: rounding of integer formats; None means the convention's rounding. Floats of at most 8 bits and
            codebooks always round half to even.
        qmin: lowest code of an integer format; None means the format's lowest code. A ``narrow`` convention leaves out
            the lowest code of signed symmetric specs.
        qmax: highest code of an integer format; None means the format's highest code.
        scale_format: "float" (float32 or float64), "e8m0" (a power of two, OCP MX) or "e4m3" (a float8 per group
            times a float32 per tensor, NVFP4).

    Invariants: ``format.qmin <= qmin < qmax <= format.qmax``. The zero point of a symmetric spec is at least ``qmin``
    and less than ``qmax``. Specs of formats other than integers are symmetric.

    >>> import detent as dt
    >>> spec = dt.QuantSpec(dt.int8, granularity=dt.PerAxis(0))
    >>> spec.symmetric, spec.qmin, spec.qmax, str(spec.rounding)
    (True, -127, 127, 'half_even')
    """

    format: Format
    granularity: Granularity
    symmetric: bool
    convention: Convention
    rounding: Rounding
    qmin: int | float
    qmax: int | float
    scale_format: ScaleFormat

    def __init__(
        self,
        format: Format | str,
        granularity: Granularity | str = PerTensor(),
        symmetric: bool | None = None,
        convention: Convention | str = Convention.onnx,
        rounding: Rounding | str | None = None,
        qmin: float | None = None,
        qmax: float | None = None,
        scale_format: ScaleFormat = "float",
    ) -> None:
        put = object.__setattr__
        put(self, "format", _get_element(format))
        put(self, "granularity", get_granularity(granularity))
        put(self, "convention", get_convention(convention))
        put(self, "symmetric", self.format.signed if symmetric is None else plain(symmetric))
        put(self, "rounding", self._resolved_rounding(rounding))
        put(self, "qmin", self._default_qmin() if qmin is None else plain(qmin))
        put(self, "qmax", self.format.qmax if qmax is None else plain(qmax))
        put(self, "scale_format", scale_format)
        if not isinstance(self.symmetric, bool):
            raise SpecError(f"got symmetric={symmetric!r}, expected True, False or None")
        _check_types(self)
        _check_symmetry(self)
        _check_range(self)
        _check_scale_format(self)

    def _resolved_rounding(self, given: Rounding | str | None) -> Rounding:
        if given is not None:
            rounding = get_rounding(given)
            if not self.format.is_integer and rounding != half_even:
                raise SpecError(
                    f"got rounding={rounding}, but {self.format.name} rounds half to even: leave out rounding="
                )
            return rounding
        return self.convention.rounding if self.format.is_integer else half_even

    def _default_qmin(self) -> int | float:
        narrow = self.format.is_integer and self.format.signed and self.symmetric and self.convention.narrow
        return -self.format.qmax if narrow else self.format.qmin

    def __hash__(self) -> int:
        """Return a cached hash, because every operator call looks up its plan with the spec as a key."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    @property
    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __reduce__(self) -> tuple[type["QuantSpec"], tuple[object, ...]]:
        """Pickle the fields, not the cached hash: hashes of strings differ between processes."""
        return QuantSpec, self._fields

    @property
    def bits(self) -> int:
        """The bit width of a code."""
        return self.format.bits

    @property
    def num_levels(self) -> int:
        """The number of different codes that the spec can produce.

        >>> import detent as dt
        >>> [dt.QuantSpec(name).num_levels for name in ("int8", "uint8", "float8_e4m3fn")]
        [255, 256, 254]
        """
        if self.format.is_integer:
            return int(self.qmax) - int(self.qmin) + 1
        return len([level for level in self.format.levels if abs(level) <= self.format.qmax])

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of a symmetric spec: 0 for signed formats, the middle code for unsigned ones.

        >>> import detent as dt
        >>> dt.QuantSpec(dt.uint8, symmetric=True).symmetric_zero_point
        128
        """
        if self.format.signed:
            return 0
        return (int(self.qmin) + int(self.qmax) + 1) // 2

    def replace(self, **changes: object) -> "QuantSpec":
        """Return a changed copy; defaults of symmetry, rounding, qmin and qmax are resolved again.

        >>> import detent as dt
        >>> dt.QuantSpec(dt.int8).replace(convention=dt.Convention.torch).qmin
        -128
        """
        unknown = set(changes) - {field.name for field in fields(self)}
        if unknown:
            raise SpecError(f"got unknown fields {sorted(unknown)}, expected {', '.join(f.name for f in fields(self))}")
        return QuantSpec(**{**self._given(), **changes})  # type: ignore[arg-type]  # checked on construction

    def _given(self) -> dict[str, object]:
        """Return the fields that differ from their defaults."""
        kept: dict[str, object] = {"format": self.format}
        if self.granularity != PerTensor():
            kept["granularity"] = self.granularity
        if self.symmetric != self.format.signed:
            kept["symmetric"] = self.symmetric
        if self.convention != Convention.onnx:
            kept["convention"] = self.convention
        if self.format.is_integer and self.rounding != self.convention.rounding:
            kept["rounding"] = self.rounding
        if self.qmin != self._default_qmin():
            kept["qmin"] = self.qmin
        if self.qmax != self.format.qmax:
            kept["qmax"] = self.qmax
        if self.scale_format != "float":
            kept["scale_format"] = self.scale_format
        return kept

    def __repr__(self) -> str:
        if self in NAMED_SPECS.values():
            return f"dt.{self}"
        given = self._given()
        parts = [repr(given.pop("format"))]
        if "granularity" in given:
            parts.append(repr(str(given.pop("granularity"))))
        if given.get("convention") in PRESETS.values():
            given["convention"] = self.convention.name
        return f"dt.QuantSpec({', '.join([*parts, *(f'{name}={value!r}' for name, value in given.items())])})"

    def __str__(self) -> str:
        """Return the short string; fields that it cannot express follow in brackets.

        ``parse`` rejects texts with brackets.
        """
        for name, spec in NAMED_SPECS.items():
            if spec == self:
                return name
        symmetry = "symmetric" if self.symmetric else "affine"
        given = self._given()
        rest = [f"{key}={given[key]}" for key in ("rounding", "qmin", "qmax", "scale_format") if key in given]
        text = f"{self.format.name}/{self.granularity}/{symmetry}/{self.convention.name}"
        return f"{text} [{', '.join(rest)}]" if rest else text

    @classmethod
    def parse(cls, text: str) -> "QuantSpec":
        """Parse a short string.

        Raises:
            SpecError: a part is unknown or out of order; the message suggests the closest valid part.

        >>> QuantSpec.parse("int4/group128/symmetric/torch") == QuantSpec("int4", "group128", convention="torch")
        True
        """
        if not isinstance(text, str):
            raise SpecError(f"got {text!r} as spec, expected a string such as 'int8/axis0'")
        _refuse_block_format(text)
        head, *parts = text.split("/")
        changes: dict[str, object] = {}
        for part in parts:
            field, value = _parse_part(text, part)
            if changes and _ORDER.index(field) <= max(map(_ORDER.index, changes)):
                raise SpecError(f"part {part!r} of the spec {text!r} is repeated or out of order: expected {_GRAMMAR}")
            changes[field] = value
        if head in NAMED_SPECS:
            return NAMED_SPECS[head].replace(**changes)
        if head not in FORMATS:
            names = ", ".join(NAMED_SPECS)
            hint = closest(head, [*FORMATS, *NAMED_SPECS, *BLOCK_FORMATS])
            raise SpecError(
                f"unknown format {head!r}{hint} expected {FORMAT_NAMES}, one of the specs {names}, or one of the block "
                f"formats {', '.join(BLOCK_FORMATS)}"
            )
        return cls(head, **changes)  # type: ignore[arg-type]  # values made by _parse_part

    def to_json(self) -> str:
        """Return all fields and a version number as one line of JSON."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """Return all fields and a version number as JSON-ready data."""
        return {
            "version": JSON_VERSION,
            "format": self.format.name,
            "granularity": self.granularity.to_dict(),
            "symmetric": self.symmetric,
            "convention": self.convention.to_dict(),
            "rounding": str(self.rounding),
            "qmin": self.qmin,
            "qmax": self.qmax,
            "scale_format": self.scale_format,
        }

    @classmethod
    def from_json(cls, text: str) -> "QuantSpec":
        """Read the JSON of ``to_json``.

        Raises:
            SpecError: not JSON, unsupported version, missing or unknown keys, invalid values.
        """
        return cls.from_dict(parse(text, "a QuantSpec", error=SpecError))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "QuantSpec":
        """Make a spec from the data of ``to_dict``."""
        names = [field.name for field in fields(cls)]
        with reading("the data do not describe a QuantSpec", error=SpecError):
            entries = table(data, "a QuantSpec", names, error=SpecError, version=JSON_VERSION)
            if None in entries.values() or not isinstance(entries["format"], str):
                raise SpecError(f"got {data!r}, expected a format name in 'format', and no None in other fields")
            entries["granularity"] = granularity_from_dict(entries["granularity"])
            entries["convention"] = Convention.from_dict(entries["convention"])
            return cls(**entries)


_GRAMMAR = "format[/granularity][/symmetric|affine][/convention]"
_ORDER = ("granularity", "symmetric", "convention")


def _parse_part(text: str, part: str) -> tuple[str, object]:
    if part in _SYMMETRY:
        return "symmetric", _SYMMETRY[part]
    if part in PRESETS:
        return "convention", PRESETS[part]
    try:
        return "granularity", get_granularity(part)
    except SpecError as error:
        hint = closest(part, [*_SYMMETRY, *PRESETS])
        if part == CHANNEL or hint == ":":
            raise
        parts = "tensor, axisN, token, groupN, blockNxM, symmetric, affine or a convention"
        raise SpecError(f"unknown part {part!r} of the spec {text!r}{hint} expected {parts}") from error


def _get_element(value: Format | str) -> Format:
    if isinstance(value, str) and (value in NAMED_SPECS or "/" in value):
        raise SpecError(
            f"got the spec {value!r} as format=, expected a format: to make a spec, use dt.QuantSpec.parse({value!r})"
        )
    return get_format(value)


def _check_types(spec: QuantSpec) -> None:
    for name in ("qmin", "qmax"):
        value = getattr(spec, name)
        fits = int if spec.format.is_integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, fits):
            raise SpecError(
                f"got {name}={value!r} for {spec.format.name}, expected {'an integer' if fits is int else 'a number'}"
            )


def _check_range(spec: QuantSpec) -> None:
    form = spec.format
    if not form.is_integer:
        if (spec.qmin, spec.qmax) != (form.qmin, form.qmax):
            raise SpecError(
                f"got qmin={spec.qmin} and qmax={spec.qmax}, but {form.name} has the fixed range [{form.qmin}, "
                f"{form.qmax}]: leave out qmin= and qmax="
            )
        return
    if not form.qmin <= spec.qmin < spec.qmax <= form.qmax:
        raise SpecError(
            f"got qmin={spec.qmin} and qmax={spec.qmax}, expected qmin < qmax in the range [{form.qmin}, {form.qmax}] "
            f"of {form.name}"
        )


def _check_symmetry(spec: QuantSpec) -> None:
    if not spec.symmetric:
        if not spec.format.is_integer:
            raise SpecError(f"got symmetric=False, but {spec.format.name} has no zero point: leave out symmetric=")
        return
    zero_point = spec.symmetric_zero_point
    if not spec.qmin <= zero_point <= spec.qmax or spec.qmax - zero_point < 1:
        raise SpecError(
            f"a symmetric {spec.format.name} spec with codes in [{spec.qmin}, {spec.qmax}] and zero point {zero_point} "
            "cannot represent positive values: use symmetric=False, more bits, or different qmin= and qmax="
        )


def _check_scale_format(spec: QuantSpec) -> None:
    if spec.scale_format not in get_args(ScaleFormat):
        raise SpecError(f"got scale_format={spec.scale_format!r}, expected one of {', '.join(get_args(ScaleFormat))}")
    if spec.scale_format != "float" and spec.format.kind != "float":
        raise SpecError(
            f"got scale_format={spec.scale_format!r} for {spec.format.name}, but only small floats such as "
            "float4_e2m1fn support it: use scale_format='float'"
        )


# The block formats MXFP4 and MXFP8 (OCP MX) and NVFP4, by their usual names.
NAMED_SPECS: Mapping[str, QuantSpec] = {}
mxfp4 = QuantSpec(float4_e2m1fn, PerGroup(32), scale_format="e8m0")
mxfp8 = QuantSpec(float8_e4m3fn, PerGroup(32), scale_format="e8m0")
mxfp8_e5m2 = QuantSpec(float8_e5m2, PerGroup(32), scale_format="e8m0")
nvfp4 = QuantSpec(float4_e2m1fn, PerGroup(16), scale_format="e4m3")
NAMED_SPECS = {"mxfp4": mxfp4, "mxfp8": mxfp8, "mxfp8_e5m2": mxfp8_e5m2, "nvfp4": nvfp4}


def get_spec(value: QuantSpec | Format | str) -> QuantSpec:
    """Parse a short string, or make a spec with this format; return a QuantSpec unchanged.

    Raises:
        SpecError: the string is invalid, or the value is a block format, which has no params.
    """
    if isinstance(value, QuantSpec):
        return value
    _refuse_block_format(value)
    return QuantSpec(value) if isinstance(value, Format) else QuantSpec.parse(value)


def _refuse_block_format(value: object) -> None:
    form = find_block_format(value)
    if form is not None:
        raise SpecError(
            f"got the block format {form}, which derives its scales itself and has no params: pass it to dt.quantize, "
            "dt.fake_quantize, dt.fake_quantize_backward or dt.Rule(weight=...), or use a spec such as 'int4/group32'"
        )


def code_dtype(spec: QuantSpec) -> np.dtype[Any]:
    """Return the dtype of an unpacked code."""
    if spec.format.kind == "float":
        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spec.format.storage))
        return small
    return np.dtype(spec.format.storage)


def parameter_bits(spec: QuantSpec, sets: int, float_bits: int = 32) -> int:
    """Return how many bits ``sets`` scales need, including zero points (affine specs) and the tensor scale (NVFP4)."""
    scale_bits = float_bits if spec.scale_format == "float" else 8
    tensor_bits = 32 if spec.scale_format == "e4m3" else 0
    return sets * (scale_bits + (0 if spec.symmetric else spec.bits)) + tensor_bits


def stored_nbytes(
    spec: QuantSpec | BlockFormat, shape: tuple[int, ...], widths: Sequence[int] = (), *, zero_point_bits: int = 0
) -> int:
    """Return the size of a tensor's codes, scales and zero points in bytes.

    ``widths`` are the bit widths that a file format supports for codes, in ascending order. Codes and zero points use
    the first width that is large enough, and zero points are counted even for symmetric specs. Zero points have at
    least ``zero_point_bits``. Without widths, codes and zero points are packed at ``spec.bits`` each. The blocks of a
    block format contain their scales.
    """
    if isinstance(spec, BlockFormat):
        return spec.nbytes(shape)
    count, sets = prod(shape), spec.granularity.tiling(shape).sets
    if not widths:
        return _whole_bytes(count * spec.bits) + _whole_bytes(parameter_bits(spec, sets))
    bits = next(width for width in widths if width >= spec.bits)
    return _whole_bytes(count * bits) + _whole_bytes(sets * 32) + _whole_bytes(sets * max(bits, zero_point_bits))


_BYTE = 8  # bits
_CONVS, _MATMULS = ("Conv", "ConvTranspose"), ("MatMul", "Gemm")  # ONNX operators


def onnx_widths(operator: str) -> tuple[int, ...]:
    """Return the bit widths that the codes of a weight may have in an ONNX file; tables of Gather have no 4 bits."""
    return (8, 16) if operator == "Gather" else (4, 8, 16)


def reads_bytes(operator: str, weight: QuantSpec, input_bits: int) -> bool:
    """Whether a layer in an ONNX file reads the codes of its weight in bytes, because it has no kernel for 4 bits.

    ``input_bits`` is the bit width of the codes of the layer's input, or 0 if the input is float. Matmuls with a float
    or 16-bit input, or with a scale per group, run in float or on kernels for 4 bits.

    >>> spec = QuantSpec("int4", "axis0")
    >>> reads_bytes("Conv", spec, 0), reads_bytes("MatMul", spec, 8), reads_bytes("MatMul", spec, 0)
    (True, True, False)
    """
    has_integer_kernel = 0 < input_bits <= _BYTE and not isinstance(weight.granularity, PerGroup)
    return operator in _CONVS or (operator in _MATMULS and has_integer_kernel)


def onnx_nbytes(spec: QuantSpec | BlockFormat, shape: tuple[int, ...], operator: str, input_bits: int = 0) -> int:
    """Return the size of a weight's codes, scales and zero points in an ONNX file; arguments as in ``reads_bytes``.

    >>> onnx_nbytes(QuantSpec("int4", "axis0"), (2, 32), "Conv"), onnx_nbytes(QuantSpec("int4"), (2, 32), "Gather")
    (42, 69)
    """
    as_bytes = isinstance(spec, QuantSpec) and reads_bytes(operator, spec, input_bits)
    return stored_nbytes(spec, shape, onnx_widths(operator), zero_point_bits=_BYTE if as_bytes else 0)


def _whole_bytes(bits: int) -> int:
    return -(-bits // 8)


def short_spec(spec: QuantSpec) -> str:
    """Return a text for reprs: the spec's short string in quotes; without a short string, the constructor call."""
    text = spec_text(spec)
    return repr(spec) if text is None else repr(text)


def spec_text(spec: QuantSpec | BlockFormat) -> str | None:
    """Return the short string that ``QuantSpec.parse`` turns into this spec, or None if there is no such string.

    The string of a block format is its name.
    """
    if isinstance(spec, BlockFormat):
        return spec.name
    if str(spec) in NAMED_SPECS:
        return str(spec)
    parts = [f"{spec.format.name}/{spec.granularity}"]
    if not (spec.symmetric and spec.format.signed):
        parts.append("symmetric" if spec.symmetric else "affine")
    if spec.convention != Convention.onnx:
        parts.append(spec.convention.name)
    text = "/".join(parts)
    try:
        return text if QuantSpec.parse(text) == spec else None
    except SpecError:  # a convention that is not a preset
        return None
