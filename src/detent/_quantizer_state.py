"""The layout of a quantizer's state dict: a version, two scalars, the parameters' arrays, the observer's state.

Used by ``detent.quantizer``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from detent._checks import as_integer, plain
from detent._plan_checks import STEP_LIMIT
from detent.errors import SpecError, StateError
from detent.spec import QuantSpec

VERSION = 1
_OBSERVER = "observer."
_SCALARS = frozenset({"version", "spec", "initialized", "step"})


class State(NamedTuple):
    """A state dict taken apart; ``arrays`` is empty before calibration, ``observed`` without an observer."""

    spec: QuantSpec
    initialized: bool
    step: int
    arrays: dict[str, Any]
    observed: dict[str, Any]


def join(state: State) -> dict[str, Any]:
    """One flat dict of copies."""
    flat: dict[str, Any] = {"version": VERSION, "spec": state.spec.to_json(), "initialized": state.initialized}
    flat |= {"step": state.step, **state.arrays}
    flat |= {_OBSERVER + name: value for name, value in state.observed.items()}
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in flat.items()}


def split(flat: Mapping[str, Any]) -> State:
    """The parts of a flat dict, which must belong together."""
    if not isinstance(flat, Mapping) or not all(isinstance(name, str) for name in flat) or not set(flat) >= _SCALARS:
        given = list(flat) if isinstance(flat, Mapping) else []
        missing = sorted(_SCALARS - set(given))
        raise StateError(f"state holds the keys {given}, missing {missing}: expected what state_dict() returned")
    scalars = {name: plain(flat[name]) for name in _SCALARS}
    if type(scalars["version"]) is not int or scalars["version"] != VERSION:
        raise StateError(f"this detent reads FakeQuantize state version {VERSION}, got {scalars['version']!r}")
    if not isinstance(scalars["initialized"], bool):
        raise StateError(f"initialized is True or False, got {scalars['initialized']!r}")
    step = as_integer("the state's step", scalars["step"], at_least=0, at_most=STEP_LIMIT - 1, error=StateError)
    observed = {name.removeprefix(_OBSERVER): value for name, value in flat.items() if name.startswith(_OBSERVER)}
    rest = {name: value for name, value in flat.items() if name not in _SCALARS and not name.startswith(_OBSERVER)}
    if scalars["initialized"] != bool(rest):
        raise StateError(f"initialized is {scalars['initialized']} but the state holds the arrays {sorted(rest)}")
    try:
        spec = QuantSpec.from_json(scalars["spec"])
    except SpecError as error:
        raise StateError(f"the state's spec cannot be read: {error}") from error
    return State(spec, scalars["initialized"], step, rest, observed)
