"""VerifyReport: what verification found, in numbers, as text and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from detent.codec import encode
from detent.errors import DtypeError
from detent.metrics import worst_output

__all__ = ["Difference", "EndToEnd", "Kernel", "VerifyReport"]

MAX_NOTES_SHOWN, MAX_KERNELS_SHOWN = 8, 12
MATCHES = {
    "source": "all codes match the source",
    "digests": "all quantizer codes match; weights match the digests recorded for this source",
    "nothing": "all quantizer codes match; weights not compared",
}


@dataclass(frozen=True)
class Difference:
    """One code, scale or zero point that is not what the source says.

    Attributes:
        node, tensor: of the file; the index is that of the element in the tensor.
        expected, got: what the source says, and what the file or the runtime has.
        x: what was quantized, where that is known.
        scale, zero_point: those that belong to the element, as the source has them.

    >>> print(Difference("fc_Q", "fc_q", (0, 3), 17, 18, 0.35, 0.02, 0, "wrong code"))
    fc_Q: wrong code, fc_q[0, 3] is 18, expected 17 (x 0.35, scale 0.02, zero point 0)
    """

    node: str
    tensor: str
    index: tuple[int, ...]
    expected: float | int | str | None
    got: float | int | str | None
    x: float | None
    scale: float | None
    zero_point: int | None
    cause: str

    def __str__(self) -> str:
        named = (("x", self.x), ("scale", self.scale), ("zero point", self.zero_point))
        known = ", ".join(f"{name} {value!r}" for name, value in named if value is not None)
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return (
            f"{self.node}: {self.cause}, {self.tensor}{place} is {self.got!r}, expected {self.expected!r}"
            f"{f' ({known})' if known else ''}"
        )


@dataclass(frozen=True)
class EndToEnd:
    """Source and file from end to end.

    Attributes:
        compared_codes, differing_codes: codes of activations, of the source and of this run.
        max_steps: the largest distance of two codes.
        first_node: the first node whose codes differ.
        output_sqnr_db: SQNR of each float output.
        agreement: top-1 agreement; None where the first output holds no classes.

    >>> EndToEnd(100, 1, 1, "fc_Q", {"y": 61.25}, 1.0)
    EndToEnd(1 of 100 codes differ, by at most 1 step, first at fc_Q; y 61.2 dB; agreement 100.00 %)
    """

    compared_codes: int = 0
    differing_codes: int = 0
    max_steps: int = 0
    first_node: str | None = None
    output_sqnr_db: Mapping[str, float] = field(default_factory=dict)
    agreement: float | None = None
    cause: str = ""

    def __repr__(self) -> str:
        return f"EndToEnd({self})"

    def __str__(self) -> str:
        parts = [self._codes()] if self.compared_codes else []
        parts.append(", ".join(f"{name} {value:.1f} dB" for name, value in self.output_sqnr_db.items()))
        if self.agreement is not None:
            parts.append(f"agreement {self.agreement:.2%}".replace("%", " %"))
        return "; ".join(part for part in parts if part)

    def _codes(self) -> str:
        counts = f"{self.differing_codes:,} of {self.compared_codes:,} codes differ"
        if not self.differing_codes:
            return counts
        steps = f"{self.max_steps} step{'s' if self.max_steps != 1 else ''}"
        return f"{counts}, by at most {steps}, first at {self.first_node}"


class Kernel(NamedTuple):
    """One integer kernel of ONNX Runtime beside exact arithmetic.

    Attributes:
        node, kernel: name and operator in the optimized graph.
        compared, differing: codes; 0 compared where its formula is not known here.
        max_steps: the largest distance of two codes.
        saturated: whether sums themselves are wrong.
    """

    node: str
    kernel: str
    compared: int
    differing: int
    max_steps: int
    saturated: bool


@dataclass(frozen=True)
class VerifyReport:
    """What verification found; ``ok`` is the verdict.

    A code differs where its number, its scale or its zero point does.

    Attributes:
        compared_codes, differing_codes: of level 1: weights, and activations fed with what ONNX Runtime saw.
        first_difference: of level 1.
        end_to_end: level 2 by run, "unoptimized" and "optimized"; also "accuracy_level_0" for products that compute
            with 8-bit activations unless told otherwise, and "openvino" where that is installed.
        saturation: the largest wrong code of the first kernel whose sums saturate.
        notes: what was not compared, and what else should be known.
        weights_by: what the weights were compared with: "source"; "digests" of how they were written for that source,
            where it is a float ONNX model, whose weights folding and smoothing change; or "nothing".

    >>> report = VerifyReport((1,), 1, 100, 0)
    >>> print(report)
    codes that differ: 0 of 100
    level 1: all codes match the source (1 batch)
    """

    levels: tuple[int, ...]
    batches: int
    compared_codes: int
    differing_codes: int
    first_difference: Difference | None = None
    end_to_end: Mapping[str, EndToEnd] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    saturation: Difference | None = None
    notes: tuple[str, ...] = ()
    weights_by: str = "source"

    @property
    def ok(self) -> bool:
        """Whether level 1 found no difference and level 3 no saturation."""
        return not self.differing_codes and self.first_difference is None and self.saturation is None

    @property
    def output_sqnr_db(self) -> float | None:
        """SQNR of the worst float output, optimized; None without level 2. ``end_to_end`` has all outputs."""
        run = self.end_to_end.get("optimized")
        return None if run is None else run.output_sqnr_db.get(worst_output(run.output_sqnr_db))

    @property
    def agreement(self) -> float | None:
        """Top-1 agreement, optimized; None where there are no classes."""
        run = self.end_to_end.get("optimized")
        return None if run is None else run.agreement

    def __bool__(self) -> bool:
        raise DtypeError("a VerifyReport is neither true nor false: ask report.ok")

    def to_json(self) -> str:
        """Everything, as JSON; figures that are no finite numbers are written as text."""
        document = {
            "version": 1,
            "ok": self.ok,
            "levels": self.levels,
            "batches": self.batches,
            "compared_codes": self.compared_codes,
            "differing_codes": self.differing_codes,
            "first_difference": self.first_difference,
            "output_sqnr_db": self.output_sqnr_db,
            "agreement": self.agreement,
            "end_to_end": self.end_to_end,
            "kernels": [each._asdict() for each in self.kernels],
            "saturation": self.saturation,
            "notes": self.notes,
            "weights_by": self.weights_by,
        }
        return json.dumps(encode(document), allow_nan=False)

    def __str__(self) -> str:
        lines = [f"codes that differ: {self.differing_codes} of {self.compared_codes}"]
        batches = f"{self.batches} batch{'es' if self.batches != 1 else ''}"
        if 1 in self.levels:
            first = self.first_difference
            summary = MATCHES[self.weights_by] if first is None else str(first)
            lines.append(f"level 1: {summary} ({batches})")
        lines += [f"level 2, {name.replace('_', ' ')}: {each}" for name, each in self.end_to_end.items()]
        causes = dict.fromkeys(each.cause for each in self.end_to_end.values() if each.cause)
        lines += [f"         {cause}" for cause in causes]
        if 3 in self.levels:
            lines += self._kernel_lines()
        lines += [f"note: {note}" for note in self.notes[:MAX_NOTES_SHOWN]]
        if len(self.notes) > MAX_NOTES_SHOWN:
            lines.append(f"note: and {len(self.notes) - MAX_NOTES_SHOWN} more, see report.notes")
        return "\n".join(lines)

    def _kernel_lines(self) -> list[str]:
        compared = [each for each in self.kernels if each.compared]
        codes, differing = sum(each.compared for each in compared), sum(each.differing for each in compared)
        lines = [f"level 3: {len(compared)} integer kernels, {differing:,} of {codes:,} codes differ"]
        if self.saturation is not None:
            lines.append(f"         {self.saturation}")
        bad = [each for each in compared if each.differing]
        lines += [
            f"         {each.node} ({each.kernel}): {each.differing:,} of {each.compared:,}, by at most "
            f"{each.max_steps} steps{', saturated' if each.saturated else ''}"
            for each in bad[:MAX_KERNELS_SHOWN]
        ]
        return lines
