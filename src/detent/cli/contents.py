"""Contents: what ``detent inspect`` found in a file, whatever its kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from detent.cli.screen import Screen
from detent.tables import bytes_text

__all__ = ["Contents", "Held", "span"]

LONG = 200


@dataclass(frozen=True)
class Held:
    """One tensor or quantizer of a file.

    Attributes:
        name: in the file.
        kind: weight, bias, activation, float, ...
        type: its spec or element type.
        shape: None for activations.
        nbytes: in the file.
        low, high: the ends of its values, or of what a quantizer of activations can hold; None where not known.

    >>> Held("w", "weight", "int8", (2, 3), 6, -1.0, 1.0).cells()
    ('w', 'weight', 'int8', '2x3', '6 B', '-1 .. 1')
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    nbytes: int
    low: float | None = None
    high: float | None = None

    def cells(self) -> tuple[str, ...]:
        """A row of a table."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        size = "" if self.shape is None else bytes_text(self.nbytes)
        kind = " ".join(self.type.split("/")[:2])  # the rest would not fit a line
        return self.name, self.kind, kind, shape, size, span(self.low, self.high)


def span(low: float | None, high: float | None) -> str:
    """The ends of a range in a few digits.

    >>> span(-0.123456, 2.0)
    '-0.123 .. 2'
    """
    return "" if low is None or high is None else f"{low:.3g} .. {high:.3g}"


@dataclass(frozen=True)
class Contents:
    """All that was found.

    Attributes:
        facts: what the file says of itself, by label.
        rows: its tensors and quantizers.
        document: the same for machines.

    >>> Contents({"file": "a.onnx"}, ()).show(Screen(), limit=None)
    file: a.onnx
    """

    facts: Mapping[str, str]
    rows: Sequence[Held]
    document: Mapping[str, Any] = field(default_factory=dict)

    def show(self, screen: Screen, limit: int | None) -> None:
        """Print it."""
        for name, text in self.facts.items():
            screen.say(f"{name}: {text if len(text) <= LONG else text[:LONG] + ' ...'}")
        shown = self.rows if limit is None else self.rows[:limit]
        if shown:
            columns = ("tensor", "kind", "type", "shape", "size", "range")
            screen.table(columns, [row.cells() for row in shown], right=(4,))
        if len(shown) < len(self.rows):
            screen.say(f"and {len(self.rows) - len(shown):,} more: give --all")
