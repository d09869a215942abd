"""DemoResult: the results of the demo as a table, as numbers and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap

from detent.codec import encode
from detent.errors import SpecError
from detent.tables import table_lines
from detent.verification import VerifyReport

__all__ = ["COLUMNS", "DemoResult", "DemoRow"]

COLUMNS = ("", "PyTorch", "ONNX Runtime", "same class", "bytes", "ratio", "SQNR", "codes differ")
WIDTH = 80
NOTES = (
    "W8, W4 and W2 are the bits of weights; their inputs have 8. At 4 and 2 bits the first and the last layer keep 8.",
    "Accuracies are on images that no network was trained on; SQNR is that of the logits against float's.",
    "PTQ quantizes the float network. QAT trains the last epochs quantized, as many as float gets; its weights are its "
    "own, so that its SQNR says little: judge it by its accuracy.",
    "Codes are those of all weights, and of every quantizer for its input in ONNX Runtime. The accumulation order "
    "differs there, so logits differ a little.",
)
TWO_BITS = "W2 is stored in 4 bits: ONNX has no smaller integers before opset 25."


@dataclass(frozen=True)
class DemoRow:
    """One network of the demo, before or after quantization.

    Attributes:
        label: "float", or the bits of its weights and how it was quantized, "W4 QAT".
        recipe: the preset; None for float.
        accuracy_torch, accuracy_onnxruntime: shares of the test images that are classified right.
        samples: the number of test images.
        equal_predictions: images for which both predict the same class, right or wrong.
        nbytes, nbytes_float: sizes of this ONNX file and of the float network's.
        sqnr_db: of the logits in ONNX Runtime, against those of the float network; None for float itself.
        compared_codes, differing_codes: of level 1 of ``dt.verify``.

    >>> row = DemoRow("W4 QAT", "w4a8", 0.98, 0.978, 500, 499, 30_000, 180_000, 21.5, 1000, 0)
    >>> row.ratio, row.cells()
    (6.0, ('W4 QAT', '98.0 %', '97.8 %', '499 of 500', '30,000', '6.0x', '21.5 dB', '0 of 1000'))
    """

    label: str
    recipe: str | None
    accuracy_torch: float
    accuracy_onnxruntime: float
    samples: int
    equal_predictions: int
    nbytes: int
    nbytes_float: int
    sqnr_db: float | None = None
    compared_codes: int = 0
    differing_codes: int = 0

    def __post_init__(self) -> None:
        shares = (self.accuracy_torch, self.accuracy_onnxruntime)
        if not all(0 <= share <= 1 for share in shares):
            raise SpecError(f"accuracies are shares from 0 to 1, got {shares}")
        if min(self.samples, self.nbytes, self.nbytes_float) <= 0 or self.equal_predictions > self.samples:
            raise SpecError(f"a row needs samples and bytes, and at most as many equal predictions, got {self}")

    @property
    def ratio(self) -> float:
        """How many times smaller the file is than the float network's."""
        return self.nbytes_float / self.nbytes

    def cells(self) -> tuple[str, ...]:
        """The cells of the table row."""
        return (
            self.label,
            f"{100 * self.accuracy_torch:.1f} %",
            f"{100 * self.accuracy_onnxruntime:.1f} %",
            f"{self.equal_predictions} of {self.samples}",
            f"{self.nbytes:,}",
            f"{self.ratio:.1f}x",
            "-" if self.sqnr_db is None else f"{self.sqnr_db:.1f} dB",
            "-" if self.recipe is None else f"{self.differing_codes} of {self.compared_codes}",
        )


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo; ``print`` shows the table.

    Attributes:
        rows: float first.
        verifications: a report for each quantized row, by label.
        report_path: the HTML report.
        files: all files that were written, the report first.
        shown: the label of the row whose file was written and whose layers are in the report.

    >>> rows = (DemoRow("float", None, 0.99, 0.99, 500, 500, 180_000, 180_000),
    ...         DemoRow("W8 QAT", "w8a8", 0.99, 0.99, 500, 500, 60_000, 180_000, 31.0, 1000, 0))
    >>> verifications = {"W8 QAT": VerifyReport((1,), 5, 1000, 0)}
    >>> result = DemoResult(rows, verifications, Path("demo-report.html"), (), "W8 QAT")
    >>> result.ok, result["W8 QAT"].ratio, result.verification.batches, result.codes_line()
    (True, 3.0, 5, 'codes that differ: 0 of 1000')
    """

    rows: tuple[DemoRow, ...]
    verifications: Mapping[str, VerifyReport]
    report_path: Path
    files: tuple[Path, ...]
    shown: str
    seed: int = 0
    quick: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        quantized = {row.label for row in self.rows if row.recipe is not None}
        if quantized != set(self.verifications) or self.shown not in quantized:
            raise SpecError(f"each of {sorted(quantized)} has a verification, got {sorted(self.verifications)}")

    def __getitem__(self, label: str) -> DemoRow:
        rows = {row.label: row for row in self.rows}
        if label not in rows:
            raise SpecError(f"no row is named {label!r}: {', '.join(rows)}")
        return rows[label]

    @property
    def verification(self) -> VerifyReport:
        """The verification of the written file, at all three levels; at the first if the run was quick."""
        return self.verifications[self.shown]

    @property
    def ok(self) -> bool:
        """Whether the verification of every file passed."""
        return all(report.ok for report in self.verifications.values())

    @property
    def compared_codes(self) -> int:
        """The number of compared codes in all files."""
        return sum(row.compared_codes for row in self.rows)

    @property
    def differing_codes(self) -> int:
        """The number of codes that differ."""
        return sum(row.differing_codes for row in self.rows)

    def codes_line(self) -> str:
        """One line: how many codes differ."""
        return f"codes that differ: {self.differing_codes} of {self.compared_codes}"

    def notes(self) -> tuple[str, ...]:
        """Notes below the table."""
        has_two = any(row.label.startswith("W2") for row in self.rows)
        return (*NOTES[:1], *((TWO_BITS,) if has_two else ()), *NOTES[1:])

    def to_json(self) -> str:
        """Everything except the verifications' details as JSON; SQNRs that are not finite are text."""
        rows = [asdict(row) | {"ratio": row.ratio, "sqnr_db": encode(row.sqnr_db)} for row in self.rows]
        content = {
            "version": 1,
            "ok": self.ok,
            "seed": self.seed,
            "quick": self.quick,
            "compared_codes": self.compared_codes,
            "differing_codes": self.differing_codes,
            "rows": rows,
            "report": str(self.report_path),
            "files": [str(path) for path in self.files],
            "facts": dict(self.facts),
        }
        return json.dumps(content, allow_nan=False)

    def __str__(self) -> str:
        rows = [COLUMNS, *(row.cells() for row in self.rows)]
        notes = [line for note in self.notes() for line in wrap(note, WIDTH)]
        return "\n".join([*table_lines(rows, right=range(1, len(COLUMNS))), "", *notes, "", self.codes_line()])
