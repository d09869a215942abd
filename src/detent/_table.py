"""Tables of text: columns as wide as their widest cell."""

from collections.abc import Container, Sequence

__all__ = ["table_lines"]


def table_lines(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table; columns are flush left, but for those in ``right``.

    >>> table_lines([("name", "n"), ("a", "10")], right=(1,))
    ['name   n', 'a     10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
