"""Subset search: which of several changes to a model lower its noise, measured for all of them together.

Changes interact, so the noise of one change alone says little. First all changes are made, then each half of them is
switched, each quarter, and so on. A switch is kept if it removes at least 2 % of the noise.
"""

from collections.abc import Callable, Sequence

__all__ = ["search_subset"]

MAX_MEASUREMENTS = 16  # limit on the measurements after the first
MAX_SWITCHED_NOISE = 0.98  # a switch must remove at least 2 % of the noise


def search_subset(
    candidates: Sequence[str], measure: Callable[[set[str], float], float], plain: float
) -> tuple[set[str], float]:
    """Search the subset of changes with the least noise; return the subset and its noise.

    ``measure(changes, limit)`` returns the noise with some changes; a noise above the limit need not be exact.
    ``plain`` is the noise without changes.

    >>> noise = {"a": -3.0, "b": 2.0, "c": -1.0}
    >>> search_subset("abc", lambda changes, limit: 10.0 + sum(noise[each] for each in changes), 10.0)[0] == {"a", "c"}
    True
    """
    chosen, pending = set(candidates), _halves(candidates)
    remaining = measure(chosen, float("inf"))
    if not remaining <= plain:
        chosen, remaining = set(), plain
    for _ in range(MAX_MEASUREMENTS):
        if not pending or not remaining:
            break
        switched = pending.pop(0)
        changed = chosen ^ set(switched)
        now = measure(changed, MAX_SWITCHED_NOISE * remaining)
        if now < MAX_SWITCHED_NOISE * remaining:
            chosen, remaining = changed, now
        pending += _halves(switched)
    return chosen, remaining


def _halves(candidates: Sequence[str]) -> list[Sequence[str]]:
    """Return both halves of some candidates; [] for a single candidate."""
    half = len(candidates) // 2
    return [candidates[:half], candidates[half:]] if half else []
