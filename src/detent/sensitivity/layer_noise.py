"""Results of sensitivity measurements, and the mixed-precision allocations chosen from them.

``LayerNoise`` is the result for one layer, and ``Sensitivity`` is the result for all layers. ``Mix`` is a
mixed-precision allocation: one candidate per layer, with the predicted and the measured SQNR. ``Cost`` is the estimated
cost of a measurement.

A candidate is a way to quantize a layer, labeled by a spec ("int4/axis0") or by the name of the measured recipe. The
noise of a candidate is the power of the error at the model's outputs, divided by the power of the outputs:
``sum (y - y')^2 / sum y^2`` over all samples. With several outputs, the noise is the mean of this ratio over all
outputs, so that large outputs do not hide small outputs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from detent.checks import as_integer
from detent.codec import Leaves, check_version, decode, encode, parse, reading
from detent.errors import FileFormatError, SpecError
from detent.metrics import sqnr_of
from detent.plots import bar_axes
from detent.recipe import RECIPE_LEAF, Recipe, exact_pattern
from detent.rule import Rule
from detent.sensitivity.knapsack import best_choice, hull_choices, smallest_total
from detent.tables import counted, html_table, short_name, table_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FLOAT", "OVERFLOW_NOISE", "STORAGES", "Cost", "LayerNoise", "Mix", "Sensitivity", "Storage"]

Storage = Literal["onnx", "packed"]
STORAGES = ("onnx", "packed")
FLOAT = "float"  # the candidate of a layer that is kept in float
OVERFLOW_NOISE = 1e30  # replaces infinite noise of outputs that overflow, because JSON has no infinity
BYTES_LIMIT = 1 << 62  # so that sums of bytes fit in 64-bit integers
VERSION = 1
OPTIONS_LIMIT = 64  # maximum number of candidates in a file; the list is searched for each layer
OPTIONS_SHOWN = 4  # at most this many candidates are in a repr, so that the repr fits on a line


@dataclass(frozen=True)
class LayerNoise:
    """Noise and size of one layer with each candidate.

    Invariants: ``noise`` and ``nbytes`` have the same keys, at least one. Noise values are from 0 to 1e30. The
    order of candidates does not change the hash.

    Attributes:
        elements: number of weight elements.
        nbytes_float: size of the weights in float, in bytes.
        noise: maps each candidate to the noise at the model's outputs with only this layer quantized. The noise is
            relative to the power of the outputs.
        nbytes: maps each candidate to the size of the quantized weights in bytes.
        tied: other layers that share this layer's weight and are quantized together with it.

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
            raise SpecError(f"got layer name {self.name!r} and type {self.type!r}, expected text for both")
        where = f"layer {self.name!r}"
        for what in ("elements", "nbytes_float"):
            as_integer(f"{what} of {where}", getattr(self, what), at_least=0)
        if not self.noise or set(self.noise) != set(self.nbytes):
            raise SpecError(
                f"{where} has noise for {list(self.noise)} and nbytes for {list(self.nbytes)}, expected the same "
                "candidates in both, and at least one"
            )
        for option, value in self.noise.items():
            if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= OVERFLOW_NOISE:
                raise SpecError(
                    f"the noise of {where} with {option!r} must be a number in 0..{OVERFLOW_NOISE:g}, got {value!r}"
                )
            as_integer(f"nbytes of {where} with {option!r}", self.nbytes[option], at_least=0)
        object.__setattr__(self, "noise", MappingProxyType({key: float(value) for key, value in self.noise.items()}))
        object.__setattr__(self, "nbytes", MappingProxyType(dict(self.nbytes)))
        object.__setattr__(self, "tied", tuple(self.tied))

    def __reduce__(self) -> tuple[Any, ...]:  # mapping proxies cannot be pickled
        noise, nbytes = dict(self.noise), dict(self.nbytes)
        return type(self), (self.name, self.type, self.elements, self.nbytes_float, noise, nbytes, self.tied)

    def __hash__(self) -> int:
        options = frozenset((option, noise, self.nbytes[option]) for option, noise in self.noise.items())
        return hash((self.name, self.type, self.elements, self.nbytes_float, options, self.tied))

    def __repr__(self) -> str:
        noise = ", ".join(f"{option}: {value:.3g}" for option, value in self.noise.items())
        return f"<LayerNoise {self.name!r}: {self.type}, {self.elements:,} elements, noise {noise}>"

    @property
    def worst(self) -> float:
        """Largest noise over all candidates."""
        return max(self.noise.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layer and of the layers tied to it."""
        return (self.name, *self.tied)


def _noise(layer: LayerNoise, option: str) -> float:
    return 0.0 if option == FLOAT else layer.noise[option]


def _nbytes(layer: LayerNoise, option: str) -> int:
    return layer.nbytes_float if option == FLOAT else layer.nbytes[option]


@dataclass(frozen=True)
class Cost:
    """Cost of a measurement, passed to ``announce`` before the measurement starts.

    Attributes:
        layers: number of measured layers; layers that share a weight count as one.
        options: number of candidates.
        runs: number of runs of the model over all samples.
        samples: number of samples per run.
        seconds_estimate: estimated time of all runs.

    >>> print(Cost(14, 3, 42, 32, 8.4))
    14 layers, 3 candidates: 42 runs over 32 samples, about 8 s
    """

    layers: int
    options: int
    runs: int
    samples: int
    seconds_estimate: float

    def __str__(self) -> str:
        seconds = self.seconds_estimate
        time = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s" if seconds >= 1 else "1 s or less"
        layers, options = counted(self.layers, "layer"), counted(self.options, "candidate")
        return f"{layers}, {options}: {counted(self.runs, 'run')} over {counted(self.samples, 'sample')}, about {time}"


@dataclass(frozen=True)
class Mix:
    """A mixed-precision allocation: one candidate for every layer. ``str`` returns a table.

    Attributes:
        layers: the layers that were measured.
        options: maps the name of each layer to its candidate; "float" keeps the layer in float.
        recipe: the allocation as a recipe for ``qo.quantize`` and ``qt.prepare``, with one rule per quantized layer.
        samples: number of samples on which ``qs.run_mix`` measures the SQNR.
        target: target for which ``qs.run_mix`` quantizes.
        measured_sqnr_db: SQNR of the outputs with this allocation, from ``qs.run_mix`` or ``qs.refine``; None if it was
            not measured.

    >>> from detent.sensitivity import LayerNoise, Sensitivity
    >>> layer = LayerNoise("fc", "MatMul", 100, 400, {"int4/axis0": 0.01}, {"int4/axis0": 90})
    >>> mix = Sensitivity((layer,), ("int4/axis0",)).choose(100)
    >>> mix.nbytes, mix.predicted_sqnr_db, mix.recipe
    (90, 20.0, dt.Recipe([dt.Rule('fc', weight='int4/axis0')], name='mix'))
    >>> print(mix.with_measured(19.5))
    layer  type    candidate   bytes  single-layer SQNR
    fc     MatMul  int4/axis0     90            20.0 dB
    1 layer in 90 bytes of weights; SQNR 20.0 dB predicted, 19.5 dB measured
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
        """Size of all weights in bytes."""
        return sum(_nbytes(layer, self.options[layer.name]) for layer in self.layers)

    @property
    def noise(self) -> float:
        """Sum of the layers' noise."""
        return sum(_noise(layer, self.options[layer.name]) for layer in self.layers)

    @property
    def predicted_sqnr_db(self) -> float:
        """Predicted SQNR of the outputs in dB, assuming that the noise of all layers adds."""
        return sqnr_of(self.noise)

    def with_measured(self, sqnr_db: float) -> "Mix":
        """Return a copy of the allocation with a measured SQNR."""
        if isnan(sqnr_db):
            raise SpecError("the measured SQNR is NaN: check whether the outputs overflow")
        return replace(self, measured_sqnr_db=float(sqnr_db))

    def __repr__(self) -> str:
        return f"<Mix: {self._headline()}>"

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._rows(), right=(3, 4)), self._headline()])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=(3, 4), notes=[self._headline()])

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layer", "type", "candidate", "bytes", "single-layer SQNR")]
        for layer in self.layers:
            option = self.options[layer.name]
            noise = _noise(layer, option)
            alone = f"{sqnr_of(noise):.1f} dB" if noise else "-"
            rows.append((short_name(layer.name), layer.type, option, f"{_nbytes(layer, option):,}", alone))
        return rows

    def _headline(self) -> str:
        measured = "not measured" if self.measured_sqnr_db is None else f"{self.measured_sqnr_db:.1f} dB measured"
        return (
            f"{counted(len(self.layers), 'layer')} in {self.nbytes:,} bytes of weights; "
            f"SQNR {self.predicted_sqnr_db:.1f} dB predicted, {measured}"
        )


def _check_options(layers: Sequence[LayerNoise], options: Mapping[str, str]) -> None:
    names = {layer.name for layer in layers}
    for name in sorted(set(options) - names):
        raise SpecError(f"layer {name!r} was not measured: choose candidates for measured layers only")
    for name in sorted(names - set(options)):
        raise SpecError(
            f"got no candidate for layer {name!r}, expected one for every layer: add it ({FLOAT!r} keeps the layer in "
            "float)"
        )
    for layer in layers:
        option = options[layer.name]
        if option != FLOAT and option not in layer.noise:
            raise SpecError(
                f"layer {layer.name!r} was not measured with {option!r}, expected one of {', '.join(layer.noise)}"
            )


@dataclass(frozen=True)
class Sensitivity:
    """Noise at a model's outputs with one layer quantized at a time.

    ``str`` returns a table with the most sensitive layers first.

    Invariants: layer names, including those of tied layers, are unique. Every candidate of a layer is in ``options``.
    All weights together take at most 2**62 bytes, even if each layer has its largest candidate or is float.

    Attributes:
        layers: the layers in the order of the model.
        options: labels of all candidates. A layer has only the candidates that its weight supports.
        recipe: the measured recipe, with one rule per layer; None if only weight specs were measured.
        samples: number of samples on which the noise was measured.
        storage: how bytes are counted, "onnx" or "packed".
        target: target for which the noise was measured.

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
    2 layers, 32 samples. Each row: output SQNR with only that layer quantized. Row "all": estimate for all layers, \
assuming that their noise adds.
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
            raise SpecError("got no layers or no candidates, expected at least one of each")
        names = [name for layer in self.layers for name in layer.names]
        if len(set(names)) != len(names) or len(set(self.options)) != len(self.options):
            raise SpecError("got a layer name or a candidate twice, expected unique names, also for tied layers")
        for layer in self.layers:
            unknown = [option for option in layer.noise if option not in self.options]
            if unknown:
                raise SpecError(
                    f"layer {layer.name!r} has the candidate {unknown[0]!r}, expected one of {', '.join(self.options)}"
                )
        largest = sum(max(layer.nbytes_float, *layer.nbytes.values()) for layer in self.layers)
        if largest > BYTES_LIMIT:
            raise SpecError(
                f"with each layer's largest candidate, the weights take {largest:,} bytes, expected at most "
                f"{BYTES_LIMIT:,}"
            )
        if self.recipe is not None:
            patterns = {rule.match for rule in self.recipe.rules}
            missing = [name for name in names if exact_pattern(name) not in patterns]
            if missing:
                raise SpecError(
                    f"the measured recipe has no rule for layer {missing[0]!r}, expected one rule per layer"
                )

    @property
    def nbytes_float(self) -> int:
        """Size of all weights in float, in bytes."""
        return sum(layer.nbytes_float for layer in self.layers)

    def ranked(self, option: str | None = None) -> tuple[LayerNoise, ...]:
        """Return the layers by noise, largest first.

        Args:
            option: the candidate whose noise is compared; layers without this candidate come last. None compares the
                largest noise of each layer.
        """
        if option is not None and option not in self.options:
            raise SpecError(f"unknown candidate {option!r}, expected one of {', '.join(self.options)}")
        worst = {layer.name: layer.worst if option is None else layer.noise.get(option, -1.0) for layer in self.layers}
        return tuple(sorted(self.layers, key=lambda layer: -worst[layer.name]))

    def uniform(self, option: str) -> Mix:
        """Return the allocation in which every layer has the candidate ``option``.

        Raises:
            SpecError: a layer was not measured with this candidate.
        """
        return self.mixed({layer.name: option for layer in self.layers}, f"uniform {option}")

    def choose(self, budget_nbytes: int, *, keep_float: bool = False) -> Mix:
        """Choose one candidate per layer, so that the total noise is smallest within a budget; the solution is exact.

        Args:
            budget_nbytes: maximum total size of the measured weights, in bytes.
            keep_float: whether layers may also be kept in float.

        Raises:
            SpecError: no allocation fits the budget; the message has the size of the smallest allocation.
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
                f"no allocation fits {budget:,} bytes; the smallest needs {smallest_total(sizes):,}: raise the budget, "
                "or measure candidates with fewer bits"
            )
        chosen = zip(self.layers, choices, places, strict=True)
        return self.mixed({layer.name: options[place] for layer, options, place in chosen})

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Return bytes and predicted SQNR of the best allocations, from the smallest to the largest.

        These allocations are the corners of the lower convex hull of bytes and noise. For a budget between two corners,
        ``choose`` may find an allocation with less noise than the smaller corner.
        """
        sizes = [[(layer.nbytes[option], noise) for option, noise in layer.noise.items()] for layer in self.layers]
        return tuple((nbytes, sqnr_of(noise)) for nbytes, noise in hull_choices(sizes))

    def mixed(self, options: Mapping[str, str], name: str = "mix") -> Mix:
        """Return the allocation in ``options``, which maps each layer name to a candidate.

        Raises:
            SpecError: a layer is missing, unknown, or was not measured with its candidate.
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
        """Serialize to JSON, with the version of the document format.

        Raises:
            SpecError: the recipe contains a callable.
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
        """Read JSON that ``to_json`` wrote. The text may come from an untrusted file.

        Raises:
            FileFormatError: the text is too long, not JSON, or has unexpected keys, types, sizes or numbers.

        >>> Sensitivity.from_json('{"version": 2}')
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: the text is not the JSON of a Sensitivity: got version 2 of a sensitivity, \
but this release of detent reads version 1: update detent
        """
        with reading("the text is not the JSON of a Sensitivity"):
            data = parse(text, "a sensitivity")
            check_version(data.pop("version", None), VERSION, "a sensitivity")
            fields = decode(_Fields, data, "sensitivity", _LEAVES)
            if len(fields.options) > OPTIONS_LIMIT:
                raise FileFormatError(f"got {len(fields.options)} candidates, expected at most {OPTIONS_LIMIT}")
            layers = tuple(each.layer() for each in fields.layers)
            return cls(layers, fields.options, fields.recipe, fields.samples, fields.storage, fields.target)

    def __repr__(self) -> str:
        options = f"{counted(len(self.options), 'candidate')} ({', '.join(self.options[:OPTIONS_SHOWN])}"
        more = ", ..." if len(self.options) > OPTIONS_SHOWN else ""
        layers, samples = counted(len(self.layers), "layer"), counted(self.samples, "sample")
        return f"<Sensitivity: {layers}, {options}{more}), {samples}>"

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._rows(), right=range(2, len(self.options) + 3)), self._headline()])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=range(2, len(self.options) + 3), notes=[self._headline()])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot the SQNR of the outputs with only one layer quantized, per layer and candidate.

        The most sensitive layer is on top. A candidate with zero noise has no point.

        Args:
            ax: matplotlib Axes to draw on; None creates new Axes.

        Returns:
            The Axes with the plot.

        Raises:
            UnsupportedError: ``ax`` is None and matplotlib is not installed.
        """
        layers = self.ranked()
        ax = bar_axes(ax, [layer.name for layer in layers])
        for option in self.options:
            rows = [row for row, layer in enumerate(layers) if layer.noise.get(option)]
            ax.plot([sqnr_of(layers[row].noise[option]) for row in rows], rows, "o", label=option)
        ax.grid(axis="x", alpha=0.3)
        ax.set_xlabel("SQNR of the outputs in dB, with only this layer quantized")
        ax.legend(title="candidate", loc="upper left", bbox_to_anchor=(1.01, 1.0))
        return ax

    def _rows(self) -> list[tuple[str, ...]]:
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
        return rows

    def _headline(self) -> str:
        return (
            f"{counted(len(self.layers), 'layer')}, {counted(self.samples, 'sample')}. Each row: output SQNR with only "
            'that layer quantized. Row "all": estimate for all layers, assuming that their noise adds.'
        )


# Fields of ``Sensitivity`` in JSON, in the order in which they are written


@dataclass(frozen=True)
class _LayerFields:
    name: str
    type: str
    elements: int
    nbytes_float: int
    tied: tuple[str, ...]
    options: Mapping[str, tuple[float, int]]  # maps candidates to noise and bytes

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
