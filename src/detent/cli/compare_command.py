"""``detent compare``: compare two reports, or two quantized models of one float model, layer by layer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detent.cli.exits import check_distinct, check_is_file, check_report_path, require
from detent.cli.inspect_command import is_checkpoint
from detent.cli.options import (
    DATA,
    AsJson,
    BatchSize,
    Data,
    Force,
    Preprocess,
    Quiet,
    Report,
    Tokenizer,
    Verbose,
    data_files,
)
from detent.cli.screen import Screen
from detent.errors import SpecError

if TYPE_CHECKING:
    from detent.onnx_model import DataFiles
    from detent.report import Report as ModelReport

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Compare two reports, quantized models or checkpoints by layer.

Two models must come from the same float model. With --data and --source, the outputs of each model are also \
compared with the float model. The exit code is 0 even if there are differences."""
EXAMPLE = "detent compare model.w8a8.onnx model.w4a8.onnx --report diff.html"
MAX_BATCHES = 8  # batches on which activations and outputs are measured
REPORT_SUFFIXES = (".html", ".json")


def run(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Report (.html, .json), quantized model (.onnx) or checkpoint.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ],
    second: Annotated[
        Path,
        typer.Argument(
            metavar="B", help="Report, model or checkpoint to compare with A.", show_default=False, rich_help_panel=DATA
        ),
    ],
    *,
    data: Data = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FILE",
            help="Float model that A and B were quantized from.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    report: Report = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare two reports or models; see ``HELP``."""
    check_report_path(report, force=force)
    read = {"A": first, "B": second, "--data": data, "--source": source, "--tokenizer": tokenizer}
    check_distinct({"--report": report}, read)
    if is_checkpoint(first) and is_checkpoint(second):
        if any(value is not None for value in (data, source, batch_size, preprocess, tokenizer, report)):
            raise SpecError("checkpoints are compared without other options: pass only A, B and --json")
        _compare_checkpoints(first, second, Screen(as_json=as_json, quiet=quiet, verbose=verbose))
        return
    if is_checkpoint(first) or is_checkpoint(second):
        one, other = (first, second) if is_checkpoint(first) else (second, first)
        raise SpecError(f"{one} is a checkpoint, but {other} is not: compare two checkpoints, or two models or reports")
    from detent import report as qr  # noqa: PLC0415 - it may load ONNX

    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    files = None
    if data is not None or preprocess is not None or tokenizer is not None:
        require("onnx", "onnxruntime")
        files = data_files(data, batch_size, preprocess, tokenizer)
    comparison = qr.compare(*(_report(path, files, source, screen) for path in (first, second)))
    screen.say(str(comparison))
    if report is not None:
        comparison.save(report)
        screen.say(f"report: {report}")
    screen.emit(json.loads(comparison.to_json()))


def _compare_checkpoints(first: Path, second: Path, screen: Screen) -> None:
    from detent.checkpoint import compare  # noqa: PLC0415 - loaded only if needed

    comparison = compare(first, second)
    screen.say(str(comparison))
    screen.emit(comparison.document())


def _report(path: Path, data: "DataFiles | None", source: Path | None, screen: Screen) -> "ModelReport":
    """Load a report, or build the report of a model."""
    from detent import report as qr  # noqa: PLC0415 - already loaded

    check_is_file(path)
    if path.suffix.lower() in REPORT_SUFFIXES:
        if data is not None or source is not None:
            raise SpecError(f"{path} is a report, but --data and --source are only for models: drop both options")
        return qr.Report.load(path)
    if (data is None) != (source is None):
        missing = "--source (the float model)" if source is None else "--data"
        raise SpecError(f"comparing outputs needs --data and --source: add {missing}")
    require("onnx", "onnxruntime")
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415 - these load ONNX
    from detent.onnx_model.files import load_model  # noqa: PLC0415
    from detent.onnx_model.qdq_reader import is_quantized  # noqa: PLC0415

    model = load_model(path)
    if not is_quantized(model.proto):
        raise SpecError(f"{path} is not quantized: compare quantized models, and pass the float model as --source")
    screen.note(f"reading {path}")
    batches = None if data is None else open_batches(data, model.inputs).first(MAX_BATCHES)
    screen.note(*(() if batches is None else batches.notes))
    return qr.build(model, batches, source=source)
