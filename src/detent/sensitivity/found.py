"""Sensitivity: the noise of all layers, and the choice of options under a budget of bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from detent.checks import as_integer
from detent.errors import FileFormatError, SpecError
from detent.recipe import Recipe
from detent.sensitivity import reading
from detent.sensitivity.choosing import best_choice, hull_choices, smallest_total
from detent.sensitivity.mix import FLOAT, Mix, exact, mixed_recipe, short
from detent.sensitivity.noise import LayerNoise, counted, sqnr_of
from detent.tables import table_lines

__all__ = ["Sensitivity"]

LARGEST = 1 << 62  # bytes, which then can be added up in 64 bits


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
        if most > LARGEST:
            raise SpecError(f"the largest options of all layers take {most:,} bytes, expected at most {LARGEST:,}")
        if self.recipe is not None:
            known = {rule.match for rule in self.recipe.rules}
            missing = [name for name in names if exact(name) not in known]
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
        return reading.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Sensitivity":
        """What ``to_json`` wrote; the text is not trusted.

        Raises:
            FileFormatError: too long, not JSON, other keys, types, sizes or numbers.

        >>> Sensitivity.from_json('{"version": 1}')
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: a sensitivity needs exactly the keys layers, options, recipe, samples, \
storage, target, version, got ['version']
        """
        fields = reading.from_json(text)
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
