"""Report: everything that is known of a quantized model, as a value that JSON and a page can hold."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal, Protocol

from detent import storage
from detent.codec import TEXT_LIMIT, decode, encode, parse
from detent.errors import FileFormatError, SpecError
from detent.report.evidence import SensitivityFacts, VerificationFacts
from detent.report.parts import Layer, Reproduction, Size, Table, Tensor
from detent.tables import table_lines

__all__ = ["Basis", "Report", "check_suffix", "write_page"]

Basis = Literal["sensitivity", "output", "weight", "input", "none"]
VERSION, KIND = 1, "detent-report"
ISLAND = re.compile(r'<script type="application/json" id="report-data">(.*?)</script>', re.DOTALL)
SHOWN = 20


@dataclass(frozen=True)
class Report:
    """What quantization did to a model; ``build`` makes one, ``str`` is a table of the layers that hurt most.

    Attributes:
        title: of the page.
        nbytes_before, nbytes_after: of the float file, None where that is not known, and of the quantized one.
        layers: by damage, worst first; those in float come last.
        others: quantized activations that no layer reads directly.
        sizes: what the bytes of the file are.
        damage_basis: what damage is a share of: the noise at the outputs that a layer causes alone ("sensitivity"), the
            noise in results ("output"), in weights ("weight") or in inputs ("input"), each relative to its signal.
        output_sqnr_db: of each output.
        output_sqnr_against: what outputs were compared with.
        agreement: the share of samples of the same largest class.
        batches: how many were run.
        facts, tables: a user's own.
        sensitivity, verification: where they were given.
        reproduction: what it takes to make the file again.
        steps: what was done to keep the accuracy.
        notes: what could not be looked at.

    >>> page = Report("small", 100, 30, (Layer("fc", "Gemm", "integers", "QGemm", damage=1.0),))
    >>> print(page)
    small: 100 -> 30 bytes (0.300), 1 of 1 layers quantized, 1 in integers
    layer  type  runs as  damage   SQNR   clip
    fc     Gemm  QGemm    100.0 %  -      -
    >>> page.counts, Report.from_json(page.to_json()) == page, page.to_html()[:15]
    ((1, 1, 1), True, '<!DOCTYPE html>')
    >>> several = Report("small", 100, 30, output_sqnr_db={"a": 30.0, "b": 20.0})
    >>> several.worst_output, several.sqnr_db
    ('b', 20.0)
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page.save(f"{folder}/page.html")
    ...     Report.load(f"{folder}/page.html") == page
    True
    """

    title: str
    nbytes_before: int | None
    nbytes_after: int
    layers: tuple[Layer, ...] = ()
    others: tuple[Tensor, ...] = ()
    sizes: tuple[Size, ...] = ()
    damage_basis: Basis = "none"
    output_sqnr_db: Mapping[str, float] = field(default_factory=dict)
    output_sqnr_against: str = ""
    agreement: float | None = None
    batches: int = 0
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    sensitivity: SensitivityFacts | None = None
    verification: VerificationFacts | None = None
    reproduction: Reproduction = field(default_factory=Reproduction)
    steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.agreement is not None and not 0 <= self.agreement <= 1:
            raise SpecError(f"agreement is a share from 0 to 1, got {self.agreement}")

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many layers there are, how many are quantized, and how many run in integers."""
        quantized = sum(layer.is_quantized for layer in self.layers)
        return len(self.layers), quantized, sum(layer.status == "integers" for layer in self.layers)

    @property
    def worst_output(self) -> str:
        """The output of the lowest SQNR, "" where nothing was compared."""
        return min(self.output_sqnr_db, key=lambda name: _rank(self.output_sqnr_db[name]), default="")

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of the worst output, None where nothing was compared."""
        return self.output_sqnr_db.get(self.worst_output)

    def to_json(self) -> str:
        """Everything, as JSON; figures that are no finite numbers are written as text."""
        about = {"kind": KIND, "version": VERSION, **encode(self)}
        return json.dumps(about, allow_nan=False, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that ``to_json`` wrote.

        Raises:
            FileFormatError: no JSON, another version, or keys and values that a report does not have.

        >>> Report.from_json('{"kind": "detent-report", "version": 2}')
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: the report has version 2, this detent reads 1: make it again
        """
        about = parse(text, "the report")
        kind, version = about.pop("kind", None), about.pop("version", None)
        if kind != KIND:
            raise FileFormatError(f"the text is no report of detent's: its kind is {str(kind)[:SHOWN]!r}, not {KIND!r}")
        if type(version) is not int or version != VERSION:  # True and 1.0 equal 1
            shown = str(version)[:SHOWN]
            raise FileFormatError(f"the report has version {shown}, this detent reads {VERSION}: make it again")
        try:
            return decode(cls, about, "report")
        except SpecError as error:
            raise FileFormatError(f"the report cannot be read: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Report":
        """The report of a .json or .html file that ``save`` wrote.

        Raises:
            FileFormatError: no such file, another suffix, too large, or no report.
        """
        source = Path(path)
        check_suffix(source)
        try:
            if source.stat().st_size > TEXT_LIMIT:
                raise FileFormatError(f"{source} is larger than the {TEXT_LIMIT} bytes that are read")
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise FileFormatError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{source} is no UTF-8 text: {error}") from error
        if source.suffix.lower() == ".json":
            return cls.from_json(text)
        found = ISLAND.search(text)
        if found is None:
            raise FileFormatError(f"{source} is no page of detent's: it holds no report-data")
        return cls.from_json(found.group(1))

    def to_html(self) -> str:
        """One page that needs no network.

        Raises:
            UnsupportedError: Jinja is not installed.
        """
        from detent.report.rendering import render_report  # noqa: PLC0415 - imports Jinja

        return render_report(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .html or .json file, atomically: readers see the old file or the new one.

        Raises:
            FileFormatError: another suffix.

        >>> Report("small", 100, 30).save("page.pdf")
        Traceback (most recent call last):
        ...
        detent.errors.FileFormatError: reports are .html or .json files, got 'page.pdf': give it such a suffix
        """
        write_page(self, path)

    def __str__(self) -> str:
        total, quantized, integers = self.counts
        before = "" if self.nbytes_before is None else f"{self.nbytes_before:,} -> "
        ratio = f" ({self.nbytes_after / self.nbytes_before:.3f})" if self.nbytes_before else ""
        sqnr = "" if self.sqnr_db is None else f", {self.sqnr_db:.1f} dB"
        head = (
            f"{self.title}: {before}{self.nbytes_after:,} bytes{ratio}, {quantized} of {total} layers quantized, "
            f"{integers} in integers{sqnr}"
        )
        rows = [_row(layer) for layer in self.layers[:SHOWN]]
        lines = table_lines([("layer", "type", "runs as", "damage", "SQNR", "clip"), *rows]) if rows else []
        rest = [f"and {total - SHOWN} more"] if total > SHOWN else []
        return "\n".join([head, *lines, *rest])


def _rank(db: float) -> float:
    return db if db == db else -inf  # noqa: PLR0124 - NaN is the worst there is


class Page(Protocol):
    """What can be written as a page."""

    def to_json(self) -> str: ...

    def to_html(self) -> str: ...


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Write a .html or .json file, atomically.

    >>> write_page(Report("small", 100, 30), "page.pdf")
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: reports are .html or .json files, got 'page.pdf': give it such a suffix
    """
    target = Path(path)
    check_suffix(target)
    text = page.to_json() if target.suffix.lower() == ".json" else page.to_html()
    storage.write_atomic(target, text.encode())


def check_suffix(path: Path) -> None:
    """Refuse files that are neither HTML nor JSON.

    >>> check_suffix(Path("page.html"))
    """
    if path.suffix.lower() not in {".html", ".json"}:
        raise FileFormatError(f"reports are .html or .json files, got {os.fspath(path)!r}: give it such a suffix")


def _row(layer: Layer) -> tuple[str, ...]:
    clip = None if layer.input is None else layer.input.clip_fraction
    return (
        layer.name,
        layer.type,
        layer.kernel or layer.status,
        "-" if layer.damage is None else f"{layer.damage:.1%}".replace("%", " %"),
        "-" if layer.output_sqnr_db is None else f"{layer.output_sqnr_db:.1f} dB",
        "-" if clip is None else f"{clip:.2%}".replace("%", " %"),
    )
