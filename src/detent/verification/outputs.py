"""Outputs: source and file from end to end; level 2.

Codes may differ here though every quantizer is right: sums in another order differ in their last bits, biases are
rounded to the unit of integer sums, and a value beside the boundary of two codes falls on its other side. What follows
then gets other inputs.
"""

from collections.abc import Mapping, Sequence
from math import inf, isnan, log10, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.metrics import mse
from detent.verification.codes import steps_between
from detent.verification.verify_report import EndToEnd

__all__ = ["Noise", "OutputCheck"]

Array = NDArray[Any]
MOST_CLASSES = 10_000
MOVED = "move values across the boundary of two codes"
LATER = ", and later layers start from what differs"


class Noise:
    """Signal and noise, summed over batches.

    >>> noise = Noise()
    >>> noise.add(np.float32([10.0]), np.float32([9.0]))
    >>> noise.add(np.float32([0.0]), np.float32([0.0]))
    >>> noise.db
    20.0
    """

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = 0.0

    def add(self, x: Array, y: Array) -> None:
        """Add a batch: what it should be, and what it is."""
        if not x.size:
            return
        self._signal += mse(x, np.zeros_like(x)) * x.size
        self._noise += mse(x, y) * x.size

    @property
    def db(self) -> float:
        """The ratio in decibels."""
        if isnan(self._noise) or isnan(self._signal) or self._signal == self._noise == inf:
            return nan
        if not self._noise:
            return inf
        return 10 * log10(self._signal / self._noise) if self._signal else -inf


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
        self._names, self._causes = list(names), tuple(causes)
        self._noise: dict[str, Noise] = {}
        self._codes = [0, 0, 0]
        self._first: str | None = None
        self._same = self._samples = 0
        self.notes: dict[str, None] = {}

    def add_outputs(self, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """Add the outputs of a batch."""
        for i, (name, x, y) in enumerate(zip(self._names, expected, got, strict=True)):
            if x.dtype.kind != "f" or y.dtype.kind != "f":
                continue
            if x.shape != y.shape:
                self.notes[f"output {name!r} has shape {y.shape}, the source's {x.shape}: not compared"] = None
                continue
            self._noise.setdefault(name, Noise()).add(x.astype(np.float32), y.astype(np.float32))
            if i == 0 and x.ndim == 2 and 2 <= x.shape[1] <= MOST_CLASSES:
                self._samples += len(x)
                self._same += int(np.count_nonzero(np.argmax(x, axis=1) == np.argmax(y, axis=1)))

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
        noise: Mapping[str, float] = {name: each.db for name, each in self._noise.items()}
        agreement = self._same / self._samples if self._samples else None
        return EndToEnd(compared, differing, steps, self._first, noise, agreement, cause)
