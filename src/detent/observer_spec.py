"""ObserverSpec: which observer a recipe asks for. A description without data, from which fresh observers are made.

========================================= ====================================================
``minmax``                                the smallest and largest value
``percentile(lower, upper, precision)``   all but the outermost parts, in percent
``mse(norm, precision)``                  the least mean ``|error|^norm``
``entropy(precision)``                    the least divergence of distributions
========================================= ====================================================

The granularity is not part of it: it is that of the spec the observer will serve. A moving average is not among them
either: it is the scale mode ``EMA``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from detent._rule_texts import Setting, parse_call, write_call
from detent.errors import DetentError, SpecError, closest
from detent.granularity import Granularity, PerTensor
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Observer, Percentile

__all__ = ["ObserverLike", "ObserverSpec", "get_observer_spec"]

_CLASSES: Mapping[str, type[Observer]] = {"minmax": MinMax, "percentile": Percentile, "mse": MSE, "entropy": Entropy}
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "minmax": (),
    "percentile": ("lower", "upper", "precision"),
    "mse": ("norm", "precision"),
    "entropy": ("precision",),
}
_AVERAGES = ("ema", "emaminmax", "ema_minmax")


@dataclass(frozen=True, init=False, repr=False)
class ObserverSpec:
    """Which observer, with which settings.

    Attributes:
        kind: "minmax", "percentile", "mse" or "entropy".
        settings: every setting of that kind with its name and value, defaults included.

    >>> wanted = ObserverSpec("mse", norm=2.4)
    >>> str(wanted), wanted.make("axis0")
    ('mse(2.4)', MSE(norm=2.4, granularity=PerAxis(axis=0)))
    """

    kind: str
    settings: tuple[tuple[str, float], ...]

    def __init__(self, kind: str, **settings: Setting) -> None:
        if not isinstance(kind, str) or kind not in _CLASSES:
            raise SpecError(f"unknown observer {kind!r}{closest(str(kind), _CLASSES)} expected {', '.join(_CLASSES)}")
        unknown = [name for name in settings if name not in _SETTINGS[kind]]
        if unknown:
            takes = ", ".join(_SETTINGS[kind]) or "no settings"
            raise SpecError(f"observer {kind!r} has no setting {unknown[0]!r}: it takes {takes}")
        try:
            made = _CLASSES[kind](**settings)  # type: ignore[arg-type]  # checks its settings
        except (DetentError, OverflowError) as error:
            raise SpecError(f"observer {kind!r}: {error}") from error
        object.__setattr__(self, "kind", kind)
        # Adding zero makes -0.0 the 0.0 that it equals.
        object.__setattr__(self, "settings", tuple((name, getattr(made, name) + 0) for name in _SETTINGS[kind]))

    @classmethod
    def parse(cls, text: str) -> "ObserverSpec":
        """The description that a text such as ``"mse(2.4)"`` names; ``str`` gives such a text.

        Raises:
            SpecError: unknown, or settings that make no observer; the message holds the closest name.

        >>> ObserverSpec.parse("percentile(0.1, 99.9)") == ObserverSpec.parse("percentile")
        True
        """
        if not isinstance(text, str):
            raise SpecError(f"an observer's text looks like 'mse(2.4)', got {text!r}")
        if text.partition("(")[0].lower() in _AVERAGES:
            raise _no_average(text)
        kind, settings = parse_call("observer", text, _SETTINGS)
        return cls(kind, **settings)

    @classmethod
    def of(cls, observer: Observer) -> "ObserverSpec":
        """The description of an observer that has seen nothing and has no granularity of its own.

        >>> from detent.observers import Percentile
        >>> ObserverSpec.of(Percentile(1, 99))
        ObserverSpec('percentile', lower=1.0, upper=99.0)
        """
        for kind, known in _CLASSES.items():
            if type(observer) is known:
                _check_bare(observer)
                return cls(kind, **{name: getattr(observer, name) for name in _SETTINGS[kind]})
        if isinstance(observer, EMAMinMax):
            raise _no_average(observer)
        names = ", ".join(known.__name__ for known in _CLASSES.values())
        raise SpecError(f"a recipe's observer is one of {names}, got {observer!r}")

    def make(self, granularity: Granularity | str = PerTensor()) -> Observer:
        """A fresh observer with that granularity.

        >>> ObserverSpec("minmax").make("token")
        MinMax(granularity=PerToken())
        """
        return _CLASSES[self.kind](granularity=granularity, **dict(self.settings))

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
    """The description that a text, an observer class or a fresh observer stands for; an ObserverSpec passes through.

    >>> from detent.observers import MSE
    >>> get_observer_spec("mse") == get_observer_spec(MSE) == get_observer_spec(MSE())
    True
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
    raise SpecError(f"an observer is a text such as 'mse(2.4)', an observer class or a fresh observer, got {value!r}")


def _check_bare(observer: Observer) -> None:
    if observer.count or observer.nonfinite:
        raise SpecError(f"{observer!r} has observed {observer.count} values, a recipe needs a fresh one: reset() it")
    if observer.granularity != PerTensor():
        raise SpecError(
            f"{observer!r} has a granularity, which a recipe takes from the spec that is observed for: leave it out"
        )


def _no_average(value: object) -> SpecError:
    return SpecError(
        f"a moving average is a scale mode, not an observer of a recipe, got {value!r}: use mode='ema(0.9)' or "
        f"mode=dt.EMA(0.9), or one of the observers {', '.join(_CLASSES)}"
    )
