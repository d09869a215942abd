"""Summary: a table of what a quantized model holds."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

__all__ = ["Summary", "SummaryRow"]

WIDEST = 48
FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class SummaryRow:
    """One quantized tensor.

    Attributes:
        name: in the file.
        kind: weight, bias or activation.
        type: its spec, or the type of its codes.
        shape: of weights and biases.
        nbytes: of its codes, scales and zero points; none for activations.
        readers: the nodes that read it.

    >>> SummaryRow("w", "weight", "int8/tensor/symmetric/onnx", (2, 3), 10, ("MatMul y",)).nbytes
    10
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    nbytes: int
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """All of them; ``str`` is a table.

    Attributes:
        rows: one per quantized tensor.
        nodes: how many there are of each operator.
        skipped: what is quantized in ways that are not read, and why.
        float_nbytes: bytes of constants that stay floats.

    >>> row = SummaryRow("w", "weight", "int8/tensor/symmetric/onnx", (2, 3), 10, ("MatMul y",))
    >>> made = Summary((row,), {"MatMul": 1}, {}, 0)
    >>> print(made)
    1 weight, 10 bytes (24 as float32); 0 biases, 0 bytes; 0 activation quantizers; 0 bytes of other floats
    1 MatMul
    tensor  kind    type                        shape  bytes  read by
    w       weight  int8/tensor/symmetric/onnx  2x3       10  MatMul y
    >>> made.count("weight"), made.nbytes("weight"), made.to_json()[:14]
    (1, 10, '{"rows": [{"na')
    """

    rows: tuple[SummaryRow, ...]
    nodes: Mapping[str, int]
    skipped: Mapping[str, str]
    float_nbytes: int

    def count(self, kind: str) -> int:
        """How many rows are of that kind."""
        return sum(row.kind == kind for row in self.rows)

    def nbytes(self, kind: str) -> int:
        """The bytes of the rows of that kind."""
        return sum(row.nbytes for row in self.rows if row.kind == kind)

    def to_json(self) -> str:
        """The same facts for machines."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        floats = sum(FLOAT * prod(row.shape or ()) for row in self.rows if row.kind == "weight")
        weights, biases, activations = (self.count(kind) for kind in ("weight", "bias", "activation"))
        head = (
            f"{weights} weight{'s' * (weights != 1)}, {self.nbytes('weight')} bytes ({floats} as float32); "
            f"{biases} bias{'es' * (biases != 1)}, {self.nbytes('bias')} bytes; "
            f"{activations} activation quantizer{'s' * (activations != 1)}; {self.float_nbytes} bytes of other floats"
        )
        nodes = ", ".join(
            f"{count} {name}" for name, count in sorted(self.nodes.items(), key=lambda at: (-at[1], at[0]))
        )
        skipped = [f"not read: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join([head, nodes, *self._table(), *skipped])

    def _table(self) -> list[str]:
        cells = [("tensor", "kind", "type", "shape", "bytes", "read by")]
        for row in self.rows:
            shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "1"
            amount = "" if row.kind == "activation" else str(row.nbytes)
            cells.append((_short(row.name), row.kind, row.type, shape, amount, ", ".join(row.readers)))
        if len(cells) == 1:
            return []
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]) - 1)]
        return [
            "  ".join(
                cell.rjust(width) if i == 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line[:-1], widths, strict=True))
            )
            + f"  {line[-1]}"
            for line in cells
        ]


def _short(name: str) -> str:
    """The end of a long name, where names of modules differ."""
    return name if len(name) <= WIDEST else "..." + name[3 - WIDEST :]
