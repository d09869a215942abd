"""``detent verify``: compare a quantized file with its source, code by code."""

import json
from pathlib import Path
from typing import Annotated

import typer

from detent.cli.exits import DIFFERENCE, require
from detent.cli.options import AsJson, BatchSize, Quiet
from detent.cli.screen import Screen
from detent.errors import SpecError

__all__ = ["HELP", "run"]

HELP = """Verify a quantized file against its source, code by code; exit 1 on a mismatch.

Level 1 compares codes, scales and zero points; level 2 both models from end to end; level 3 the integer kernels of \
this machine with exact arithmetic.

Example: [bold]detent verify model.onnx model.w8a8.onnx --data calibration.npz[/bold]"""


def run(
    source: Annotated[Path, typer.Argument(help="The float model that the file was made from.", show_default=False)],
    artifact: Annotated[Path, typer.Argument(help="The quantized file.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", "-d", help="Batches of inputs, as `detent quantize` takes them.")],
    *,
    levels: Annotated[
        str, typer.Option("--levels", help="Levels to run: 1 codes, 2 outputs, 3 integer kernels.")
    ] = "1,2,3",
    batches: Annotated[
        int | None, typer.Option("--batches", min=1, help="How many to look at.", show_default="all")
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Verify a file; see ``HELP``."""
    level_numbers = _levels(levels)
    require("onnx", "onnxruntime")
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model.files import load_model  # noqa: PLC0415
    from detent.verification import verify  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    quantized = load_model(artifact)
    inputs = open_batches(data, quantized.inputs, batch_size)
    inputs = inputs if batches is None else inputs.first(batches)
    screen.note(f"verifying {artifact} with {inputs.count:,} batches")
    with screen.progress("verifying") as step:
        report = verify(source, quantized, inputs.counted(step), levels=level_numbers)
    screen.say(str(report))
    screen.emit(json.loads(report.to_json()))
    if not report.ok:
        raise typer.Exit(DIFFERENCE)


def _levels(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part in {"1", "2", "3"} for part in parts):
        raise SpecError(f"--levels {text!r}: expected some of 1, 2 and 3, such as 1,3")
    return tuple(sorted({int(part) for part in parts}))
