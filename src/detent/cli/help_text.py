"""Help texts that fit on one screen: options in groups, mostly one line each, and an example at the end.

The group of an option is its ``rich_help_panel``. Typer's own help draws a box around each group and is too long.
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["DEFAULT_GROUP", "GroupedCommand", "GroupedProgram", "default_text", "grouped", "option_names"]

DEFAULT_GROUP = "Output"  # for --help, which has no group of its own
COMMANDS = "Commands"
MIN_COLUMNS, MAX_COLUMNS = 40, 80
MAX_LABEL_COLUMNS = 26  # leaves 50 of 80 columns for the text

Sections = Mapping[str, Sequence[tuple[str, str]]]  # maps section titles to rows of label and text


class Parameter(Protocol):
    """The attributes that an argument or option has in all versions of Typer."""

    @property
    def name(self) -> str | None:
        """Name of the parameter in the Python function."""

    @property
    def opts(self) -> list[str]:
        """Names on the command line, such as "--data" and "-d"."""

    @property
    def required(self) -> bool:
        """Whether the parameter must be given."""

    @property
    def default(self) -> object:
        """The default value."""

    @property
    def metavar(self) -> str | None:
        """The placeholder for the value in the help, such as "PATH"."""

    @property
    def param_type_name(self) -> str:
        """Either "argument" or "option"."""


class Writer(Protocol):
    """Click's help formatter, with only the method that this module uses."""

    def write(self, string: str, /) -> None:
        """Append text."""


def option_names(parameter: Parameter) -> str:
    """Return the names and the placeholder of an option, or the placeholder of an argument."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or str(parameter.name).upper()
    names = ", ".join(sorted(parameter.opts, key=len, reverse=True))
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def default_text(parameter: Parameter) -> str:
    """Return the default of a parameter as text, or "" for flags and for a default of None.

    For an option that must be given, the text is "required".
    """
    shown = getattr(parameter, "show_default", None)
    if parameter.param_type_name == "option" and parameter.required:
        return "required"
    if isinstance(shown, str):
        return shown
    value = parameter.default
    return "" if shown is False or value is None or isinstance(value, bool) or callable(value) else str(value)


def grouped(parameters: Iterable[Parameter], default: str = DEFAULT_GROUP) -> dict[str, list[Parameter]]:
    """Group parameters by their help panel; groups are in the order of their first parameters."""
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(parameter)
    return groups


def _sections(parameters: Sequence[Parameter], default: str) -> dict[str, list[tuple[str, str]]]:
    return {
        name: [(option_names(each), _with_default(each)) for each in members]
        for name, members in grouped(parameters, default).items()
    }


def _with_default(parameter: Parameter) -> str:
    text, default = str(getattr(parameter, "help", None) or ""), default_text(parameter)
    text = text if text.endswith("...") else text.removesuffix(".")
    return f"{text} [{default}]" if default else text


def _lines(usage: str, description: str, sections: Sections, epilog: str) -> Iterator[str]:
    columns = min(MAX_COLUMNS, max(MIN_COLUMNS, shutil.get_terminal_size().columns))
    yield usage
    for paragraph in description.split("\n\n"):
        yield from ("", *textwrap.wrap(" ".join(paragraph.split()), columns, break_on_hyphens=False))
    yield ""
    label_columns = {title: max(len(label) for label, _ in rows) for title, rows in sections.items()}
    if COMMANDS not in sections:  # in a command's help, all groups of options have the same label width
        label_columns = dict.fromkeys(sections, max(label_columns.values()))
    for title, rows in sections.items():
        indent = " " * (min(MAX_LABEL_COLUMNS, label_columns[title]) + 4)
        yield typer.style(f"{title}:", bold=True)
        for label, text in rows:
            start = f"  {label}  ".ljust(len(indent))
            yield from textwrap.wrap(text, columns, initial_indent=start, subsequent_indent=indent)
    for line in ("", *epilog.splitlines()):
        yield from textwrap.wrap(line, columns, subsequent_indent="  ", break_on_hyphens=False) or [""]


class GroupedCommand(TyperCommand):
    """A command whose help lists options in groups."""

    def collect_usage_pieces(self, ctx: object) -> list[str]:
        """Return the pieces of the usage line: arguments, then options."""
        del ctx
        arguments = [each for each in self.params if each.param_type_name == "argument"]
        return [
            *(name if each.required else f"[{name}]" for each in arguments if (name := option_names(each))),
            "[OPTIONS]",
        ]

    def format_help(self, ctx: "typer.Context", formatter: Writer) -> None:  # type: ignore[override]
        """Write usage, description, options in groups, and the example."""
        sections = _sections(self.get_params(ctx), DEFAULT_GROUP)
        formatter.write("\n".join(_lines(ctx.get_usage(), self.help or "", sections, self.epilog or "")))


class GroupedProgram(TyperGroup):
    """The program; its help lists commands before options."""

    def format_help(self, ctx: "typer.Context", formatter: Writer) -> None:  # type: ignore[override]
        """Write usage, description, commands, options, exit codes and the example."""
        commands = [(name, (command.help or "").partition(".")[0]) for name, command in self.commands.items()]
        sections = {COMMANDS: commands, **_sections(self.get_params(ctx), "Options")}
        formatter.write("\n".join(_lines(ctx.get_usage(), self.help or "", sections, self.epilog or "")))
