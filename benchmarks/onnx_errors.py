"""Errors of others as they stand in a table: the first line, shortened, without this machine's folders."""

import re

LONGEST = 160
_FOLDERS = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+-])")


def first_line(error: BaseException) -> str:
    """The type and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return shortened(text)


def shortened(text: str) -> str:
    """Of a length that fits into a list."""
    plain = _FOLDERS.sub("", text)
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 3] + "..."
