"""VerifyReport: the result of a verification, in numbers, as text and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from detent.checks import plain
from detent.codec import encode
from detent.errors import DtypeError
from detent.metrics import worst_output
from detent.tables import counted

__all__ = ["Difference", "EndToEnd", "Kernel", "MadeBy", "Replay", "Segments", "VerifyReport", "element"]

MadeBy: TypeAlias = Literal["decisions", "export", "copy"]
JSON_VERSION = 2
MATCHES = {
    "decisions": "the file matches its source and its decisions",
    "export": "the file matches the export of this model",
    "copy": "the file is a copy of its source",
}
MAX_NOTES_SHOWN, MAX_KERNELS_SHOWN = 8, 12  # so that the text fits on a screen


@dataclass(frozen=True)
class Difference:
    """A mismatch: a node, attribute, tensor, code, scale or zero point that does not follow from the source.

    Attributes:
        node: name of the node, in the file.
        tensor: name of the tensor, in the file.
        index: index of the element in the tensor.
        expected: value that follows from the source.
        got: value in the file, or value that the runtime computed.
        x: value that was quantized, or None if unknown.
        scale: scale of the element in the source, or None if unknown.
        zero_point: zero point of the element in the source, or None if unknown.
        cause: what is wrong, e.g. "wrong code" or "wrong scale, off by 3 ulp".

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
        """Create a mismatch without x, scale and zero point."""
        return cls(node, tensor, index, expected, got, None, None, None, cause)

    def __str__(self) -> str:
        named = (("x", self.x), ("scale", self.scale), ("zero point", self.zero_point))
        details = ", ".join(f"{name} {value!r}" for name, value in named if value is not None)
        index = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        values = ""
        if self.expected is not None or self.got is not None:
            got, expected = ("nothing" if each is None else repr(each) for each in (self.got, self.expected))
            values = f", {self.tensor}{index} is {got}, expected {expected}"
        return f"{self.node}: {self.cause}{values}{f' ({details})' if details else ''}"


def element(value: object) -> float | int | str:
    """Convert an array element of any type to a value that a ``Difference`` can hold."""
    value = plain(value)
    return value if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class EndToEnd:
    """Comparison of source and file end to end; differences do not fail the verification.

    Attributes:
        compared_codes: number of activation codes that were compared.
        differing_codes: number of activation codes that differ.
        max_steps: the largest difference between a code in the source and the code of the same element in the file.
        first_node: the first node whose codes differ.
        output_sqnr_db: maps the name of each float output to its SQNR in dB.
        agreement: top-1 agreement, or None if the first output has no class scores.
        cause: why codes and outputs may differ although nothing is wrong.

    >>> EndToEnd(100, 1, 1, "fc_Q", {"y": 61.25}, 1.0)
    EndToEnd(1 % of the codes differ, by at most 1, first at fc_Q; SQNR of y 61.2 dB; top-1 agreement 100.00 %)
    >>> EndToEnd(100, 0, output_sqnr_db={"y": float("inf")})
    EndToEnd(all codes match; y matches bit for bit)
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
        parts.append(", ".join(_output_text(name, value) for name, value in self.output_sqnr_db.items()))
        if self.agreement is not None:
            parts.append(f"top-1 agreement {self.agreement:.2%}".replace("%", " %"))
        return "; ".join(part for part in parts if part) or "no float output was compared"

    def _codes(self) -> str:
        if not self.differing_codes:
            return "all codes match"
        share = f"{100 * self.differing_codes / self.compared_codes:.2g} %"
        return f"{share} of the codes differ, by at most {self.max_steps}, first at {self.first_node}"


def _output_text(name: str, sqnr_db: float) -> str:
    """Format the SQNR of an output; it is infinite if all values are equal."""
    return f"{name} matches bit for bit" if sqnr_db == inf else f"SQNR of {name} {sqnr_db:.1f} dB"


class Kernel(NamedTuple):
    """Comparison of an integer kernel of ONNX Runtime with exact arithmetic.

    Attributes:
        node: name of the node in the optimized graph.
        kernel: operator of the node in the optimized graph.
        compared: number of codes that were compared; 0 if level 3 does not support the kernel.
        differing: number of codes that differ.
        max_steps: the largest difference between a code and its exact value.
        saturated: whether an accumulator saturated, which makes sums wrong.
    """

    node: str
    kernel: str
    compared: int
    differing: int
    max_steps: int
    saturated: bool


@dataclass(frozen=True)
class Replay:
    """Result of level 1, which quantizes the source again with the file's decisions and compares the result.

    Attributes:
        reason: why the file could not be replayed, or "" if it was replayed.
        nodes: number of compared nodes.
        constants: number of compared elements of constants.
        differences: mismatches, most important first.
        decided: texts about decisions that do not follow from the source, one text per kind of decision. The replay
            accepts these decisions within bounds.
        hint: a possible explanation of the mismatches.
        made_by: how the file was made: "decisions" (``qo.quantize``), "export" (of a PyTorch model) or "copy" (of the
            source).

    >>> Replay("the file has no decisions").ok, Replay(nodes=12, constants=3400).ok
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
        """Whether the file was replayed, and the result matches the file."""
        return not self.reason and not self.differences

    def __str__(self) -> str:
        if self.reason:
            return f"not replayed: {self.reason}"
        if self.differences:
            more = f" (and {len(self.differences) - 1} more)" if len(self.differences) > 1 else ""
            return f"{self.differences[0]}{more}{f'; {self.hint}' if self.hint else ''}"
        nodes, constants = counted(self.nodes, "node", ","), counted(self.constants, "constant", ",")
        return f"{nodes} and {constants} match, bit for bit"


@dataclass(frozen=True)
class Segments:
    """Result of level 2, which cuts the source at its quantizers and runs each segment on the file's codes.

    Attributes:
        reason: why nothing was compared, or "" if something was compared.
        compared_codes: number of activation codes that were compared.
        differing_codes: number of activation codes that are wrong.
        codes_within_bound: number of codes that differ only because a value is within ``bound`` of a rounding boundary.
        compared_outputs: number of outputs that were compared, over all batches.
        differing_outputs: number of outputs that are wrong, over all batches.
        bound: how much the values of source and file may differ, as text, or "" if they must be bit-exact.
        first: the first mismatch.
        is_same: whether source and file are the same model, so there is nothing to run.

    >>> print(Segments(compared_codes=1000, compared_outputs=2))
    1,000 codes and 2 outputs match, bit for bit
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
        """Whether segments were compared, and all segments give the codes and outputs of the file."""
        return not (self.reason or self.differing_codes or self.differing_outputs or self.first is not None)

    def __str__(self) -> str:
        if self.reason:
            return f"inconclusive: {self.reason}"
        if not self.ok:
            counts = f"{self.differing_codes:,} of {self.compared_codes:,} codes and {self.differing_outputs:,} of "
            return f"{counts}{self.compared_outputs:,} outputs differ, first: {self.first}"
        if self.is_same:
            return "source and file are the same model"
        codes, outputs = counted(self.compared_codes, "code", ","), counted(self.compared_outputs, "output", ",")
        counts = f"{codes} and {outputs} match"
        if not self.bound:
            return f"{counts}, bit for bit"
        within = counted(self.codes_within_bound, "code", ",")
        return f"{counts}, except {within} next to a rounding boundary ({self.bound})"


@dataclass(frozen=True)
class VerifyReport:
    """Result of ``dt.verify``; ``ok`` says whether the file passed.

    Attributes:
        levels: levels that were requested.
        batches: number of batches.
        compared_codes: number of compared codes of weights, and of activations in all batches.
        differing_codes: number of these codes that are wrong.
        first_difference: the first mismatch of any level.
        replay: result of level 1, or None if level 1 was not requested.
        segments: result of level 2, or None if level 2 was not requested.
        end_to_end: maps the name of each run to its end-to-end comparison (level 2). The runs are "unoptimized",
            "optimized", "accuracy_level_0" (if weight-only matmuls use 8-bit activations by default) and "openvino"
            (if OpenVINO is installed).
        kernels: results of level 3, one per integer kernel.
        saturation: the largest mismatch of the first kernel with a saturated accumulator.
        kernel_difference: the first layer that runs on an integer kernel although the file keeps it in float, or whose
            integer kernel is missing.
        notes: further observations, which are not errors.
        not_compared: parts of the file that no level compared.

    >>> report = VerifyReport((1,), 1, 100, 0, replay=Replay(nodes=12, constants=3400))
    >>> print(report)
    ok: the file matches its source and its decisions; 100 codes compared, none differ
    level 1: 12 nodes and 3,400 constants match, bit for bit
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
        """Whether every requested level compared something and found no mismatch."""
        return not self.failure

    @property
    def failure(self) -> str:
        """Why the report is not ok, in one line, or "" if the report is ok."""
        if self.replay is not None and self.replay.differences:
            return str(self.replay)
        if self.first_difference is not None:
            return str(self.first_difference)
        if self.differing_codes:
            return f"{self.differing_codes:,} of {self.compared_codes:,} codes differ"
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
        """Lowest SQNR of all outputs in the optimized run, in dB, or None without level 2."""
        run = self.end_to_end.get("optimized")
        return None if run is None else run.output_sqnr_db.get(worst_output(run.output_sqnr_db))

    @property
    def agreement(self) -> float | None:
        """Top-1 agreement in the optimized run, or None without level 2 or without class scores."""
        run = self.end_to_end.get("optimized")
        return None if run is None else run.agreement

    def __bool__(self) -> bool:
        raise DtypeError("a VerifyReport has no truth value: use report.ok")

    def to_json(self) -> str:
        """Return the report as JSON; NaN and infinities are written as strings."""
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
        """Result in one line: "ok" or "not ok", and the reason."""
        if self.failure:
            return f"not ok: {self.failure}"
        match = "everything compared matches; the file was not replayed, because level 1 was not requested"
        if self.replay is not None:
            match = MATCHES[self.replay.made_by]
        codes = max(self.compared_codes, 0 if self.segments is None else self.segments.compared_codes)
        parts = [match, *([f"{counted(codes, 'code', ',')} compared, none differ"] if codes else [])]
        run = self.end_to_end.get("optimized")
        if run is not None and (worst := worst_output(run.output_sqnr_db)):
            sqnr_db = run.output_sqnr_db[worst]
            worst_text = f"SQNR of worst output {worst!r}: {sqnr_db:.1f} dB"
            parts.append("all outputs match bit for bit" if sqnr_db == inf else worst_text)
        return f"ok: {'; '.join(parts)}"

    def __str__(self) -> str:
        lines = [self.headline]
        batches = f" ({counted(self.batches, 'batch')})" if self.batches else ""
        if self.replay is not None:
            lines.append(f"level 1: {self.replay}")
            lines += [f"         accepted within bounds: {each}" for each in self.replay.decided]
        if self.segments is not None:
            lines.append(f"level 2: {self.segments}{batches}")
        if 3 in self.levels:
            lines += self._kernel_lines()
        lines += [f"end to end, {name.replace('_', ' ')}: {each}" for name, each in self.end_to_end.items()]
        causes = dict.fromkeys(each.cause for each in self.end_to_end.values() if each.cause)
        lines += [f"         {cause}" for cause in causes]
        lines += [f"not compared: {each}" for each in self.not_compared[:MAX_NOTES_SHOWN]]
        lines += [f"note: {note}" for note in self.notes[:MAX_NOTES_SHOWN]]
        if len(self.notes) > MAX_NOTES_SHOWN:
            lines.append(f"note: {len(self.notes) - MAX_NOTES_SHOWN} more in report.notes")
        return "\n".join(lines)

    def _kernel_lines(self) -> list[str]:
        compared = [each for each in self.kernels if each.compared]
        codes, differing = sum(each.compared for each in compared), sum(each.differing for each in compared)
        kernels = counted(len(compared), "integer kernel")
        lines = [f"level 3: {kernels}, {differing:,} of {codes:,} codes differ from exact arithmetic"]
        lines += [f"         {each}" for each in (self.kernel_difference, self.saturation) if each is not None]
        wrong = [each for each in compared if each.differing]
        lines += [
            f"         {each.node} ({each.kernel}): {each.differing:,} of {each.compared:,} codes differ, by at most "
            f"{each.max_steps}{', saturated' if each.saturated else ''}"
            for each in wrong[:MAX_KERNELS_SHOWN]
        ]
        return lines
