"""Verdict: what a quantized file is worth, as far as it was asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from detent.cli.judging import Accuracy
from detent.cli.timing import Timing
from detent.proof import VerifyReport
from detent.report.rendering import skip_argument

__all__ = ["Hurting", "Verdict", "Wish"]


class Wish(NamedTuple):
    """Which parts are wanted.

    >>> Wish(bench=False).verify
    True
    """

    verify: bool = True
    bench: bool = True
    rank: bool = True


class Hurting(NamedTuple):
    """A layer and its share of the noise at the outputs.

    >>> Hurting("fc", 0.4).flag
    '--skip fc'
    """

    name: str
    share: float

    @property
    def flag(self) -> str:
        """What leaves it in float."""
        return f"--skip {skip_argument(self.name)}"


@dataclass(frozen=True)
class Verdict:
    """What the result is worth.

    Attributes:
        accuracy: of the outputs; None without data.
        timing: of both models.
        verification: of a few batches.
        hurting: the layers that cause the most noise, worst first.
        sensitivity: where those come from, a ``detent.sensitivity.Sensitivity``.
        report: the page that was written.
        hints: what may be done better.

    >>> Verdict(Accuracy({"y": 20.0}, 0.9, 3)).missed(30.0, 0.8)
    ['the SQNR of output y is 20.0 dB, below the limit of 30 dB']
    """

    accuracy: Accuracy | None = None
    timing: Timing | None = None
    verification: VerifyReport | None = None
    hurting: tuple[Hurting, ...] = ()
    sensitivity: object = field(default=None, repr=False)
    report: Path | None = None
    hints: tuple[str, ...] = ()

    def missed(self, sqnr_db: float | None, agreement: float | None) -> list[str]:
        """The limits that are not kept, and codes that differ."""
        found, near = [], self.accuracy
        if sqnr_db is not None and (near is None or near.sqnr_db is None or not near.sqnr_db >= sqnr_db):
            known = near is not None and near.sqnr_db is not None
            got = f"of output {near.worst_output} is {near.sqnr_db:.1f} dB" if near and known else "is not known"
            found.append(f"the SQNR {got}, below the limit of {sqnr_db:g} dB")
        if agreement is not None and (near is None or near.agreement is None or near.agreement < agreement):
            got = "not known" if near is None or near.agreement is None else f"{near.agreement:.4g}"
            found.append(f"the agreement is {got}, below the limit of {agreement:g}")
        if self.verification is not None and not self.verification.ok:
            found.append("the file does not compute what its source computes")
        return found
