"""``detent demo``: the main job from end to end, on data that come with the package."""

import json
from pathlib import Path
from typing import Annotated

import typer

from detent.cli.exits import DIFFERENCE, require
from detent.cli.options import AsJson, Quiet
from detent.cli.screen import Screen
from detent.storage import check_directory

__all__ = ["HELP", "run"]

HELP = """Train a small network, quantize it at 8, 4 and 2 bits, export, verify, and write demo-report.html.

Nothing is downloaded: the digits it learns are in the package. It takes under two minutes on two cores.

It writes demo-report.html, demo-float.onnx, demo-w4-qat.onnx and demo-calibration.npz, and replaces \
files of these names.

Example: [bold]detent demo[/bold]"""


def run(
    folder: Annotated[
        Path, typer.Argument(help="Where its four files are written; those of these names are replaced.")
    ] = Path(),
    seed: Annotated[int, typer.Option(help="Seed for weight initialization and batch order.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="4 bits only and few epochs, in seconds.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run the demo; see ``HELP``."""
    check_directory(folder, writable=False)
    require("torch", "onnx", "onnxscript", "onnxruntime", "jinja2")
    from detent import demo  # noqa: PLC0415 - it loads PyTorch

    screen = Screen(as_json=as_json, quiet=quiet)
    with screen.stages() as step:
        result = demo.run(folder, seed=seed, quick=quick, say=screen.note, progress=step)
    screen.say(str(result))
    screen.say(f"report: {result.report_path}")
    screen.emit(json.loads(result.to_json()))
    if not result.ok:
        raise typer.Exit(DIFFERENCE)
