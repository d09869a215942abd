"""The options of every command, read from the program itself: a hook of MkDocs.

A page that has the line `<!-- commands -->` shows them in its place. In the repository the line is a comment.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

MARK = "<!-- commands -->"
COMMAND = re.compile(r"\[bold\](.*?)\[/bold\]", re.DOTALL)
SPECIAL = re.compile(r"([|<>*_\[\]])")


def as_markdown(text: str | None) -> str:
    r"""Help with commands as code, and the rest as it is, in one line.

    >>> print(as_markdown("Example: [bold]detent verify a_b[/bold] of a_b"))
    Example: `detent verify a_b` of a\_b
    """
    pieces = COMMAND.split(" ".join((text or "").split()))
    return "".join(f"`{piece}`" if number % 2 else SPECIAL.sub(r"\\\1", piece) for number, piece in enumerate(pieces))


class Parameter(Protocol):
    """What the parameters of typer and of click have in common."""

    name: str | None
    opts: list[str]
    secondary_opts: list[str]
    required: bool
    default: object
    param_type_name: str


class Command(Protocol):
    """What the commands of typer and of click have in common."""

    help: str | None

    @property
    def params(self) -> Sequence[Parameter]:
        """Its arguments and options."""


def default_of(parameter: Parameter) -> str:
    """What holds when the option is not given."""
    shown = getattr(parameter, "show_default", None)
    if parameter.required or isinstance(shown, str):
        return "required" if parameter.required else as_markdown(shown)
    value = parameter.default
    return f"`{value}`" if isinstance(value, int | float | str | Path) and value is not False else ""


def row(parameter: Parameter) -> str:
    """One line of a command's table."""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{str(parameter.name).upper()}`"
    return f"| {names} | {default_of(parameter)} | {as_markdown(getattr(parameter, 'help', ''))} |"


def described(name: str, command: Command) -> str:
    """The section of one command."""
    rows = [row(parameter) for parameter in command.params if parameter.name != "help"]
    table = "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])
    prose = [as_markdown(paragraph) for paragraph in re.split(r"\n\s*\n", command.help or "")]
    return "\n\n".join([f"## detent {name}", *prose, table if rows else ""])


def on_page_markdown(markdown: str, **_: object) -> str:
    """Puts the commands where the mark is."""
    if MARK not in markdown:
        return markdown
    import typer  # noqa: PLC0415 - for the one page that needs it

    from detent.cli.app import make_app  # noqa: PLC0415

    commands: dict[str, Command] = vars(typer.main.get_command(make_app()))["commands"]
    return markdown.replace(MARK, "\n\n".join(described(name, command) for name, command in commands.items()))
