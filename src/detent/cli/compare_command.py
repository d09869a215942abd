"""``detent compare``: two reports, or two quantized models of one float model, layer by layer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detent.cli.exits import check_distinct, check_is_file, check_report_path, require
from detent.cli.options import AsJson, BatchSize, Data, Force, Quiet, Report
from detent.cli.screen import Screen
from detent.errors import SpecError

if TYPE_CHECKING:
    from detent.report import Report as Page

__all__ = ["HELP", "run"]

HELP = """Compare two reports (.html or .json), or two quantized models of one float model (.onnx), layer by layer.

With --data and --source (the float model), models are compared by what they compute, and not only by what they hold. \
The exit code is 0 whether they differ or not.

Example: [bold]detent compare model.w8a8.onnx model.w4a8.onnx --report comparison.html[/bold]"""
MAX_BATCHES = 8
REPORTS = (".html", ".json")


def run(
    first: Annotated[Path, typer.Argument(metavar="A", help="A report or a model.", show_default=False)],
    second: Annotated[
        Path, typer.Argument(metavar="B", help="The report or model to compare with A.", show_default=False)
    ],
    data: Data = None,
    source: Annotated[
        Path | None, typer.Option("--source", help="The float model that both were made from.", show_default=False)
    ] = None,
    report: Report = None,
    batch_size: BatchSize = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two reports or models; see ``HELP``."""
    check_report_path(report, force=force)
    check_distinct({"--report": report}, {"A": first, "B": second, "--data": data, "--source": source})
    from detent import report as qr  # noqa: PLC0415 - it may load ONNX

    screen = Screen(as_json=as_json, quiet=quiet)
    both = qr.compare(*(_page(path, data, source, batch_size, screen) for path in (first, second)))
    screen.say(str(both))
    if report is not None:
        both.save(report)
        screen.say(f"report: {report}")
    screen.emit(json.loads(both.to_json()))


def _page(path: Path, data: Path | None, source: Path | None, batch_size: int | None, screen: Screen) -> "Page":
    from detent import report as qr  # noqa: PLC0415 - loaded by now

    check_is_file(path)
    if path.suffix.lower() in REPORTS:
        if data is not None or source is not None:
            raise SpecError("--data and --source are for models: a report has been measured already")
        return qr.Report.load(path)
    if (data is None) != (source is None):
        lacking = "--source (the float model)" if source is None else "--data"
        raise SpecError(f"comparing outputs needs --data and --source: add {lacking}")
    require("onnx", "onnxruntime")
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415 - these load ONNX
    from detent.onnx_model.files import load_model  # noqa: PLC0415
    from detent.onnx_model.qdq_reader import is_quantized  # noqa: PLC0415

    model = load_model(path)
    if not is_quantized(model.proto):
        raise SpecError(f"{path} is not quantized: compare quantized models, and give the float one as --source")
    screen.note(f"reading {path}")
    batches = None if data is None else open_batches(data, model.inputs, batch_size).first(MAX_BATCHES)
    return qr.build(model, batches, source=source)
