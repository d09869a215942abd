"""Choosing: one option per layer, the least sum of noise in so many bytes.

This is the multiple-choice knapsack problem. It is solved exactly, by dynamic programming over the bytes used:

- of a layer, options that another one beats in bytes and in noise are dropped;
- layers are added one by one, and of all partial choices only those are kept that no other beats in both;
- a partial choice is dropped as well where the linear relaxation of the layers to come, which may mix two options of
  a layer and so is never worse than a real choice, cannot make it as good as a choice that is known already.

The relaxation takes the steps of all layers' lower convex hulls in the order of what they gain per byte (Sinha and
Zoltners 1979). Where no step is cut, it is a real choice, and the best one for its bytes: ``hull_choices`` are these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_choice", "hull_choices", "smallest_total"]

Option = tuple[int, float]  # bytes, noise
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SLACK = 1e-9  # of the known choice's noise: sums of floats in another order must not cost the best choice


@dataclass(frozen=True)
class _Front:
    """The options of a layer that no other beats, by growing bytes, and which of them are on the lower convex hull."""

    nbytes: Integers
    noise: Floats
    places: Integers  # in the options as they were given
    hull: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """From one option on a layer's hull to the next."""

    layer: int
    to: int
    nbytes: int
    gain: float


def smallest_total(layers: Sequence[Sequence[Option]]) -> int:
    """The bytes that the smallest option of every layer takes.

    >>> smallest_total([[(4, 0.5), (8, 0.1)], [(3, 0.2)]])
    7
    """
    return sum(min(nbytes for nbytes, _ in options) for options in layers)


def best_choice(layers: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """The place of each layer's option such that all fit the budget and their noise is least; of equals, the smallest.

    Args:
        layers: of each layer the (bytes, noise) of its options.
        budget: in bytes.

    Returns:
        None where not even the smallest options fit.

    >>> best_choice([[(4, 0.5), (8, 0.1)], [(4, 0.3), (8, 0.2)]], 12)
    [1, 0]
    >>> best_choice([[(4, 0.5)]], 3) is None
    True
    """
    fronts = [_front(options) for options in layers]
    if sum(int(front.nbytes[0]) for front in fronts) > budget:
        return None
    known = _relaxed_choice(fronts, budget)
    limit = sum(float(front.noise[at]) for front, at in zip(fronts, known, strict=True))
    bounds = _bounds(fronts)
    nbytes, noise = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[Integers, Integers]] = []  # of each partial choice the one it continues, and its last option
    for front, (bytes_to_come, noise_to_come) in zip(fronts, bounds[1:], strict=True):
        every = (nbytes[:, None] + front.nbytes[None]).ravel()
        caused = (noise[:, None] + front.noise[None]).ravel()
        left = budget - every
        least = np.where(left < bytes_to_come[0], np.inf, np.interp(left, bytes_to_come, noise_to_come))
        kept = np.flatnonzero(caused + least <= limit * (1 + SLACK))
        kept = kept[np.lexsort((caused[kept], every[kept]))]
        kept = kept[_improves(caused[kept])]
        trail.append((kept // len(front.nbytes), kept % len(front.nbytes)))
        nbytes, noise = every[kept], caused[kept]
    at, chosen = len(noise) - 1, list[int]()  # the last one has the least noise
    for (before, option), front in zip(reversed(trail), reversed(fronts), strict=True):
        chosen.append(int(front.places[option[at]]))
        at = int(before[at])
    return chosen[::-1]


def hull_choices(layers: Sequence[Sequence[Option]]) -> Iterator[tuple[int, float]]:
    """The bytes and noise of the best choices on the lower convex hull of all, from the smallest to the best.

    >>> list(hull_choices([[(4, 0.5), (8, 0.25)], [(4, 0.25), (8, 0.125)]]))
    [(8, 0.75), (12, 0.5), (16, 0.375)]
    """
    fronts = [_front(options) for options in layers]
    nbytes = sum(int(front.nbytes[0]) for front in fronts)
    at = [0] * len(fronts)
    yield nbytes, sum(float(front.noise[0]) for front in fronts)
    for step in _steps(fronts):
        nbytes += step.nbytes
        at[step.layer] = step.to
        yield nbytes, sum(float(front.noise[place]) for front, place in zip(fronts, at, strict=True))


def _front(options: Sequence[Option]) -> _Front:
    nbytes = np.array([option[0] for option in options], np.int64)
    noise = np.array([option[1] for option in options], np.float64)
    order = np.lexsort((noise, nbytes))
    order = order[_improves(noise[order])]
    nbytes, noise = nbytes[order], noise[order]
    hull: list[int] = []
    for at in range(len(order)):
        while len(hull) > 1 and _is_above(nbytes, noise, hull[-2], hull[-1], at):
            hull.pop()
        hull.append(at)
    return _Front(nbytes, noise, order, tuple(hull))


def _improves(noise: Floats) -> NDArray[np.bool_]:
    """Which values are below all before them."""
    if not len(noise):
        return np.zeros(0, np.bool_)
    return np.concatenate([[True], noise[1:] < np.minimum.accumulate(noise)[:-1]])


def _is_above(nbytes: Integers, noise: Floats, a: int, b: int, c: int) -> bool:
    """Whether point b is on or above the line from a to c."""
    one = (noise[a] - noise[b]) * (nbytes[c] - nbytes[a])
    return bool(one <= (noise[a] - noise[c]) * (nbytes[b] - nbytes[a]))


def _steps(fronts: Sequence[_Front]) -> list[_Step]:
    """All steps, those that gain most per byte first; of one layer they are in order, as its hull is convex."""
    steps = []
    for layer, front in enumerate(fronts):
        for a, b in zip(front.hull, front.hull[1:], strict=False):
            steps.append(
                _Step(layer, b, int(front.nbytes[b] - front.nbytes[a]), float(front.noise[a] - front.noise[b]))
            )
    return sorted(steps, key=lambda step: (-step.gain / step.nbytes, step.layer, step.to))


def _relaxed_choice(fronts: Sequence[_Front], budget: int) -> list[int]:
    """A good choice: the steps of the relaxation, as long as they fit; a layer stops at its first that does not."""
    at, stopped = [0] * len(fronts), set[int]()
    used = sum(int(front.nbytes[0]) for front in fronts)
    for step in _steps(fronts):
        if step.layer in stopped or used + step.nbytes > budget:
            stopped.add(step.layer)
            continue
        at[step.layer] = step.to
        used += step.nbytes
    return at


def _bounds(fronts: Sequence[_Front]) -> list[tuple[Floats, Floats]]:
    """For the layers from each on the corners of their relaxation: bytes, and the least noise in them."""
    found = []
    steps = _steps(fronts)
    for first in range(len(fronts) + 1):
        rest = [step for step in steps if step.layer >= first]
        start = float(sum(int(front.nbytes[0]) for front in fronts[first:]))
        noise = float(sum(float(front.noise[0]) for front in fronts[first:]))
        nbytes = start + np.cumsum([0.0, *(step.nbytes for step in rest)])
        found.append((nbytes, np.maximum(noise - np.cumsum([0.0, *(step.gain for step in rest)]), 0.0)))
    return found
