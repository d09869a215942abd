"""Text for people: tables as text and HTML, short reprs, byte counts, and short names."""

import html
import re
from collections.abc import Container, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from detent.errors import SpecError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "bytes_text",
    "counted",
    "html_table",
    "of_whole",
    "parse_bytes",
    "short_name",
    "short_repr",
    "svg_histogram",
    "table_lines",
]

MAX_NAME_CHARS = 60  # longer names are shortened in tables
HISTOGRAM_SIZE = 256, 48  # pixels: as wide as a narrow notebook column, as high as two table rows
HTML_HEIGHT = "32em"  # a longer table in a notebook scrolls


def table_lines(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Format the lines of a table; columns are left-aligned, except columns whose index is in ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]], right: Container[int] = (), *, notes: Sequence[str] = ()) -> str:
    """Format a table for ``_repr_html_``; the first of ``rows`` is the header, and ``notes`` are lines below the table.

    All text is escaped, because names come from untrusted files. Styles are inline, and no other file is loaded.

    >>> html_table([("layer",), ("<fc>",)])[-74:]
    '<tr><td style="text-align:left">&lt;fc&gt;</td></tr></tbody></table></div>'
    """
    head, *body = (_html_row(row, right, "td" if i else "th") for i, row in enumerate(rows))
    table = f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
    below = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return f'<div style="max-height:{HTML_HEIGHT};overflow:auto">{table}</div>{below}'


def _html_row(row: Sequence[str], right: Container[int], tag: str) -> str:
    sides = ["right" if i in right else "left" for i in range(len(row))]
    cells = (
        f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>' for side, cell in zip(sides, row, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def svg_histogram(counts: Sequence[int], left: str, right: str, title: str) -> str:
    """Draw counts as bars for ``_repr_html_``, with the labels ``left`` and ``right`` below the first and last bar."""
    width, height = HISTOGRAM_SIZE
    step, largest = width / max(len(counts), 1), max([*counts, 1])
    bars = "".join(
        f"M{i * step:.2f} {height}v-{height * count / largest:.2f}h{step:.2f}v{height * count / largest:.2f}z"
        for i, count in enumerate(counts)
        if count
    )
    labels = (
        f'<text x="0" y="{height + 14}">{html.escape(left)}</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">{html.escape(right)}</text>'
    )
    return (
        f'<svg width="{width}" height="{height + 18}" viewBox="0 0 {width} {height + 18}" role="img" '
        f'fill="currentColor" font-size="11"><title>{html.escape(title)}</title><path d="{bars}" opacity="0.6"/>'
        f'<path d="M0 {height}h{width}" stroke="currentColor"/>{labels}</svg>'
    )


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SI_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a byte count such as "1500000", "1.5MB" or "512 KiB"."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not (count := int(float(match[1]) * unit)):
        raise SpecError(f"invalid size {text!r}: expected e.g. 1500000, 1.5MB or 512KiB")
    return count


def of_whole(text: str, whole: int) -> int:
    """Parse a byte count, or a percentage of ``whole`` such as "50%"."""
    if not text.strip().endswith("%"):
        return parse_bytes(text)
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise SpecError(f"invalid percentage {text!r}: expected e.g. 50%")
    return int(whole * share / 100)


def bytes_text(count: float, *, is_padded: bool = False) -> str:
    """Format a byte count with three digits and a unit; ``is_padded`` keeps trailing zeros after the point."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_SI_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    text = f"{count:.0f}" if not unit else f"{count:#.3g}".rstrip(".") if is_padded else f"{count:.3g}"
    return f"{text} {_SI_UNITS[unit]}"


def counted(count: int, noun: str, form: str = "") -> str:
    """Format a count and a noun in singular or plural; ``form`` is a format spec for the number, such as ",".

    >>> counted(1, "batch"), counted(2, "batch"), counted(3000, "layer", ",")
    ('1 batch', '2 batches', '3,000 layers')
    """
    return f"{count:{form}} {noun}{'' if count == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def short_name(name: str) -> str:
    """Shorten a long name to its beginning and its end."""
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:20]}...{name[23 - MAX_NAME_CHARS :]}"


def short_repr(value: "DataclassInstance") -> str:
    """Format the constructor call of a dataclass instance; fields with default values are left out."""
    parts = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        own = getattr(value, field.name)
        if own is not default and own != default:
            parts.append(f"{field.name}={own!r}")
    return f"{type(value).__name__}({', '.join(parts)})"
