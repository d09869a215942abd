"""Conventions: the quantization rules of other libraries and runtimes, as plain data.

Libraries with the formula ``q = round(x / s) + z`` differ in eight rules, such as the rounding, or the scale of a
symmetric range. A ``Convention`` has one field for each of these rules.

Presets follow the documented formula of a library; a comment says where the library's code differs from the formula.
A scale may differ by one ulp from the library's scale, because detent computes scales in float64.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from detent.codec import table
from detent.errors import SpecError, closest
from detent.rounding import Rounding, get_rounding, half_away, half_even

__all__ = ["PRESETS", "Convention", "ZeroRange", "get_convention"]

Division = Literal["divide", "reciprocal"]
ZeroPoint = Literal["after_round", "before_round"]
SymmetricScale = Literal["qmax", "half_span", "tight"]
Mask = Literal["identity", "code_inclusive", "code_exclusive", "value_inclusive", "value_exclusive"]
ZeroRangeKind = Literal["unit", "unit_at_qmin", "eps", "width", "error"]

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "division": get_args(Division),
        "zero_point": get_args(ZeroPoint),
        "symmetric_scale": get_args(SymmetricScale),
        "mask": get_args(Mask),
    }
)


_PRESETS: dict[str, "Convention"] = {}


@dataclass(frozen=True)
class ZeroRange:
    """Rule for scale and zero point if the scale would be 0 or too small.

    ============ ==========================================================================
    unit         scale 1; zero point nearest to 0 (affine), or fixed by the spec (symmetric)
    unit_at_qmin scale 1, zero point qmin
    eps          the scale is raised to at least ``value``
    width        the width (symmetric: largest magnitude) is raised to at least ``value``
    error        a RangeError is raised
    ============ ==========================================================================
    """

    kind: ZeroRangeKind
    value: float = 0.0

    def __post_init__(self) -> None:
        kinds = get_args(ZeroRangeKind)
        if self.kind not in kinds:
            raise SpecError(
                f"unknown kind {self.kind!r} of ZeroRange{closest(str(self.kind), kinds)} expected {', '.join(kinds)}"
            )
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise SpecError(f"got value={self.value!r} for ZeroRange({self.kind!r}), expected a number")
        needs_value = self.kind in {"eps", "width"}
        if not (0.0 < self.value <= sys.float_info.max if needs_value else self.value == 0):
            expected = "a positive finite value" if needs_value else "no value: leave out value="
            raise SpecError(f"got value={self.value!r} for ZeroRange({self.kind!r}), expected {expected}")
        object.__setattr__(self, "value", float(self.value))


@dataclass(frozen=True, repr=False)
class Convention:
    """Quantization rules of one library or runtime.

    Attributes:
        division: "divide" (``fl(x / s)``) or "reciprocal" (``fl(x * fl(1 / s))``).
        rounding: rounding of codes. Zero points use half_away if ``rounding`` is half_away, otherwise half_even.
        zero_point: whether the zero point is added "after_round" or "before_round".
        symmetric_scale: scale of a symmetric range: "qmax", "half_span" or "tight" (docs/numerics.md, section 4).
        narrow: whether signed symmetric integers leave out the lowest code.
        include_zero: whether an affine range is widened to include zero.
        zero_range: rule for scales that would be 0 or too small.
        mask: the default straight-through estimator; it says where the gradient passes.

    >>> import detent as dt
    >>> dt.Convention.torch.division, dt.Convention.onnx.division
    ('reciprocal', 'divide')
    """

    name: str
    division: Division
    rounding: Rounding
    zero_point: ZeroPoint
    symmetric_scale: SymmetricScale
    narrow: bool
    include_zero: bool
    zero_range: ZeroRange
    mask: Mask

    if TYPE_CHECKING:  # types of the presets below; at run time, some tools would list such annotations as fields
        onnx: ClassVar["Convention"]
        torch: ClassVar["Convention"]
        torch_fused: ClassVar["Convention"]
        compressed_tensors: ClassVar["Convention"]
        oxicuda: ClassVar["Convention"]
        entrenar: ClassVar["Convention"]
        torsh: ClassVar["Convention"]
        rlx: ClassVar["Convention"]
        baracuda: ClassVar["Convention"]
        baracuda_channel: ClassVar["Convention"]
        baracuda_token: ClassVar["Convention"]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise SpecError(f"got name={self.name!r} for a convention, expected an identifier such as 'my_runtime'")
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise SpecError(
                    f"convention {self.name!r}: unknown {field} {value!r}{closest(str(value), choices)} "
                    f"expected {', '.join(choices)}"
                )
        for field in ("narrow", "include_zero"):
            if not isinstance(getattr(self, field), bool):
                raise SpecError(
                    f"got {field}={getattr(self, field)!r} in convention {self.name!r}, expected True or False"
                )
        object.__setattr__(self, "rounding", get_rounding(self.rounding))
        if not isinstance(self.zero_range, ZeroRange):
            raise SpecError(f"got zero_range={self.zero_range!r} in convention {self.name!r}, expected a dt.ZeroRange")
        if self != _PRESETS.get(self.name, self):
            raise SpecError(f"convention {self.name!r} differs from the preset of that name: choose a different name")

    def __repr__(self) -> str:
        if self.name in _PRESETS:
            return f"dt.Convention.{self.name}"
        return f"dt.Convention({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"

    def to_dict(self) -> dict[str, object]:
        """Return every field as JSON-ready data."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {
            "rounding": str(self.rounding),
            "zero_range": {"kind": self.zero_range.kind, "value": self.zero_range.value},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Convention":
        """Make a convention from the data of ``to_dict``; missing and unknown keys are errors."""
        entries = table(data, "a convention", [field.name for field in fields(cls)], error=SpecError)
        zero_range = table(entries["zero_range"], "a convention's zero_range", ("kind", "value"), error=SpecError)
        return cls(**{**entries, "zero_range": ZeroRange(**zero_range)})


_UNIT = ZeroRange("unit")
_TORCH_EPS = ZeroRange("eps", 2.0**-23)


# fmt: off
_ROWS = (
    Convention("onnx",               "divide",     half_even, "after_round",  "qmax",      True,  True,  _UNIT,      "code_inclusive"),
    Convention("torch",              "reciprocal", half_even, "after_round",  "half_span", False, True,  _TORCH_EPS, "code_inclusive"),
    # torch's fused operator switches to affine for one-sided ranges and raises scales below 6.1e-5. This preset uses the
    # rule for two-sided ranges, and raises scales below 2^-23, as torch's observers do.
    Convention("torch_fused",        "reciprocal", half_even, "after_round",  "tight",     False, True,  _TORCH_EPS, "code_inclusive"),
    Convention("compressed_tensors", "divide",     half_even, "before_round", "half_span", False, True,  _TORCH_EPS, "identity"),
    # oxicuda's GPU code rounds half to even, has no zero point and uses +-127 for int8. This preset follows its CPU code.
    Convention("oxicuda",            "divide",     half_away, "before_round", "qmax",      False, False, ZeroRange("width", 1e-8), "value_inclusive"),
    # entrenar's clamped backward ignores the zero point; detent's Clipped(on="value") includes it. entrenar computes the
    # zero point from scale 0 before it raises the scale to 1e-10; detent raises the scale first.
    Convention("entrenar",           "divide",     half_away, "before_round", "qmax",      True,  False, ZeroRange("eps", 1e-10), "identity"),
    Convention("torsh",              "divide",     half_away, "after_round",  "half_span", False, False, ZeroRange("unit_at_qmin"), "identity"),
    # rlx's backward recomputes a per-batch scale even in EMA and fixed mode; detent's backward uses the scale of
    # forward.
    Convention("rlx",                "divide",     half_away, "after_round",  "qmax",      True,  True,  ZeroRange("eps", 1e-12), "identity"),
    Convention("baracuda",           "reciprocal", half_even, "after_round",  "qmax",      False, True,  _UNIT,      "code_inclusive"),
    # In baracuda, the forward pass divides, and the mask multiplies by the reciprocal. In detent both divide.
    Convention("baracuda_channel",   "divide",     half_even, "after_round",  "qmax",      False, True,  _UNIT,      "code_inclusive"),
    # baracuda documents an inclusive mask, but its code has exclusive bounds and rounds before it adds the zero point.
    # This preset has exclusive bounds, and applies them to the codes of the forward pass.
    Convention("baracuda_token",     "divide",     half_even, "before_round", "qmax",      False, True,  _UNIT,      "code_exclusive"),
)
# fmt: on

_PRESETS |= {row.name: row for row in _ROWS}
PRESETS: MappingProxyType[str, Convention] = MappingProxyType(_PRESETS)
for _preset in _ROWS:
    setattr(Convention, _preset.name, _preset)


def get_convention(value: Convention | str) -> Convention:
    """Look up a preset by name; return a Convention unchanged.

    >>> get_convention("torch")
    dt.Convention.torch
    """
    if isinstance(value, Convention):
        return value
    if not isinstance(value, str) or value not in PRESETS:
        raise SpecError(f"unknown convention {value!r}{closest(str(value), PRESETS)} expected {', '.join(PRESETS)}")
    return PRESETS[value]
