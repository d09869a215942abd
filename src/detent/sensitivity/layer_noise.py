"""Noise of layers at the outputs, by option, and the mixed-precision assignments chosen from it.

``LayerNoise`` is one layer, ``Sensitivity`` all of them, ``Mix`` an option for every layer with its predicted and
measured SQNR, ``Cost`` what a measurement takes. The noise of an option is the power of the outputs' error relative to
their own power, ``sum (y - y')^2 / sum y^2`` over all samples; of several outputs it is the mean, so that outputs of
large values do not hide the others.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from types import MappingProxyType
from typing import Any, Literal

from detent.checks import as_integer
from detent.codec import Leaves, check_version, decode, encode, parse, reading
from detent.errors import FileFormatError, SpecError
from detent.metrics import sqnr_of
from detent.recipe import RECIPE_LEAF, Recipe, exact_pattern
from detent.rule import Rule
from detent.sensitivity.knapsack import best_choice, hull_choices, smallest_total
from detent.tables import short_name, table_lines

__all__ = ["FLOAT", "OVERFLOW_NOISE", "STORAGES", "Cost", "LayerNoise", "Mix", "Sensitivity", "Storage"]

Storage = Literal["onnx", "packed"]
STORAGES = ("onnx", "packed")
FLOAT = "float"  # the option of a layer that is kept in float
OVERFLOW_NOISE = 1e30  # noise of outputs that overflow
BYTES_LIMIT = 1 << 62  # sums of bytes fit into 64 bits
VERSION = 1
OPTIONS_LIMIT = 64  # of a file, in which each layer's options are looked up


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class LayerNoise:
    """The measured noise of one layer, relative to the power of the outputs, and its size in bytes, by option.

    Invariants: ``noise`` and ``nbytes`` have the same keys, at least one; noise is in 0..1e30. Equal values have equal
    hashes, whatever the order of their options.

    Attributes:
        elements, nbytes_float: size of its weights in float.
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

    def __reduce__(self) -> tuple[Any, ...]:  # mapping proxies cannot be pickled
        noise, nbytes = dict(self.noise), dict(self.nbytes)
        return type(self), (self.name, self.type, self.elements, self.nbytes_float, noise, nbytes, self.tied)

    def __hash__(self) -> int:
        options = frozenset((option, noise, self.nbytes[option]) for option, noise in self.noise.items())
        return hash((self.name, self.type, self.elements, self.nbytes_float, options, self.tied))

    @property
    def worst(self) -> float:
        """The largest noise of all options."""
        return max(self.noise.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layer and of those tied to it."""
        return (self.name, *self.tied)


def _noise(layer: LayerNoise, option: str) -> float:
    return 0.0 if option == FLOAT else layer.noise[option]


def _nbytes(layer: LayerNoise, option: str) -> int:
    return layer.nbytes_float if option == FLOAT else layer.nbytes[option]


@dataclass(frozen=True)
class Cost:
    """The cost of a measurement, announced before the long part.

    Attributes:
        layers, options: how many are measured, and how many each may have.
        runs: how often the model runs over all samples: once per layer and option.
        seconds_estimate: the time of one run, times all runs.

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
        layers, options = _counted(self.layers, "layer"), _counted(self.options, "option")
        return (
            f"{layers}, {options}: {_counted(self.runs, 'run')} over {_counted(self.samples, 'sample')}, about {time}"
        )


@dataclass(frozen=True)
class Mix:
    """A mixed-precision assignment: the chosen option of every layer.

    Attributes:
        options: the option of each layer, by name; "float" keeps it in float.
        recipe: one rule per layer, for ``qo.quantize`` and ``qt.prepare``.
        samples, target: what ``qs.run_mix`` measures on and for.
        measured_sqnr_db: the SQNR of the mix when it was run; None before.

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
        _check_options(self.layers, self.options)
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __reduce__(self) -> tuple[Any, ...]:  # mapping proxies cannot be pickled
        options = dict(self.options)
        return type(self), (self.layers, options, self.recipe, self.samples, self.target, self.measured_sqnr_db)

    def __hash__(self) -> int:
        options = frozenset(self.options.items())
        return hash((self.layers, options, self.recipe, self.samples, self.target, self.measured_sqnr_db))

    @property
    def nbytes(self) -> int:
        """The bytes of all layers' weights."""
        return sum(_nbytes(layer, self.options[layer.name]) for layer in self.layers)

    @property
    def noise(self) -> float:
        """The sum of the layers' noise powers."""
        return sum(_noise(layer, self.options[layer.name]) for layer in self.layers)

    @property
    def predicted_sqnr_db(self) -> float:
        """The SQNR if the layers' noise powers add up."""
        return sqnr_of(self.noise)

    def with_measured(self, sqnr_db: float) -> "Mix":
        """The mix with a measured SQNR."""
        if isnan(sqnr_db):
            raise SpecError("the measured SQNR is NaN: did the outputs overflow?")
        return replace(self, measured_sqnr_db=float(sqnr_db))

    def __str__(self) -> str:
        rows = [("layer", "type", "option", "bytes", "SQNR alone")]
        for layer in self.layers:
            option = self.options[layer.name]
            noise = _noise(layer, option)
            alone = f"{sqnr_of(noise):.1f} dB" if noise else "-"
            rows.append((short_name(layer.name), layer.type, option, f"{_nbytes(layer, option):,}", alone))
        measured = "not run" if self.measured_sqnr_db is None else f"{self.measured_sqnr_db:.1f} dB"
        last = (
            f"{_counted(len(self.layers), 'layer')} in {self.nbytes:,} bytes of weights; SQNR predicted "
            f"{self.predicted_sqnr_db:.1f} dB, measured {measured}"
        )
        return "\n".join([*table_lines(rows, right=(3, 4)), last])


def _check_options(layers: Sequence[LayerNoise], options: Mapping[str, str]) -> None:
    unknown = set(options) ^ {layer.name for layer in layers}
    if unknown:
        raise SpecError(f"a mix has one option for every layer that was measured: see {sorted(unknown)[0]!r}")
    for layer in layers:
        option = options[layer.name]
        if option != FLOAT and option not in layer.noise:
            raise SpecError(f"layer {layer.name!r} cannot have {option!r}, only {', '.join(layer.noise)}")


@dataclass(frozen=True)
class Sensitivity:
    """The noise at a model's outputs when each layer alone is quantized; ``str`` is a table.

    Invariants: names are unique, ties included; every layer's options are among ``options``; the largest options of
    all layers together, float among them, take at most 2**62 bytes.

    Attributes:
        layers: in the model's order.
        options: all labels; a layer lacks those that its weight cannot have.
        recipe: one rule per layer of the recipe that was measured; None if the options are specs of weights.
        samples: on how many the noise was measured.
        storage: how bytes are counted, "onnx" or "packed".
        target: what the noise was measured for.

    >>> quiet = LayerNoise("a", "Conv", 100, 400, {"int4/axis0": 0.001, "int8/axis0": 1e-5}, {"int4/axis0": 60, \
"int8/axis0": 110})
    >>> loud = LayerNoise("b", "Conv", 100, 400, {"int4/axis0": 0.1, "int8/axis0": 1e-3}, {"int4/axis0": 60, \
"int8/axis0": 110})
    >>> sensitivity = Sensitivity((quiet, loud), ("int4/axis0", "int8/axis0"))
    >>> mix = sensitivity.choose(180)
    >>> dict(mix.options), mix.nbytes, round(mix.predicted_sqnr_db, 2)
    ({'a': 'int4/axis0', 'b': 'int8/axis0'}, 170, 26.99)
    >>> [nbytes for nbytes, _ in sensitivity.curve()]
    [120, 170, 220]
    >>> print(sensitivity)
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
    storage: Storage = "onnx"
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
        largest = sum(max(layer.nbytes_float, *layer.nbytes.values()) for layer in self.layers)
        if largest > BYTES_LIMIT:
            raise SpecError(
                f"the largest options of all layers take {largest:,} bytes, expected at most {BYTES_LIMIT:,}"
            )
        if self.recipe is not None:
            patterns = {rule.match for rule in self.recipe.rules}
            missing = [name for name in names if exact_pattern(name) not in patterns]
            if missing:
                raise SpecError(f"the recipe that was measured has no rule for layer {missing[0]!r}")

    @property
    def nbytes_float(self) -> int:
        """The bytes of all weights in float."""
        return sum(layer.nbytes_float for layer in self.layers)

    def ranked(self, option: str | None = None) -> tuple[LayerNoise, ...]:
        """The layers by their noise at an option, or at each layer's worst, largest first; those without it last."""
        if option is not None and option not in self.options:
            raise SpecError(f"there is no option {option!r}, expected one of {', '.join(self.options)}")
        worst = {layer.name: layer.worst if option is None else layer.noise.get(option, -1.0) for layer in self.layers}
        return tuple(sorted(self.layers, key=lambda layer: -worst[layer.name]))

    def uniform(self, option: str) -> Mix:
        """The mix in which every layer has the same option; SpecError if a layer cannot have it."""
        return self.mixed({layer.name: option for layer in self.layers}, f"uniform {option}")

    def choose(self, budget_nbytes: int, *, keep_float: bool = False) -> Mix:
        """The options of least noise whose bytes fit a budget; exact for the sum of the layers' noise powers.

        Args:
            budget_nbytes: for all weights that were measured; may be larger than any choice.
            keep_float: whether layers may also be kept in float.

        Raises:
            SpecError: no choice fits; the message names the smallest.
        """
        budget = as_integer("budget_nbytes", budget_nbytes, at_least=0)
        extra = (FLOAT,) if keep_float else ()
        choices = [(*layer.noise, *extra) for layer in self.layers]
        sizes = [
            [(_nbytes(layer, option), _noise(layer, option)) for option in options]
            for layer, options in zip(self.layers, choices, strict=True)
        ]
        places = best_choice(sizes, budget)
        if places is None:
            raise SpecError(
                f"no choice fits {budget:,} bytes: the smallest takes {smallest_total(sizes):,}; give a larger budget, "
                "or measure smaller widths"
            )
        chosen = zip(self.layers, choices, places, strict=True)
        return self.mixed({layer.name: options[place] for layer, options, place in chosen})

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Bytes and predicted SQNR of best choices, from the smallest to the largest.

        These are the corners of the lower convex hull of bytes and noise; between two of them ``choose`` may find
        choices that lie above the straight line.
        """
        sizes = [[(layer.nbytes[option], noise) for option, noise in layer.noise.items()] for layer in self.layers]
        return tuple((nbytes, sqnr_of(noise)) for nbytes, noise in hull_choices(sizes))

    def mixed(self, options: Mapping[str, str], name: str = "mix") -> Mix:
        """The mix with these options, by the names of layers.

        Raises:
            SpecError: a layer has no option, or one that was not measured.
        """
        _check_options(self.layers, options)
        measured = {rule.match: rule for rule in self.recipe.rules} if self.recipe is not None else {}
        rules = []
        for layer in self.layers:
            if options[layer.name] != FLOAT:
                patterns = [exact_pattern(each) for each in layer.names]
                rules += [measured.get(match) or Rule(match, weight=options[layer.name]) for match in patterns]
        return Mix(self.layers, options, Recipe(rules, name), self.samples, self.target)

    def to_json(self) -> str:
        """The sensitivity as JSON, with a version.

        Raises:
            SpecError: the recipe holds a callable.
        """
        layers = [
            _LayerFields(
                layer.name,
                layer.type,
                layer.elements,
                layer.nbytes_float,
                layer.tied,
                {option: (noise, layer.nbytes[option]) for option, noise in layer.noise.items()},
            )
            for layer in self.layers
        ]
        fields = _Fields(self.options, self.samples, self.storage, self.target, self.recipe, tuple(layers))
        return json.dumps({"version": VERSION, **encode(fields, _LEAVES)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Sensitivity":
        """Read what ``to_json`` wrote; the text is not trusted.

        Raises:
            FileFormatError: too long, not JSON, unexpected keys, types, sizes or numbers.

        >>> Sensitivity.from_json('{"version": 2}')
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: not the JSON of a sensitivity: this detent reads version 1 of a sensitivity, \
got 2: update detent
        """
        with reading("not the JSON of a sensitivity"):
            data = parse(text, "a sensitivity")
            check_version(data.pop("version", None), VERSION, "a sensitivity")
            fields = decode(_Fields, data, "sensitivity", _LEAVES)
            if len(fields.options) > OPTIONS_LIMIT:
                raise FileFormatError(f"it has {len(fields.options)} options, at most {OPTIONS_LIMIT} are read")
            layers = tuple(each.layer() for each in fields.layers)
            return cls(layers, fields.options, fields.recipe, fields.samples, fields.storage, fields.target)

    def __str__(self) -> str:
        rows = [("layer", "type", "elements", *self.options)]
        for layer in self.ranked():
            cells = (f"{sqnr_of(layer.noise[each]):.1f} dB" if each in layer.noise else "-" for each in self.options)
            rows.append((short_name(layer.name), layer.type, f"{layer.elements:,}", *cells))
        shared = [each for each in self.options if all(each in layer.noise for layer in self.layers)]
        sums = {each: f"{sqnr_of(sum(layer.noise[each] for layer in self.layers)):.1f} dB" for each in shared}
        sizes = {each: f"{sum(layer.nbytes[each] for layer in self.layers):,}" for each in shared}
        elements = sum(layer.elements for layer in self.layers)
        rows.append(("all", "", f"{elements:,}", *(sums.get(each, "-") for each in self.options)))
        rows.append(("bytes", "", f"{self.nbytes_float:,}", *(sizes.get(each, "-") for each in self.options)))
        last = (
            f"{_counted(len(self.layers), 'layer')} on {_counted(self.samples, 'sample')}: SQNR of the "
            "outputs when one layer alone is quantized; all: when their noise adds up"
        )
        return "\n".join([*table_lines(rows, right=range(2, len(self.options) + 3)), last])


# JSON: the fields of a sensitivity in the order in which they are written


@dataclass(frozen=True)
class _LayerFields:
    name: str
    type: str
    elements: int
    nbytes_float: int
    tied: tuple[str, ...]
    options: Mapping[str, tuple[float, int]]  # noise and bytes

    def layer(self) -> LayerNoise:
        noise = {option: noise for option, (noise, _) in self.options.items()}
        nbytes = {option: nbytes for option, (_, nbytes) in self.options.items()}
        return LayerNoise(self.name, self.type, self.elements, self.nbytes_float, noise, nbytes, self.tied)


@dataclass(frozen=True)
class _Fields:
    options: tuple[str, ...]
    samples: int
    storage: Storage
    target: str
    recipe: Recipe | None
    layers: tuple[_LayerFields, ...]


_LEAVES: Leaves = {Recipe: RECIPE_LEAF}
