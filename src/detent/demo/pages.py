"""Pages: what a run leaves behind, written when all else is done."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import detent.report as qr
from detent.demo.pictures import Pictures
from detent.demo.result import COLUMNS, DemoResult, DemoRow
from detent.proof import VerifyReport
from detent.storage import write_atomic

__all__ = ["Kept", "keep"]

PAGE, CALIBRATION = "demo-report.html", "demo-calibration.npz"
LOOKED_AT = 100  # images per batch of the page's figures
ABOUT_SQNR = "of logits against float's; QAT has weights of its own, so judge it by its accuracy"
UNBROKEN = "\u00a0"  # a space at which no line ends
CALIBRATED = 256  # images that are kept


@dataclass(frozen=True)
class Kept:
    """Where files are, where they go, and what the page says.

    Attributes:
        scratch: the folder of the exported files.
        folder: where to.
        train, test: the images that networks were trained and tested on.
        label: the row whose file is kept.
        facts: for the page.

    >>> kept = Kept(Path("a"), Path("b"), None, None, "W4 QAT", {})
    >>> kept.names
    ('demo-float.onnx', 'demo-w4-qat.onnx')
    """

    scratch: Path
    folder: Path
    train: Pictures
    test: Pictures
    label: str
    facts: Mapping[str, str]

    @property
    def names(self) -> tuple[str, str]:
        """The models that are kept: float, and quantized."""
        return "demo-float.onnx", f"demo-{self.label.lower().replace(' ', '-')}.onnx"


def keep(
    kept: Kept, rows: tuple[DemoRow, ...], verifications: Mapping[str, VerifyReport], *, seed: int, quick: bool
) -> DemoResult:
    """Write the page, the float and the quantized model, and images to calibrate with; the result names them.

    >>> keep.__name__
    'keep'
    """
    page, data = kept.folder / PAGE, kept.folder / CALIBRATION
    models = tuple(kept.folder / name for name in kept.names)
    result = DemoResult(rows, verifications, page, (page, *models, data), kept.label, seed, quick, kept.facts)
    built = _page(kept, result)
    for path in models:
        write_atomic(path, (kept.scratch / path.name).read_bytes())
    write_atomic(data, _npz(kept.train.first(CALIBRATED)))
    built.save(page)
    return result


def _page(kept: Kept, result: DemoResult) -> qr.Report:
    artifact = kept.scratch / kept.names[1]
    source = artifact.with_name(f"{artifact.stem}-in-float.onnx")
    table = qr.Table(
        "Accuracy, size and proof: float, quantized after training (PTQ), trained quantized (QAT)",
        ("network", *COLUMNS[1:]),
        tuple(tuple(cell.replace(" ", UNBROKEN) for cell in row.cells()) for row in result.rows),
    )
    return qr.build(
        artifact,
        kept.test.batches(LOOKED_AT),
        source=source if source.exists() else None,
        verification=result.verification,
        title=f"detent demo: handwritten digits, {kept.label}",
        facts={**kept.facts, "all files": result.codes_line(), "SQNR": ABOUT_SQNR},
        tables=(table,),
        command="detent demo" if not result.seed else f"detent demo --seed {result.seed}",
    )


def _npz(pictures: Pictures) -> bytes:
    """The images by the name of the models' input, and nothing else: what ``detent quantize --data`` reads."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, input=pictures.images)
    return buffer.getvalue()
