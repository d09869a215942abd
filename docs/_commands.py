"""MkDocs hook that lists the options of every command, read from the program itself.

The list replaces the line `<!-- commands -->` of a page. In the repository the line is a comment.
"""

import re

MARK = "<!-- commands -->"
SPECIAL = re.compile(r"([|<>*_\[\]])")


def escaped(text: str) -> str:
    r"""Escape Markdown in a text, and put it on one line.

    >>> print(escaped("a_b\n  or [c]"))
    a\_b or \[c\]
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the mark by a section per command."""
    if MARK not in markdown:
        return markdown
    from detent.cli.app import COMMANDS  # noqa: PLC0415 - for the one page that needs it

    return markdown.replace(MARK, "\n\n".join(section(name) for name in COMMANDS))


def section(name: str) -> str:
    """Describe one command: its help, a table of its options in groups, and its example."""
    import typer  # noqa: PLC0415 - for the one page that needs it

    from detent.cli.app import COMMANDS, make_app  # noqa: PLC0415
    from detent.cli.help_text import default_text, grouped, option_names  # noqa: PLC0415

    module, command = COMMANDS[name], vars(typer.main.get_command(make_app()))["commands"][name]
    rows = [
        f"| {group} | `{option_names(each)}` | {escaped(default_text(each))} | {escaped(getattr(each, 'help', ''))} |"
        for group, members in grouped(command.params).items()
        for each in members
    ]
    prose = [escaped(paragraph) for paragraph in module.HELP.split("\n\n")]
    table = "\n".join(["| group | option | default | meaning |", "|---|---|---|---|", *rows])
    return "\n\n".join([f"## detent {name}", *prose, table, f"Example: `{module.EXAMPLE}`"])
