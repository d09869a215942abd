"""Mix: the chosen option of every layer, as a recipe, with what is predicted of it and what was measured."""

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isnan
from types import MappingProxyType
from typing import Any

from detent.errors import SpecError
from detent.recipe import Recipe
from detent.rule import Rule
from detent.sensitivity.noise import LayerNoise, counted, sqnr_of
from detent.tables import table_lines

__all__ = ["FLOAT", "Mix", "exact", "mixed_recipe", "short"]

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


def exact(name: str) -> str:
    """A pattern of rules that matches this name and no other.

    >>> exact("features.0"), exact("a[0]*"), exact("@first"), exact("re:x"), exact("")
    ('features.0', 'a[[]0][*]', '[@]first', '[r]e:x', 're:')
    """
    if not name:
        return "re:"
    escaped = glob.escape(name)
    if escaped.startswith("@"):
        return f"[@]{escaped[1:]}"
    return f"[r]{escaped[1:]}" if escaped.startswith("re:") else escaped


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
            rules.append(Rule(exact(each), weight=option) if given is None else known[exact(each)])
    return Recipe(rules, name)
