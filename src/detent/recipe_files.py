"""Recipes as JSON and TOML text.

Both hold the same data, and readers treat it as hostile::

    {version, name, rules: [{match, types, weight, input, output, mode, ste, observer, skip}, ...]}

``version`` and ``rules`` are needed, everything else has its default; unknown keys and other types are refused. Specs
are their short text, or every field where no short text can hold them; modes, estimators and observers are texts.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as brief

from detent.codec import check_version, parse, storable
from detent.errors import DetentError, FileFormatError, SpecError, closest
from detent.rule import SETTINGS, SPECS, Rule, estimator_text, mode_text
from detent.spec import QuantSpec, spec_text

__all__ = []

VERSION = 1
SIZE_LIMIT = 1 << 20
DOTS_LIMIT = 64
SUFFIXES = (".toml", ".json")
_TOP = ("version", "name", "rules")
_KEYS = ("match", "types", *SETTINGS, "skip")
# The strings and comments of TOML, ended or not.
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\(?:.|\Z))*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
Contents = tuple[str, tuple[Rule, ...]]


# Writing


def to_json(name: str, rules: tuple[Rule, ...]) -> str:
    """The recipe as indented JSON."""
    return json.dumps({"version": VERSION, "name": name, "rules": _numbered(rules)}, indent=2)


def to_toml(name: str, rules: tuple[Rule, ...]) -> str:
    """The recipe as TOML, one table per rule."""
    lines = [f"version = {VERSION}", f"name = {_toml(name)}"]
    lines += [] if rules else ["rules = []"]
    for data in _numbered(rules):
        lines += ["", "[[rules]]", *(f"{key} = {_toml(value)}" for key, value in data.items())]
    return "\n".join([*lines, ""])


def to_bytes(path: Path, name: str, rules: tuple[Rule, ...]) -> bytes:
    """What a file of that name holds."""
    write = to_toml if checked_suffix(path) == ".toml" else to_json
    data = write(name, rules).encode()
    if len(data) > SIZE_LIMIT:
        raise FileFormatError(f"the recipe takes {len(data)} bytes, of at most {SIZE_LIMIT}: load would refuse it")
    return data


def _numbered(rules: tuple[Rule, ...]) -> list[dict[str, object]]:
    found = []
    for i, rule in enumerate(rules):
        try:
            found.append(_data(rule))
        except SpecError as error:
            raise SpecError(f"rule {i}: {error}") from error
    return found


def _data(rule: Rule) -> dict[str, object]:
    data: dict[str, object] = {"match": rule.match}
    if rule.types:
        data["types"] = list(rule.types)
    for name in SPECS:
        spec = getattr(rule, name)
        if spec is not None:
            data[name] = spec_text(spec) or spec.to_dict()
    if rule.mode is not None:
        data["mode"] = mode_text(rule.mode)
    if rule.ste is not None:
        data["ste"] = estimator_text(rule.ste)
    if rule.observer is not None:
        data["observer"] = str(rule.observer)
    return {**data, "skip": True} if rule.skip else data


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + _ESCAPED.sub(_escape, value) + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    return repr(value)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


# Reading


def from_json(text: str) -> Contents:
    """The name and rules that ``to_json`` wrote."""
    return _parsed(text, "JSON", lambda: parse(text, "the JSON of a recipe", error=SpecError))


def from_toml(text: str) -> Contents:
    """The name and rules that ``to_toml`` wrote."""
    return _parsed(text, "TOML", lambda: _toml_data(text))


def read(path: Path) -> Contents:
    """The name and rules of a file."""
    suffix = checked_suffix(path)
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise FileFormatError(f"{path} is larger than the {SIZE_LIMIT} bytes that a recipe may have")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not UTF-8 text: {error}") from error
    try:
        return from_toml(text) if suffix == ".toml" else from_json(text)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def checked_suffix(path: Path) -> str:
    """The suffix of the file, which must be one that recipes have."""
    if path.suffix.lower() not in SUFFIXES:
        raise FileFormatError(f"recipes are {' or '.join(SUFFIXES)} files, got {str(path)!r}: give it such a suffix")
    return path.suffix.lower()


def _parsed(text: str, kind: str, parse: Callable[[], object]) -> Contents:
    if not isinstance(text, str):
        raise SpecError(f"expected the {kind} of a recipe as text, got {type(text).__name__}: use load for a path")
    if len(text) > SIZE_LIMIT:
        raise SpecError(f"{len(text)} characters are more than the {SIZE_LIMIT} that a recipe may have")
    try:
        data = parse()
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not the {kind} of a recipe: {error}") from error
    return _contents(data)


def _toml_data(text: str) -> object:
    """The data of TOML; keys of very many parts, which take tomllib hours, are refused before."""
    dots = max((line.count(".") for line in _QUOTED.sub("", text).split("\n")), default=0)
    if dots > DOTS_LIMIT:
        raise SpecError(f"not the TOML of a recipe: a line has {dots} dots outside of strings, at most {DOTS_LIMIT}")
    return tomllib.loads(text)


def _contents(data: object) -> Contents:
    table = _table("a recipe", data, _TOP)
    for key in ("version", "rules"):
        if key not in table:
            raise SpecError(f"a recipe needs the keys 'version' and 'rules', got {brief(sorted(table))}: add {key!r}")
    check_version(table["version"], VERSION, "recipes", error=SpecError)
    name, rules = table.get("name", ""), table["rules"]
    if not isinstance(name, str):
        raise SpecError(f"the name of a recipe is text, got {brief(name)}")
    if not isinstance(rules, list):
        raise SpecError(f"the rules of a recipe are a list of tables, got {brief(rules)}")
    return storable("the name of a recipe", name), tuple(_rule(i, rule) for i, rule in enumerate(rules))


def _table(what: str, data: object, keys: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise SpecError(f"{what} is a table with the keys {', '.join(keys)}, got {brief(data)}")
    for key in data:
        if key not in keys:
            raise SpecError(f"{what} has no key {brief(key)}{closest(key[:80], keys)} expected {', '.join(keys)}")
    return data


def _rule(i: int, data: object) -> Rule:
    fields = dict(_table(f"rule {i}", data, _KEYS))
    try:
        for key, value in fields.items():
            fields[key] = _field(key, value)
        return Rule(**fields)  # type: ignore[arg-type]  # checked by _field
    except DetentError as error:
        raise SpecError(f"rule {i}: {error}") from error


def _field(key: str, value: object) -> object:
    """The value of a rule's field, which has the type that files give it."""
    if key in SPECS and isinstance(value, dict):
        return _spec(key, value)
    if key == "types" and isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    wanted = bool if key == "skip" else str
    if not isinstance(value, wanted):
        also = {"types": " or a list of text", **dict.fromkeys(SPECS, " or a table of all fields")}.get(key, "")
        raise SpecError(f"{key} is {'true or false' if wanted is bool else 'text'}{also}, got {brief(value)}")
    return value


def _spec(key: str, data: dict[str, object]) -> QuantSpec:
    try:
        return QuantSpec.from_dict(data)
    except SpecError:
        raise
    except (DetentError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{key} is no spec: {type(error).__name__}, {error}") from error
