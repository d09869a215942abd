"""Judging: what a quantized file is worth, beside the model it was made from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isnan
from os import PathLike
from typing import Any

from numpy.typing import NDArray

from detent.errors import SpecError
from detent.onnx_model import load, make_session
from detent.onnx_model.graph import Graph
from detent.onnx_model.sessions import refusals
from detent.proof.outputs import OutputCheck

__all__ = ["Accuracy", "check_has_classes", "judge", "worst"]

Feed = dict[str, NDArray[Any]]


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
        return worst(self.outputs_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """Of the worst float output."""
        return self.outputs_sqnr_db.get(self.worst_output)


def worst(sqnr_db: Mapping[str, float]) -> str:
    """The name of the lowest figure, where NaN is the lowest; "" of none.

    >>> worst({"a": 3.0, "b": float("nan"), "c": 1.0}), worst({})
    ('b', '')
    """
    return min(sqnr_db, key=lambda name: -inf if isnan(sqnr_db[name]) else sqnr_db[name], default="")


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
    check, count = OutputCheck(names), 0
    with refusals():
        for feed in feeds:
            count += 1
            check.add_outputs(before.run(names, feed), after.run(names, feed))
    found = check.result()
    return Accuracy(found.output_sqnr_db, found.agreement, count)


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
    check = OutputCheck(names)
    with refusals():
        outputs = session.run(names, feed)
    check.add_outputs(outputs, outputs)
    if check.result().agreement is None:
        raise SpecError(
            f"the first output has shape {outputs[0].shape}: agreement needs one row of class scores per sample, so "
            "use --fail-below-sqnr"
        )
