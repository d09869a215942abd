"""VerifyReport: what verification found, in numbers, as text and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, TypeAlias

from detent.checks import plain
from detent.codec import encode
from detent.errors import DtypeError
from detent.metrics import worst_output

__all__ = ["Difference", "EndToEnd", "Kernel", "MadeBy", "Replay", "Segments", "VerifyReport", "element"]

MadeBy: TypeAlias = Literal["decisions", "export", "copy"]
JSON_VERSION = 2
MADE_BY = {
    "decisions": "what its source and its decisions make it",
    "export": "what this model exports",
    "copy": "a copy of its source",
}
MAX_NOTES_SHOWN, MAX_KERNELS_SHOWN = 8, 12


@dataclass(frozen=True)
class Difference:
    """One node, attribute, tensor, code, scale or zero point that is not what the source says.

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

    @classmethod
    def of(
        cls,
        node: str,
        tensor: str,
        cause: str,
        expected: float | int | str | None = None,
        got: float | int | str | None = None,
        index: tuple[int, ...] = (),
    ) -> "Difference":
        """A difference of anything but the code of a quantizer, which has no x, scale and zero point."""
        return cls(node, tensor, index, expected, got, None, None, None, cause)

    def __str__(self) -> str:
        named = (("x", self.x), ("scale", self.scale), ("zero point", self.zero_point))
        known = ", ".join(f"{name} {value!r}" for name, value in named if value is not None)
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        values = ""
        if self.expected is not None or self.got is not None:
            got, expected = ("nothing" if each is None else repr(each) for each in (self.got, self.expected))
            values = f", {self.tensor}{place} is {got}, expected {expected}"
        return f"{self.node}: {self.cause}{values}{f' ({known})' if known else ''}"


def element(value: object) -> float | int | str:
    """An element of an array of any type, for a difference."""
    value = plain(value)
    return value if isinstance(value, int | float) else str(value)


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
    EndToEnd(1 % of the codes move, by at most 1 step, first at fc_Q; y 61.2 dB; agreement 100.00 %)
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
        if not self.differing_codes:
            return "all codes equal"
        steps = f"{self.max_steps} step{'s' if self.max_steps != 1 else ''}"
        share = f"{100 * self.differing_codes / self.compared_codes:.2g} %"
        return f"{share} of the codes move, by at most {steps}, first at {self.first_node}"


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
class Replay:
    """Level 1 without data: the file beside what detent makes of its source by the file's decisions.

    Attributes:
        reason: why there was nothing to compare with; "" where there was.
        nodes, constants: compared nodes, and elements of constants.
        differences: what is not as it should be, most telling first.
        decided: what is taken as given within its bounds, as lines of text.
        hint: what may explain the differences.
        made_by: how the file comes from its source: by decisions, by an export of a PyTorch model, as a copy.

    >>> Replay("the file carries no decisions").ok, Replay(nodes=12, constants=3400).ok
    (False, True)
    """

    reason: str = ""
    nodes: int = 0
    constants: int = 0
    differences: tuple[Difference, ...] = ()
    decided: tuple[str, ...] = ()
    hint: str = ""
    made_by: MadeBy = "decisions"

    @property
    def ok(self) -> bool:
        """Whether the file is what its source and its decisions make it."""
        return not self.reason and not self.differences

    def __str__(self) -> str:
        if self.reason:
            return f"not replayed: {self.reason}"
        if self.differences:
            more = f" (and {len(self.differences) - 1} more)" if len(self.differences) > 1 else ""
            return f"{self.differences[0]}{more}{f'; {self.hint}' if self.hint else ''}"
        return f"{self.nodes:,} nodes and {self.constants:,} constants are what the source gives, to the bit"


@dataclass(frozen=True)
class Segments:
    """Level 2: the source between quantizers, each part fed the file's codes, beside the file as it is written.

    Attributes:
        reason: why there was nothing to compare; "" where there was.
        compared_codes, differing_codes: of activations; those that differ are an error.
        codes_within_bound: that differ next to a rounding boundary, no further from it than ``bound`` explains.
        compared_outputs, differing_outputs: over all batches.
        bound: how far the values of source and file may be apart; "" where they have to be equal to the bit.
        first: the first difference.
        is_same: source and file are one model, which leaves nothing to run.

    >>> print(Segments(compared_codes=1000, compared_outputs=2))
    1,000 codes and 2 outputs are equal to the bit
    """

    reason: str = ""
    compared_codes: int = 0
    differing_codes: int = 0
    codes_within_bound: int = 0
    compared_outputs: int = 0
    differing_outputs: int = 0
    bound: str = ""
    first: Difference | None = None
    is_same: bool = False

    @property
    def ok(self) -> bool:
        """Whether every part of the source gives the file's codes and outputs."""
        return not (self.reason or self.differing_codes or self.differing_outputs or self.first is not None)

    def __str__(self) -> str:
        if self.reason:
            return f"no verdict: {self.reason}"
        if not self.ok:
            counts = f"{self.differing_codes:,} of {self.compared_codes:,} codes and {self.differing_outputs:,} of "
            return f"{counts}{self.compared_outputs:,} outputs differ; the first: {self.first}"
        if self.is_same:
            return "source and file are the same model"
        what = f"{self.compared_codes:,} codes and {self.compared_outputs:,} outputs are equal"
        if not self.bound:
            return f"{what} to the bit"
        return f"{what}, but for {self.codes_within_bound:,} codes next to a rounding boundary ({self.bound})"


@dataclass(frozen=True)
class VerifyReport:
    """What verification found; ``ok`` is the verdict.

    Attributes:
        levels, batches: what was asked for, and how many batches there were.
        compared_codes, differing_codes: codes of weights, and of activations for each batch.
        first_difference: the first of any level.
        replay: level 1: the file beside what its source and its decisions give; None if level 1 was left out.
        segments: level 2, the verdict; None if level 2 was left out.
        end_to_end: level 2, for information, by run: "unoptimized" and "optimized"; also "accuracy_level_0" for
            products that compute with 8-bit activations unless told otherwise, and "openvino" where that is installed.
        kernels: level 3, by integer kernel.
        saturation: the largest wrong code of the first kernel whose sums saturate.
        kernel_difference: the first integer kernel that was not asked for, or that is gone.
        notes: what else should be known.
        not_compared: what no level looked at.

    >>> report = VerifyReport((1,), 1, 100, 0, replay=Replay(nodes=12, constants=3400))
    >>> print(report)
    ok: the file is what its source and its decisions make it; 100 codes compared, none differ
    level 1: 12 nodes and 3,400 constants are what the source gives, to the bit
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
    replay: Replay | None = None
    segments: Segments | None = None
    kernel_difference: Difference | None = None
    not_compared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every level that was asked for has compared what it is for, and found nothing wrong."""
        return not self.failure

    @property
    def failure(self) -> str:
        """Why the report is not ok, in one line; "" where it is."""
        if self.replay is not None and self.replay.differences:
            return str(self.replay)
        if self.first_difference is not None:
            return str(self.first_difference)
        if self.differing_codes:
            return f"{self.differing_codes:,} codes differ"
        if self.saturation is not None:
            return str(self.saturation)
        if self.kernel_difference is not None:
            return str(self.kernel_difference)
        for part in (self.replay, self.segments):
            if part is not None and not part.ok:
                return str(part)
        return ""

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
        names = [each.name for each in fields(self) if each.name != "kernels"]
        document = {
            "version": JSON_VERSION,
            "ok": self.ok,
            "failure": self.failure,
            **{name: getattr(self, name) for name in names},
            "output_sqnr_db": self.output_sqnr_db,
            "agreement": self.agreement,
            "kernels": [each._asdict() for each in self.kernels],
        }
        return json.dumps(encode(document), allow_nan=False)

    @property
    def headline(self) -> str:
        """The verdict, and what it is about, in one line."""
        if self.failure:
            return f"not ok: {self.failure}"
        what = "nothing differs in what was compared; the file was not replayed, as asked"
        if self.replay is not None:
            what = f"the file is {MADE_BY[self.replay.made_by]}"
        codes = max(self.compared_codes, 0 if self.segments is None else self.segments.compared_codes)
        parts = [what, *([f"{codes:,} codes compared, none differ"] if codes else [])]
        run = self.end_to_end.get("optimized")
        if run is not None and (worst := worst_output(run.output_sqnr_db)):
            parts.append(f"worst output {worst}: {run.output_sqnr_db[worst]:.1f} dB")
        return f"ok: {'; '.join(parts)}"

    def __str__(self) -> str:
        lines = [self.headline]
        batches = f" ({self.batches} batch{'es' if self.batches != 1 else ''})" if self.batches else ""
        if self.replay is not None:
            lines.append(f"level 1: {self.replay}")
            lines += [f"         decided: {each}" for each in self.replay.decided]
        if self.segments is not None:
            lines.append(f"level 2: {self.segments}{batches}")
        if 3 in self.levels:
            lines += self._kernel_lines()
        lines += [f"from end to end, {name.replace('_', ' ')}: {each}" for name, each in self.end_to_end.items()]
        causes = dict.fromkeys(each.cause for each in self.end_to_end.values() if each.cause)
        lines += [f"         {cause}" for cause in causes]
        lines += [f"not compared: {each}" for each in self.not_compared[:MAX_NOTES_SHOWN]]
        lines += [f"note: {note}" for note in self.notes[:MAX_NOTES_SHOWN]]
        if len(self.notes) > MAX_NOTES_SHOWN:
            lines.append(f"note: and {len(self.notes) - MAX_NOTES_SHOWN} more, see report.notes")
        return "\n".join(lines)

    def _kernel_lines(self) -> list[str]:
        compared = [each for each in self.kernels if each.compared]
        codes, differing = sum(each.compared for each in compared), sum(each.differing for each in compared)
        lines = [f"level 3: {len(compared)} integer kernels, {differing:,} of {codes:,} codes differ from exact sums"]
        lines += [f"         {each}" for each in (self.kernel_difference, self.saturation) if each is not None]
        bad = [each for each in compared if each.differing]
        lines += [
            f"         {each.node} ({each.kernel}): {each.differing:,} of {each.compared:,}, by at most "
            f"{each.max_steps} steps{', saturated' if each.saturated else ''}"
            for each in bad[:MAX_KERNELS_SHOWN]
        ]
        return lines
