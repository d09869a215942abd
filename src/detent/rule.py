"""Rule: what some of a model's layers get. A recipe is a list of them.

A rule names layers by their full dotted name and by their types, and holds what they get; what it leaves at None is
not its business. Rules know nothing of any framework: a layer is a name, the names of its types, and whether it is the
first or the last one with weights.
"""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from detent._checks import plain
from detent._rule_texts import as_estimator, as_mode, as_text, estimator_text, mode_text, spec_text
from detent.errors import SpecError, closest
from detent.formats import Format
from detent.observer_spec import ObserverLike, ObserverSpec, get_observer_spec
from detent.scale_mode import ScaleMode
from detent.spec import QuantSpec, get_spec
from detent.ste import Custom, Estimator, EstimatorLike

__all__ = ["Layer", "Rule"]

SpecLike = QuantSpec | Format | str
PLACES = ("@first", "@last")
SPECS = ("weight", "input", "output")
SETTINGS = (*SPECS, "mode", "ste", "observer")


class Layer(NamedTuple):
    """What rules see of a layer.

    Attributes:
        name: the full dotted name.
        types: the names of its classes, or of its operation.
        first, last: whether it is the first or the last layer with weights.

    >>> Layer("features.0", ("Conv2d",), first=True).last
    False
    """

    name: str
    types: tuple[str, ...]
    first: bool = False
    last: bool = False


@dataclass(frozen=True, init=False, repr=False)
class Rule:
    """Which layers, and what they get.

    Args:
        match: a glob over the full dotted name (``*`` crosses dots; case counts), ``re:`` and a regular expression that
            fits the whole name, or ``@first`` or ``@last``: the first or last layer with weights.
        types: names of classes or operations, any of which the layer has; none means any layer.
        weight, input, output: specs; None leaves them as earlier rules have them.
        mode: a scale mode or its text: "per_batch", "ema(0.9)", "fixed", "learned".
        ste: an estimator, its text, such as "clipped(value)", or a callable.
        observer: an observer's text, such as "mse(2.4)" or "percentile(0.1, 99.9)", its class, or a fresh one.
        skip: leave the layer alone; a rule that skips names no specs.

    Raises:
        SpecError: a pattern or a value that cannot exist.

    >>> import detent as dt
    >>> dt.Rule(types="Linear", weight="int4/axis0", mode=dt.EMA(0.9))
    dt.Rule(types=('Linear',), weight='int4/axis0', mode='ema(0.9)')
    >>> dt.Rule("head*", skip=True).skip
    True
    """

    match: str
    types: tuple[str, ...]
    weight: QuantSpec | None
    input: QuantSpec | None
    output: QuantSpec | None
    mode: ScaleMode | None
    ste: Estimator | None
    observer: ObserverSpec | None
    skip: bool

    def __init__(
        self,
        match: str = "*",
        *,
        types: Iterable[str] | str = (),
        weight: SpecLike | None = None,
        input: SpecLike | None = None,  # noqa: A002 - the noun
        output: SpecLike | None = None,
        mode: ScaleMode | str | None = None,
        ste: EstimatorLike | str = None,
        observer: ObserverLike | None = None,
        skip: bool = False,
    ) -> None:
        put = object.__setattr__
        put(self, "match", as_text("match", match))
        put(self, "types", _as_types(types))
        for name, value in zip(SPECS, (weight, input, output), strict=True):
            put(self, name, None if value is None else get_spec(value))
        put(self, "mode", None if mode is None else as_mode(mode))
        put(self, "ste", None if ste is None else as_estimator(ste))
        put(self, "observer", None if observer is None else get_observer_spec(observer))
        put(self, "skip", plain(skip))
        _pattern(self.match)
        if not isinstance(self.skip, bool):
            raise SpecError(f"skip is True or False, got {skip!r}")
        named = [name for name in SPECS if getattr(self, name) is not None]
        if self.skip and named:
            raise SpecError(f"a rule that skips layers gives them no {' or '.join(named)}: leave out one or the other")

    def matches(self, layer: Layer) -> bool:
        """Whether the layer is one of those that the rule names.

        >>> rule = Rule("features.*", types=("Conv2d", "Linear"))
        >>> rule.matches(Layer("features.0", ("Conv2d",))), rule.matches(Layer("features.1", ("ReLU",)))
        (True, False)
        """
        return self.matches_name(layer) and self.matches_types(layer)

    def matches_name(self, layer: Layer) -> bool:
        """Whether the layer's name, or its place, is one that the rule names.

        >>> Rule("@last").matches_name(Layer("head", (), last=True))
        True
        """
        pattern = _pattern(self.match)
        if pattern is None:
            return layer.first if self.match == "@first" else layer.last
        return pattern.fullmatch(layer.name) is not None

    def matches_types(self, layer: Layer) -> bool:
        """Whether the layer has one of the rule's types, or the rule has none.

        >>> Rule(types="Linear").matches_types(Layer("head", ("NonDynamicallyQuantizableLinear", "Linear")))
        True
        """
        return not self.types or not set(self.types).isdisjoint(layer.types)

    def texts(self) -> dict[str, str]:
        """What the rule sets, as short texts by field; those of specs and callables without one are for reading only.

        >>> Rule(weight="int8/axis0", observer="mse", skip=False).texts()
        {'weight': 'int8/axis0', 'observer': 'mse'}
        """
        found: dict[str, str] = {}
        for name in SPECS:
            spec = getattr(self, name)
            if spec is not None:
                found[name] = spec_text(spec) or str(spec)
        if self.mode is not None:
            found["mode"] = mode_text(self.mode)
        if isinstance(self.ste, Custom):
            found["ste"] = getattr(self.ste.function, "__qualname__", repr(self.ste.function))
        elif self.ste is not None:
            found["ste"] = estimator_text(self.ste)
        return found if self.observer is None else {**found, "observer": str(self.observer)}

    def __repr__(self) -> str:
        parts = [] if self.match == "*" else [repr(self.match)]
        if self.types:
            parts.append(f"types={self.types!r}")
        for name, text in self.texts().items():
            value = getattr(self, name)
            exact = not isinstance(value, Custom) and (not isinstance(value, QuantSpec) or spec_text(value) is not None)
            parts.append(f"{name}={text!r}" if exact else f"{name}={value!r}")
        return f"dt.Rule({', '.join([*parts, 'skip=True'] if self.skip else parts)})"


def _as_types(types: Iterable[str] | str) -> tuple[str, ...]:
    """The names, each once."""
    if isinstance(types, str | type):
        return (as_text("a type", types),)
    if not isinstance(types, Iterable):
        raise SpecError(f"types are names such as ('Linear', 'Conv2d'), got {types!r}")
    return tuple(dict.fromkeys(as_text("a type", name) for name in types))


@lru_cache(maxsize=1024)
def _pattern(match: str) -> re.Pattern[str] | None:
    """What a layer's name must fit, or None for the place of a layer."""
    if match in PLACES:
        return None
    if match.startswith("@"):
        raise SpecError(
            f"unknown place {match!r}{closest(match, PLACES)} expected {' or '.join(PLACES)}; for a name that begins "
            f"with @ write '[@]{match[1:]}'"
        )
    expression = match[3:] if match.startswith("re:") else fnmatch.translate(match)
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise SpecError(f"match {match[:200]!r} holds no regular expression: {error}") from error
