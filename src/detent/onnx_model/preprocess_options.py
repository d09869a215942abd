"""Preprocessing of images, sounds and texts, as one value with a text form such as "imagenet,size=224x224".

A pixel v of channel c, from 0 to 255, becomes

    (v * scale - mean[c]) / std[c]

which is computed in float64 and rounded once. The presets name common values of scale, mean and std:

========== ======= ===================== =====================
preset     scale   mean                  std
========== ======= ===================== =====================
imagenet   1/255   0.485, 0.456, 0.406   0.229, 0.224, 0.225
0..1       1/255   0                     1
-1..1      1/255   0.5                   0.5
0..255     1       0                     1
========== ======= ===================== =====================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from detent.checks import as_integer, as_number
from detent.errors import DtypeError, SpecError, closest

__all__ = ["PRESETS", "Preprocessing"]

MAX_CHARS = 1000  # of a text to parse
MAX_CHARS_SHOWN = 80
MAX_SIDE = 1 << 14  # pixels
MAX_RATE, MAX_LENGTH = 1 << 20, 1 << 27  # Hz; samples or tokens
BYTE_SCALE = 1 / 255
CHOICES = {"crop": ("center", "none"), "layout": ("nchw", "nhwc"), "color": ("rgb", "bgr", "gray")}
NORMALIZATION = ("scale", "mean", "std")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of images, sounds and texts. Fields that are None follow from the model, or are guessed.

    If one of ``scale``, ``mean`` and ``std`` is given, the others are 1/255, 0 and 1.

    Attributes:
        scale: factor of a pixel from 0 to 255.
        mean: values to subtract: one for all channels, or one per channel in the order of ``color``.
        std: values to divide by: one for all channels, or one per channel in the order of ``color``.
        size: height and width of the input in pixels.
        resize: length of an image's shorter side before it is cropped; 8/7 of the size's shorter side by default, which
            is 256 for 224.
        crop: "center" cuts the middle out of the resized image; "none" stretches the whole image to ``size``.
        layout: "nchw" or "nhwc".
        color: "rgb", "bgr" or "gray".
        rate: sounds with another sample rate are resampled to this rate, in Hz.
        length: samples of a sound, or tokens of a text, if the model accepts any length.

    Raises:
        SpecError: a field is invalid.

    >>> Preprocessing.parse("mean=0.5,0.4,0.3, std=0.2, size=192x256").mean
    (0.5, 0.4, 0.3)
    >>> str(Preprocessing(mean=0.5, std=0.5, color="bgr")), Preprocessing.parse("imagenet").std
    ('-1..1,color=bgr', (0.229, 0.224, 0.225))
    """

    scale: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None
    resize: int | None = None
    crop: str | None = None
    layout: str | None = None
    color: str | None = None
    rate: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        self._normalize()
        for name, limit in (("resize", MAX_SIDE), ("rate", MAX_RATE), ("length", MAX_LENGTH)):
            if getattr(self, name) is not None:
                self._set(name, as_integer(f"{name} of preprocess", getattr(self, name), at_least=1, at_most=limit))
        if self.size is not None:
            if not isinstance(self.size, tuple | list) or len(self.size) != 2:
                raise SpecError(
                    f"size of preprocess must be a height and a width, got {self.size!r}: use e.g. (224, 224)"
                )
            sides = (as_integer("size of preprocess", side, at_least=1, at_most=MAX_SIDE) for side in self.size)
            self._set("size", tuple(sides))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise SpecError(f"{name} of preprocess must be {' or '.join(choices)}, got {value!r:.80}")
        if self.crop == "none" and self.resize is not None:
            raise SpecError(
                f"resize={self.resize} needs crop=center: drop resize, or crop=none, which stretches the image"
            )

    def _normalize(self) -> None:
        """Check scale, mean and std; if one of them is given, set the others."""
        if all(getattr(self, name) is None for name in NORMALIZATION):
            return
        scale = as_number("scale of preprocess", BYTE_SCALE if self.scale is None else self.scale)
        mean = _numbers("mean", (0.0,) if self.mean is None else self.mean)
        std = _numbers("std", (1.0,) if self.std is None else self.std)
        if scale <= 0 or min(std) <= 0:
            raise SpecError(f"scale and std of preprocess must be positive, got scale={scale:g} and std={std}")
        for name, value in (("scale", scale), ("mean", mean), ("std", std)):
            self._set(name, value)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the fields that are not None."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)

    @property
    def preset(self) -> str:
        """Name of the preset with the same scale, mean and std, or ""."""
        own = _normalization(self)
        return next((name for name, preset in PRESETS.items() if _normalization(preset) == own), "")

    @classmethod
    def parse(cls, text: str) -> "Preprocessing":
        """Parse a comma-separated list of a preset and key=value pairs.

        Raises:
            SpecError: a key or value is unknown or occurs twice.
            DtypeError: the argument is not text.
        """
        if not isinstance(text, str):
            raise DtypeError(f"preprocess must be text, got {type(text).__name__}")
        values: dict[str, Any] = {}
        last = ""
        if len(text) > MAX_CHARS:
            raise SpecError(f"preprocess has {len(text)} characters, expected at most {MAX_CHARS}: shorten it")
        for part in (part.strip() for part in text.split(",")):
            key, sign, value = (each.strip() for each in part.partition("="))
            if not sign and last in {"mean", "std"} and _NUMBER.fullmatch(part):
                values[last] += (_number(last, part),)
                continue
            if not part and not text.strip():
                continue
            given = {key: _value(key, value)} if sign else _preset(part)
            if values.keys() & given.keys():
                raise SpecError(f"preprocess {text[:MAX_CHARS_SHOWN]!r} sets {next(iter(given))} twice: remove one")
            values |= given
            last = key
        return cls(**values)

    def __str__(self) -> str:
        preset, parts = self.preset, list[str]()
        if preset:
            parts.append(preset)
        for name in self.given:
            value = getattr(self, name)
            if name in NORMALIZATION:
                if not preset:
                    parts.append(f"{name}={_text(value)}")
            elif name == "size":
                parts.append(f"size={value[0]}x{value[1]}")
            else:
                parts.append(f"{name}={value}")
        return ",".join(parts)

    def with_defaults(self, **values: object) -> "Preprocessing":
        """Return a copy in which fields that are None have these values."""
        missing = {name: value for name, value in values.items() if getattr(self, name) is None}
        return replace(self, **missing)  # type: ignore[arg-type]  # the fields are checked at run time


def _normalization(preprocessing: Preprocessing) -> tuple[object, ...]:
    return tuple(getattr(preprocessing, name) for name in NORMALIZATION)


def _numbers(name: str, value: object) -> tuple[float, ...]:
    parts = value if isinstance(value, tuple | list) else (value,)
    if len(parts) not in {1, 3}:
        raise SpecError(f"{name} of preprocess must be 1 number, or 3 for the channels of RGB or BGR, got {len(parts)}")
    return tuple(as_number(f"{name} of preprocess", part) for part in parts)


def _number(key: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise SpecError(
            f"invalid {key}={text[:MAX_CHARS_SHOWN]!r} in preprocess: expected a number such as 0.5 or 1/255"
        )
    above, _, below = text.partition("/")
    if below and not int(below):
        raise SpecError(f"invalid {key}={text[:MAX_CHARS_SHOWN]!r} in preprocess: division by zero")
    return float(above) / int(below) if below else float(above)


def _value(key: str, text: str) -> object:
    """Parse the value of a key."""
    keys = [each.name for each in fields(Preprocessing)]
    if key not in keys:
        raise SpecError(
            f"unknown key {key[:MAX_CHARS_SHOWN]!r} in preprocess{closest(key, keys)} expected one of {', '.join(keys)}"
        )
    if key == "scale":
        return _number(key, text)
    if key in NORMALIZATION:
        return (_number(key, text),)
    if key == "size":
        match = _SIZE.fullmatch(text)
        if match is None:
            raise SpecError(
                f"invalid size={text[:MAX_CHARS_SHOWN]!r} in preprocess: expected HEIGHTxWIDTH, e.g. 224x224"
            )
        return int(match[1]), int(match[2])
    if key in CHOICES:
        return text.lower()
    if not re.fullmatch(r"\d{1,10}", text):
        raise SpecError(f"invalid {key}={text[:MAX_CHARS_SHOWN]!r} in preprocess: expected a whole number")
    return int(text)


def _preset(text: str) -> dict[str, object]:
    if text not in PRESETS:
        raise SpecError(
            f"unknown preprocess {text[:MAX_CHARS_SHOWN]!r}{closest(text, PRESETS)} expected {', '.join(PRESETS)}, or "
            "key=value pairs such as mean=0.5,std=0.5,size=224x224"
        )
    return dict(zip(NORMALIZATION, _normalization(PRESETS[text]), strict=True))


def _text(value: float | tuple[float, ...]) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return ",".join("1/255" if part == BYTE_SCALE else repr(part) for part in parts)


PRESETS: Mapping[str, Preprocessing] = MappingProxyType(
    {
        "imagenet": Preprocessing(BYTE_SCALE, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "0..1": Preprocessing(BYTE_SCALE, (0.0,), (1.0,)),
        "-1..1": Preprocessing(BYTE_SCALE, (0.5,), (0.5,)),
        "0..255": Preprocessing(1.0, (0.0,), (1.0,)),
    }
)
