"""Builders of reports: from a quantized file, or from its evaluation. ONNX is imported when one is called."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from detent.errors import DtypeError
from detent.report.document import Report, Table
from detent.verification.verify_report import VerifyReport

if TYPE_CHECKING:
    from detent.evaluate import Evaluation
    from detent.onnx.pipeline import QuantizeReport
    from detent.onnx_model.batches import BatchSource
    from detent.onnx_model.files import ModelSource
    from detent.sensitivity import Mix, Sensitivity

__all__ = ["build", "build_from_evaluation"]

EVALUATION_BATCHES = 4  # whose activations are looked at


def build(  # noqa: PLR0913 - all that may be known of a model
    artifact: "ModelSource",
    data: "BatchSource | None" = None,
    *,
    source: "ModelSource | None" = None,
    result: "QuantizeReport | None" = None,
    verification: VerifyReport | None = None,
    sensitivity: "Sensitivity | None" = None,
    mix: "Mix | None" = None,
    title: str | None = None,
    facts: Mapping[str, object] | None = None,
    tables: Sequence[Table] = (),
    command: str = "",
) -> Report:
    """Look at a quantized file: its weights, what goes through its quantizers, and how far it is from the float model.

    Args:
        artifact: a quantized ONNX file, of ``qo.quantize``, ``qt.export_onnx`` or another program.
        data: batches, of which the first eight are run once; without them, nothing is known of activations.
        source: the float model that it was made from; without it, and without ``result``, nothing is compared.
        result: what ``qo.quantize`` returned: specs, reasons, and the float model after equalizing and smoothing.
        verification: what ``dt.verify`` returned.
        sensitivity: what ``qs.measure`` returned; ranks layers by the noise that each causes alone.
        mix: what ``choose`` returned.
        title: of the report; the file's name by default.
        facts, tables: labels, texts and tables for the summary.
        command: the command line that made the file.

    Raises:
        FileFormatError, UnsupportedError: the file cannot be read, or is not quantized.
        SpecError, ShapeError, DtypeError: data that do not fit the model.

    >>> import tempfile, numpy as np, detent.onnx as qo, detent.report as qr
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {3.0, -1.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.float32([[2.0, 0.5]])]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = qo.quantize(model, f"{folder}/small.onnx", data)
    ...     page = qr.build(f"{folder}/small.onnx", data, source=model, result=result)
    >>> page.title, page.layers[0].name, page.layers[0].weight.codes_available, page.layers[0].status
    ('small.onnx', 'fc', 255, 'integers')
    """
    from detent.report.contents import ReportInputs, measure_report  # noqa: PLC0415 - imports ONNX

    if verification is not None and not isinstance(verification, VerifyReport):
        raise DtypeError(f"verification is what dt.verify returns, got {type(verification).__name__}")
    for table in tables:
        if not isinstance(table, Table):
            raise DtypeError(f"tables holds qr.Table(title, columns, rows), got {type(table).__name__}")
    named = tuple((str(label), str(text)) for label, text in (facts or {}).items())
    path = artifact if isinstance(artifact, str | PathLike) else getattr(artifact, "path", None)
    name = title or ("model in memory" if path is None else Path(path).name)
    given = ReportInputs(source, result, verification, sensitivity, mix, str(name), named, tuple(tables), str(command))
    return measure_report(artifact, data, given)


def build_from_evaluation(evaluation: "Evaluation", *, command: str = "") -> Report:
    """Build the report of a model that ``detent.evaluate`` has evaluated; its metrics are those of the evaluation.

    >>> import tempfile, numpy as np, detent.evaluate as qe, detent.report as qr
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N,2] x) => (float[N,1] y) <float[2,1] w = {3.0, -1.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.float32([[i, 0.5]]) for i in range(20)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     evaluation = qe.quantize_and_evaluate(model, f"{folder}/small.onnx", data)
    ...     report = qr.build_from_evaluation(evaluation)
    >>> report.output_sqnr_against
    'the float model, on 2 held-out batches'
    """
    split, accuracy = evaluation.split, evaluation.accuracy
    report = build(
        evaluation.quantized,
        None if split is None else split.evaluation.first(EVALUATION_BATCHES),
        source=evaluation.source,
        result=evaluation.result,
        verification=evaluation.verification,
        sensitivity=evaluation.sensitivity,
        facts={} if evaluation.timing is None else {"Time": str(evaluation.timing)},
        command=command,
    )
    if accuracy is None:
        return report
    return replace(
        report,
        output_sqnr_db=dict(accuracy.outputs_sqnr_db),
        output_sqnr_against=f"the float model, on {split}",
        agreement=accuracy.agreement,
    )
