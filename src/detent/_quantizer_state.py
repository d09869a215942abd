"""The layout of a quantizer's state dict: a version, two scalars, the parameters' arrays, the observer's state.

Used by ``detent.quantizer``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from detent._plan_checks import check_step
from detent.errors import StateError

VERSION = 1
_OBSERVER = "observer."
_SCALARS = frozenset({"version", "initialized", "step"})


class State(NamedTuple):
    """A state dict taken apart; ``arrays`` is empty before calibration, ``observed`` without an observer."""

    initialized: bool
    step: int
    arrays: dict[str, Any]
    observed: dict[str, Any]


def join(state: State) -> dict[str, Any]:
    """One flat dict of copies."""
    flat: dict[str, Any] = {"version": VERSION, "initialized": state.initialized, "step": state.step, **state.arrays}
    flat |= {_OBSERVER + name: value for name, value in state.observed.items()}
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in flat.items()}


def split(flat: Mapping[str, Any]) -> State:
    """The parts of a flat dict, which must belong together."""
    if not isinstance(flat, Mapping) or not set(flat) >= _SCALARS:
        given = sorted(flat) if isinstance(flat, Mapping) else []
        missing = sorted(_SCALARS - set(given))
        raise StateError(f"state holds the keys {given}, missing {missing}: expected what state_dict() returned")
    if flat["version"] != VERSION:
        raise StateError(f"this detent reads FakeQuantize state version {VERSION}, got {flat['version']!r}")
    initialized = flat["initialized"]
    if not isinstance(initialized, bool | np.bool_):
        raise StateError(f"initialized is True or False, got {initialized!r}")
    observed = {name.removeprefix(_OBSERVER): value for name, value in flat.items() if name.startswith(_OBSERVER)}
    rest = {name: value for name, value in flat.items() if name not in _SCALARS and not name.startswith(_OBSERVER)}
    if bool(initialized) != bool(rest):
        raise StateError(f"initialized is {initialized} but the state holds the arrays {sorted(rest)}")
    return State(bool(initialized), check_step(flat["step"]), rest, observed)
