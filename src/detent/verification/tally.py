"""Tally: counts of compared and differing codes, and the first mismatch."""

from typing import SupportsInt

from detent.verification.verify_report import Difference

__all__ = ["Tally"]


class Tally:
    """Counts of compared and differing codes, and the first mismatch."""

    def __init__(self) -> None:
        self.compared = self.differing = 0
        self.first: Difference | None = None

    def count(self, compared: SupportsInt, differing: SupportsInt) -> None:
        """Count compared codes, and how many of them differ."""
        self.compared += int(compared)
        self.differing += int(differing)

    def note(
        self,
        cause: str,
        node: str,
        tensor: str,
        index: tuple[int, ...] = (),
        expected: float | str | None = None,
        got: float | str | None = None,
        x: float | None = None,
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> None:
        """Record a mismatch if it is the first."""
        if self.first is None:
            self.first = Difference(node, tensor, index, expected, got, x, scale, zero_point, cause)
