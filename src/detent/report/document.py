"""Report: all statistics and metrics of a quantized model. It can be written as JSON and as HTML.

A report contains the results of ``dt.verify`` and ``qs.measure`` if these results were passed. Unknown values are None,
never estimates: without data there is no clip fraction, and without the float weight a weight has no SQNR.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Literal, Protocol

from detent import storage
from detent.codec import TEXT_LIMIT, Leaf, decode, encode, parse, storable, table
from detent.errors import FileFormatError, SpecError
from detent.metrics import worst_output
from detent.recipe import RECIPE_LEAF, Recipe
from detent.sensitivity.layer_noise import Mix, Sensitivity
from detent.spec import QuantSpec
from detent.tables import counted, html_table, table_lines
from detent.verification.verify_report import Difference, Kernel, VerifyReport

__all__ = [
    "Basis",
    "Histogram",
    "Layer",
    "Report",
    "Reproduction",
    "Size",
    "Table",
    "Tensor",
    "check_suffix",
    "matching_candidate",
    "short",
    "write_report",
]

Status = Literal["integer", "quantized", "float"]
Basis = Literal["sensitivity", "output", "weight", "input", "none"]
BINS = 64  # largest number of bins of a histogram
DIGITS = 6  # significant digits of numbers in a report
VERSION, KIND = 4, "detent-report"
ISLAND = re.compile(r'<script type="application/json" id="report-data">(.*?)</script>', re.DOTALL)
MAX_LAYERS_SHOWN = MAX_CHARS_SHOWN = 20


def short(value: float) -> float:
    """Round a number to six significant digits, as in reports."""
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class Histogram:
    """Counts in at most 64 bins of equal width.

    Attributes:
        low: lower edge of the first bin.
        width: width of a bin.
        counts: count of each bin.
        of: what is counted: "values", or "codes" minus their zero point.

    >>> Histogram(-1.0, 0.5, (1, 3, 2, 2)).high
    1.0
    """

    low: float
    width: float
    counts: tuple[int, ...]
    of: Literal["values", "codes"] = "values"

    def __post_init__(self) -> None:
        if not 0 < len(self.counts) <= BINS or min(self.counts) < 0:
            raise SpecError(f"got {len(self.counts)} counts of a histogram, expected 1 to {BINS}, each at least 0")
        if not (0 < self.width < 1e300 and abs(self.low) < 1e300):
            raise SpecError(f"got low={self.low} and width={self.width}, expected finite numbers and width > 0")

    @property
    def high(self) -> float:
        """Upper edge of the last bin."""
        return self.low + self.width * len(self.counts)


@dataclass(frozen=True)
class Tensor:
    """Statistics of a weight or an activation, and its quantization.

    Attributes:
        name: name of the tensor in the file.
        spec: how the tensor is quantized.
        shape: shape of a weight, or () for activations, whose shapes vary.
        elements: number of elements measured.
        minimum: smallest value; for weights, after dequantization.
        maximum: largest value; for weights, after dequantization.
        clip_low: lower bound of the clipping range, in the units of the histogram. None if it is unknown or not the
            same for all elements.
        clip_high: upper bound of the clipping range; see ``clip_low``.
        sqnr_db: SQNR of quantizing this tensor.
        clip_fraction: share of elements outside the clipping range.
        codes_used: number of different codes that occur.
        codes_available: number of codes that the format has.
        code_low: smallest code that occurs, minus the zero point.
        code_high: largest code that occurs, minus the zero point.
        digest: SHA-256 of a weight's codes, scales and zero points.
        scales: number of scales.
        histogram: histogram of an activation's values, or of a weight's codes.
        note: further information.

    >>> Tensor("w", "uint8/axis0", code_low=-8, code_high=7).codes_text
    'codes -8..7'
    """

    name: str
    spec: str
    shape: tuple[int, ...] = ()
    elements: int = 0
    minimum: float | None = None
    maximum: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    sqnr_db: float | None = None
    clip_fraction: float | None = None
    codes_used: int | None = None
    codes_available: int | None = None
    code_low: int | None = None
    code_high: int | None = None
    digest: str = ""
    scales: int = 1
    histogram: Histogram | None = None
    note: str = ""

    @property
    def code_usage(self) -> float | None:
        """Share of the available codes that occur."""
        return self.codes_used / self.codes_available if self.codes_used is not None and self.codes_available else None

    @property
    def codes_text(self) -> str:
        """Smallest and largest code that occur, as text, or "" if unknown."""
        return "" if self.code_low is None or self.code_high is None else f"codes {self.code_low}..{self.code_high}"


@dataclass(frozen=True)
class Layer:
    """Statistics of one layer.

    Attributes:
        name: name of the node, or of the module if the file was exported from PyTorch.
        type: operator of the node.
        status: "integer" if the layer runs on an integer kernel, "quantized" if it is dequantized and computed in
            float, "float" if it is kept in float.
        kernel: operator that runs the layer in ONNX Runtime on this machine.
        reason: why the layer is kept in float.
        note: further information.
        weight: statistics of the layer's weight.
        input: statistics of the layer's input.
        output_sqnr_db: SQNR of the layer's output compared with the float model, with all earlier layers quantized.
        noise_share: the layer's share of the noise of all layers; ``Report.noise_share_basis`` says which noise.
        nbytes_float: size of the weight in float32, in bytes.
        nbytes: size of the weight in the file, including scales and zero points, in bytes.

    >>> Layer("fc", "MatMul", "integer", kernel="QGemm").is_quantized
    True
    """

    name: str
    type: str
    status: Status
    kernel: str = ""
    reason: str = ""
    note: str = ""
    weight: Tensor | None = None
    input: Tensor | None = None
    output_sqnr_db: float | None = None
    noise_share: float | None = None
    nbytes_float: int | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.noise_share is not None and not 0 <= self.noise_share <= 1:
            raise SpecError(
                f"the noise share of layer {self.name!r} must be a share from 0 to 1, got {self.noise_share}"
            )

    @property
    def is_quantized(self) -> bool:
        """Whether the layer's weight or input is quantized."""
        return self.status != "float"


@dataclass(frozen=True)
class Size:
    """Size of a part of the file, in bytes."""

    name: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise SpecError(f"got {self.nbytes} bytes for the part {self.name!r}, expected at least 0")


@dataclass(frozen=True)
class Table:
    """A table that a user adds to the summary; columns of numbers are aligned right.

    >>> Table("Accuracy", ("model", "top 1"), (("float",),))
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: row 0 of table 'Accuracy' has 1 cell, expected 2, one per column: model, top 1
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", str(self.title))
        object.__setattr__(self, "columns", tuple(map(str, self.columns)))
        object.__setattr__(self, "rows", tuple(tuple(map(str, row)) for row in self.rows))
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise SpecError(
                    f"row {i} of table {self.title!r} has {counted(len(row), 'cell')}, expected {len(self.columns)}, "
                    f"one per column: {', '.join(self.columns)}"
                )


@dataclass(frozen=True)
class Reproduction:
    """Everything needed to produce the file again.

    Attributes:
        written_by: version of detent that wrote the file, or "" if another tool wrote it.
        target: runtime and CPU that the file was quantized for.
        recipe: name of the recipe.
        recipe_toml: the recipe as TOML.
        data: hash of the calibration data.
        sha256: hash of the file.
        command: command line that produced the file.
        versions: versions of the packages that built this report.
        machine: processor family of the machine that built this report.
        instruction_set: instruction set of detent's kernels on that machine.
        origin: "onnx" for files from ``qo.quantize``, "torch" for files from ``qt.export_onnx``, or "other".
    """

    written_by: str = ""
    target: str = ""
    recipe: str = ""
    recipe_toml: str = ""
    data: str = ""
    sha256: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    instruction_set: str = ""
    origin: Literal["onnx", "torch", "other"] = "other"


def matching_candidate(spec: str, options: Sequence[str]) -> str:
    """Return the candidate that was measured for a weight with this spec, or "" if no candidate or several match.

    Args:
        spec: complete spec of a layer's weight, with the layer's own axis.
        options: the candidates, as the short texts that users write.
    """
    layer_spec = _parsed(spec)
    if layer_spec is None:
        return ""
    parsed = {option: each for option in options if (each := _parsed(option)) is not None}
    matches = [option for option, each in parsed.items() if _key(each) == _key(layer_spec)]
    if len(matches) > 1:  # for example if a symmetric and an affine candidate were measured
        granularity = layer_spec.granularity
        matches = [option for option in matches if replace(parsed[option], granularity=granularity) == layer_spec]
    return matches[0] if len(matches) == 1 else ""


def _parsed(text: str) -> QuantSpec | None:
    try:
        return QuantSpec.parse(text)
    except SpecError:
        return None


def _key(spec: QuantSpec) -> tuple[object, ...]:
    """Return the format of a spec, and the kind and size of its granularity, but not the axis."""
    granularity = spec.granularity.to_dict()
    return spec.format.name, granularity["kind"], granularity.get("size"), str(granularity.get("sizes"))


def _write_difference(difference: Difference) -> dict[str, object]:
    return {each.name: encode(getattr(difference, each.name)) for each in fields(Difference)}


def _read_difference(value: object) -> Difference:
    entry = table(value, "a difference", [each.name for each in fields(Difference)])
    index, scalars = entry["index"], {name: each for name, each in entry.items() if name != "index"}
    if not isinstance(index, list) or not all(type(each) is int for each in index):
        raise FileFormatError(
            "the index of a difference in the verification must be a list of integers, such as [0, 3]"
        )
    for name, each in scalars.items():
        if not isinstance(each, str | int | float | NoneType):
            raise FileFormatError(
                f"{name} of a difference in the verification must be a number or text, got {type(each).__name__}"
            )
        if isinstance(each, str):
            storable(name, each)
    return Difference(**scalars, index=tuple(index))


def _read_kernel(value: object) -> Kernel:
    kinds = (str, str, int, int, int, bool)
    if not isinstance(value, list) or [type(each) for each in value] != list(kinds):
        raise FileFormatError(
            "a kernel in the verification must be a list [node, kernel, compared, differing, max_steps, saturated] of "
            "two texts, three integers, and true or false"
        )
    return Kernel(*value)


_LEAVES = {
    Recipe: RECIPE_LEAF,
    Difference: Leaf(_write_difference, _read_difference),
    Kernel: Leaf(list, _read_kernel),
}


@dataclass(frozen=True)
class Report:
    """Report on a quantized model, from ``build``; ``str()`` returns a table of the most sensitive layers.

    Attributes:
        title: title of the report.
        nbytes_before: size of the float model in bytes, or None if unknown.
        nbytes_after: size of the quantized model in bytes.
        layers: layers sorted by noise share, largest first; layers in float come last.
        others: quantized activations that no layer reads directly.
        sizes: sizes of the parts of the file.
        noise_share_basis: the tensor whose relative noise is measured: "sensitivity" (model outputs, with one layer
            quantized at a time), "output", "weight" or "input" (of the layer), or "none".
        output_sqnr_db: maps the name of each float output to its SQNR in dB.
        output_sqnr_against: the model that outputs were compared with, as text.
        agreement: top-1 agreement, from 0 to 1.
        batches: number of batches on which activations were measured.
        facts: pairs of label and text that a user added to the summary.
        tables: tables that a user added to the summary.
        sensitivity: the result of ``qs.measure``.
        mix: the result of ``Sensitivity.choose``.
        verification: the result of ``dt.verify``.
        reproduction: everything needed to produce the file again.
        steps: what the accuracy passes changed, and hints.
        notes: measurements that were not possible, and why.

    >>> report = Report("small", 100, 30, (Layer("fc", "Gemm", "integer", "QGemm", noise_share=1.0),))
    >>> print(report)
    small: 100 -> 30 bytes (0.300), 1 of 1 layers quantized, 1 on integer kernels
    layer  type  runs as  noise share  SQNR   clip
    fc     Gemm  QGemm    100.0 %      -      -
    >>> report.counts, Report.from_json(report.to_json()) == report, report.to_html()[:15]
    ((1, 1, 1), True, '<!DOCTYPE html>')
    """

    title: str
    nbytes_before: int | None
    nbytes_after: int
    layers: tuple[Layer, ...] = ()
    others: tuple[Tensor, ...] = ()
    sizes: tuple[Size, ...] = ()
    noise_share_basis: Basis = "none"
    output_sqnr_db: Mapping[str, float] = field(default_factory=dict)
    output_sqnr_against: str = ""
    agreement: float | None = None
    batches: int = 0
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    sensitivity: Sensitivity | None = None
    mix: Mix | None = None
    verification: VerifyReport | None = None
    reproduction: Reproduction = field(default_factory=Reproduction)
    steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.agreement is not None and not 0 <= self.agreement <= 1:
            raise SpecError(f"agreement must be a share from 0 to 1, got {self.agreement}")

    @property
    def counts(self) -> tuple[int, int, int]:
        """Three numbers: all layers, quantized layers, and layers on integer kernels."""
        quantized = sum(layer.is_quantized for layer in self.layers)
        return len(self.layers), quantized, sum(layer.status == "integer" for layer in self.layers)

    @property
    def worst_output(self) -> str:
        """Name of the output with the lowest SQNR, or "" if outputs were not compared."""
        return worst_output(self.output_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """Lowest SQNR of all outputs, or None if outputs were not compared."""
        return self.output_sqnr_db.get(self.worst_output)

    def to_json(self) -> str:
        """Return the report as JSON, with a format version; NaN and infinite numbers are written as strings."""
        document = {"kind": KIND, "version": VERSION, **encode(self, _LEAVES)}
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Read a report that ``to_json`` wrote; the text is untrusted.

        Raises:
            FileFormatError: the text is not JSON, has an unsupported version, or has unexpected keys or values.
        """
        document = parse(text, "the report")
        kind, version = (document.pop(key, None) for key in ("kind", "version"))
        if kind != KIND:
            shown = str(kind)[:MAX_CHARS_SHOWN]
            raise FileFormatError(f"the text is not a detent report: its kind is {shown!r}, expected {KIND!r}")
        if type(version) is not int or version != VERSION:  # without the type check, 4.0 would pass as 4
            shown, is_newer = str(version)[:MAX_CHARS_SHOWN], type(version) is int and version > VERSION
            advice = "update detent, or build the report again" if is_newer else "build the report again"
            raise FileFormatError(f"the report has version {shown}, but this detent reads version {VERSION}: {advice}")
        try:
            return decode(cls, document, "report", _LEAVES)
        except SpecError as error:
            raise FileFormatError(f"invalid report: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Report":
        """Read a .json or .html file that ``save`` wrote.

        Raises:
            FileFormatError: the file is missing, too large, not a report, or has an unsupported suffix.
        """
        source = Path(path)
        check_suffix(source)
        try:
            if source.stat().st_size > TEXT_LIMIT:
                raise FileFormatError(
                    f"{source} is larger than {TEXT_LIMIT} bytes, the limit for reports: build a new report"
                )
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise FileFormatError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{source} is not UTF-8 text: {error}") from error
        if source.suffix.lower() == ".json":
            return cls.from_json(text)
        island = ISLAND.search(text)
        if island is None:
            raise FileFormatError(
                f"{source} has no report-data element, expected a file that Report.save wrote: "
                "build and save the report again"
            )
        return cls.from_json(island.group(1))

    def to_html(self) -> str:
        """Return the report as a single HTML file that makes no network requests.

        Raises:
            UnsupportedError: Jinja is not installed.
        """
        from detent.report.html import render_report  # noqa: PLC0415 - imports Jinja

        return render_report(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .html or .json file, atomically: readers see the old file or the new one.

        Raises:
            FileFormatError: the suffix is not .html or .json.
        """
        write_report(self, path)

    def __str__(self) -> str:
        rows = [_row(layer) for layer in self.layers[:MAX_LAYERS_SHOWN]]
        more = len(self.layers) - len(rows)
        lines = [
            *(table_lines([_HEAD, *rows]) if rows else []),
            *([f"and {counted(more, 'more layer')}"] if more else []),
        ]
        return "\n".join([self._headline(), *lines])

    def __repr__(self) -> str:
        return f"<Report {self._headline()}>"

    def _repr_html_(self) -> str:
        return html_table([_HEAD, *map(_row, self.layers)], right=(3, 4, 5), notes=[self._headline(), *self.notes])

    def _headline(self) -> str:
        total, quantized, integer = self.counts
        before = "" if self.nbytes_before is None else f"{self.nbytes_before:,} -> "
        ratio = f" ({self.nbytes_after / self.nbytes_before:.3f})" if self.nbytes_before else ""
        sqnr = "" if self.sqnr_db is None else f", output SQNR {self.sqnr_db:.1f} dB"
        return (
            f"{self.title}: {before}{self.nbytes_after:,} bytes{ratio}, {quantized} of {total} layers quantized, "
            f"{integer} on integer kernels{sqnr}"
        )


class Renderable(Protocol):
    """An object that can be written as JSON and as HTML."""

    def to_json(self) -> str: ...

    def to_html(self) -> str: ...


def write_report(report: Renderable, path: str | os.PathLike[str]) -> None:
    """Write a report or a comparison as an .html or .json file, atomically."""
    target = Path(path)
    check_suffix(target)
    text = report.to_json() if target.suffix.lower() == ".json" else report.to_html()
    storage.write_atomic(target, text.encode())


def check_suffix(path: Path) -> None:
    """Raise FileFormatError for a path that ends with neither .html nor .json."""
    if path.suffix.lower() not in {".html", ".json"}:
        raise FileFormatError(f"got {os.fspath(path)!r}, expected a report with the suffix .html or .json")


_HEAD = ("layer", "type", "runs as", "noise share", "SQNR", "clip")


def _row(layer: Layer) -> tuple[str, ...]:
    clip = None if layer.input is None else layer.input.clip_fraction
    return (
        layer.name,
        layer.type,
        layer.kernel or layer.status,
        "-" if layer.noise_share is None else f"{layer.noise_share:.1%}".replace("%", " %"),
        "-" if layer.output_sqnr_db is None else f"{layer.output_sqnr_db:.1f} dB",
        "-" if clip is None else f"{clip:.2%}".replace("%", " %"),
    )
