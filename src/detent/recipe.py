"""Recipe: ordered rules that assign specs to layers, for both frontends (PyTorch and ONNX).

Later rules override earlier ones, field by field: each field of a layer comes from the last matching rule that sets it.
A rule with ``skip=True`` keeps the layer in float, unless a later rule sets a weight, input or output spec. Layers that
no rule matches are kept in float. A rule that matches no layer is an error (``check_matched``); the message suggests
similar names.

If no rule sets a mode, ``qt.prepare`` chooses it by bit width. With 4 bits or fewer, scales are learned, from the range
of least error (``Learned(start="mse", zero_point="auto", rate=10)``). With more bits, activations have an EMA range
(``EMA(0.99)``), and weights the min-max range of their current values (``PerBatch``). In ``qo.quantize``, ``PerBatch``
means dynamic quantization: the file computes the range of each input when it runs. ``qo.quantize`` ignores other modes:
it fixes these scales when it writes the file.

Presets are ``w<bits>a<bits>[-g<group>]``, ``w8a8-dynamic`` and ``fp8``. Weights are signed and symmetric, per-channel
(axis 0) or per-group; inputs are unsigned and affine, per-tensor. Presets with ``a16`` are weight-only; below 8 bits
their default group size is 128. All other presets below 8 bits keep the first and the last layer of the model at 8 bits
(DoReFa-Net, Zhou et al. 2016). The name of a block format, such as ``q4_k``, is a weight-only preset, too.
"""

import glob
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from detent import recipe_files, storage
from detent.block_format import BlockFormat
from detent.codec import Leaf, storable
from detent.errors import FileFormatError, SpecError, closest
from detent.gguf import BLOCK_FORMATS
from detent.rule import PLACES, SETTINGS, SPECS, Arithmetic, Layer, ObserverLike, ObserverSpec, Rule, as_mode
from detent.scale_mode import PerBatch, ScaleMode
from detent.spec import QuantSpec
from detent.ste import Estimator, EstimatorLike
from detent.tables import counted, html_table, table_lines

__all__ = ["Decision", "PlanTotals", "Recipe", "get_recipe"]

PRESETS: MappingProxyType[str, str] = MappingProxyType(
    {
        "w8a8": "8-bit weights and inputs",
        "w8a8-dynamic": "8-bit weights; 8-bit inputs with the range of the current batch, without calibration",
        "w4a8": "4-bit weights, 8-bit inputs; the first and last layer at 8 bits",
        "w4a4": "4-bit weights and inputs; the first and last layer at 8 bits",
        "w2a8": "2-bit weights, 8-bit inputs; the first and last layer at 8 bits",
        "fp8": "float8_e4m3fn weights and inputs",
        "w8a16": "8-bit weights only",
        "w4a16": "4-bit weights only, in groups of 128 (w4a16-g128)",
        "w4a16-g32": "4-bit weights only, in groups of 32",
        "w4a16-g64": "4-bit weights only, in groups of 64",
        "w4a16-g128": "4-bit weights only, in groups of 128",
    }
)
FLOAT_BITS, FULL_BITS = 16, 8  # a16 means float activations; first and last layers have 8 bits
COMMON_GROUP = 128  # the group size of most published 4-bit models
_NAME = re.compile(r"w([2-8])a([2-8]|16)(?:-g([1-9][0-9]{0,8}))?", re.ASCII)
_FULL = ("int8/axis0", "uint8/tensor/affine")
DYNAMIC = "w8a8-dynamic"
_FP8 = ("float8_e4m3fn/axis0", "float8_e4m3fn/tensor")
_PresetRow = tuple[str, str, str | None]
EXCLUDED, NO_RULE = "excluded", "no rule matches"  # why a plan keeps a layer in float
MAX_NAMES_SHOWN = 3  # the largest number of suggestions in a message
MAX_REPR_CHARS = 100  # width of a notebook line; a longer repr has one line per rule
_WILD = re.compile(r"[*?]|\[.*?\]")
LayerLike = Layer | tuple[str, Iterable[str]] | tuple[str, Iterable[str], bool, bool]


@dataclass(frozen=True)
class Decision:
    """Merged settings of one layer, and the indices of the rules that matched it."""

    weight: QuantSpec | BlockFormat | None = None
    input: QuantSpec | None = None
    output: QuantSpec | None = None
    mode: ScaleMode | None = None
    ste: Estimator | None = None
    observer: ObserverSpec | None = None
    arithmetic: Arithmetic | None = None
    skip: bool = False
    rules: tuple[int, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        """Whether the input is quantized dynamically: with the range of the current batch."""
        return self.input is not None and self.mode == PerBatch()


@dataclass(frozen=True, init=False, repr=False)
class Recipe:
    """Ordered rules and a name; later rules override earlier ones, field by field.

    >>> import detent as dt
    >>> recipe = dt.Recipe([dt.Rule(types="Linear", weight="int4/axis0"), dt.Rule("head*", skip=True)])
    >>> recipe.resolve("body.0", ["Linear"]).weight == dt.QuantSpec.parse("int4/axis0")
    True
    """

    rules: tuple[Rule, ...]
    name: str

    def __init__(self, rules: Iterable[Rule], name: str = "") -> None:
        if isinstance(rules, Rule | str) or not isinstance(rules, Iterable):
            raise SpecError(
                f"got {rules!r} as rules of a recipe, expected a list of rules: use [dt.Rule(...)], "
                "dt.Recipe.preset(name) or dt.Recipe.load(path)"
            )
        object.__setattr__(self, "rules", tuple(rules))
        for i, rule in enumerate(self.rules):
            if not isinstance(rule, Rule):
                raise SpecError(f"got {rule!r} as rule {i} of a recipe, expected a dt.Rule")
        if not isinstance(name, str):
            raise SpecError(f"got {name!r} as name of a recipe, expected text")
        object.__setattr__(self, "name", storable("the name of a recipe", name))

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        mode: ScaleMode | str | None = None,
        ste: EstimatorLike | str = None,
        observer: ObserverLike | None = None,
    ) -> "Recipe":
        """Make a preset recipe; ``mode``, ``ste`` and ``observer`` are set in every rule.

        Presets are ``fp8`` and ``w<bits>a<bits>[-g<group>]``, with 2 to 8 bits for weights and for activations;
        ``a16`` leaves activations in float (weight-only). Weight-only presets below 8 bits have group size 128 by
        default. In other presets below 8 bits, the first and the last layer have 8 bits. ``w8a8-dynamic`` is ``w8a8``
        with the mode ``PerBatch``. The name of a block format, such as ``q4_k``, is a weight-only preset.

        Raises:
            SpecError: unknown preset; the message suggests the closest preset. Or ``w8a8-dynamic`` with another mode.

        >>> print(Recipe.preset("w4a8", mode="learned"))
        Recipe 'w4a8', 3 rules
           match   weight      input                mode
        0  *       int4/axis0  uint8/tensor/affine  learned
        1  @first  int8/axis0  uint8/tensor/affine  learned
        2  @last   int8/axis0  uint8/tensor/affine  learned
        """
        full, rows = _rows(name)
        if full == DYNAMIC:
            mode = _dynamic_mode(mode)
        settings = {"mode": mode, "ste": ste, "observer": observer}
        rules = [Rule(match, weight=weight, input=input_spec, **settings) for match, weight, input_spec in rows]  # type: ignore[arg-type]  # as annotated above
        return cls(rules, full)

    def resolve(self, name: str, types: Iterable[str], *, first: bool = False, last: bool = False) -> Decision:
        """Merge the settings of all rules that match a layer.

        Args:
            name: full dotted name of the layer.
            types: names of the layer's class and its base classes, or the name of its operation.
            first: whether the layer is the first one with weights.
            last: whether the layer is the last one with weights.

        >>> Recipe.preset("w4a8").resolve("conv1", ["Conv2d"], first=True).weight.bits
        8
        """
        layer = _as_layer((name, types, first, last))
        matched = tuple(i for i, rule in enumerate(self.rules) if rule.matches(layer))
        settings: dict[str, object] = {}
        skip = False
        for rule in (self.rules[i] for i in matched):
            own = {key: getattr(rule, key) for key in SETTINGS if getattr(rule, key) is not None}
            settings |= own
            skip = rule.skip or (skip and own.keys().isdisjoint(SPECS))
        return Decision(**settings, skip=skip, rules=matched)  # type: ignore[arg-type]  # the fields of rules

    def check_matched(self, layers: Iterable[LayerLike]) -> None:
        """Raise if a rule matches none of the layers; each layer is a tuple ``(name, types, first, last)``.

        Raises:
            SpecError: some rules match no layer. For each such rule, the message says whether the pattern or the types
                did not match, and suggests the closest names.

        >>> Recipe([Rule("haed*", skip=True)]).check_matched([("body.0", ["Linear"]), ("head", ["Linear"])])
        Traceback (most recent call last):
        ...
        detent.errors.SpecError: 1 of 1 rules matches none of 2 layers:
          rule 0, dt.Rule('haed*', skip=True): no name matches 'haed*': did you mean 'head'?
        """
        checked = [_as_layer(layer) for layer in layers]
        unmatched = [i for i, rule in enumerate(self.rules) if not any(map(rule.matches, checked))]
        if unmatched:
            rules = f"{len(unmatched)} of {len(self.rules)} rules {'matches' if len(unmatched) == 1 else 'match'}"
            lines = [f"  rule {i}, {self.rules[i]!r}: {explain_unmatched(self.rules[i], checked)}" for i in unmatched]
            raise SpecError("\n".join([f"{rules} none of {counted(len(checked), 'layer')}:", *lines]))

    def to_json(self) -> str:
        """Return the recipe as JSON text, with a version number.

        Raises:
            SpecError: a rule has a callable as estimator.
        """
        return recipe_files.to_json(self.name, self.rules)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """Read the JSON of ``to_json``.

        Raises:
            SpecError: not JSON, unsupported version, unknown keys, or invalid values.
        """
        name, rules = recipe_files.from_json(text)
        return cls(rules, name)

    def to_toml(self) -> str:
        """Return the recipe as TOML text, with a version number.

        Raises:
            SpecError: a rule has a callable as estimator.

        >>> print(Recipe.preset("w8a16", observer="mse").to_toml())
        version = 1
        name = "w8a16"
        <BLANKLINE>
        [[rules]]
        match = "*"
        weight = "int8/axis0"
        observer = "mse"
        <BLANKLINE>
        """
        return recipe_files.to_toml(self.name, self.rules)

    @classmethod
    def from_toml(cls, text: str) -> "Recipe":
        r"""Read the TOML of ``to_toml``, or TOML written by hand.

        Raises:
            SpecError: not TOML, unsupported version, unknown keys, or invalid values.

        >>> Recipe.from_toml('version = 1\nrules = [{ types = "Linear", weight = "int4/group32" }]')
        dt.Recipe([dt.Rule(types=('Linear',), weight='int4/group32')])
        """
        name, rules = recipe_files.from_toml(text)
        return cls(rules, name)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Recipe":
        """Read a recipe from a .toml or .json file of at most 1 MiB.

        Raises:
            FileFormatError: the file does not exist, is too large or not UTF-8, or its suffix is not .toml or .json.
            SpecError: the text is not a recipe.

        >>> Recipe.load("w8a8.toml")
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: w8a8.toml: no such file or directory; expected a recipe in a .toml or .json \
file, or a preset: w8a8, w8a8-dynamic, w4a8, w4a4, w2a8, fp8, w8a16, w4a16, w4a16-g32, w4a16-g64, w4a16-g128
        """
        try:
            name, rules = recipe_files.read(Path(path))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise FileFormatError(
                f"{path}: {why}; expected a recipe in a .toml or .json file, or a preset: {', '.join(PRESETS)}"
            ) from error
        return cls(rules, name)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a .toml or .json file atomically: readers see the old file or the new one.

        Raises:
            FileFormatError: the suffix is not .toml or .json, or the recipe is larger than ``load`` accepts.
            SpecError: a rule has a callable as estimator.

        >>> Recipe([]).save("recipe.yaml")
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: got 'recipe.yaml', expected a recipe with the suffix .toml or .json
        """
        storage.write_atomic(path, recipe_files.to_bytes(Path(path), self.name, self.rules))

    def diff(self, other: "Recipe | str | PathLike[str]") -> str:
        """Return the changes from this recipe to the other, with one line per rule, or "" if the recipes are equal.

        >>> print(Recipe.preset("w4a8").diff("w2a8"))
        - name 'w4a8'
        + name 'w2a8'
        - dt.Rule(weight='int4/axis0', input='uint8/tensor/affine')
        + dt.Rule(weight='int2/axis0', input='uint8/tensor/affine')
          dt.Rule('@first', weight='int8/axis0', input='uint8/tensor/affine')
          dt.Rule('@last', weight='int8/axis0', input='uint8/tensor/affine')
        """
        theirs = get_recipe(other)
        if self == theirs:
            return ""
        lines = [] if self.name == theirs.name else [f"- name {self.name!r}", f"+ name {theirs.name!r}"]
        for kind, a, b, c, d in SequenceMatcher(None, self.rules, theirs.rules, autojunk=False).get_opcodes():
            if kind == "equal":
                lines += [f"  {rule!r}" for rule in self.rules[a:b]]
            else:
                lines += [f"- {rule!r}" for rule in self.rules[a:b]] + [f"+ {rule!r}" for rule in theirs.rules[c:d]]
        return "\n".join(lines)

    def __repr__(self) -> str:
        if self._is_preset:
            return f"dt.Recipe.preset({self.name!r})"
        name = f", name={self.name!r}" if self.name else ""
        line = f"dt.Recipe([{', '.join(map(repr, self.rules))}]{name})"
        if len(line) <= MAX_REPR_CHARS or len(self.rules) == 1:
            return line
        return "\n".join(["dt.Recipe([", *(f"    {rule!r}," for rule in self.rules), f"]{name})"])

    @property
    def _is_preset(self) -> bool:
        try:
            return Recipe.preset(self.name) == self
        except SpecError:
            return False

    def __str__(self) -> str:
        """Format a table with one row per rule and one column per field that some rule sets."""
        return "\n".join([self._title, *(table_lines(self._rows) if self.rules else [])])

    def _repr_html_(self) -> str:
        return html_table(self._rows, notes=[self._title])

    @property
    def _title(self) -> str:
        count = counted(len(self.rules), "rule")
        return f"Recipe {self.name!r}, {count}" if self.name else f"Recipe, {count}"

    @property
    def _rows(self) -> list[list[str]]:
        """The rows of the table, the header first."""
        rows = [{"": str(i), **_cells(rule)} for i, rule in enumerate(self.rules)]
        used = [key for key in ("", "match", "types", *SETTINGS, "skip") if any(key in row for row in rows)]
        return [used, *([row.get(key, "-") for key in used] for row in rows)]


# Writes and reads a recipe as part of a JSON document.
RECIPE_LEAF = Leaf(lambda recipe: json.loads(recipe.to_json()), lambda value: Recipe.from_json(json.dumps(value)))


def _cells(rule: Rule) -> dict[str, str]:
    texts = {"match": rule.match, "types": ", ".join(rule.types), **rule.texts(), "skip": "yes" if rule.skip else ""}
    return {key: text if text.isprintable() else ascii(text)[1:-1] for key, text in texts.items() if text}


def _as_layer(value: LayerLike) -> Layer:
    try:
        name, types, *places = value
        first, last = map(bool, places or (False, False))
        layer = Layer(name, (types,) if isinstance(types, str) else tuple(types), first, last)
    except (TypeError, ValueError) as error:
        raise SpecError(f"got {value!r} as layer, expected a tuple (name, types, first, last)") from error
    if not isinstance(name, str) or not all(isinstance(each, str) for each in layer.types):
        raise SpecError(f"got layer name {name!r} and types {types!r}, expected text")
    return layer


def get_recipe(value: Recipe | str | PathLike[str]) -> Recipe:
    """Make the preset of this name, or read the .toml or .json file at this path; return a Recipe unchanged."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, PathLike) or (isinstance(value, str) and value.lower().endswith(recipe_files.SUFFIXES)):
        return Recipe.load(value)
    if isinstance(value, str):
        return Recipe.preset(value)
    raise SpecError(
        f"got {value!r} as recipe, expected a dt.Recipe, a preset such as 'w8a8' or the path of a .toml or .json file"
    )


def _dynamic_mode(mode: ScaleMode | str | None) -> ScaleMode:
    """Return the mode of dynamic quantization; reject any other mode."""
    dynamic = PerBatch()
    if mode is not None and as_mode(mode) != dynamic:
        raise SpecError(f"got mode={mode!r} for preset {DYNAMIC!r}, whose mode is PerBatch: omit mode=, or use 'w8a8'")
    return dynamic


def _rows(name: str) -> tuple[str, list[_PresetRow]]:
    """Return a preset's full name and its rules, each as (pattern, weight spec, input spec)."""
    if name == "fp8":
        return name, [("*", *_FP8)]
    if name == DYNAMIC:
        return name, [("*", *_FULL)]
    if isinstance(name, str) and name in BLOCK_FORMATS:
        return name, [("*", name, None)]
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        hint = closest(str(name).lower(), [*PRESETS, *BLOCK_FORMATS])
        raise SpecError(
            f"unknown preset {name!r}{hint} expected one of {', '.join(PRESETS)}, w<bits>a<bits>[-g<group>] with 2 "
            "to 8 bits for weights and for activations (a16 leaves activations in float), or a block format: "
            f"{', '.join(BLOCK_FORMATS)}"
        )
    weight_bits, input_bits = int(parts[1]), int(parts[2])
    group = int(parts[3]) if parts[3] else None
    if input_bits == FLOAT_BITS and weight_bits < FULL_BITS and group is None:
        group = COMMON_GROUP
    weight = f"int{weight_bits}/axis0" if group is None else f"int{weight_bits}/group{group}"
    if input_bits == FLOAT_BITS:
        if weight_bits < FULL_BITS:  # a zero point per group lowers the error more than its bits cost
            weight = f"uint{weight_bits}/group{group}/affine"
        full = f"w{weight_bits}a16" if group is None else f"w{weight_bits}a16-g{group}"
        return full, [("*", weight, None)]
    rows: list[_PresetRow] = [("*", weight, f"uint{input_bits}/tensor/affine")]
    if min(weight_bits, input_bits) < FULL_BITS:
        rows += [("@first", *_FULL), ("@last", *_FULL)]
    return name, rows


def explain_unmatched(rule: Rule, layers: list[Layer]) -> str:
    """Explain why the rule matches none of the layers, with the closest names or types."""
    named = [layer for layer in layers if rule.matches_name(layer)]
    if named:
        types = {kind for layer in named for kind in layer.types}
        count = counted(len(named), "layer")
        return (
            f"{rule.match!r} matches {count}, but no layer of type {' or '.join(rule.types)}{_meant(rule.types, types)}"
        )
    message = _no_name(rule, layers)
    if not layers or any(map(rule.matches_types, layers)):
        return message
    types = {kind for layer in layers for kind in layer.types}
    return f"{message}; also, no layer has the type {' or '.join(rule.types)}{_meant(rule.types, types)}"


def _no_name(rule: Rule, layers: list[Layer]) -> str:
    if rule.match in PLACES:
        return f"there is no {rule.match[1:]} layer with weights"
    message = f"no name matches {rule.match!r}"
    wider = _wider(rule, layers)
    if wider:
        return f"{message}: did you mean {wider!r}?"
    name = _WILD.sub("", rule.match.removeprefix("re:"))
    return message + _meant([name], {layer.name for layer in layers})


def _wider(rule: Rule, layers: list[Layer]) -> str | None:
    """Return the rule's glob with a ``*`` added before, after or around it, if such a glob matches a layer."""
    if rule.match.startswith("re:"):
        return None
    for match in (f"*.{rule.match}", f"{rule.match}.*", f"*{rule.match}", f"{rule.match}*", f"*{rule.match}*"):
        try:
            if any(map(replace(rule, match=match).matches, layers)):
                return match
        except SpecError:
            continue
    return None


def _meant(given: Iterable[str], existing: Iterable[str]) -> str:
    """Format ``: did you mean 'a' or 'b'?`` from close matches; without close matches, list some of ``existing``."""
    names = sorted(existing)
    by_lower = {name.lower(): name for name in names}
    close = dict.fromkeys(
        by_lower[match]
        for each in given
        for match in get_close_matches(each.lower(), by_lower, n=MAX_NAMES_SHOWN, cutoff=0.5)
    )
    if close:
        return f": did you mean {' or '.join(map(repr, list(close)[:MAX_NAMES_SHOWN]))}?"
    some = ", ".join(map(repr, names[:MAX_NAMES_SHOWN]))
    return f": the model has {some}{', ...' if len(names) > MAX_NAMES_SHOWN else ''}" if names else ""


def exact_pattern(name: str) -> str:
    """Return a pattern that matches only this name."""
    if not name:
        return "re:"
    escaped = glob.escape(name)
    if escaped.startswith("@"):
        return f"[@]{escaped[1:]}"
    return f"[r]{escaped[1:]}" if escaped.startswith("re:") else escaped


def skip_flag(name: str) -> str:
    """Return the ``--skip`` option that keeps only this layer in float, quoted for a shell."""
    return f"--skip {shlex.quote(exact_pattern(name))}"


def skipped_names(names: Sequence[str], patterns: str | Iterable[str], hint: str) -> set[str]:
    """Return the layer names that match one of the patterns; a pattern is a name or a glob.

    ``hint`` is the part of the error message that says where the user finds the layer names.
    """
    skipped: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matched = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matched:
            raise SpecError(f"skip={pattern!r} matches no layer{closest(pattern, names)} {hint} the layer names")
        skipped |= matched
    return skipped


class PlanLine(Protocol):
    @property
    def is_quantized(self) -> bool: ...

    @property
    def nbytes_before(self) -> int: ...

    @property
    def nbytes_after(self) -> int: ...


Line = TypeVar("Line", bound=PlanLine)


class PlanTotals(Generic[Line]):
    """Base class of the frontends' plans: a recipe, one entry per layer, and totals over all layers."""

    recipe: Recipe
    layers: tuple[Line, ...]

    @property
    def quantized(self) -> tuple[Line, ...]:
        """The layers that are quantized."""
        return tuple(layer for layer in self.layers if layer.is_quantized)

    @property
    def nbytes_before(self) -> int:
        """The size of all weights in the plan before quantization, in bytes."""
        return sum(layer.nbytes_before for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        """The size of all weights in the plan after quantization, in bytes; scales and zero points are included."""
        return sum(layer.nbytes_after for layer in self.layers)

    def _summary(self, target: str = "") -> str:
        """Format the totals over all layers, for the last line of a table."""
        recipe = self.recipe
        name = f"recipe {recipe.name!r}" if recipe.name else f"a recipe of {counted(len(recipe.rules), 'rule')}"
        return (
            f"{len(self.quantized)} of {len(self.layers)} layers quantized by {name}{target}; weights "
            f"{self.nbytes_before:,} -> {self.nbytes_after:,} bytes"
        )
