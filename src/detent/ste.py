"""Straight-through estimators (STE): substitutes for a gradient that is zero almost everywhere (Bengio et al. 2013).

==================================== ==================================================================================
Identity()                           ``g``
Clipped(on="code")                   ``g`` where ``qmin <= u <= qmax``, else 0; u is the code before clamping
Clipped(on="value")                  ``g`` where ``(qmin-z)*s <= x <= (qmax-z)*s``, else 0
Clipped(bounds="exclusive")          as above, with ``<`` instead of ``<=``
HardTanh()                           ``g * max(0, 1 - |v|)``, ``v = (x - c) / h``; c: range's middle, h: half width
Tanh(unit="range")                   ``g * (1 - tanh(v)**2)``, v as in HardTanh
Tanh(unit="step")                    ``g * (1 - tanh(v)**2)``, ``v = x / s``
a callable                           the result of ``f(g, x, params)``
==================================== ==================================================================================

Estimators are plain data; the arithmetic is in ``detent.kernels.reference``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from detent.convention import Convention
from detent.errors import SpecError, closest

__all__ = ["Clipped", "Custom", "Estimator", "EstimatorLike", "HardTanh", "Identity", "Tanh", "get_estimator"]


def _check(owner: str, field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"got {owner}({field}={value!r}){closest(str(value), choices)} expected {' or '.join(choices)}")


@dataclass(frozen=True)
class Identity:
    """STE that passes the gradient unchanged."""


@dataclass(frozen=True)
class Clipped:
    """STE that passes the gradient of elements that were not clipped."""

    on: Literal["code", "value"] = "code"
    bounds: Literal["inclusive", "exclusive"] = "inclusive"

    def __post_init__(self) -> None:
        _check("Clipped", "on", self.on, ("code", "value"))
        _check("Clipped", "bounds", self.bounds, ("inclusive", "exclusive"))


@dataclass(frozen=True)
class HardTanh:
    """STE whose gradient falls linearly from g in the middle of the range to 0 at its bounds."""


@dataclass(frozen=True)
class Tanh:
    """STE with the derivative of tanh.

    ``unit`` is the unit of x: half the width of the range ("range"), or the scale ("step").
    """

    unit: Literal["range", "step"] = "range"

    def __post_init__(self) -> None:
        _check("Tanh", "unit", self.unit, ("range", "step"))


@dataclass(frozen=True)
class Custom:
    """STE from a callable ``f(g, x, params)``, which returns the gradient of x in g's shape and dtype.

    >>> Custom(lambda g, x, params: 2 * g).function(1.5, None, None)
    3.0
    """

    function: Callable[..., object]


Estimator: TypeAlias = Identity | Clipped | HardTanh | Tanh | Custom
EstimatorLike: TypeAlias = (
    Estimator | Literal["identity", "clipped", "hard_tanh", "tanh"] | Callable[..., object] | None
)

_NAMES: dict[str, Estimator] = {"identity": Identity(), "clipped": Clipped(), "hard_tanh": HardTanh(), "tanh": Tanh()}
_MASKS: dict[str, Estimator] = {
    "identity": Identity(),
    "code_inclusive": Clipped(),
    "code_exclusive": Clipped(bounds="exclusive"),
    "value_inclusive": Clipped(on="value"),
    "value_exclusive": Clipped(on="value", bounds="exclusive"),
}


def get_estimator(value: EstimatorLike, convention: Convention) -> Estimator:
    """Return the estimator for a name, a callable, or None, which stands for the mask of the convention."""
    if value is None:
        return _MASKS[convention.mask]
    if isinstance(value, Estimator):
        return value
    if isinstance(value, str) and value in _NAMES:
        return _NAMES[value]
    if callable(value) and not isinstance(value, type):
        return Custom(value)
    raise SpecError(
        f"unknown estimator {value!r}{closest(str(value), _NAMES)} expected {', '.join(_NAMES)}, a value such as "
        "ste.Clipped(), or a callable f(g, x, params)"
    )
