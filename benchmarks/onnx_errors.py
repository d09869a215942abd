"""Format error messages of other tools for a table: the first line, shortened, without paths of this machine."""

import re

MAX_CHARS = 160
_DIRECTORIES = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+-])")


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return shortened(text)


def shortened(text: str) -> str:
    """Remove directory names from a text, and shorten it to MAX_CHARS."""
    plain = _DIRECTORIES.sub("", text)
    return plain if len(plain) <= MAX_CHARS else plain[: MAX_CHARS - 3] + "..."
