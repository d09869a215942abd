"""Noise of layers at the outputs, by option, and the mixed-precision assignments chosen from it.

``LayerNoise`` is one layer, ``Sensitivity`` all of them, ``Mix`` an option for every layer with its predicted and
measured SQNR, ``Cost`` what a measurement takes. The noise of an option is the power of the outputs' error relative to
their own power, ``sum (y - y')^2 / sum y^2`` over all samples, and of several outputs the mean, so that outputs of
large values do not hide the others.

As JSON, whose text is untrusted:

::

    {version, options, samples, storage, target, recipe: null or a recipe,
     layers: [{name, type, elements, nbytes_float, tied, options: {label: [noise, nbytes]}}]}
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isnan
from reprlib import repr as brief
from types import MappingProxyType
from typing import Any, Literal

from detent.checks import as_integer
from detent.codec import parse, reading, table
from detent.errors import FileFormatError, SpecError
from detent.metrics import sqnr_of
from detent.recipe import Recipe, exact_pattern
from detent.rule import Rule
from detent.sensitivity.knapsack import best_choice, hull_choices, smallest_total
from detent.tables import table_lines

__all__ = [
    "FLOAT",
    "OVERFLOW_NOISE",
    "STORAGES",
    "Cost",
    "LayerNoise",
    "Mix",
    "Sensitivity",
    "Storage",
    "counted",
    "from_json",
    "mixed_recipe",
    "short",
    "to_json",
]

Storage = Literal["onnx", "packed"]
STORAGES = ("onnx", "packed")

OVERFLOW_NOISE = 1e30  # what outputs that overflow are counted as


def counted(count: int, noun: str) -> str:
    """So many things, in words.

    >>> counted(1, "layer"), counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class LayerNoise:
    """What was measured of one layer.

    Invariants: ``noise`` and ``nbytes`` have the same keys, at least one; noise is in 0..1e30. Equal values have equal
    hashes, whatever the order of their options.

    Attributes:
        name: of the layer.
        type: its operator or class.
        elements: of its weights.
        nbytes_float: of its weights in float.
        noise: at the outputs, relative to their power, by option.
        nbytes: of its weights, by option.
        tied: other layers with the same weight, which are quantized together with it.

    Raises:
        SpecError: an invariant is broken.

    >>> layer = LayerNoise("fc", "MatMul", 100, 400, {"int4/axis0": 0.01, "int8/axis0": 0.0001}, {"int4/axis0": 90, \
"int8/axis0": 140})
    >>> layer.worst, layer.names
    (0.01, ('fc',))
    """

    name: str
    type: str
    elements: int
    nbytes_float: int
    noise: Mapping[str, float]
    nbytes: Mapping[str, int]
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.type, str):
            raise SpecError(f"name and type of a layer are text, got {self.name!r} and {self.type!r}")
        where = f"layer {self.name!r}"
        for what in ("elements", "nbytes_float"):
            as_integer(f"{what} of {where}", getattr(self, what), at_least=0)
        if not self.noise or set(self.noise) != set(self.nbytes):
            raise SpecError(
                f"{where} needs noise and nbytes of the same options, at least one, got {list(self.noise)} and "
                f"{list(self.nbytes)}"
            )
        for option, value in self.noise.items():
            if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= OVERFLOW_NOISE:
                raise SpecError(
                    f"the noise of {where} at {option!r} is a number in 0..{OVERFLOW_NOISE:g}, got {value!r}"
                )
            as_integer(f"nbytes of {where} at {option!r}", self.nbytes[option], at_least=0)
        object.__setattr__(self, "noise", MappingProxyType({key: float(value) for key, value in self.noise.items()}))
        object.__setattr__(self, "nbytes", MappingProxyType(dict(self.nbytes)))
        object.__setattr__(self, "tied", tuple(self.tied))

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.name, self.type, self.elements, self.nbytes_float, dict(self.noise), dict(self.nbytes), self.tied)
        return type(self), about

    def __hash__(self) -> int:
        options = frozenset((option, noise, self.nbytes[option]) for option, noise in self.noise.items())
        return hash((self.name, self.type, self.elements, self.nbytes_float, options, self.tied))

    @property
    def worst(self) -> float:
        """The largest noise of all options."""
        return max(self.noise.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The layer's name, and those of the layers that are tied to it."""
        return (self.name, *self.tied)


@dataclass(frozen=True)
class Cost:
    """What measuring is going to cost, announced before the long part.

    Attributes:
        layers: how many are measured.
        options: how many each may have.
        runs: how often the model runs over all samples: once per layer and option.
        samples: in each of these.
        seconds_estimate: of one run, timed, times all.

    >>> print(Cost(14, 3, 42, 32, 8.4))
    14 layers, 3 options: 42 runs over 32 samples, about 8 s
    """

    layers: int
    options: int
    runs: int
    samples: int
    seconds_estimate: float

    def __str__(self) -> str:
        seconds = self.seconds_estimate
        time = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s" if seconds >= 1 else "1 s or less"
        layers, options = counted(self.layers, "layer"), counted(self.options, "option")
        return f"{layers}, {options}: {counted(self.runs, 'run')} over {counted(self.samples, 'sample')}, about {time}"


FLOAT = "float"
WIDEST = 60  # characters of a name in tables


@dataclass(frozen=True)
class Mix:
    """The chosen option of every layer.

    Attributes:
        layers: what was measured of them.
        options: the option of each, by name; "float" leaves a layer as it is.
        recipe: one rule per layer, for ``qo.quantize`` and ``qt.prepare``.
        samples: how many ``qs.run_mix`` takes.
        target: what the noise was measured for.
        measured_sqnr_db: of the mix when it was run; None before.

    >>> from detent.sensitivity import LayerNoise, Sensitivity
    >>> layer = LayerNoise("fc", "MatMul", 100, 400, {"int4/axis0": 0.01}, {"int4/axis0": 90})
    >>> mix = Sensitivity((layer,), ("int4/axis0",)).choose(100)
    >>> mix.nbytes, mix.predicted_sqnr_db, mix.recipe
    (90, 20.0, dt.Recipe([dt.Rule('fc', weight='int4/axis0')], name='mix'))
    >>> print(mix.with_measured(19.5))
    layer  type    option      bytes  SQNR alone
    fc     MatMul  int4/axis0     90     20.0 dB
    1 layer in 90 bytes of weights; SQNR predicted 20.0 dB, measured 19.5 dB
    """

    layers: tuple[LayerNoise, ...]
    options: Mapping[str, str]
    recipe: Recipe
    samples: int = 32
    target: str = "onnxruntime"
    measured_sqnr_db: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if set(self.options) != {layer.name for layer in self.layers}:
            raise SpecError("a mix has one option for every layer, and for no other")
        for layer in self.layers:
            option = self.options[layer.name]
            if option != FLOAT and option not in layer.noise:
                raise SpecError(f"layer {layer.name!r} was not measured at {option!r}, only at {list(layer.noise)}")
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.layers, dict(self.options), self.recipe, self.samples, self.target, self.measured_sqnr_db)
        return type(self), about

    def __hash__(self) -> int:
        options = frozenset(self.options.items())
        return hash((self.layers, options, self.recipe, self.samples, self.target, self.measured_sqnr_db))

    @property
    def nbytes(self) -> int:
        """The bytes of all layers' weights."""
        return sum(self._nbytes(layer) for layer in self.layers)

    @property
    def noise(self) -> float:
        """The sum of the layers' noise powers."""
        return sum(self._noise(layer) for layer in self.layers)

    @property
    def predicted_sqnr_db(self) -> float:
        """What the sum of the layers' noise powers comes to."""
        return sqnr_of(self.noise)

    def with_measured(self, sqnr_db: float) -> "Mix":
        """The same with what was measured."""
        if isnan(sqnr_db):
            raise SpecError("the measured SQNR is NaN: did the outputs overflow?")
        return replace(self, measured_sqnr_db=float(sqnr_db))

    def _nbytes(self, layer: LayerNoise) -> int:
        option = self.options[layer.name]
        return layer.nbytes_float if option == FLOAT else layer.nbytes[option]

    def _noise(self, layer: LayerNoise) -> float:
        option = self.options[layer.name]
        return 0.0 if option == FLOAT else layer.noise[option]

    def __str__(self) -> str:
        rows = [("layer", "type", "option", "bytes", "SQNR alone")]
        for layer in self.layers:
            noise = self._noise(layer)
            alone = f"{sqnr_of(noise):.1f} dB" if noise else "-"
            rows.append((short(layer.name), layer.type, self.options[layer.name], f"{self._nbytes(layer):,}", alone))
        measured = "not run" if self.measured_sqnr_db is None else f"{self.measured_sqnr_db:.1f} dB"
        last = (
            f"{counted(len(self.layers), 'layer')} in {self.nbytes:,} bytes of weights; SQNR predicted "
            f"{self.predicted_sqnr_db:.1f} dB, measured {measured}"
        )
        return "\n".join([*table_lines(rows, right=(3, 4)), last])


def short(name: str) -> str:
    """A name that fits into a table: of a very long one its beginning and its end.

    >>> short("conv"), short("a" * 50 + "b" * 50)
    ('conv', 'aaaaaaaaaaaaaaaaaaaa...bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb')
    """
    return name if len(name) <= WIDEST else f"{name[:20]}...{name[23 - WIDEST :]}"


def mixed_recipe(
    layers: Iterable[LayerNoise], options: Mapping[str, str], given: Recipe | None, name: str = "mix"
) -> Recipe:
    """One rule per layer that is not left in float.

    Args:
        layers: all of them.
        options: the option of each.
        given: what the recipe that was measured gives each layer, one rule each; None where options are specs.
        name: of the recipe.

    >>> layer = LayerNoise("fc", "MatMul", 100, 400, {"int4/axis0": 0.01}, {"int4/axis0": 90})
    >>> mixed_recipe([layer], {"fc": "int4/axis0"}, None)
    dt.Recipe([dt.Rule('fc', weight='int4/axis0')], name='mix')
    """
    known = {rule.match: rule for rule in given.rules} if given is not None else {}
    rules = []
    for layer in layers:
        option = options[layer.name]
        if option == FLOAT:
            continue
        for each in layer.names:
            rules.append(Rule(exact_pattern(each), weight=option) if given is None else known[exact_pattern(each)])
    return Recipe(rules, name)


VERSION = 1
LAYERS_LIMIT, OPTIONS_LIMIT = 100_000, 64
INTEGER_LIMIT = 1 << 62
_KEYS = ("layers", "options", "recipe", "samples", "storage", "target")
_LAYER_KEYS = ("elements", "name", "nbytes_float", "options", "tied", "type")


def to_json(found: "Sensitivity") -> str:
    """A sensitivity as JSON.

    >>> from detent.sensitivity import LayerNoise, Sensitivity
    >>> to_json(Sensitivity((LayerNoise("a", "Conv", 1, 4, {"w8a8": 0.5}, {"w8a8": 5}),), ("w8a8",)))[:30]
    '{"version": 1, "options": ["w8'
    """
    layers = [
        {
            "name": layer.name,
            "type": layer.type,
            "elements": layer.elements,
            "nbytes_float": layer.nbytes_float,
            "tied": list(layer.tied),
            "options": {option: [noise, layer.nbytes[option]] for option, noise in layer.noise.items()},
        }
        for layer in found.layers
    ]
    about = {
        "version": VERSION,
        "options": list(found.options),
        "samples": found.samples,
        "storage": found.storage,
        "target": found.target,
        "recipe": None if found.recipe is None else json.loads(found.recipe.to_json()),
        "layers": layers,
    }
    return json.dumps(about, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """The fields of the sensitivity that a text describes.

    Raises:
        FileFormatError: too long, not JSON, other keys, types, sizes or numbers.

    >>> from_json("[]")
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: not the JSON of a sensitivity: a sensitivity is a JSON object, got []
    """
    with reading("not the JSON of a sensitivity"):
        return _fields(table(parse(text, "a sensitivity"), "a sensitivity", _KEYS, version=VERSION))


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    options = _texts("options", data["options"], OPTIONS_LIMIT)
    storage, target = (_text(key, data[key]) for key in ("storage", "target"))
    if storage not in STORAGES:
        raise FileFormatError(f"storage is one of {', '.join(STORAGES)}, got {brief(storage)}")
    layers = data["layers"]
    if not isinstance(layers, list) or not 0 < len(layers) <= LAYERS_LIMIT:
        raise FileFormatError(f"layers are a list of 1 to {LAYERS_LIMIT} tables, got {brief(layers)}")
    recipe = data["recipe"]
    if recipe is not None and not isinstance(recipe, dict):
        raise FileFormatError(f"recipe is null or the table of a recipe, got {brief(recipe)}")
    return {
        "layers": tuple(_layer(number, layer) for number, layer in enumerate(layers)),
        "options": options,
        "recipe": None if recipe is None else Recipe.from_json(json.dumps(recipe)),
        "samples": as_integer("samples", data["samples"], at_least=1, at_most=INTEGER_LIMIT, error=FileFormatError),
        "storage": storage,
        "target": target,
    }


def _layer(number: int, data: object) -> LayerNoise:
    where = f"layer {number}"
    entries = table(data, where, _LAYER_KEYS)
    measured = entries["options"]
    if not isinstance(measured, dict) or not 0 < len(measured) <= OPTIONS_LIMIT:
        raise FileFormatError(f"{where} needs a table of 1 to {OPTIONS_LIMIT} options, got {brief(measured)}")
    noise, nbytes = dict[str, float](), dict[str, int]()
    for option, pair in measured.items():
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in {float, int}:
            raise FileFormatError(f"{where} needs [noise, bytes] at {brief(option)}, got {brief(pair)}")
        noise[option] = _finite(f"the noise of {where}", pair[0])
        nbytes[option] = _size(f"the bytes of {where}", pair[1])
    return LayerNoise(
        _text(f"the name of {where}", entries["name"]),
        _text(f"the type of {where}", entries["type"]),
        _size(f"the elements of {where}", entries["elements"]),
        _size(f"nbytes_float of {where}", entries["nbytes_float"]),
        noise,
        nbytes,
        _texts(f"tied of {where}", entries["tied"], LAYERS_LIMIT),
    )


def _finite(what: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise FileFormatError(f"{what} is too large: {brief(value)}") from error


def _size(what: str, value: object) -> int:
    return as_integer(what, value, at_least=0, at_most=INTEGER_LIMIT, error=FileFormatError)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise FileFormatError(f"{what} is text, got {brief(value)}")
    return value


def _texts(what: str, value: object, limit: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise FileFormatError(f"{what} is a list of at most {limit} texts, got {brief(value)}")
    return tuple(_text(what, each) for each in value)


BYTES_LIMIT = 1 << 62  # bytes, which then can be added up in 64 bits


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing each layer alone does to a model's outputs; ``str`` is a table.

    Invariants: names are unique, ties included; every layer's options are among ``options``; the largest options of
    all layers together, float among them, take at most 2**62 bytes.

    Attributes:
        layers: in the model's order.
        options: all labels; a layer lacks those that its weight cannot have.
        recipe: what the recipe that was measured gives each layer; None where the options are specs of weights.
        samples: on how many the noise was measured.
        storage: how bytes are counted, "onnx" or "packed".
        target: what the noise was measured for.

    >>> quiet = LayerNoise("a", "Conv", 100, 400, {"int4/axis0": 0.001, "int8/axis0": 1e-5}, {"int4/axis0": 60, \
"int8/axis0": 110})
    >>> loud = LayerNoise("b", "Conv", 100, 400, {"int4/axis0": 0.1, "int8/axis0": 1e-3}, {"int4/axis0": 60, \
"int8/axis0": 110})
    >>> found = Sensitivity((quiet, loud), ("int4/axis0", "int8/axis0"))
    >>> [layer.name for layer in found.ranked()], found.nbytes_float
    (['b', 'a'], 800)
    >>> mix = found.choose(180)
    >>> dict(mix.options), mix.nbytes, round(mix.predicted_sqnr_db, 2)
    ({'a': 'int4/axis0', 'b': 'int8/axis0'}, 170, 26.99)
    >>> [nbytes for nbytes, _ in found.curve()]
    [120, 170, 220]
    >>> Sensitivity.from_json(found.to_json()) == found
    True
    >>> print(found)
    layer  type  elements  int4/axis0  int8/axis0
    b      Conv       100     10.0 dB     30.0 dB
    a      Conv       100     30.0 dB     50.0 dB
    all               200     10.0 dB     30.0 dB
    bytes             800         120         220
    2 layers on 32 samples: SQNR of the outputs when one layer alone is quantized; all: when their noise adds up
    """

    layers: tuple[LayerNoise, ...]
    options: tuple[str, ...]
    recipe: Recipe | None = None
    samples: int = 32
    storage: str = "onnx"
    target: str = "onnxruntime"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "options", tuple(self.options))
        as_integer("samples", self.samples, at_least=1)
        if not self.layers or not self.options:
            raise SpecError("a sensitivity has at least one layer and one option")
        names = [name for layer in self.layers for name in layer.names]
        if len(set(names)) != len(names) or len(set(self.options)) != len(self.options):
            raise SpecError("names of layers and labels of options are unique, ties included")
        for layer in self.layers:
            unknown = [option for option in layer.noise if option not in self.options]
            if unknown:
                raise SpecError(f"layer {layer.name!r} has the option {unknown[0]!r}, which is not listed")
        most = sum(max(layer.nbytes_float, *layer.nbytes.values()) for layer in self.layers)
        if most > BYTES_LIMIT:
            raise SpecError(f"the largest options of all layers take {most:,} bytes, expected at most {BYTES_LIMIT:,}")
        if self.recipe is not None:
            known = {rule.match for rule in self.recipe.rules}
            missing = [name for name in names if exact_pattern(name) not in known]
            if missing:
                raise SpecError(f"the recipe that was measured has no rule for layer {missing[0]!r}")

    @property
    def nbytes_float(self) -> int:
        """The bytes of all weights in float."""
        return sum(layer.nbytes_float for layer in self.layers)

    def ranked(self, option: str | None = None) -> tuple[LayerNoise, ...]:
        """The layers by the noise they cause, worst first.

        Args:
            option: the one to compare by; layers without it come last. None takes each layer's worst.
        """
        if option is not None and option not in self.options:
            raise SpecError(f"there is no option {option!r}, expected one of {', '.join(self.options)}")
        worst = {layer.name: layer.worst if option is None else layer.noise.get(option, -1.0) for layer in self.layers}
        return tuple(sorted(self.layers, key=lambda layer: -worst[layer.name]))

    def uniform(self, option: str) -> Mix:
        """The mix in which every layer has the same option.

        Raises:
            SpecError: a layer cannot have it.

        >>> Sensitivity((LayerNoise("a", "Conv", 1, 4, {"int4/axis0": 0.1}, {"int4/axis0": 5}),), ("int4/axis0",)) \
.uniform("int4/axis0").nbytes
        5
        """
        return self.mixed({layer.name: option for layer in self.layers}, f"uniform {option}")

    def choose(self, budget_nbytes: int, *, keep_float: bool = False) -> Mix:
        """The options of least noise whose bytes fit a budget; exact for the sum of the layers' noise powers.

        Args:
            budget_nbytes: of all weights that were measured; may be larger than any choice.
            keep_float: whether layers may also stay float.

        Raises:
            SpecError: no choice fits; the message names the smallest.
        """
        budget = as_integer("budget_nbytes", budget_nbytes, at_least=0)
        choices = [list(self._choices(layer, keep_float=keep_float)) for layer in self.layers]
        sizes = [[(nbytes, noise) for _, nbytes, noise in options] for options in choices]
        places = best_choice(sizes, budget)
        if places is None:
            raise SpecError(
                f"no choice fits {budget:,} bytes: the smallest takes {smallest_total(sizes):,}; give a larger budget, "
                "or measure smaller widths"
            )
        names = (layer.name for layer in self.layers)
        return self.mixed(
            {name: options[at][0] for name, options, at in zip(names, choices, places, strict=True)}, "mix"
        )

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Bytes and predicted SQNR of best choices, from the smallest to the largest.

        These are the corners of the lower convex hull of bytes and noise; between two of them ``choose`` may find
        choices that lie above the straight line.
        """
        sizes = [[(nbytes, noise) for _, nbytes, noise in self._choices(layer)] for layer in self.layers]
        return tuple((nbytes, sqnr_of(noise)) for nbytes, noise in hull_choices(sizes))

    @staticmethod
    def _choices(layer: LayerNoise, *, keep_float: bool = False) -> Iterator[tuple[str, int, float]]:
        for option, noise in layer.noise.items():
            yield option, layer.nbytes[option], noise
        if keep_float:
            yield FLOAT, layer.nbytes_float, 0.0

    def mixed(self, options: Mapping[str, str], name: str = "mix") -> Mix:
        """The mix with these options, by the names of layers.

        Raises:
            SpecError: a layer has no option, or one that was not measured.

        >>> layer = LayerNoise("a", "Conv", 1, 4, {"int4/axis0": 0.1}, {"int4/axis0": 5})
        >>> Sensitivity((layer,), ("int4/axis0",)).mixed({"a": "float"}).nbytes
        4
        """
        unknown = set(options) ^ {layer.name for layer in self.layers}
        if unknown:
            raise SpecError(f"a mix has one option for every layer that was measured: see {sorted(unknown)[0]!r}")
        for layer in self.layers:
            option = options[layer.name]
            if option != FLOAT and option not in layer.noise:
                raise SpecError(f"layer {layer.name!r} cannot have {option!r}, only {', '.join(layer.noise)}")
        recipe = mixed_recipe(self.layers, options, self.recipe, name)
        return Mix(self.layers, options, recipe, self.samples, self.target)

    def to_json(self) -> str:
        """The same as JSON, with a version.

        Raises:
            SpecError: the recipe holds a callable.
        """
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Sensitivity":
        """What ``to_json`` wrote; the text is not trusted.

        Raises:
            FileFormatError: too long, not JSON, other keys, types, sizes or numbers.

        >>> Sensitivity.from_json('{"version": 1}')
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: not the JSON of a sensitivity: a sensitivity needs exactly the keys layers, \
options, recipe, samples, storage, target, version: unexpected [], missing ['layers', 'options', 'recipe', 'samples', \
'storage', 'target']
        """
        fields = from_json(text)
        try:
            return cls(**fields)
        except SpecError as error:
            raise FileFormatError(f"not the JSON of a sensitivity: {error}") from error

    def __str__(self) -> str:
        rows = [("layer", "type", "elements", *self.options)]
        for layer in self.ranked():
            cells = [f"{sqnr_of(layer.noise[each]):.1f} dB" if each in layer.noise else "-" for each in self.options]
            rows.append((short(layer.name), layer.type, f"{layer.elements:,}", *cells))
        whole = [each for each in self.options if all(each in layer.noise for layer in self.layers)]
        sums = {each: sum(layer.noise[each] for layer in self.layers) for each in whole}
        sizes = {each: sum(layer.nbytes[each] for layer in self.layers) for each in whole}
        elements = sum(layer.elements for layer in self.layers)
        rows.append(
            ("all", "", f"{elements:,}", *(f"{sqnr_of(sums[o]):.1f} dB" if o in sums else "-" for o in self.options))
        )
        rows.append(
            ("bytes", "", f"{self.nbytes_float:,}", *(f"{sizes[o]:,}" if o in sizes else "-" for o in self.options))
        )
        last = (
            f"{counted(len(self.layers), 'layer')} on {counted(self.samples, 'sample')}: SQNR of the "
            "outputs when one layer alone is quantized; all: when their noise adds up"
        )
        return "\n".join([*table_lines(rows, right=range(2, len(self.options) + 3)), last])
