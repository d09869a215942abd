"""DemoResult: the results of the demo, as an object, a table and JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap

from detent.codec import encode
from detent.errors import SpecError
from detent.tables import html_table, table_lines
from detent.verification import VerifyReport

__all__ = ["COLUMNS", "DemoResult", "DemoRow"]

COLUMNS = ("", "PyTorch", "ONNX Runtime", "same class", "bytes", "ratio", "SQNR", "codes differ")
WIDTH = 80  # characters per line of the notes
NOTES = (
    "W8, W4 and W2 have weights of 8, 4 and 2 bits; layer inputs have 8 bits. In W4 and W2, the first and the last "
    "layer have 8-bit weights.",
    "Accuracy is measured on test images that are not used for training. SQNR compares the logits with the float "
    "network's logits.",
    "PTQ quantizes the trained float network. QAT trains the last epochs with quantization. All networks train for the "
    "same number of epochs. QAT changes the weights, so compare QAT by accuracy, not by SQNR.",
    "The codes of all weights and activations are compared between PyTorch and ONNX Runtime. Each quantizer gets the "
    "same input in both. The order of additions differs, so logits differ slightly.",
)
TWO_BITS = "W2 is stored in 4 bits: ONNX has no smaller integer type before opset 25."


@dataclass(frozen=True)
class DemoRow:
    """One network of the demo, before or after quantization.

    Attributes:
        label: "float", or the bits of the weights and the method, such as "W4 QAT".
        recipe: name of the preset, or None for the float network.
        accuracy_torch: share of test images that PyTorch classifies correctly.
        accuracy_onnxruntime: share of test images that ONNX Runtime classifies correctly.
        samples: number of test images.
        equal_predictions: number of test images for which PyTorch and ONNX Runtime predict the same class.
        nbytes: size of the ONNX file of this network.
        nbytes_float: size of the ONNX file of the float network.
        sqnr_db: SQNR of the logits in ONNX Runtime, compared with the float network, or None for the float network.
        compared_codes: number of codes of weights and activations that ``dt.verify`` compared.
        differing_codes: number of compared codes that differ.

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
            raise SpecError(f"got accuracies {shares}, expected shares from 0 to 1")
        if min(self.samples, self.nbytes, self.nbytes_float) <= 0 or self.equal_predictions > self.samples:
            raise SpecError(
                f"got {self}, expected samples, nbytes and nbytes_float above 0, and equal_predictions <= samples"
            )

    @property
    def ratio(self) -> float:
        """Size of the float network's file divided by the size of this file."""
        return self.nbytes_float / self.nbytes

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table row."""
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
    """Results of the demo; ``str`` returns a table.

    Attributes:
        rows: one row per network, float first.
        verifications: maps the label of each quantized row to its ``VerifyReport``.
        report_path: path of the HTML report.
        files: paths of all files written, the report first.
        shown: label of the row whose file was written and whose layers are in the report.
        seed: seed of the run.
        quick: whether the run was shortened for tests.
        facts: maps labels to texts about the network, the data, the training and the seed.

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
            raise SpecError(
                f"got verifications of {sorted(self.verifications)} and shown={self.shown!r}, expected one "
                f"verification per quantized row {sorted(quantized)}, and one of these rows for shown="
            )

    def __getitem__(self, label: str) -> DemoRow:
        rows = {row.label: row for row in self.rows}
        if label not in rows:
            raise SpecError(f"no row has the label {label!r}, expected one of {', '.join(rows)}")
        return rows[label]

    @property
    def verification(self) -> VerifyReport:
        """Verification of the written file: at all three levels, or only at level 1 after a quick run."""
        return self.verifications[self.shown]

    @property
    def ok(self) -> bool:
        """Whether the verification of every file passed."""
        return all(report.ok for report in self.verifications.values())

    @property
    def compared_codes(self) -> int:
        """Number of compared codes, over all files."""
        return sum(row.compared_codes for row in self.rows)

    @property
    def differing_codes(self) -> int:
        """Number of codes that differ, over all files."""
        return sum(row.differing_codes for row in self.rows)

    def codes_line(self) -> str:
        """Return the line with the number of codes that differ."""
        return f"codes that differ: {self.differing_codes} of {self.compared_codes}"

    def notes(self) -> tuple[str, ...]:
        """Return the notes below the table."""
        has_two = any(row.label.startswith("W2") for row in self.rows)
        return (*NOTES[:1], *((TWO_BITS,) if has_two else ()), *NOTES[1:])

    def to_json(self) -> str:
        """Serialize to JSON, without the details of verifications; an infinite SQNR is written as text."""
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
        notes = [line for note in self.notes() for line in wrap(note, WIDTH)]
        return "\n".join([*table_lines(self._table(), right=range(1, len(COLUMNS))), "", *notes, "", self.codes_line()])

    def __repr__(self) -> str:
        return f"<DemoResult: {len(self.rows)} networks, {self.codes_line()}, {self.report_path}>"

    def _repr_html_(self) -> str:
        return html_table(self._table(), right=range(1, len(COLUMNS)), notes=[*self.notes(), self.codes_line()])

    def _table(self) -> list[tuple[str, ...]]:
        return [COLUMNS, *(row.cells() for row in self.rows)]
