"""App: the commands put together."""

from typing import Annotated

import rich.console  # noqa: F401 - typer works without it, our tables do not: entry says so
import typer

from detent import __version__
from detent.cli import (
    bench_command,
    compare_command,
    demo_command,
    doctor_command,
    inspect_command,
    quantize_command,
    sensitivity_command,
    verify_command,
)
from detent.cli.exits import report_errors

__all__ = ["make_app"]

ABOUT = """Quantize neural networks, and verify that the exported file matches the model.

Example: [bold]detent quantize model.onnx --data calibration.npz --report report.html[/bold]"""
CODES = (
    "Exit codes: 0 done, 1 a mismatch, a limit not met or nothing quantized, 2 bad input, 3 a missing extra, 130 "
    "interrupted."
)
COMMANDS = {
    "demo": demo_command,
    "quantize": quantize_command,
    "verify": verify_command,
    "inspect": inspect_command,
    "compare": compare_command,
    "sensitivity": sensitivity_command,
    "bench": bench_command,
    "doctor": doctor_command,
}


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="detent",
        help=ABOUT,
        epilog=CODES,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, module in COMMANDS.items():
        app.command(name, help=module.HELP)(report_errors(module.run))
    return app


def _show(on: bool) -> None:
    if on:
        typer.echo(f"detent {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show, is_eager=True)
    ] = False,
) -> None:
    del version  # its callback does the work
