"""Holdout: data divided into what calibrates and what judges, without being held in memory.

Of 20 batches and more, every tenth is kept from calibration. Which ones depends on nothing but their number.

Judging: what a quantized file is worth, beside the model it was made from.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from detent.errors import SpecError
from detent.metrics import OutputComparison, worst_output
from detent.onnx_model import load, make_session
from detent.onnx_model.batches import Batches, Feed, open_batches
from detent.onnx_model.graph import Graph
from detent.onnx_model.sessions import refusals

if TYPE_CHECKING:
    from detent.onnx_model.batches import InputInfo

__all__ = ["FEWEST", "Accuracy", "Part", "Split", "check_has_classes", "first_batches", "judge", "split"]

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


@dataclass(frozen=True)
class Accuracy:
    """How near the outputs are.

    Attributes:
        outputs_sqnr_db: of each float output, over all batches.
        agreement: the share of samples with the same largest class; None where the first output holds no classes.
        batches: how many there were.

    >>> found = Accuracy({"y": 41.0, "z": 30.5}, 1.0, 3)
    >>> found.worst_output, found.sqnr_db
    ('z', 30.5)
    """

    outputs_sqnr_db: Mapping[str, float]
    agreement: float | None
    batches: int

    @property
    def worst_output(self) -> str:
        """The float output with the lowest SQNR; "" where there is no float output."""
        return worst_output(self.outputs_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """Of the worst float output."""
        return self.outputs_sqnr_db.get(self.worst_output)


def judge(source: str | PathLike[str], artifact: str | PathLike[str], feeds: Iterable[Feed]) -> Accuracy:
    """Run both on some batches, and compare what they give.

    >>> import tempfile, numpy as np
    >>> from onnx import parser
    >>> from detent.onnx_model import save
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x) => (float[1,2] y) { y = Abs(x) }')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(made, f"{folder}/a.onnx")
    ...     judge(f"{folder}/a.onnx", f"{folder}/a.onnx", [{"x": np.float32([[1, 2]])}]).agreement
    1.0
    """
    names = Graph(load(artifact)).outputs
    before, after = make_session(source), make_session(artifact)
    outputs, count = OutputComparison(names), 0
    with refusals():
        for feed in feeds:
            count += 1
            outputs.add(before.run(names, feed), after.run(names, feed))
    return Accuracy(outputs.sqnr_db, outputs.agreement, count)


def check_has_classes(source: str | PathLike[str], feed: Feed) -> None:
    """Make sure that agreement can be told, before anything takes long.

    Raises:
        SpecError: the first output is no table of scores.

    >>> import numpy as np
    >>> from onnx import parser
    >>> check_has_classes(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Abs(x) }'),
    ...     {"x": np.float32([1, 2])})
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: the first output has shape (2,): agreement needs one row of class scores per sample, \
so use --fail-below-sqnr
    """
    session = make_session(source)
    names = [value.name for value in session.get_outputs()]
    with refusals():
        outputs = session.run(names, feed)
    comparison = OutputComparison(names)
    comparison.add(outputs, outputs)
    if comparison.agreement is None:
        raise SpecError(
            f"the first output has shape {outputs[0].shape}: agreement needs one row of class scores per sample, so "
            "use --fail-below-sqnr"
        )
