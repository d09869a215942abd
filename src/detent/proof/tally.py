"""Tally: codes counted, and the first one that differs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.proof.report import Difference

__all__ = ["Tally", "first_index", "steps_between"]

Array = NDArray[Any]


class Tally:
    """How many codes were compared, how many differ, and the first of them.

    >>> tally = Tally()
    >>> tally.count(10, 1)
    >>> tally.note(Difference("Q", "q", (0,), 1, 2, None, None, None, "another code"))
    >>> tally.compared, tally.differing, tally.first.got
    (10, 1, 2)
    """

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0
        self.first: Difference | None = None

    def count(self, compared: int, differing: int) -> None:
        """Add numbers of codes."""
        self.compared += int(compared)
        self.differing += int(differing)

    def note(self, difference: Difference) -> None:
        """Keep a difference, if it is the first."""
        if self.first is None:
            self.first = difference


def first_index(bad: Array) -> tuple[int, ...]:
    """The index of the first True, in C order.

    >>> first_index(np.array([[False, False], [True, True]]))
    (1, 0)
    """
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))


def steps_between(a: Array, b: Array) -> int:
    """The largest distance of two codes; of small floats, of what they stand for.

    >>> steps_between(np.uint8([0, 9]), np.uint8([255, 9]))
    255
    """
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return int(np.ceil(np.nanmax(distance, initial=0.0)))
