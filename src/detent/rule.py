"""Rule: specs, scale mode, estimator and observer for some layers of a model. A recipe is a list of rules.

A rule selects layers by full dotted name and type. A field that is None keeps the value of earlier rules. Rules are
independent of frameworks: a layer is a name, the names of its types, and whether it is the first or the last layer with
weights.

Every field can be written as a short text. The text of a spec is ``format/granularity/...``. Scale modes, estimators
and observers are written as calls: ``name``, ``name(1)``, ``name(1, key=2)``, with arguments in the order of the class.
Texts leave out default values, so equal values have equal texts. Therefore, a changed default needs a new version
number of recipe files.

A rule contains the description of an observer, an ``ObserverSpec``. Its method ``make`` creates the observer:

========================================= ====================================================
``minmax``                                min-max range
``percentile(lower, upper, precision)``   range between two percentiles
``mse(norm, precision)``                  MSE-optimal range: least mean ``|error|^norm``
``entropy(precision)``                    range with the least KL divergence
========================================= ====================================================

``make`` receives the granularity of the quantized tensor's spec. For a moving average, use the scale mode ``EMA``
instead of an observer.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.checks import plain
from detent.codec import Setting, as_text, parse_call, reading, write_call
from detent.convention import Convention
from detent.errors import SpecError, closest
from detent.formats import Format
from detent.gguf import find_block_format
from detent.granularity import CHANNEL, Granularity, PerAxis, PerGroup, PerTensor
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Observer, Percentile, best_params
from detent.params import QuantParams
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode, get_scale_mode
from detent.spec import QuantSpec, get_spec, spec_text
from detent.ste import Clipped, Custom, Estimator, EstimatorLike, HardTanh, Identity, Tanh, get_estimator

__all__ = [
    "Arithmetic",
    "Layer",
    "ObserverLike",
    "ObserverSpec",
    "Rule",
    "check_arithmetic",
    "check_axis",
    "get_observer_spec",
    "get_weight_spec",
]

Value = TypeVar("Value")
_MODES: Mapping[str, type[ScaleMode]] = {"per_batch": PerBatch, "ema": EMA, "fixed": Fixed, "learned": Learned}
_ESTIMATORS: Mapping[str, Callable[..., Estimator]] = {
    "identity": Identity,
    "clipped": Clipped,
    "hard_tanh": HardTanh,
    "tanh": Tanh,
}
_CLASSES: Mapping[str, type[Observer]] = {"minmax": MinMax, "percentile": Percentile, "mse": MSE, "entropy": Entropy}
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "minmax": (),
    "percentile": ("lower", "upper", "precision"),
    "mse": ("norm", "precision"),
    "entropy": ("precision",),
}
SQUARED = 2.0  # norm
_AVERAGES = ("ema", "emaminmax", "ema_minmax")
SpecLike = QuantSpec | BlockFormat | Format | str
PLACES = ("@first", "@last")
SPECS = ("weight", "input", "output")
SETTINGS = (*SPECS, "mode", "ste", "observer", "arithmetic")
Arithmetic = Literal["float", "integer", "auto"]
ARITHMETICS: tuple[Arithmetic, ...] = ("float", "integer", "auto")


@dataclass(frozen=True, init=False, repr=False)
class ObserverSpec:
    """Description of an observer: its kind and settings, but no observed data."""

    kind: str
    settings: tuple[tuple[str, float], ...]

    def __init__(self, kind: str, **settings: Setting) -> None:
        if not isinstance(kind, str) or kind not in _CLASSES:
            raise SpecError(f"unknown observer {kind!r}{closest(str(kind), _CLASSES)} expected {', '.join(_CLASSES)}")
        unknown = [name for name in settings if name not in _SETTINGS[kind]]
        if unknown:
            names = ", ".join(_SETTINGS[kind]) or "no settings"
            raise SpecError(f"unknown setting {unknown[0]!r} of observer {kind!r}: expected {names}")
        with reading(f"observer {kind!r}", error=SpecError):
            observer = _CLASSES[kind](**settings)  # type: ignore[arg-type]  # checks its settings
        object.__setattr__(self, "kind", kind)
        # Adding zero turns -0.0 into 0.0, so that equal settings have equal texts.
        object.__setattr__(self, "settings", tuple((name, getattr(observer, name) + 0) for name in _SETTINGS[kind]))

    @classmethod
    def parse(cls, text: str) -> "ObserverSpec":
        """Parse a text such as ``"mse(2.4)"``; the inverse of ``str``."""
        if not isinstance(text, str):
            raise SpecError(f"got {text!r} as observer, expected a text such as 'mse(2.4)'")
        if text.partition("(")[0].lower() in _AVERAGES:
            raise _no_average(text)
        kind, settings = parse_call("observer", text, _SETTINGS)
        return cls(kind, **settings)

    @classmethod
    def of(cls, observer: Observer) -> "ObserverSpec":
        """Make the description of an observer that has observed no data and has the default granularity."""
        for kind, cls_of_kind in _CLASSES.items():
            if type(observer) is cls_of_kind:
                _check_bare(observer)
                return cls(kind, **{name: getattr(observer, name) for name in _SETTINGS[kind]})
        if isinstance(observer, EMAMinMax):
            raise _no_average(observer)
        names = ", ".join(each.__name__ for each in _CLASSES.values())
        raise SpecError(f"got {observer!r} as observer of a recipe, expected one of {names}")

    def make(self, granularity: Granularity | str = PerTensor()) -> Observer:
        """Make an observer with this granularity that has observed no data."""
        return _CLASSES[self.kind](granularity=granularity, **dict(self.settings))

    def params_of(self, x: NDArray[Any], spec: QuantSpec) -> QuantParams:
        """Compute the parameters of one array, such as a weight.

        The observer "mse" with norm 2 searches for the best scale on the elements of x, instead of on a histogram.
        """
        if self.kind == "mse" and dict(self.settings)["norm"] == SQUARED and np.isfinite(x).all():
            return best_params(x, spec)
        return self.make(spec.granularity).observe(x).params(spec)

    def _defaults(self) -> dict[str, Setting]:
        default = _CLASSES[self.kind]()
        return {name: getattr(default, name) for name in _SETTINGS[self.kind]}

    def __str__(self) -> str:
        return write_call(self.kind, dict(self.settings), self._defaults())

    def __repr__(self) -> str:
        default = self._defaults()
        changed = [f"{name}={value!r}" for name, value in self.settings if value != default[name]]
        return f"ObserverSpec({', '.join([repr(self.kind), *changed])})"


ObserverLike = ObserverSpec | Observer | type[Observer] | str


def get_observer_spec(value: ObserverLike) -> ObserverSpec:
    """Make an ObserverSpec from a text, an observer class or an observer without data.

    An ObserverSpec is returned unchanged.
    """
    if isinstance(value, ObserverSpec):
        return value
    if isinstance(value, str):
        return ObserverSpec.parse(value)
    if isinstance(value, type) and value in _CLASSES.values():
        return ObserverSpec.of(value())
    if isinstance(value, type) and issubclass(value, EMAMinMax):
        raise _no_average(value)
    if isinstance(value, Observer):
        return ObserverSpec.of(value)
    raise SpecError(
        f"got {value!r} as observer, expected a text such as 'mse(2.4)', an observer class or an observer without data"
    )


def _check_bare(observer: Observer) -> None:
    if observer.count or observer.nonfinite:
        raise SpecError(f"got {observer!r}, which has observed data, expected an observer without data: call reset()")
    if observer.granularity != PerTensor():
        raise SpecError(
            f"got {observer!r} with a granularity, but in a recipe, the spec sets the granularity: omit the "
            "observer's granularity"
        )


def _no_average(value: object) -> SpecError:
    return SpecError(
        f"got {value!r} as observer, but a moving average is a scale mode: use mode='ema(0.9)' or mode=dt.EMA(0.9), or "
        f"one of the observers {', '.join(_CLASSES)}"
    )


class Layer(NamedTuple):
    """Layer as a rule sees it: name, types, and whether it is the first or the last layer with weights."""

    name: str
    types: tuple[str, ...]
    first: bool = False
    last: bool = False


@dataclass(frozen=True, init=False, repr=False)
class Rule:
    """Selection of layers, and their specs, scale mode, estimator and observer.

    Args:
        match: a glob over the full dotted name (``*`` also matches dots; case-sensitive). Or ``re:`` followed by a
            regular expression for the whole name. Or ``@first`` or ``@last``, the first or last layer with weights.
        types: names of classes or operations; the rule selects layers of any of these types. Empty means all types.
        weight: the weight's spec; None keeps the spec of earlier rules. In a text, the granularity may be "channel", as
            in "int8/channel": one scale per output channel, on the output-channel axis of the layer's weight. A block
            format such as "q4_k" is a spec, too.
        input: the input's spec; None keeps the spec of earlier rules.
        output: the output's spec; None keeps the spec of earlier rules.
        mode: a scale mode or its text: "per_batch", "ema(0.9)", "fixed", "learned".
        ste: a straight-through estimator, a text such as "clipped(value)", or a callable.
        observer: a text such as "mse(2.4)" or "percentile(0.1, 99.9)", an observer class, or an observer without data.
        arithmetic: how ``qt.prepare`` multiplies in these layers: "float", "integer" (an error if a layer cannot), or
            "auto" (integer if possible). None keeps the value of earlier rules. Other functions ignore it.
        skip: whether to keep the layers in float; a rule with ``skip=True`` cannot have specs.

    Raises:
        SpecError: an invalid pattern or value.

    >>> import detent as dt
    >>> dt.Rule(types="Linear", weight="int4/axis0", mode=dt.EMA(0.9))
    dt.Rule(types=('Linear',), weight='int4/axis0', mode='ema(0.9)')
    """

    match: str
    types: tuple[str, ...]
    weight: QuantSpec | BlockFormat | None
    input: QuantSpec | None
    output: QuantSpec | None
    mode: ScaleMode | None
    ste: Estimator | None
    observer: ObserverSpec | None
    arithmetic: Arithmetic | None
    skip: bool

    def __init__(  # noqa: PLR0913 - one argument per field
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
        arithmetic: Arithmetic | None = None,
        skip: bool = False,
    ) -> None:
        put = object.__setattr__
        put(self, "match", as_text("match", match))
        put(self, "types", _as_types(types))
        put(self, "weight", None if weight is None else get_weight_spec(weight))
        for name, value in (("input", input), ("output", output)):
            put(self, name, None if value is None else _activation_spec(name, value))
        put(self, "mode", None if mode is None else as_mode(mode))
        put(self, "ste", None if ste is None else as_estimator(ste))
        put(self, "observer", None if observer is None else get_observer_spec(observer))
        put(self, "arithmetic", None if arithmetic is None else check_arithmetic(arithmetic))
        put(self, "skip", plain(skip))
        _pattern(self.match)
        if not isinstance(self.skip, bool):
            raise SpecError(f"got skip={skip!r}, expected True or False")
        named = [name for name in SPECS if getattr(self, name) is not None]
        if self.skip and named:
            raise SpecError(f"got skip=True and a spec for {' and '.join(named)}: omit skip, or omit all specs")

    def matches(self, layer: Layer) -> bool:
        """Return whether the rule selects the layer.

        >>> rule = Rule("features.*", types=("Conv2d", "Linear"))
        >>> rule.matches(Layer("features.0", ("Conv2d",))), rule.matches(Layer("features.1", ("ReLU",)))
        (True, False)
        """
        return self.matches_name(layer) and self.matches_types(layer)

    def matches_name(self, layer: Layer) -> bool:
        """Return whether the layer's name matches; for ``@first`` and ``@last``, whether its position does."""
        pattern = _pattern(self.match)
        if pattern is None:
            return layer.first if self.match == "@first" else layer.last
        return pattern.fullmatch(layer.name) is not None

    def matches_types(self, layer: Layer) -> bool:
        """Return whether the layer has one of the rule's types; a rule without types matches every layer."""
        return not self.types or not set(self.types).isdisjoint(layer.types)

    def texts(self) -> dict[str, str]:
        """Return a dict that maps field names to short texts; texts of callables and of some specs cannot be parsed."""
        specs = {name: getattr(self, name) for name in SPECS}
        texts = {name: spec_text(spec) or str(spec) for name, spec in specs.items() if spec is not None}
        if self.mode is not None:
            texts["mode"] = mode_text(self.mode)
        if isinstance(self.ste, Custom):
            texts["ste"] = getattr(self.ste.function, "__qualname__", repr(self.ste.function))
        elif self.ste is not None:
            texts["ste"] = estimator_text(self.ste)
        if self.observer is not None:
            texts["observer"] = str(self.observer)
        return texts if self.arithmetic is None else {**texts, "arithmetic": self.arithmetic}

    def __repr__(self) -> str:
        parts = [] if self.match == "*" else [repr(self.match)]
        if self.types:
            parts.append(f"types={self.types!r}")
        for name, text in self.texts().items():
            value = getattr(self, name)
            exact = not isinstance(value, Custom) and (not isinstance(value, QuantSpec) or spec_text(value) is not None)
            parts.append(f"{name}={text!r}" if exact else f"{name}={value!r}")
        return f"dt.Rule({', '.join([*parts, 'skip=True'] if self.skip else parts)})"


def check_arithmetic(value: str) -> Arithmetic:
    """Return the arithmetic with this name; raise SpecError for an unknown name.

    >>> check_arithmetic("integer")
    'integer'
    """
    for name in ARITHMETICS:
        if value == name:
            return name
    raise SpecError(f"got arithmetic={value!r}{closest(str(value), ARITHMETICS)} expected {', '.join(ARITHMETICS)}")


def get_weight_spec(value: SpecLike) -> QuantSpec | BlockFormat:
    """Return the spec of a weight, or a block format; in a text, "channel" means one scale per output channel.

    For "channel", the returned spec has axis 0. The frontends replace this axis with the layer's output-channel axis.

    >>> get_weight_spec("int4/channel") == get_weight_spec("int4/axis0")
    True
    """
    form = find_block_format(value)
    if form is not None:
        return form
    if isinstance(value, str):
        value = "/".join("axis0" if part == CHANNEL else part for part in value.split("/"))
    return get_spec(value)  # type: ignore[arg-type]  # not a block format


def _activation_spec(name: str, value: SpecLike) -> QuantSpec:
    form = find_block_format(value)
    if form is not None:
        raise SpecError(
            f"got {name}={str(value)!r}, but the block format {form} is for weights: use a spec such as "
            "'uint8/tensor/affine' for activations"
        )
    if isinstance(value, str) and CHANNEL in value.split("/"):
        raise SpecError(
            f"got {name}={value!r}, but 'channel' means the output channels of a weight: use 'tensor' or 'token' "
            "for activations"
        )
    return get_spec(value)  # type: ignore[arg-type]  # not a block format


def _as_types(types: Iterable[str] | str) -> tuple[str, ...]:
    if isinstance(types, str | type):
        return (as_text("a type", types),)
    if not isinstance(types, Iterable):
        raise SpecError(f"got types={types!r}, expected names such as ('Linear', 'Conv2d')")
    return tuple(dict.fromkeys(as_text("a type", name) for name in types))


@lru_cache(maxsize=1024)
def _pattern(match: str) -> re.Pattern[str] | None:
    """Compile ``match`` to a regular expression for names; return None for ``@first`` and ``@last``."""
    if match in PLACES:
        return None
    if match.startswith("@"):
        raise SpecError(
            f"unknown position {match!r}{closest(match, PLACES)} expected {' or '.join(PLACES)}; for a name that "
            f"begins with @, write '[@]{match[1:]}'"
        )
    expression = match[3:] if match.startswith("re:") else fnmatch.translate(match)
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise SpecError(f"match {match[:200]!r} is not a valid regular expression: {error}") from error


def as_mode(value: ScaleMode | str) -> ScaleMode:
    """Parse a scale mode from its text; return a mode unchanged."""
    if not isinstance(value, str):
        return _of_known_type("scale mode", get_scale_mode(value), _MODES)
    name, settings = parse_call("scale mode", value, {key: _names(cls) for key, cls in _MODES.items()})
    return _MODES[name](**settings)


def mode_text(mode: ScaleMode) -> str:
    return _text(mode, _MODES)


def as_estimator(value: EstimatorLike | str) -> Estimator:
    """Parse an estimator from its text; wrap a callable as an estimator, and return an estimator unchanged."""
    if not isinstance(value, str):
        estimator = get_estimator(value, Convention.onnx)
        return estimator if isinstance(estimator, Custom) else _of_known_type("estimator", estimator, _ESTIMATORS)
    name, settings = parse_call("estimator", value, {key: _names(cls) for key, cls in _ESTIMATORS.items()})
    return _ESTIMATORS[name](**settings)


def estimator_text(estimator: Estimator) -> str:
    if isinstance(estimator, Custom):
        raise SpecError(
            f"the estimator {estimator.function!r} is a callable and cannot be written as text: use one of "
            f"{', '.join(_ESTIMATORS)}, or leave ste out and call dataclasses.replace(rule, ste=...) after loading"
        )
    return _text(estimator, _ESTIMATORS)


def _names(cls: object) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]  # dataclasses only


def _of_known_type(what: str, value: Value, classes: Mapping[str, Callable[..., object]]) -> Value:
    if type(value) not in classes.values():
        raise SpecError(f"unknown {what} {value!r}: expected one of {', '.join(classes)}")
    return value


def _text(value: object, classes: Mapping[str, Callable[..., object]]) -> str:
    cls = type(value)
    name = next(name for name, each in classes.items() if each is cls)
    own, default = ({key: getattr(of, key) for key in _names(cls)} for of in (value, cls()))
    return write_call(name, own, default)


def check_axis(spec: QuantSpec, weight: str, shape: tuple[int, ...]) -> None:
    """Raise if the spec has an axis that the weight does not have."""
    kind, rank = spec.granularity, len(shape)
    if isinstance(kind, PerAxis | PerGroup) and not -rank <= kind.axis < rank:
        raise SpecError(
            f"got the spec {spec} for {weight}, but the weight's shape {shape} has no axis {kind.axis}: use "
            "'channel' for one scale per output channel, or skip this layer"
        )
