"""Knapsack: one option per layer with the least sum of noise within a budget of bytes.

This is the multiple-choice knapsack problem. It is solved exactly, by dynamic programming over the bytes used:

- options of a layer that another one beats in bytes and in noise are dropped;
- layers are added one by one, and only partial choices are kept that no other beats in both;
- a partial choice is also dropped if the linear relaxation of the layers to come, which may mix two options of a layer
  and so is never worse than a real choice, cannot make it as good as a known choice.

The relaxation takes the steps of all layers' lower convex hulls in the order of their gain per byte (Sinha and Zoltners
1979). If no step is cut, it is a real choice, and the best one for its bytes: ``hull_choices`` yields these.

Noise spans many decades. All sums are of non-negative numbers and none is the difference of two sums, so each is right
to a few units of its own last place, however loud other layers are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_choice", "hull_choices", "smallest_total"]

Option = tuple[int, float]  # bytes, noise
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SLACK = 1e-9  # relative to the known choice's noise: another accumulation order must not lose the best choice
Corners = tuple[Integers, Floats]  # of the relaxation: bytes, and the least noise in them


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
    """The bytes of the smallest option of every layer."""
    return sum(min(nbytes for nbytes, _ in options) for options in layers)


def best_choice(layers: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """The index of each layer's option with the least noise that fits the budget; of equals, the smallest.

    None if not even the smallest options fit.

    >>> best_choice([[(4, 0.5), (8, 0.1)], [(4, 0.3), (8, 0.2)]], 12)
    [1, 0]
    """
    fronts = [_front(options) for options in layers]
    if sum(int(front.nbytes[0]) for front in fronts) > budget:
        return None
    budget = min(budget, sum(int(front.nbytes[-1]) for front in fronts))
    known = _relaxed_choice(fronts, budget)
    limit = sum(float(front.noise[at]) for front, at in zip(fronts, known, strict=True))
    nbytes, noise = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[Integers, Integers]] = []  # of each partial choice the one it continues, and its last option
    for front, corners in zip(fronts, _bounds(fronts), strict=True):
        every = (nbytes[:, None] + front.nbytes[None]).ravel()
        caused = (noise[:, None] + front.noise[None]).ravel()
        kept = np.flatnonzero(caused + _least(budget - every, corners) <= limit * (1 + SLACK))
        kept = kept[np.lexsort((caused[kept], every[kept]))]
        kept = kept[_improves(caused[kept])]
        trail.append((kept // len(front.nbytes), kept % len(front.nbytes)))
        nbytes, noise = every[kept], caused[kept]
    if not len(noise) or noise[-1] > limit:  # numbers so small that rounding is no longer relative
        return [int(front.places[at]) for front, at in zip(fronts, known, strict=True)]
    at, chosen = len(noise) - 1, list[int]()  # the last one has the least noise
    for (before, option), front in zip(reversed(trail), reversed(fronts), strict=True):
        chosen.append(int(front.places[option[at]]))
        at = int(before[at])
    return chosen[::-1]


def hull_choices(layers: Sequence[Sequence[Option]]) -> Iterator[tuple[int, float]]:
    """The bytes and noise of the choices on the lower convex hull of all, from the smallest to the best.

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
    """All steps, those that gain most per byte first; steps of one layer are in order, as its hull is convex."""
    steps: list[tuple[float, _Step]] = []
    for layer, front in enumerate(fronts):
        rate = np.inf
        for a, b in zip(front.hull, front.hull[1:], strict=False):
            nbytes, gain = int(front.nbytes[b] - front.nbytes[a]), float(front.noise[a] - front.noise[b])
            rate = min(rate, gain / nbytes)  # of steps that are alike, rounding must not bring the later one forward
            steps.append((rate, _Step(layer, b, nbytes, gain)))
    return [step for _, step in sorted(steps, key=lambda each: (-each[0], each[1].layer, each[1].to))]


def _relaxed_choice(fronts: Sequence[_Front], budget: int) -> list[int]:
    """A good choice: the steps of the relaxation as long as they fit; a layer stops at its first that does not."""
    at, stopped = [0] * len(fronts), set[int]()
    used = sum(int(front.nbytes[0]) for front in fronts)
    for step in _steps(fronts):
        if step.layer in stopped or used + step.nbytes > budget:
            stopped.add(step.layer)
            continue
        at[step.layer] = step.to
        used += step.nbytes
    return at


def _bounds(fronts: Sequence[_Front]) -> Iterator[Corners]:
    """For each layer the corners of the relaxation of all layers after it."""
    steps = _steps(fronts)
    layers = np.array([step.layer for step in steps], np.int64)
    sizes, gains = np.array([step.nbytes for step in steps], np.int64), np.array([step.gain for step in steps])
    for layer in range(len(fronts)):
        rest, behind = layers > layer, fronts[layer + 1 :]
        nbytes = np.cumsum(
            np.concatenate([[sum(int(front.nbytes[0]) for front in behind)], sizes[rest]]), dtype=np.int64
        )
        # Summed from the end: the start minus the gains would be off by the rounding of the largest noise.
        end = sum(float(front.noise[front.hull[-1]]) for front in behind)
        yield nbytes, np.cumsum(np.concatenate([[end], gains[rest][::-1]]))[::-1]


def _least(left: Integers, corners: Corners) -> Floats:
    """The relaxation's noise in the bytes that are left; infinite if they are too few.

    Unlike ``np.interp`` it adds a share of either corner, and so is right if one is far louder than the other.
    """
    nbytes, noise = corners
    after = np.searchsorted(nbytes, left, side="right")
    a, b = np.maximum(after - 1, 0), np.minimum(after, len(nbytes) - 1)
    between = np.maximum(nbytes[b] - nbytes[a], 1)
    shares = np.where(a == b, 0.0, (left - nbytes[a]) / between)
    rest = np.where(a == b, 1.0, (nbytes[b] - left) / between)
    return np.where(after == 0, np.inf, rest * noise[a] + shares * noise[b])
