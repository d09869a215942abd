"""The presets of recipes: ``w<bits>a<bits>[-g<group>]`` and ``fp8``.

Weights are signed and symmetric, one scale per index of axis 0, or per group; inputs are unsigned and affine, one scale
per tensor. ``a16`` leaves activations as they are: weights alone are quantized, below 8 bits in groups of 128.

Where bits are below 8, the first and the last layer keep 8, after the habit of leaving those two in more bits than the
rest (DoReFa-Net, Zhou et al. 2016). Weight-only presets treat all layers alike.
"""

import re
from types import MappingProxyType

from detent.errors import SpecError, closest
from detent.observer_spec import ObserverLike
from detent.rule import Rule
from detent.scale_mode import ScaleMode
from detent.ste import EstimatorLike

PRESETS: MappingProxyType[str, str] = MappingProxyType(
    {
        "w8a8": "8-bit weights and inputs",
        "w4a8": "4-bit weights, 8-bit inputs; the first and last layer at 8 bits",
        "w4a4": "4-bit weights and inputs; the first and last layer at 8 bits",
        "w2a8": "2-bit weights, 8-bit inputs; the first and last layer at 8 bits",
        "fp8": "float8_e4m3fn weights and inputs",
        "w8a16": "8-bit weights only",
        "w4a16": "the same as w4a16-g128",
        "w4a16-g32": "4-bit weights only, in groups of 32",
        "w4a16-g64": "4-bit weights only, in groups of 64",
        "w4a16-g128": "4-bit weights only, in groups of 128",
    }
)
FLOAT_BITS, FULL_BITS = 16, 8
COMMON_GROUP = 128
_NAME = re.compile(r"w([2-8])a([2-8]|16)(?:-g([1-9][0-9]{0,8}))?", re.ASCII)
_FULL = ("int8/axis0", "uint8/tensor/affine")
_FP8 = ("float8_e4m3fn/axis0", "float8_e4m3fn/tensor")
Row = tuple[str, str, str | None]


def preset(
    name: str, mode: ScaleMode | str | None, ste: EstimatorLike | str, observer: ObserverLike | None
) -> tuple[str, tuple[Rule, ...]]:
    """The full name of a preset, and its rules; mode, ste and observer go into every rule."""
    full, rows = _rows(name)
    return full, tuple(
        Rule(match, weight=weight, input=given, mode=mode, ste=ste, observer=observer) for match, weight, given in rows
    )


def _rows(name: str) -> tuple[str, list[Row]]:
    """The full name; what each rule matches, and its specs of weight and input."""
    if name == "fp8":
        return name, [("*", *_FP8)]
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        hint = closest(str(name).lower(), PRESETS)
        raise SpecError(
            f"unknown preset {name!r}{hint} expected one of {', '.join(PRESETS)}, or w<bits>a<bits>[-g<group>] with 2 "
            "to 8 bits for weights, and 2 to 8 or 16 for activations"
        )
    weight_bits, input_bits = int(found[1]), int(found[2])
    group = int(found[3]) if found[3] else None
    if input_bits == FLOAT_BITS:
        if group is None and weight_bits < FULL_BITS:
            group = COMMON_GROUP
        full = f"w{weight_bits}a16" if group is None else f"w{weight_bits}a16-g{group}"
        return full, [("*", _weight(weight_bits, group), None)]
    rows: list[Row] = [("*", _weight(weight_bits, group), f"uint{input_bits}/tensor/affine")]
    if min(weight_bits, input_bits) < FULL_BITS:
        rows += [("@first", *_FULL), ("@last", *_FULL)]
    return name, rows


def _weight(bits: int, group: int | None) -> str:
    return f"int{bits}/axis0" if group is None else f"int{bits}/group{group}"
