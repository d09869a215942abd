"""Outputs: source and file from end to end; level 2.

Codes may differ here though every quantizer is right: sums in another order differ in their last bits, biases are
rounded to the unit of integer sums, and a value beside the boundary of two codes falls on its other side. What follows
then gets other inputs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.metrics import OutputComparison
from detent.verification.codes import steps_between
from detent.verification.verify_report import EndToEnd

__all__ = ["OutputCheck"]

Array = NDArray[Any]
MOVED = "move values across the boundary of two codes"
LATER = ", and later layers start from what differs"


class OutputCheck:
    """One way to run a file, beside its source.

    Args:
        names: those of the outputs.
        causes: what may move values, so that codes differ.

    >>> check = OutputCheck(["y"])
    >>> check.add_outputs([np.float32([[1.0, 2.0]])], [np.float32([[1.0, 3.0]])])
    >>> check.add_codes("fc_Q", np.uint8([1, 2]), np.uint8([1, 3]))
    >>> found = check.result()
    >>> found.differing_codes, found.first_node, found.agreement, round(found.output_sqnr_db["y"], 2)
    (1, 'fc_Q', 1.0, 6.99)
    """

    def __init__(self, names: Sequence[str], causes: Sequence[str] = ("sums in another order",)) -> None:
        self._outputs, self._causes = OutputComparison(names), tuple(causes)
        self._codes = [0, 0, 0]
        self._first: str | None = None
        self.notes = self._outputs.notes

    def add_outputs(self, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """Add the outputs of a batch."""
        self._outputs.add(expected, got)

    def add_codes(self, node: str, expected: Array, got: Array) -> None:
        """Add the codes of a node for a batch."""
        if expected.shape != got.shape:
            self.notes[f"the codes of {node} have shape {got.shape}, expected {expected.shape}: not compared"] = None
            return
        if got.dtype.kind == "f" or expected.dtype.kind not in "iu":
            expected, got = expected.astype(np.float32), got.astype(np.float32)
        differing = int(np.count_nonzero(expected.astype(np.float64) != got.astype(np.float64)))
        steps = steps_between(expected, got) if differing else 0
        self._codes = [self._codes[0] + got.size, self._codes[1] + differing, max(self._codes[2], steps)]
        if differing and self._first is None:
            self._first = node

    def result(self) -> EndToEnd:
        """What was found."""
        compared, differing, steps = self._codes
        cause = f"{', '.join(self._causes)}: they {MOVED}{LATER if steps > 1 else ''}" if differing else ""
        sqnr_db, agreement = self._outputs.sqnr_db, self._outputs.agreement
        return EndToEnd(compared, differing, steps, self._first, sqnr_db, agreement, cause)
