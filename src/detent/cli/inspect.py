"""``detent inspect``: what a file holds. ONNX models, float or quantized by anyone, and detent's safetensors."""

from pathlib import Path
from typing import Annotated

import typer

from detent.cli.exits import check_is_file, guarded, require
from detent.cli.options import AsJson, Quiet
from detent.cli.screen import Screen
from detent.errors import FileFormatError

__all__ = ["register"]

HELP = """Say what a file holds: formats, sizes, ranges and quantizers of an ONNX model or of detent's safetensors.

Example: [bold]detent inspect model.w8a8.onnx[/bold]"""
HEADER = 9  # bytes: a length of eight, and the brace that every header of safetensors begins with


def register(app: typer.Typer) -> None:
    """Add the command.

    >>> app = typer.Typer()
    >>> register(app)
    >>> app.registered_commands[0].name
    'inspect'
    """
    app.command("inspect", help=HELP)(guarded(_inspect))


def _inspect(
    file: Annotated[Path, typer.Argument(help="An ONNX model, or a safetensors file of detent.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="All tensors, and not only the first 40.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    screen = Screen(as_json=as_json, quiet=quiet)
    check_is_file(file)
    if _is_safetensors(file):
        from detent.cli.tensor_contents import tensor_contents  # noqa: PLC0415 - the one or the other

        found = tensor_contents(file)
    else:
        require("onnx")
        from detent.cli.model_contents import model_contents  # noqa: PLC0415 - it loads ONNX

        try:
            found = model_contents(file)
        except FileFormatError as error:
            if file.suffix.lower() == ".onnx":
                raise
            raise FileFormatError(f"{error}; inspect reads ONNX models and safetensors files") from error
    found.show(screen, limit=None if everything else 40)
    screen.emit(found.document)


def _is_safetensors(file: Path) -> bool:
    if file.suffix.lower() == ".safetensors":
        return True
    with file.open("rb") as stream:
        return stream.read(HEADER)[HEADER - 1 :] == b"{"
