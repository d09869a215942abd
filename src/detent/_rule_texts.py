"""The short texts of what a rule sets: specs, scale modes, estimators, observers.

A spec has its own grammar, ``format/granularity/...``. The others are calls: ``name``, ``name(1)``, ``name(1, key=2)``,
with the settings in the order of their class. A text leaves out what is the default, so that equal values have equal
texts; the defaults belong to the version of the recipe files that hold them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TypeAlias, TypeVar

from detent._checks import plain
from detent.convention import Convention
from detent.errors import SpecError, closest
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode, get_scale_mode
from detent.spec import NAMED_SPECS, QuantSpec
from detent.ste import Clipped, Custom, Estimator, EstimatorLike, HardTanh, Identity, Tanh, get_estimator

Setting: TypeAlias = int | float | str
Settings: TypeAlias = dict[str, Setting]
Value = TypeVar("Value")
TEXT_LIMIT = 200
_CALL = re.compile(r"(\w+)(?:\(([^()]*)\))?", re.ASCII)
_KEYWORD = re.compile(r"([a-z_]+)\s*=\s*(.*)", re.ASCII | re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MODES: Mapping[str, type[ScaleMode]] = {"per_batch": PerBatch, "ema": EMA, "fixed": Fixed, "learned": Learned}
_ESTIMATORS: Mapping[str, Callable[..., Estimator]] = {
    "identity": Identity,
    "clipped": Clipped,
    "hard_tanh": HardTanh,
    "tanh": Tanh,
}


def parse_call(what: str, text: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, Settings]:
    """The name and the settings of a call; ``known`` says which settings each name has, in order."""
    match = _CALL.fullmatch(text) if len(text) <= TEXT_LIMIT else None
    if match is None or match[1] not in known:
        name = text[:TEXT_LIMIT].partition("(")[0]
        raise SpecError(f"unknown {what} {text[:TEXT_LIMIT]!r}{closest(name, known)} expected {_forms(known)}")
    name, names = match[1], known[match[1]]
    settings: Settings = {}
    by_keyword = False
    for place, part in enumerate(match[2].split(",") if (match[2] or "").strip() else ()):
        keyword = _KEYWORD.fullmatch(part.strip())
        by_keyword = by_keyword or keyword is not None
        key = keyword[1] if keyword else "" if by_keyword or place >= len(names) else names[place]
        if key not in names or key in settings:
            takes = f"takes {', '.join(names)}, each once and in this order" if names else "takes no settings"
            raise SpecError(f"{what} {text!r}: {part.strip()!r} has no place, {name} {takes}")
        settings[key] = _value(keyword[2] if keyword else part.strip())
    return name, settings


def _forms(known: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{name}({', '.join(names)})" if names else name for name, names in known.items())


def _value(text: str) -> Setting:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def write_call(name: str, settings: Mapping[str, Setting], defaults: Mapping[str, Setting]) -> str:
    """The call without the settings that have their default; by keyword from the first one that is left out."""
    parts, by_keyword = [], False
    for key, value in settings.items():
        if value == defaults[key]:
            by_keyword = True
        else:
            parts.append(f"{key}={value}" if by_keyword else f"{value}")
    return f"{name}({', '.join(parts)})" if parts else name


def as_mode(value: ScaleMode | str) -> ScaleMode:
    """The mode that a call text names; a mode passes through."""
    if not isinstance(value, str):
        return _of_known_type("scale mode", get_scale_mode(value), _MODES)
    name, settings = parse_call("scale mode", value, {key: _names(made) for key, made in _MODES.items()})
    return _MODES[name](**settings)


def mode_text(mode: ScaleMode) -> str:
    """The call text of a mode."""
    return _text(mode, _MODES)


def as_estimator(value: EstimatorLike | str) -> Estimator:
    """The estimator that a call text names; callables are wrapped, an estimator passes through."""
    if not isinstance(value, str):
        found = get_estimator(value, Convention.onnx)
        return found if isinstance(found, Custom) else _of_known_type("estimator", found, _ESTIMATORS)
    name, settings = parse_call("estimator", value, {key: _names(made) for key, made in _ESTIMATORS.items()})
    return _ESTIMATORS[name](**settings)


def estimator_text(estimator: Estimator) -> str:
    """The call text of an estimator that is no callable."""
    if isinstance(estimator, Custom):
        raise SpecError(
            f"the estimator {estimator.function!r} is a callable, which no text can hold: name one of "
            f"{', '.join(_ESTIMATORS)}, or set it in code with dataclasses.replace(rule, ste=...) after loading"
        )
    return _text(estimator, _ESTIMATORS)


def _names(made: object) -> tuple[str, ...]:
    return tuple(field.name for field in fields(made))  # type: ignore[arg-type]  # of dataclasses


def _of_known_type(what: str, value: Value, known: Mapping[str, Callable[..., object]]) -> Value:
    if type(value) not in known.values():
        raise SpecError(f"unknown {what} {value!r}: expected one of {', '.join(known)}")
    return value


def _text(value: object, known: Mapping[str, Callable[..., object]]) -> str:
    made = type(value)
    name = next(name for name, one in known.items() if one is made)
    own, default = ({key: getattr(of, key) for key in _names(made)} for of in (value, made()))
    return write_call(name, own, default)


def spec_text(spec: QuantSpec) -> str | None:
    """The text that ``QuantSpec.parse`` turns into this spec, or None where there is none."""
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
    except SpecError:  # a convention of the caller's own
        return None


def as_text(what: str, value: object) -> str:
    """The value as a string that is not empty and that every file can hold."""
    found = plain(value)
    if not isinstance(found, str) or not found:
        hint = f": use {value.__name__!r}" if isinstance(value, type) else ""
        raise SpecError(f"{what} is text that is not empty, got {value!r}{hint}")
    return storable(what, found)


def storable(what: str, text: str) -> str:
    """The text, which must be Unicode without lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecError(f"{what} holds half a surrogate pair, which no file can hold: {text!r}") from error
    return text
