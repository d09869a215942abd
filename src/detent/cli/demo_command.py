"""``detent demo``: train, quantize, export and verify a small network on data that are part of the package."""

import json
from pathlib import Path
from typing import Annotated

import typer

from detent.cli.exits import DIFFERENCE, require
from detent.cli.options import OUTPUT, AsJson, Quiet, Verbose
from detent.cli.screen import Screen
from detent.storage import check_directory

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Train, quantize, export and verify a small network.

The network is quantized at 8, 4 and 2 bits, and each result is compared with the float network. The demo takes under \
two minutes on two cores. It downloads nothing: the training images are in the package.

It writes demo-report.html, demo-float.onnx, demo-w4-qat.onnx and demo-calibration.npz, and replaces existing files \
with these names."""
EXAMPLE = "detent demo"
TRAINING = "Training"  # title of a group of options in the help


def run(
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="Seed for weight initialization and batch order.", rich_help_panel=TRAINING),
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Train briefly, only at 4 bits; takes seconds.", rich_help_panel=TRAINING)
    ] = False,
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory for the four files.", rich_help_panel=OUTPUT)
    ] = Path(),
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the demo; see ``HELP``."""
    check_directory(directory, writable=False)
    require("torch", "onnx", "onnxscript", "onnxruntime", "jinja2")
    from detent import demo  # noqa: PLC0415 - it loads PyTorch

    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    with screen.stages() as step:
        result = demo.run(directory, seed=seed, quick=quick, say=screen.note, progress=step)
    screen.say(str(result))
    screen.say(f"report: {result.report_path}")
    screen.emit(json.loads(result.to_json()))
    if not result.ok:
        raise typer.Exit(DIFFERENCE)
