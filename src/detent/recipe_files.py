"""Recipes as JSON and TOML text. Both texts have the same contents, and both are read as untrusted input.

::

    {version, name, rules: [{match, types, weight, input, output, mode, ste, observer, arithmetic, skip}, ...]}

``version`` and ``rules`` are required; all other keys have defaults. Unknown keys and wrong types are rejected. A spec
is written as its short text, or as a table of all fields if no text can express it. Modes, estimators and observers are
written as texts.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as brief

from detent.codec import check_version, parse, reading, storable
from detent.errors import FileFormatError, SpecError, closest
from detent.rule import SETTINGS, SPECS, Rule, estimator_text
from detent.spec import QuantSpec, spec_text

__all__ = []

VERSION = 1
SIZE_LIMIT = 1 << 20  # bytes
DOTS_LIMIT = 64  # dots per line of TOML, not counting strings; tomllib needs hours for keys with very many parts
SUFFIXES = (".toml", ".json")
_TOP = ("version", "name", "rules")
_KEYS = ("match", "types", *SETTINGS, "skip")
# Matches the strings and comments of TOML, whether terminated or not.
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


def to_json(name: str, rules: tuple[Rule, ...]) -> str:
    return json.dumps({"version": VERSION, "name": name, "rules": _numbered(rules)}, indent=2)


def to_toml(name: str, rules: tuple[Rule, ...]) -> str:
    lines = [f"version = {VERSION}", f"name = {_toml(name)}"]
    lines += [] if rules else ["rules = []"]
    for data in _numbered(rules):
        lines += ["", "[[rules]]", *(f"{key} = {_toml(value)}" for key, value in data.items())]
    return "\n".join([*lines, ""])


def to_bytes(path: Path, name: str, rules: tuple[Rule, ...]) -> bytes:
    write = to_toml if checked_suffix(path) == ".toml" else to_json
    data = write(name, rules).encode()
    if len(data) > SIZE_LIMIT:
        raise FileFormatError(
            f"the recipe has {len(data)} bytes, expected at most {SIZE_LIMIT} (the limit of Recipe.load): use fewer "
            "rules"
        )
    return data


def _numbered(rules: tuple[Rule, ...]) -> list[dict[str, object]]:
    entries = []
    for i, rule in enumerate(rules):
        with reading(f"rule {i}", error=SpecError):
            entries.append(_data(rule))
    return entries


def _data(rule: Rule) -> dict[str, object]:
    data: dict[str, object] = {"match": rule.match}
    if rule.types:
        data["types"] = list(rule.types)
    data |= rule.texts()
    for name in SPECS:
        spec = getattr(rule, name)
        if spec is not None and spec_text(spec) is None:
            data[name] = spec.to_dict()
    if rule.ste is not None:
        data["ste"] = estimator_text(rule.ste)  # raises an error for a callable, which has no text
    return {**data, "skip": True} if rule.skip else data


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", value) + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    return repr(value)


def from_json(text: str) -> Contents:
    return _parsed(text, "JSON", lambda: parse(text, "the recipe", error=SpecError))


def from_toml(text: str) -> Contents:
    return _parsed(text, "TOML", lambda: _toml_data(text))


def read(path: Path) -> Contents:
    suffix = checked_suffix(path)
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise FileFormatError(f"{path} is too large for a recipe: expected at most {SIZE_LIMIT} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not UTF-8 text: {error}") from error
    with reading(f"{path}", error=SpecError):
        return from_toml(text) if suffix == ".toml" else from_json(text)


def checked_suffix(path: Path) -> str:
    if path.suffix.lower() not in SUFFIXES:
        raise FileFormatError(f"got {str(path)!r}, expected a recipe with the suffix {' or '.join(SUFFIXES)}")
    return path.suffix.lower()


def _parsed(text: str, kind: str, parse: Callable[[], object]) -> Contents:
    if not isinstance(text, str):
        raise SpecError(
            f"got {type(text).__name__}, expected the {kind} of a recipe as text: for a path, call load(path)"
        )
    if len(text) > SIZE_LIMIT:
        raise SpecError(f"got {len(text)} characters, expected at most {SIZE_LIMIT} for a recipe")
    with reading(f"the text is not the {kind} of a recipe", error=SpecError, keep=SpecError):
        data = parse()
    return _contents(data)


def _toml_data(text: str) -> object:
    """Parse TOML; keys with very many parts are rejected first."""
    dots = max((line.count(".") for line in _QUOTED.sub("", text).split("\n")), default=0)
    if dots > DOTS_LIMIT:
        raise SpecError(
            f"the TOML of a recipe has a line with {dots} dots outside of strings, expected at most {DOTS_LIMIT}: "
            "split the line"
        )
    return tomllib.loads(text)


def _contents(data: object) -> Contents:
    table = _table("a recipe", data, _TOP)
    for key in ("version", "rules"):
        if key not in table:
            raise SpecError(
                f"got a recipe with the keys {brief(sorted(table))}, expected 'version' and 'rules': add {key!r}"
            )
    check_version(table["version"], VERSION, "recipes", error=SpecError)
    name, rules = table.get("name", ""), table["rules"]
    if not isinstance(name, str):
        raise SpecError(f"got {brief(name)} as name of a recipe, expected text")
    if not isinstance(rules, list):
        raise SpecError(f"got {brief(rules)} as rules of a recipe, expected a list of tables")
    return storable("the name of a recipe", name), tuple(_rule(i, rule) for i, rule in enumerate(rules))


def _table(what: str, data: object, keys: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise SpecError(f"got {brief(data)} as {what}, expected a table with the keys {', '.join(keys)}")
    for key in data:
        if key not in keys:
            raise SpecError(f"unknown key {brief(key)} in {what}{closest(key[:80], keys)} expected {', '.join(keys)}")
    return data


def _rule(i: int, data: object) -> Rule:
    fields = dict(_table(f"rule {i}", data, _KEYS))
    with reading(f"rule {i}", error=SpecError):
        return Rule(**{key: _field(key, value) for key, value in fields.items()})  # type: ignore[arg-type]


def _field(key: str, value: object) -> object:
    """Check the type of a field's value, and convert a table of spec fields to a QuantSpec."""
    if key in SPECS and isinstance(value, dict):
        with reading(f"{key} is not a spec", error=SpecError, keep=SpecError):
            return QuantSpec.from_dict(value)
    if key == "types" and isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    kind = bool if key == "skip" else str
    if not isinstance(value, kind):
        also = {"types": " or a list of texts", **dict.fromkeys(SPECS, " or a table of all fields")}.get(key, "")
        raise SpecError(f"got {brief(value)} as {key}, expected {'true or false' if kind is bool else 'text'}{also}")
    return value
