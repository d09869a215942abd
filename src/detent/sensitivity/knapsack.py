"""Knapsack: choose one candidate per layer, so that the total noise is smallest within a budget of bytes.

This is the multiple-choice knapsack problem. It is solved exactly, by dynamic programming over the bytes used:

- drop dominated candidates: another candidate of the layer has at most as many bytes and at most as much noise;
- add layers one by one, and drop partial choices that are dominated by another partial choice;
- drop a partial choice if a lower bound of its total noise exceeds the noise of a complete choice found before.

The lower bound is the LP relaxation over the remaining layers, where a layer may use a weighted mean of two candidates.
It needs only candidates on the lower convex hull of each layer's bytes and noise. At first, each layer uses its
smallest candidate. A step replaces the candidate of one layer by the next larger candidate on the hull. The steps of
all layers are taken in the order of gain per byte (Sinha and Zoltners 1979). After each complete step, every
layer has one candidate, and no choice of the same size has less noise. ``hull_choices`` yields these choices.

Noise values differ by many powers of ten. So only non-negative numbers are added, and sums are never subtracted. Each
sum is then accurate to a few ulp, even if the noise of other layers is far larger.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_choice", "hull_choices", "smallest_total"]

Option = tuple[int, float]  # a candidate: bytes, noise
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SLACK = 1e-9  # relative tolerance of the bound, so that rounding errors in sums cannot drop the best choice
Corners = tuple[Integers, Floats]  # corners of the LP relaxation: bytes, and the least noise with at most these bytes


@dataclass(frozen=True)
class _Front:
    """The candidates of a layer that are not dominated, sorted by bytes, smallest first."""

    nbytes: Integers
    noise: Floats
    indices: Integers  # positions in the caller's list of candidates
    hull: tuple[int, ...]  # positions of the candidates on the lower convex hull


@dataclass(frozen=True)
class _Step:
    """A step from one candidate on a layer's hull to the next."""

    layer: int
    to: int
    nbytes: int
    gain: float


def smallest_total(layers: Sequence[Sequence[Option]]) -> int:
    """Return the size of the smallest choice in bytes: the sum over each layer's smallest candidate."""
    return sum(min(nbytes for nbytes, _ in options) for options in layers)


def best_choice(layers: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Return the choice with the least noise that fits the budget, as one candidate index per layer.

    If several choices have the same noise, the smallest of them is returned. If even the smallest candidates do not
    fit, the result is None.

    >>> best_choice([[(4, 0.5), (8, 0.1)], [(4, 0.3), (8, 0.2)]], 12)
    [1, 0]
    """
    fronts = [_front(options) for options in layers]
    if sum(int(front.nbytes[0]) for front in fronts) > budget:
        return None
    budget = min(budget, sum(int(front.nbytes[-1]) for front in fronts))
    greedy = _relaxed_choice(fronts, budget)
    limit = sum(float(front.noise[at]) for front, at in zip(fronts, greedy, strict=True))
    nbytes, noise = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[Integers, Integers]] = []  # each partial choice: index of the choice it extends, last candidate
    for front, corners in zip(fronts, _bounds(fronts), strict=True):
        next_nbytes = (nbytes[:, None] + front.nbytes[None]).ravel()
        next_noise = (noise[:, None] + front.noise[None]).ravel()
        kept = np.flatnonzero(next_noise + _least_noise(budget - next_nbytes, corners) <= limit * (1 + SLACK))
        kept = kept[np.lexsort((next_noise[kept], next_nbytes[kept]))]
        kept = kept[_improves(next_noise[kept])]
        trail.append((kept // len(front.nbytes), kept % len(front.nbytes)))
        nbytes, noise = next_nbytes[kept], next_noise[kept]
    if not len(noise) or noise[-1] > limit:  # with subnormal numbers, the relative tolerance can be too small
        return [int(front.indices[at]) for front, at in zip(fronts, greedy, strict=True)]
    at, chosen = len(noise) - 1, list[int]()  # the last choice has the least noise
    for (before, option), front in zip(reversed(trail), reversed(fronts), strict=True):
        chosen.append(int(front.indices[option[at]]))
        at = int(before[at])
    return chosen[::-1]


def hull_choices(layers: Sequence[Sequence[Option]]) -> Iterator[tuple[int, float]]:
    """Yield bytes and noise of the choices on the lower convex hull, from the smallest to the least noisy.

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
        yield nbytes, sum(float(front.noise[index]) for front, index in zip(fronts, at, strict=True))


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
    """Return a mask of the values that are smaller than all values before them."""
    if not len(noise):
        return np.zeros(0, np.bool_)
    return np.concatenate([[True], noise[1:] < np.minimum.accumulate(noise)[:-1]])


def _is_above(nbytes: Integers, noise: Floats, a: int, b: int, c: int) -> bool:
    """Return whether point b is on or above the line from a to c."""
    gain_to_b = (noise[a] - noise[b]) * (nbytes[c] - nbytes[a])
    return bool(gain_to_b <= (noise[a] - noise[c]) * (nbytes[b] - nbytes[a]))


def _steps(fronts: Sequence[_Front]) -> list[_Step]:
    """Return all steps by gain per byte, largest first; a layer's steps stay in order, because hulls are convex."""
    steps: list[tuple[float, _Step]] = []
    for layer, front in enumerate(fronts):
        rate = np.inf
        for a, b in zip(front.hull, front.hull[1:], strict=False):
            nbytes, gain = int(front.nbytes[b] - front.nbytes[a]), float(front.noise[a] - front.noise[b])
            rate = min(rate, gain / nbytes)  # rounding errors must not put a later step of a layer first
            steps.append((rate, _Step(layer, b, nbytes, gain)))
    return [step for _, step in sorted(steps, key=lambda each: (-each[0], each[1].layer, each[1].to))]


def _relaxed_choice(fronts: Sequence[_Front], budget: int) -> list[int]:
    """Return a good choice: take the steps in order; a layer stops at its first step that exceeds the budget."""
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
    """Yield, for each layer, the corners of the LP relaxation over all layers after it."""
    steps = _steps(fronts)
    layers = np.array([step.layer for step in steps], np.int64)
    sizes, gains = np.array([step.nbytes for step in steps], np.int64), np.array([step.gain for step in steps])
    for layer in range(len(fronts)):
        rest, later = layers > layer, fronts[layer + 1 :]
        nbytes = np.cumsum(
            np.concatenate([[sum(int(front.nbytes[0]) for front in later)], sizes[rest]]), dtype=np.int64
        )
        # Sum from the end: subtracting gains from the start would keep the rounding error of the largest noise.
        end = sum(float(front.noise[front.hull[-1]]) for front in later)
        yield nbytes, np.cumsum(np.concatenate([[end], gains[rest][::-1]]))[::-1]


def _least_noise(spare: Integers, corners: Corners) -> Floats:
    """Return the least noise of the LP relaxation with at most ``spare`` bytes, or infinity if nothing fits.

    The result is a weighted sum of two corners, which is accurate even if one corner is far larger than the other;
    ``np.interp`` would be inaccurate.
    """
    nbytes, noise = corners
    after = np.searchsorted(nbytes, spare, side="right")
    a, b = np.maximum(after - 1, 0), np.minimum(after, len(nbytes) - 1)
    between = np.maximum(nbytes[b] - nbytes[a], 1)
    share_b = np.where(a == b, 0.0, (spare - nbytes[a]) / between)
    share_a = np.where(a == b, 1.0, (nbytes[b] - spare) / between)
    return np.where(after == 0, np.inf, share_a * noise[a] + share_b * noise[b])
