"""Builders of reports, from a quantized file or from its evaluation. ONNX is imported when a builder is called."""

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

EVALUATION_BATCHES = 4  # evaluation batches on which activations are measured


def build(  # noqa: PLR0913 - all optional inputs of a report
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
    """Build the report of a quantized file: statistics of weights and activations, and accuracy by layer.

    Args:
        artifact: a quantized ONNX file, from ``qo.quantize``, ``qt.export_onnx`` or another tool.
        data: batches; activations are measured on the first eight. Without data there are no statistics of activations.
        source: the float model. Without ``source`` and ``result``, nothing is compared with a float model.
        result: the report of ``qo.quantize``; it has the specs, the reasons why layers are kept in float, and the float
            model after accuracy passes.
        verification: the result of ``dt.verify``.
        sensitivity: the result of ``qs.measure``; if given, layers are ranked by sensitivity.
        mix: the mixed-precision allocation that ``Sensitivity.choose`` returned.
        title: title of the report; the name of the file by default.
        facts: further lines for the summary; maps labels to texts.
        tables: further tables for the summary.
        command: command line that produced the file.

    Raises:
        FileFormatError, UnsupportedError: the file cannot be read, or is not quantized.
        SpecError, ShapeError, DtypeError: the data do not fit the model.

    >>> import tempfile, numpy as np, detent.onnx as qo, detent.report as qr
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {3.0, -1.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.float32([[2.0, 0.5]])]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = qo.quantize(model, f"{directory}/small.onnx", data)
    ...     report = qr.build(f"{directory}/small.onnx", data, source=model, result=result)
    >>> report.title, report.layers[0].name, report.layers[0].weight.codes_available, report.layers[0].status
    ('small.onnx', 'fc', 129, 'integer')
    """
    from detent.report.contents import ReportInputs, measure_report  # noqa: PLC0415 - imports ONNX

    if verification is not None and not isinstance(verification, VerifyReport):
        raise DtypeError(f"got verification of type {type(verification).__name__}, expected the result of dt.verify")
    for table in tables:
        if not isinstance(table, Table):
            raise DtypeError(f"got {type(table).__name__} in tables, expected qr.Table(title, columns, rows)")
    notes = {"Data": "; ".join(result.data_notes)} if result is not None and result.data_notes else {}
    labels = tuple((str(label), str(text)) for label, text in {**notes, **(facts or {})}.items())
    path = artifact if isinstance(artifact, str | PathLike) else getattr(artifact, "path", None)
    name = title or ("model in memory" if path is None else Path(path).name)
    inputs = ReportInputs(
        source, result, verification, sensitivity, mix, str(name), labels, tuple(tables), str(command)
    )
    return measure_report(artifact, data, inputs)


def build_from_evaluation(evaluation: "Evaluation", *, command: str = "") -> Report:
    """Build the report of a model that ``detent.evaluate`` has evaluated, with the metrics of the evaluation.

    >>> import tempfile, numpy as np, detent.evaluate as qe, detent.report as qr
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N,2] x) => (float[N,1] y) <float[2,1] w = {3.0, -1.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.float32([[i, 0.5]]) for i in range(20)]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     evaluation = qe.quantize_and_evaluate(model, f"{directory}/small.onnx", data)
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
        facts={
            **({"Time": evaluation.time_text} if evaluation.time_text else {}),
            **_metric(evaluation),
            **_scores(evaluation),
            **_warnings(evaluation),
        },
        tables=_search_steps(evaluation),
        command=command,
    )
    if accuracy is None:
        return report
    skipped = (f"output {name!r} not compared: {reason}" for name, reason in accuracy.not_compared.items())
    return replace(
        report,
        output_sqnr_db=dict(accuracy.outputs_sqnr_db),
        output_sqnr_against=f"the float model, on {split}",
        agreement=accuracy.agreement,
        notes=tuple(dict.fromkeys((*skipped, *report.notes))),
    )


def _metric(evaluation: "Evaluation") -> dict[str, str]:
    """Return the user's metric as a fact, and the limit of its drop."""
    metric, facts = None if evaluation.accuracy is None else evaluation.accuracy.metric, dict(evaluation.facts())
    chosen = {} if metric is None else {f"Metric {metric.name}": facts[metric.name]}
    return chosen | ({"Limit max_drop": facts["max_drop"]} if "max_drop" in facts else {})


def _search_steps(evaluation: "Evaluation") -> list[Table]:
    """Return the path of the search for ``max_drop`` as a table; none without a search or without steps."""
    search = evaluation.result.search
    if search is None or not search.steps:
        return []
    columns = ("Layer", "Change", f"{search.after.name} on the search samples", "Drop", "Weight bytes")
    rows = [
        (step.layer, "kept in float" if step.in_float else "quantized again", step.value, step.drop, step.nbytes)
        for step in search.steps
    ]
    cells = [
        (layer, change, f"{value:.4f}", f"{drop:.4f}", f"{nbytes:,}") for layer, change, value, drop, nbytes in rows
    ]
    return [Table(f"Steps to meet max_drop {search.max_drop:g}", columns, tuple(cells))]


def _scores(evaluation: "Evaluation") -> dict[str, str]:
    """Return the measure of each output as a fact."""
    scores = [] if evaluation.accuracy is None else evaluation.accuracy.labeled_scores
    return {f"{label[:1].upper()}{label[1:]}": text for label, text in scores}


def _warnings(evaluation: "Evaluation") -> dict[str, str]:
    """Return the warnings as facts; warnings of the same kind, such as "low-sqnr", are one fact."""
    texts: dict[str, str] = {}
    for code, text in evaluation.warnings:
        label = f"Warning: {code}"
        texts[label] = f"{texts[label]}; {text}" if label in texts else text
    return texts
