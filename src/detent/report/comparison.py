"""Comparison of two reports, layer by layer."""

import json
import os
from dataclasses import dataclass
from math import isfinite
from typing import Any

from detent.codec import encode
from detent.errors import DtypeError
from detent.report.document import Layer, Report, write_report
from detent.tables import counted, html_table, table_lines

__all__ = ["ComparedLayer", "Comparison", "compare"]

KIND, VERSION = "detent-comparison", 2
NO_COMMON_LAYERS = "the two models share no layer names: were both made from the same float model?"


@dataclass(frozen=True)
class ComparedLayer:
    """One layer in two reports; ``a`` or ``b`` is None if that report lacks the layer."""

    name: str
    a: Layer | None
    b: Layer | None

    @property
    def sqnr_change_db(self) -> float | None:
        """SQNR in b minus SQNR in a, in dB, or None if unknown.

        The change refers to the layer's output or, if a report lacks the output's SQNR, to the layer's weight.
        """
        outputs = [None if layer is None else layer.output_sqnr_db for layer in (self.a, self.b)]
        change = _change(*outputs)
        return _change(_weight_sqnr_db(self.a), _weight_sqnr_db(self.b)) if None in outputs else change

    @property
    def nbytes_change(self) -> int | None:
        """Bytes in b minus bytes in a, or None if unknown."""
        if self.a is None or self.b is None or self.a.nbytes is None or self.b.nbytes is None:
            return None
        return self.b.nbytes - self.a.nbytes

    @property
    def is_changed(self) -> bool:
        """Whether the layer's status, kernel, specs or codes differ between the reports."""
        return _quantization(self.a) != _quantization(self.b) or _codes_differ(self.a, self.b)


def _change(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return None
    if isfinite(first) and isfinite(second):
        return second - first
    return 0.0 if first == second else None


def _weight_sqnr_db(layer: Layer | None) -> float | None:
    return None if layer is None or layer.weight is None else layer.weight.sqnr_db


def _quantization(layer: Layer | None) -> tuple[str, ...]:
    if layer is None:
        return ()
    specs = ("" if each is None else each.spec for each in (layer.weight, layer.input))
    return (layer.status, layer.kernel, *specs)


def _codes_differ(a: Layer | None, b: Layer | None) -> bool:
    """Return whether the digests of both weights are known and differ.

    Specs may be equal although codes differ: in a report, 4-bit codes that are stored in bytes may have an 8-bit spec.
    """
    digests = {"" if layer is None or layer.weight is None else layer.weight.digest for layer in (a, b)}
    return len(digests - {""}) == len((a, b))


@dataclass(frozen=True)
class Comparison:
    """Comparison of two reports; ``str()`` returns a table.

    Changes are values of the second report minus values of the first.

    >>> a = Report("a", 100, 30, (Layer("fc", "Gemm", "integer", output_sqnr_db=30.0, nbytes=20),))
    >>> b = Report("b", 100, 25, (Layer("fc", "Gemm", "integer", output_sqnr_db=24.5, nbytes=15),))
    >>> both = compare(a, b)
    >>> print(both)
    a: 30 bytes, 1 of 1 layers quantized, 1 on integer kernels
    b: 25 bytes (-5), 1 of 1 layers quantized, 1 on integer kernels
    layer  type  a              b                dB     bytes
    fc     Gemm  integer 30 dB  integer 24.5 dB  -5.5      -5
    >>> both.layers[0].sqnr_change_db, both.to_html()[:15], both.to_json()[:28], both.has_common_layers
    (-5.5, '<!DOCTYPE html>', '{"kind":"detent-comparison",', True)
    """

    a: Report
    b: Report
    layers: tuple[ComparedLayer, ...]

    @property
    def sqnr_change_db(self) -> float | None:
        """Lowest output SQNR in b minus the lowest in a, in dB, or None if unknown."""
        return _change(self.a.sqnr_db, self.b.sqnr_db)

    @property
    def has_common_layers(self) -> bool:
        """Whether a layer name occurs in both reports; also True if one of the reports has no layers."""
        return any(each.a and each.b for each in self.layers) or not (self.a.layers and self.b.layers)

    def to_json(self) -> str:
        """Return a JSON document with the metrics of both reports, and how much each metric changes."""
        document: dict[str, Any] = {"kind": KIND, "version": VERSION}
        for name, report in (("a", self.a), ("b", self.b)):
            total, quantized, integer = report.counts
            document[name] = {
                "title": report.title,
                "nbytes": report.nbytes_after,
                "layers": total,
                "layers_quantized": quantized,
                "integer_kernel_layers": integer,
                "output_sqnr_db": encode(report.output_sqnr_db),
                "agreement": encode(report.agreement),
                "recipe": report.reproduction.recipe,
            }
        document["has_common_layers"] = self.has_common_layers
        document["layers"] = [
            {
                "name": each.name,
                "sqnr_change_db": each.sqnr_change_db,
                "nbytes_change": each.nbytes_change,
                "is_changed": each.is_changed,
                "a": encode(each.a),
                "b": encode(each.b),
            }
            for each in self.layers
        ]
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))

    def to_html(self) -> str:
        """Return the comparison as a single HTML file that makes no network requests.

        Raises:
            UnsupportedError: Jinja is not installed.
        """
        from detent.report.html import render_comparison  # noqa: PLC0415 - imports Jinja

        return render_comparison(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .html or .json file, atomically: readers see the old file or the new one.

        Raises:
            FileFormatError: the suffix is not .html or .json.
        """
        write_report(self, path)

    def __str__(self) -> str:
        return "\n".join([*self._notes(), *(table_lines(self._rows(), right=(4, 5)) if self.layers else [])])

    def __repr__(self) -> str:
        return f"<Comparison of {self.a.title!r} and {self.b.title!r}: {counted(len(self.layers), 'layer')}>"

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=(4, 5), notes=self._notes())

    def _notes(self) -> list[str]:
        heads = [_headline(self.a, None), _headline(self.b, self.a.nbytes_after)]
        return heads if self.has_common_layers else [*heads, NO_COMMON_LAYERS]

    def _rows(self) -> list[tuple[str, ...]]:
        return [("layer", "type", self.a.title, self.b.title, "dB", "bytes"), *map(_row, self.layers)]


def _headline(report: Report, other_nbytes: int | None) -> str:
    total, quantized, integer = report.counts
    change = "" if other_nbytes is None else f" ({report.nbytes_after - other_nbytes:+,})"
    sqnr = "" if report.sqnr_db is None else f", output SQNR {report.sqnr_db:.1f} dB"
    return (
        f"{report.title}: {report.nbytes_after:,} bytes{change}, {quantized} of {total} layers quantized, "
        f"{integer} on integer kernels{sqnr}"
    )


def _row(each: ComparedLayer) -> tuple[str, ...]:
    either = each.a or each.b
    change, size = each.sqnr_change_db, each.nbytes_change
    return (
        each.name,
        "" if either is None else either.type,
        _cell(each.a),
        _cell(each.b),
        "-" if change is None else f"{change:+.1f}",
        "-" if size is None else f"{size:+,}",
    )


def _cell(layer: Layer | None) -> str:
    if layer is None:
        return "absent"
    spec = "" if layer.weight is None else f" {layer.weight.spec} {layer.weight.codes_text}".rstrip()
    db = layer.output_sqnr_db if layer.output_sqnr_db is not None else _weight_sqnr_db(layer)
    return f"{layer.kernel or layer.status}{spec}" + ("" if db is None else f" {db:.4g} dB")


def compare(a: Report, b: Report) -> Comparison:
    """Compare two reports. Layers are matched by name, and listed in the order of the second report.

    Raises:
        DtypeError: ``a`` or ``b`` is not a report.
    """
    for each in (a, b):
        if not isinstance(each, Report):
            raise DtypeError(f"got {type(each).__name__}, expected two reports: build each with qr.build")
    first, second = ({layer.name: layer for layer in each.layers} for each in (a, b))
    names = dict.fromkeys((*second, *first))
    return Comparison(a, b, tuple(ComparedLayer(name, first.get(name), second.get(name)) for name in names))
