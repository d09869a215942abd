"""Docstrings as the site shows them: an extension of griffe, which reads the sources for mkdocstrings.

The docstrings of detent are plain text for `help`, with three habits that Markdown reads otherwise. Examples begin at
``>>>`` without a heading, which Markdown takes for quotations; they become fenced blocks. A paragraph that ends in
``::`` introduces a block of text, and keeps one colon here or none. Columns below lines of ``=`` become a table.
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
    r"""The columns of plain text as a table of Markdown; without a line between heading and rows, it has no heading.

    >>> TABLE.sub(table, "=== ====\na   b\n=== ====\n1   2|3\n    4\n=== ====").splitlines()
    ['| a | b |', '| --- | --- |', '| 1 | 2\\|3 4 |']
    """
    lines = match[0].splitlines()
    starts = [found.start() for found in re.finditer("=+", lines[0])]
    spans = list(zip(starts, [*starts[1:], None], strict=True))
    rules = [line for line in lines if not line.strip(" =")]
    rows: list[list[str]] = [] if len(rules) == 3 else [[""] * len(spans)]
    for line in (line for line in lines if line.strip(" =")):
        cells = [BAR.sub(r"\\|", line[start:end].strip()) for start, end in spans]
        if cells[0] or not rows:
            rows.append(cells)
        else:  # the row goes on
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(spans))
    return "\n".join(f"{match['indent']}| {' | '.join(row)} |" for row in rows)


def as_markdown(text: str) -> str:
    r"""The docstring with its examples and blocks in the notation of Markdown.

    >>> as_markdown("Adds::\n\n    a + b\n\n>>> 1 + 1\n2\n").splitlines()
    ['Adds:', '', '    a + b', '', '```pycon', '>>> 1 + 1', '2', '```']
    """

    def fenced(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    text = TABLE.sub(table, text)
    return EXAMPLE.sub(fenced, LAST_COLONS.sub(":", LONE_COLONS.sub("", text)))


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
