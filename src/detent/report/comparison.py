"""Comparison: two reports side by side, layer by layer."""

import json
import os
from dataclasses import dataclass
from math import isfinite
from typing import Any

from detent.codec import encode
from detent.errors import DtypeError
from detent.report.document import Layer, Report, write_page
from detent.tables import table_lines

__all__ = ["ComparedLayer", "Comparison", "compare"]

KIND, VERSION = "detent-comparison", 1
NO_LAYER_IN_COMMON = "the two models share no layer names: were both made from the same float model?"


@dataclass(frozen=True)
class ComparedLayer:
    """One layer of two reports; None where one of them has no such layer."""

    name: str
    a: Layer | None
    b: Layer | None

    @property
    def sqnr_change_db(self) -> float | None:
        """How many dB the second is better, by what both know: the result's SQNR, or else the weight's."""
        results = [None if layer is None else layer.output_sqnr_db for layer in (self.a, self.b)]
        change = _change(*results)
        return _change(_weight(self.a), _weight(self.b)) if None in results else change

    @property
    def nbytes_change(self) -> int | None:
        """How many bytes the second takes more."""
        if self.a is None or self.b is None or self.a.nbytes is None or self.b.nbytes is None:
            return None
        return self.b.nbytes - self.a.nbytes

    @property
    def is_changed(self) -> bool:
        """Whether the layer is quantized or computed in another way, or has other codes."""
        return _way(self.a) != _way(self.b) or not _same_codes(self.a, self.b)


def _change(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return None
    if isfinite(first) and isfinite(second):
        return second - first
    return 0.0 if first == second else None


def _weight(layer: Layer | None) -> float | None:
    return None if layer is None or layer.weight is None else layer.weight.sqnr_db


def _way(layer: Layer | None) -> tuple[str, ...]:
    if layer is None:
        return ()
    specs = ("" if each is None else each.spec for each in (layer.weight, layer.input))
    return (layer.status, layer.kernel, *specs)


def _same_codes(a: Layer | None, b: Layer | None) -> bool:
    """False where it is known that they are others: both files may hold bytes, but one of them 4 bits in these."""
    digests = {"" if layer is None or layer.weight is None else layer.weight.digest for layer in (a, b)}
    return len(digests - {""}) < len((a, b))


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side; ``str`` is a table, changes are those of the second against the first.

    >>> a = Report("a", 100, 30, (Layer("fc", "Gemm", "integers", output_sqnr_db=30.0, nbytes=20),))
    >>> b = Report("b", 100, 25, (Layer("fc", "Gemm", "integers", output_sqnr_db=24.5, nbytes=15),))
    >>> both = compare(a, b)
    >>> print(both)
    a: 30 bytes, 1 of 1 layers quantized, 1 in integers
    b: 25 bytes (-5), 1 of 1 layers quantized, 1 in integers
    layer  type  a               b                dB      bytes
    fc     Gemm  integers 30 dB  integers 24.5 dB  -5.5      -5
    >>> both.layers[0].sqnr_change_db, both.to_html()[:15], both.to_json()[:28], both.is_of_one_origin
    (-5.5, '<!DOCTYPE html>', '{"kind":"detent-comparison",', True)
    """

    a: Report
    b: Report
    layers: tuple[ComparedLayer, ...]

    @property
    def sqnr_change_db(self) -> float | None:
        """How many dB the second's worst output is better than the first's; None where that is not known."""
        return _change(self.a.sqnr_db, self.b.sqnr_db)

    @property
    def is_of_one_origin(self) -> bool:
        """Whether there is a layer that both have, or one of them has none at all."""
        return any(each.a and each.b for each in self.layers) or not (self.a.layers and self.b.layers)

    def to_json(self) -> str:
        """Both reports' figures and the changes, as JSON."""
        document: dict[str, Any] = {"kind": KIND, "version": VERSION}
        for name, report in (("a", self.a), ("b", self.b)):
            total, quantized, integers = report.counts
            document[name] = {
                "title": report.title,
                "nbytes": report.nbytes_after,
                "layers": total,
                "layers_quantized": quantized,
                "layers_in_integers": integers,
                "output_sqnr_db": encode(report.output_sqnr_db),
                "agreement": encode(report.agreement),
                "recipe": report.reproduction.recipe,
            }
        document["is_of_one_origin"] = self.is_of_one_origin
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
        """One page that needs no network.

        Raises:
            UnsupportedError: Jinja is not installed.
        """
        from detent.report.html import render_comparison  # noqa: PLC0415 - imports Jinja

        return render_comparison(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .html or .json file, atomically.

        Raises:
            FileFormatError: another suffix.
        """
        write_page(self, path)

    def __str__(self) -> str:
        lines = [_head(self.a, None), _head(self.b, self.a.nbytes_after)]
        if not self.is_of_one_origin:
            lines.append(NO_LAYER_IN_COMMON)
        head = ("layer", "type", self.a.title, self.b.title, "dB", "bytes")
        rows = [_row(each) for each in self.layers]
        return "\n".join([*lines, *(table_lines([head, *rows], right=(4, 5)) if rows else [])])


def _head(report: Report, other: int | None) -> str:
    total, quantized, integers = report.counts
    change = "" if other is None else f" ({report.nbytes_after - other:+,})"
    sqnr = "" if report.sqnr_db is None else f", {report.sqnr_db:.1f} dB"
    return (
        f"{report.title}: {report.nbytes_after:,} bytes{change}, {quantized} of {total} layers quantized, "
        f"{integers} in integers{sqnr}"
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
    db = layer.output_sqnr_db if layer.output_sqnr_db is not None else _weight(layer)
    return f"{layer.kernel or layer.status}{spec}" + ("" if db is None else f" {db:.4g} dB")


def compare(a: Report, b: Report) -> Comparison:
    """Two reports side by side: layers of the same name, in the second's order of damage.

    Raises:
        DtypeError: something else than reports.
    """
    for each in (a, b):
        if not isinstance(each, Report):
            raise DtypeError(f"compare takes two reports, got {type(each).__name__}: make one with qr.build")
    first, second = ({layer.name: layer for layer in each.layers} for each in (a, b))
    names = dict.fromkeys((*second, *first))
    return Comparison(a, b, tuple(ComparedLayer(name, first.get(name), second.get(name)) for name in names))
