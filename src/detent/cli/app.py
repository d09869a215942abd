"""The ``detent`` program and its commands."""

from typing import Annotated

import rich.console  # noqa: F401 - if rich is missing, this import fails, and ``entry`` prints how to install rich
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
from detent.cli.help_text import GroupedCommand, GroupedProgram
from detent.cli.screen import show_log

__all__ = ["make_app"]

HELP = """Quantize neural networks and verify that the exported file matches the model.

`detent COMMAND --help` lists a command's options."""
EXIT_CODES = (
    "Exit codes: 0 done; 1 mismatch, --fail-below limit not met, warning with --strict, nothing quantized, or a file "
    "that is neither smaller nor faster; 2 bad input; 3 optional package missing (see detent doctor); 130 interrupted."
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
    """Create the program with all commands."""
    app = typer.Typer(
        name="detent",
        cls=GroupedProgram,
        help=HELP,
        epilog=f"{EXIT_CODES}\n\nExample: {quantize_command.EXAMPLE}",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, module in COMMANDS.items():
        command = app.command(name, cls=GroupedCommand, help=module.HELP, epilog=f"Example: {module.EXAMPLE}")
        command(report_errors(module.run))
    return app


def _show_version(on: bool) -> None:
    if on:
        typer.echo(f"detent {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the log on stderr.")] = False,
) -> None:
    del version  # ``_show_version`` prints the version
    if verbose:
        show_log()
