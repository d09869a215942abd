"""Griffe extension that converts docstrings to Markdown for mkdocstrings.

Docstrings are plain text for `help`. Three of their forms mean something else in Markdown. Examples begin with
``>>>``, a quotation in Markdown: they become fenced blocks. ``::`` at the end of a paragraph introduces a block of
text: it becomes one colon, or none on a line of its own. Columns between lines of ``=`` become a table.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*\n?(?:(?P=indent)\S.*\n?|(?P=indent) +\S.*\n?)*", re.MULTILINE)
LONE_COLONS = re.compile(r"^ *::\n\n?", re.MULTILINE)
LAST_COLONS = re.compile(r"(?<=\S)::$", re.MULTILINE)
RULE = r"(?P<indent> *)=+(?: +=+)+"
BAR = re.compile(r"\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")  # outside of code
TABLE = re.compile(rf"^{RULE}\n(?:.+\n)+?(?P=indent)=[ =]+$(?:\n(?:.+\n)+?(?P=indent)=[ =]+$)?", re.MULTILINE)


def table(match: re.Match[str]) -> str:
    r"""Convert columns of plain text to a Markdown table; without a line between heading and rows, it has no heading.

    >>> TABLE.sub(table, "=== ====\na   b\n=== ====\n1   2|3\n    4\n=== ====").splitlines()
    ['| a | b |', '| --- | --- |', '| 1 | 2\\|3 4 |']
    """
    lines = match[0].splitlines()
    starts = [column.start() for column in re.finditer("=+", lines[0])]
    spans = list(zip(starts, [*starts[1:], None], strict=True))
    rules = [line for line in lines if not line.strip(" =")]
    rows: list[list[str]] = [] if len(rules) == 3 else [[""] * len(spans)]
    for line in (line for line in lines if line.strip(" =")):
        cells = [BAR.sub(r"\\|", line[start:end].strip()) for start, end in spans]
        if cells[0] or not rows:
            rows.append(cells)
        else:  # a continuation of the row above
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(spans))
    return "\n".join(f"{match['indent']}| {' | '.join(row)} |" for row in rows)


def as_markdown(text: str) -> str:
    r"""Convert a docstring to Markdown.

    >>> as_markdown("Adds::\n\n    a + b\n\n>>> 1 + 1\n2\n").splitlines()
    ['Adds:', '', '    a + b', '', '```pycon', '>>> 1 + 1', '2', '```']
    """

    def fenced(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    text = TABLE.sub(table, text)
    return EXAMPLE.sub(fenced, LAST_COLONS.sub(":", LONE_COLONS.sub("", text)))


class Docstrings(griffe.Extension):
    """Converts every docstring that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of a module, class, function or attribute; griffe calls this."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
