"""Holdout: data divided into what calibrates and what judges, without being held in memory.

Of 20 batches and more, every tenth is kept from calibration. Which ones depends on nothing but their number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from detent.onnx_model.batches import Batches, Feed, open_batches

if TYPE_CHECKING:
    from detent.onnx_model.batches import InputInfo

__all__ = ["FEWEST", "Part", "Split", "first_batches", "split"]

FEWEST, NTH = 20, 10
FEW = 8  # batches that judge where none are held back


class Part:
    """Some batches of a source that can be read again, one after the other.

    Args:
        batches: all of them.
        chosen: the numbers of those that are taken, rising.

    >>> import numpy as np
    >>> from detent.onnx_model.batches import InputInfo
    >>> x = InputInfo("x", np.dtype("float32"), (None,))
    >>> part = Part(Batches([np.float32([i]) for i in range(5)], [x]), [1, 3])
    >>> len(part), [int(feed["x"][0]) for feed in part], len(part.first(1))
    (2, [1, 3], 1)
    """

    def __init__(self, batches: Batches, chosen: Sequence[int]) -> None:
        self.batches, self.chosen = batches, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Feed]:
        wanted = iter(self.chosen)
        following = next(wanted, None)
        if following is None:
            return
        for number, feed in enumerate(self.batches):
            if number == following:
                yield feed
                following = next(wanted, None)
            if following is None:
                return

    def first(self, count: int) -> "Part":
        """The first of them."""
        return Part(self.batches, self.chosen[:count])


@dataclass(frozen=True)
class Split:
    """What calibrates and what judges.

    Attributes:
        calibration: the batches whose ranges are taken.
        judged: those that the result is judged on.
        is_held_back: whether none of the latter are among the former.

    >>> Split(Part(Batches([], []), []), Part(Batches([], []), []), False).is_held_back
    False
    """

    calibration: Part
    judged: Part
    is_held_back: bool

    def __str__(self) -> str:
        if self.is_held_back:
            return f"{len(self.judged):,} batches that were held back"
        return f"{len(self.judged):,} of the batches that calibrated"


def split(data: str | PathLike[str], inputs: "Sequence[InputInfo]", batch_size: int | None = None) -> Split:
    """Divide a file or folder of batches.

    >>> import tempfile, numpy as np
    >>> from detent.onnx_model.batches import InputInfo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.zeros((30, 2), np.float32))
    ...     made = split(f"{folder}/x.npy", [InputInfo("x", np.dtype("float32"), (None, 2))])
    >>> len(made.calibration), list(made.judged.chosen), made.is_held_back
    (27, [9, 19, 29], True)
    """
    batches = open_batches(data, inputs, batch_size)
    count = batches.count or 0
    if count < FEWEST:
        everything = Part(batches, range(count))
        return Split(everything, everything.first(FEW), is_held_back=False)
    held = range(NTH - 1, count, NTH)
    rest = [number for number in range(count) if number % NTH != NTH - 1]
    return Split(Part(batches, rest), Part(batches, held), is_held_back=True)


def first_batches(
    data: str | PathLike[str], inputs: "Sequence[InputInfo]", batch_size: int | None = None, most: int | None = None
) -> Part:
    """The first batches of a file or folder, all where no number is given.

    >>> import tempfile, numpy as np
    >>> from detent.onnx_model.batches import InputInfo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.zeros((30, 2), np.float32))
    ...     inputs = [InputInfo("x", np.dtype("float32"), (None, 2))]
    ...     len(first_batches(f"{folder}/x.npy", inputs, most=4)), len(first_batches(f"{folder}/x.npy", inputs, 3))
    (4, 10)
    """
    opened = open_batches(data, inputs, batch_size)
    count = opened.count or 0
    return Part(opened, range(count if most is None else min(most, count)))
