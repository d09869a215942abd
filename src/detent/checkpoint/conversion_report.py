"""Reports of conversions: types and bytes per tensor, before and after the file is written."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from detent.checkpoint.conversion import Conversion
from detent.tables import bytes_text, counted, html_table, short_name, table_lines

__all__ = ["ConversionPlan", "ConversionReport", "TensorLine"]

MAX_REASONS_SHOWN = 6


@dataclass(frozen=True)
class TensorLine:
    """A tensor of the new file.

    Attributes:
        name: name in the file.
        shape: shape in the order of NumPy.
        source_type: type in the source, such as "bfloat16".
        type: type in the file, such as "Q4_K".
        nbytes: number of bytes in the file.
        reason: why the type differs from the mixture's, or "".
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    type: str
    nbytes: int
    reason: str = ""

    @property
    def bits_per_weight(self) -> float:
        """The number of stored bits per element."""
        return 8 * self.nbytes / max(prod(self.shape), 1)


def tensor_lines(conversion: Conversion) -> tuple[TensorLine, ...]:
    """Return one line per tensor of the new file."""
    source = conversion.source
    return tuple(
        TensorLine(
            each.name,
            each.place.shape,
            source[each.target.sources[0]].dtype if each.target.sources else "computed",
            each.place.type.name,
            each.place.nbytes,
            each.reason,
        )
        for each in conversion.tensors
    )


@dataclass(frozen=True)
class _Tensors:
    """Totals over the tensors of a file."""

    to: str
    tensors: tuple[TensorLine, ...]
    nbytes_before: int
    nbytes_after: int

    @property
    def bits_per_weight(self) -> float:
        """The number of stored bits per element, over all tensors."""
        return 8 * sum(line.nbytes for line in self.tensors) / max(sum(prod(line.shape) for line in self.tensors), 1)

    @property
    def types(self) -> dict[str, tuple[int, int]]:
        """The number of tensors and bytes by type, largest first."""
        totals: dict[str, tuple[int, int]] = {}
        for line in self.tensors:
            count, nbytes = totals.get(line.type, (0, 0))
            totals[line.type] = count + 1, nbytes + line.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def _lines(self) -> list[str]:
        lines = [
            f"{self.to}: {counted(len(self.tensors), 'tensor', ',')}, {bytes_text(self.nbytes_before)} -> "
            f"{bytes_text(self.nbytes_after)}, {self.bits_per_weight:.2f} bits per weight"
        ]
        lines += table_lines(self._type_rows(), right=(1, 2))
        reasons = [line for line in self.tensors if line.reason]
        lines += [f"{short_name(line.name)}: {line.reason}" for line in reasons[:MAX_REASONS_SHOWN]]
        if len(reasons) > MAX_REASONS_SHOWN:
            lines.append(f"and {counted(len(reasons) - MAX_REASONS_SHOWN, 'more tensor')} with another type")
        return lines

    def _type_rows(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = [("type", "tensors", "bytes")]
        return rows + [(name, f"{count:,}", bytes_text(nbytes)) for name, (count, nbytes) in self.types.items()]

    def _repr_html_(self) -> str:
        return html_table(self._type_rows(), right=(1, 2), notes=self._lines()[:1])

    def document(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        values = asdict(self)
        for line, each in zip(values["tensors"], self.tensors, strict=True):
            line["bits_per_weight"] = round(each.bits_per_weight, 4)
        types = {name: {"tensors": count, "nbytes": nbytes} for name, (count, nbytes) in self.types.items()}
        if "output" in values:
            values["output"] = str(values["output"])
        return values | {"types": types, "bits_per_weight": round(self.bits_per_weight, 4)}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.document(), indent=2)


@dataclass(frozen=True)
class ConversionPlan(_Tensors):
    """Plan of a conversion, returned by ``qc.plan``: types and bytes, memory and time.

    Attributes:
        to: format and mixture, such as "gguf:Q4_K_M".
        tensors: one line per tensor.
        nbytes_before: bytes of the source's tensors.
        nbytes_after: size of the file; exact.
        peak_nbytes: memory that the rows in work need at most.
        seconds: estimated time on this machine, from quantizing some rows of every type; without the disk.
        notes: remarks about the input.
    """

    peak_nbytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self._lines()
        lines.append(
            f"peak memory of the rows in work: {bytes_text(self.peak_nbytes)}; time: about {self.seconds:.0f} s"
        )
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class ConversionReport(_Tensors):
    """Result of a conversion, returned by ``qc.quantize``.

    Attributes:
        to: format and mixture, such as "gguf:Q4_K_M".
        tensors: one line per tensor.
        nbytes_before: bytes of the source's tensors.
        nbytes_after: size of the file.
        output: path of the file.
        seconds: wall time.
        resumed_nbytes: bytes that an earlier, interrupted run had written.
        warnings: remarks about the input, and scales that were kept although float16 cannot represent them.
    """

    output: Path = Path()
    seconds: float = 0.0
    resumed_nbytes: int = 0
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self._lines()
        resumed = f", {bytes_text(self.resumed_nbytes)} of them by an earlier run" if self.resumed_nbytes else ""
        lines.append(f"wrote {self.output}: {self.nbytes_after:,} bytes in {self.seconds:.1f} s{resumed}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])
