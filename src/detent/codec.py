"""Codec: JSON and short texts from untrusted files.

Reading any text either succeeds or raises a DetentError. The limits below (length, number of lists, objects and values)
bound the time and memory of reading. Values are checked before they become arrays. Messages quote only the beginning of
a value.

Frozen dataclasses are written field by field, and read according to their type annotations; a ``Leaf`` adds support for
another type. Arrays are stored exactly. JSON has no infinities and no NaN, so these values are written as "inf", "-inf"
and "nan". The short texts are calls such as ``name(1, k=2)``.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from math import inf, isfinite, nan, prod
from reprlib import repr as brief
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from detent.checks import are_sizes, plain
from detent.errors import DetentError, FileFormatError, SpecError, closest
from detent.tables import counted

__all__ = []

T = TypeVar("T")
TEXT_LIMIT = 1 << 26  # characters
CONTAINER_LIMIT = 1 << 19  # lists and objects, which need thirty times as much memory as their text
VALUE_LIMIT = 1 << 23
INTEGER_LIMIT = 1 << 62  # fits int64, with room for sums
EXACT_LIMIT = 1 << 53  # float64 represents every integer up to here
MAX_MESSAGE = 2000  # characters of an error message
MAX_CHARS_SHOWN = 60  # characters of a name quoted in a message
_SPECIAL: Mapping[str, float] = MappingProxyType({"inf": inf, "-inf": -inf, "nan": nan})
_STORED_DTYPES = frozenset({"float32", "float64", "int32", "uint8"})


def parse(
    text: str, what: str, *, error: type[DetentError] = FileFormatError, limit: int = TEXT_LIMIT
) -> dict[str, Any]:
    """Parse JSON text that must contain an object; ``what`` names the text in messages."""
    if not isinstance(text, str):
        raise error(f"got {type(text).__name__} for {what}, expected JSON text")
    if len(text) > limit:
        raise error(f"{what} has {len(text)} characters, expected at most {limit}")
    for name, count, count_limit in _counts(text):
        if count > count_limit:
            raise error(f"{what} has {count} {name}, expected at most {count_limit}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, MemoryError) as fault:
        raise error(f"{what} is not valid JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise error(f"got {brief(value)} for {what}, expected a JSON object")
    return value


def _counts(text: str) -> tuple[tuple[str, int, int], ...]:
    """Return (name, count, limit) twice: for the lists and objects in a JSON text, and for its values.

    A count is an upper bound, because brackets and commas inside strings are also counted.
    """
    return (
        ("lists and objects", text.count("[") + text.count("{"), CONTAINER_LIMIT),
        ("values", text.count(","), VALUE_LIMIT),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from the key-value pairs of a JSON object; raise if a key is repeated."""
    if len(dict(pairs)) != len(pairs):
        duplicates = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate keys {brief(duplicates)}")
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def table(
    value: object,
    what: str,
    keys: Iterable[str],
    *,
    error: type[DetentError] = FileFormatError,
    version: int | None = None,
) -> dict[str, Any]:
    """Return the value as a dict, or raise ``error`` if its keys are not exactly ``keys``.

    If ``version`` is given, the value must also have the key "version", which is checked and removed.
    """
    expected = {*keys} if version is None else {"version", *keys}
    if not isinstance(value, Mapping):
        raise error(f"got {brief(value)} for {what}, expected an object with the keys {', '.join(sorted(expected))}")
    if set(value) != expected:
        unexpected, missing = sorted(map(str, set(value) - expected)), sorted(expected - set(value))
        problems = [f"unexpected keys {brief(unexpected)}"] if unexpected else []
        problems += [f"missing keys {missing}"] if missing else []
        raise error(f"{what}: {', '.join(problems)}; expected exactly the keys {', '.join(sorted(expected))}")
    entries = dict(value)
    if version is not None:
        check_version(entries.pop("version"), version, what, error=error)
    return entries


def check_version(given: object, version: int, what: str, *, error: type[DetentError] = FileFormatError) -> None:
    """Raise unless ``given`` is the version that this release reads.

    >>> check_version(2, 1, "a recipe")
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: got version 2 of a recipe, but this release of detent reads version 1: update detent
    """
    if type(given) is not int:
        raise error(f"got version {brief(given)} of {what}, expected version {version}, an integer")
    if given != version:
        advice = "update detent" if given > version else "write it again, or use the release of detent that wrote it"
        raise error(
            f"got version {brief(given)} of {what}, but this release of detent reads version {version}: {advice}"
        )


_FAULTS = (
    *(DetentError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(RecursionError, MemoryError),
)


@contextmanager
def reading(
    complaint: str, *, error: type[DetentError] = FileFormatError, keep: type[DetentError] | tuple[()] = ()
) -> Iterator[None]:
    """Raise ``error`` in place of exceptions that untrusted data cause; exceptions of type ``keep`` pass unchanged."""
    try:
        yield
    except _FAULTS as fault:
        if isinstance(fault, keep):
            raise
        why = f"the key {fault} is missing or unknown" if isinstance(fault, KeyError) else fault
        raise error(f"{complaint}: {why}"[:MAX_MESSAGE]) from fault


class Leaf(NamedTuple):
    """Two functions for values of a type: ``write`` converts a value to JSON-ready data, ``read`` converts it back.

    ``read`` may raise any DetentError.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


Leaves: TypeAlias = Mapping[type, Leaf]
_NO_LEAVES: Leaves = MappingProxyType({})


def encode(value: object, leaves: Leaves = _NO_LEAVES) -> Any:  # noqa: ANN401 - any part of a document
    """Convert dataclasses, mappings, tuples, arrays and plain values to JSON-ready data."""
    if type(value) in leaves:
        return leaves[type(value)].write(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name), leaves) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(each, leaves) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [encode(each, leaves) for each in value]
    if isinstance(value, np.ndarray):
        return encode_array(value)
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value


def decode(cls: type[T], value: object, where: str, leaves: Leaves = _NO_LEAVES) -> T:
    """Make a dataclass instance from the data that ``encode`` returned; ``where`` names the data in messages."""
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    entries = table(value, where, hints)
    decoded = {name: _decoded(kind, entries[name], f"{where}.{name}", leaves) for name, kind in hints.items()}
    with reading(where):
        return cls(**decoded)


@cache
def _hints(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a dataclass
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _decoded(kind: Any, value: object, where: str, leaves: Leaves) -> object:  # noqa: ANN401 - an annotation
    origin = get_origin(kind)
    if origin in {Union, UnionType}:
        inner = [each for each in get_args(kind) if each is not NoneType]
        return None if value is None else _decoded(inner[0], value, where, leaves)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _wrong(where, f"one of {', '.join(map(repr, get_args(kind)))}", value)
        return value
    if origin is tuple:
        return _sequence(get_args(kind), value, where, leaves)
    if origin is np.ndarray and np.ndarray not in leaves:
        return decode_array(value, where)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        item = get_args(kind)[1]
        return {
            _text(key, where): _decoded(item, each, f"{where}[{key[:MAX_CHARS_SHOWN]!r}]", leaves)
            for key, each in value.items()
        }
    if (leaf := leaves.get(origin or kind)) is not None:
        with reading(where):
            return leaf.read(value)
    if isinstance(kind, type) and is_dataclass(kind):
        return decode(kind, value, where, leaves)
    return _plain(kind, value, where)


def _sequence(kinds: tuple[Any, ...], value: object, where: str, leaves: Leaves) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    if kinds[-1] is Ellipsis:
        return tuple(_decoded(kinds[0], each, f"{where}[{i}]", leaves) for i, each in enumerate(value))
    if len(value) != len(kinds):
        raise _wrong(where, f"a list of {len(kinds)} values", value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_decoded(kind, each, f"{where}[{i}]", leaves) for i, (kind, each) in pairs)


def _plain(kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - an annotation
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return _text(value, where)
    if kind is int and type(value) is int and abs(value) < INTEGER_LIMIT:
        return value
    if kind is float:
        if isinstance(value, str) and value in _SPECIAL:
            return _SPECIAL[value]
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
    names = {bool: "true or false", str: "text", int: "an integer", float: "a number"}
    raise _wrong(where, names[kind], value)


def _text(value: str, where: str) -> str:
    """Check that the text has no lone surrogates, which JSON allows but UTF-8 cannot encode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(where, "text without lone surrogates", value) from error
    return value


def _wrong(where: str, expected: str, value: object) -> FileFormatError:
    return FileFormatError(f"{where} must be {expected}, got {brief(value)[:MAX_CHARS_SHOWN]}")


def encode_array(values: NDArray[Any]) -> dict[str, object]:
    """Convert an array of floats or integers to JSON-ready data; every float is stored exactly."""
    return {"dtype": str(values.dtype), "shape": list(values.shape), "values": encode(values.ravel().tolist())}


def decode_array(value: object, what: str, *, error: type[DetentError] = FileFormatError) -> NDArray[Any]:
    """Make an array from the data that ``encode_array`` returned; shape and dtype must match the values."""
    entry = table(value, what, ("dtype", "shape", "values"), error=error)
    dtype, listed = entry["dtype"], entry["values"]
    if not isinstance(dtype, str) or dtype not in _STORED_DTYPES or not isinstance(listed, list):
        raise error(
            f"got {brief(entry)} for {what}, expected a list of numbers as 'values', and as 'dtype' one of "
            f"{', '.join(sorted(_STORED_DTYPES))}"
        )
    shape = entry["shape"]
    if not are_sizes(shape) or len(listed) != prod(shape):
        raise error(
            f"{what} has {counted(len(listed), 'number')} for shape {brief(shape)}, expected one number per element"
        )
    if not all(_is_exact(each) for each in listed):
        raise error(
            f"got {brief(listed)} for {what}, expected numbers that float64 stores exactly, or 'inf', '-inf', 'nan'"
        )
    values = np.array([_SPECIAL.get(each, each) for each in listed], np.float64)
    with np.errstate(all="ignore"):
        array = values.astype(dtype)
    if not np.array_equal(array, values, equal_nan=True):
        raise error(
            f"the numbers {brief(listed)} of {what} do not fit {dtype}, expected numbers that {dtype} stores exactly"
        )
    return array.reshape(shape)


def _is_exact(value: object) -> bool:
    """Return whether float64 represents the value exactly; the texts "inf", "-inf" and "nan" also count as exact."""
    if type(value) is int:
        return abs(value) <= EXACT_LIMIT
    return isfinite(value) if type(value) is float else isinstance(value, str) and value in _SPECIAL


Setting: TypeAlias = int | float | str
Settings: TypeAlias = dict[str, Setting]
CALL_LIMIT = 200
_CALL = re.compile(r"(\w+)(?:\(([^()]*)\))?", re.ASCII)
_KEYWORD = re.compile(r"([a-z_]+)\s*=\s*(.*)", re.ASCII | re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def parse_call(what: str, text: str, signatures: Mapping[str, tuple[str, ...]]) -> tuple[str, Settings]:
    """Parse a call such as ``name(1, k=2)``; ``signatures`` maps each valid name to the names of its settings."""
    match = _CALL.fullmatch(text) if len(text) <= CALL_LIMIT else None
    if match is None or match[1] not in signatures:
        name = text[:CALL_LIMIT].partition("(")[0]
        raise SpecError(
            f"unknown {what} {text[:CALL_LIMIT]!r}{closest(name, signatures)} expected {_forms(signatures)}"
        )
    name, names = match[1], signatures[match[1]]
    settings: Settings = {}
    by_keyword = False
    for place, part in enumerate(match[2].split(",") if (match[2] or "").strip() else ()):
        keyword = _KEYWORD.fullmatch(part.strip())
        by_keyword = by_keyword or keyword is not None
        key = keyword[1] if keyword else "" if by_keyword or place >= len(names) else names[place]
        if key not in names or key in settings:
            expected = (
                f"expected at most the settings {', '.join(names)}, in this order" if names else "expected no settings"
            )
            raise SpecError(f"unexpected setting {part.strip()!r} of {what} {text!r}: {expected}")
        settings[key] = _value(keyword[2] if keyword else part.strip())
    return name, settings


def _forms(signatures: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{name}({', '.join(names)})" if names else name for name, names in signatures.items())


def _value(text: str) -> Setting:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def write_call(name: str, settings: Mapping[str, Setting], defaults: Mapping[str, Setting]) -> str:
    """Format a call without the settings that have default values.

    Settings after an omitted setting are written as keywords.
    """
    parts, by_keyword = [], False
    for key, value in settings.items():
        if value == defaults[key]:
            by_keyword = True
        else:
            parts.append(f"{key}={value}" if by_keyword else f"{value}")
    return f"{name}({', '.join(parts)})" if parts else name


def as_text(what: str, value: object) -> str:
    """Check that the value is a string that is not empty and can be encoded."""
    text = plain(value)
    if not isinstance(text, str) or not text:
        hint = f": use {value.__name__!r}" if isinstance(value, type) else ""
        raise SpecError(f"got {value!r} for {what}, expected text that is not empty{hint}")
    return storable(what, text)


def storable(what: str, text: str) -> str:
    """Check that the text has no lone surrogates, which files cannot contain."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecError(
            f"{what} contains a lone surrogate, which UTF-8 cannot encode: remove it from {text!r}"
        ) from error
    return text
