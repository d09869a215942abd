"""Report: everything that is known of a quantized model, as a value that JSON and a page can hold.

Verification and sensitivity are held as ``dt.verify`` and ``qs.measure`` returned them. None stands for what is not
known: without data there is no clip fraction, without the float weight no SQNR of a weight. Nothing is guessed.

JSON has version 2; version 1, which held copies of the verification and the sensitivity, is refused.
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
from detent.tables import table_lines
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
    "option_of",
    "short",
    "write_page",
]

Status = Literal["integers", "quantized", "float"]
Basis = Literal["sensitivity", "output", "weight", "input", "none"]
BINS = 64
DIGITS = 6
VERSION, KIND = 3, "detent-report"
ISLAND = re.compile(r'<script type="application/json" id="report-data">(.*?)</script>', re.DOTALL)
MAX_LAYERS_SHOWN = MAX_CHARS_SHOWN = 20


def short(value: float) -> float:
    """A number with as many digits as a report shows at most."""
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class Histogram:
    """Counts in at most 64 bins of one width, of "values", or of "codes" less their zero point.

    >>> Histogram(-1.0, 0.5, (1, 3, 2, 2)).high
    1.0
    """

    low: float
    width: float
    counts: tuple[int, ...]
    of: Literal["values", "codes"] = "values"

    def __post_init__(self) -> None:
        if not 0 < len(self.counts) <= BINS or min(self.counts) < 0:
            raise SpecError(f"a histogram has 1 to {BINS} counts of at least 0, got {len(self.counts)}")
        if not (0 < self.width < 1e300 and abs(self.low) < 1e300):
            raise SpecError(f"a histogram has a finite start and a positive width, got {self.low} and {self.width}")

    @property
    def high(self) -> float:
        """Where the last bin ends."""
        return self.low + self.width * len(self.counts)


@dataclass(frozen=True)
class Tensor:
    """What is known of a weight or an activation and its quantizer.

    Attributes:
        shape: of a weight; () of activations, whose shapes vary.
        elements: how many were looked at.
        minimum, maximum: of the values that were seen; of weights as they are decoded.
        clip_low, clip_high: the quantizer's range in the units of the histogram, if it is the same for all elements.
        sqnr_db: of quantizing this tensor alone.
        clip_fraction: the share of elements beyond the range.
        code_low, code_high: the smallest and the largest code that occur, less the zero point.
        digest: of codes, scales and zero points of a weight.
        scales: how many there are.
        histogram: of the values of activations, of the codes of weights.

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
        """The share of the codes that occur."""
        return self.codes_used / self.codes_available if self.codes_used is not None and self.codes_available else None

    @property
    def codes_text(self) -> str:
        """The codes that occur, from the smallest to the largest; "" where they are not known."""
        return "" if self.code_low is None or self.code_high is None else f"codes {self.code_low}..{self.code_high}"


@dataclass(frozen=True)
class Layer:
    """What became of one layer.

    Attributes:
        name, type: of its node, or of its module where it comes from PyTorch.
        status: "integers" where the runtime computes with integers, "quantized" where it decodes and computes in
            float, "float" where it was kept in float.
        kernel: the operator that computes it in ONNX Runtime on this machine.
        reason: why it was kept in float.
        output_sqnr_db: of what it computes, beside the float model, with all layers before it quantized too.
        damage: its share of the noise, by what ``Report.damage_basis`` says.
        nbytes_float, nbytes: of its weight in float32, and in the file with its scales.

    >>> Layer("fc", "MatMul", "integers", kernel="QGemm").is_quantized
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
    damage: float | None = None
    nbytes_float: int | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.damage is not None and not 0 <= self.damage <= 1:
            raise SpecError(f"the damage of layer {self.name!r} is a share from 0 to 1, got {self.damage}")

    @property
    def is_quantized(self) -> bool:
        """Whether its weight or its input is quantized."""
        return self.status != "float"


@dataclass(frozen=True)
class Size:
    """Bytes of a part of the file."""

    name: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise SpecError(f"the part {self.name!r} has {self.nbytes} bytes, expected at least 0")


@dataclass(frozen=True)
class Table:
    """A table of a user's own, which the summary shows; a column of numbers is set flush right.

    >>> Table("Accuracy", ("model", "top 1"), (("float",),))
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: row 0 of table 'Accuracy' has 1 cells, expected 2: model, top 1
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
                    f"row {i} of table {self.title!r} has {len(row)} cells, expected {len(self.columns)}: "
                    f"{', '.join(self.columns)}"
                )


@dataclass(frozen=True)
class Reproduction:
    """What it takes to make the same file again.

    Attributes:
        made_by: the version of detent that wrote the file; "" where another program did.
        recipe, recipe_toml: name and text of the recipe.
        data: a hash of the calibration data.
        sha256: of the file.
        versions: of the packages that made this report.
        machine, level: the processor family, and the instruction set of the kernels.
        origin: "onnx" of files that ``qo.quantize`` wrote, "torch" of those of ``qt.export_onnx``.
    """

    made_by: str = ""
    target: str = ""
    recipe: str = ""
    recipe_toml: str = ""
    data: str = ""
    sha256: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    level: str = ""
    origin: Literal["onnx", "torch", "other"] = "other"


def option_of(spec: str, options: Sequence[str]) -> str:
    """The option that a weight of that spec was measured with, "" where there is none, or no telling which.

    Options are as a user says them, the spec is as the layer has it: its axis is the one of the layer's outputs, and
    it says all that options leave out.
    """
    own = _parsed(spec)
    if own is None:
        return ""
    parsed = {option: each for option in options if (each := _parsed(option)) is not None}
    like = [option for option, each in parsed.items() if _key(each) == _key(own)]
    if len(like) > 1:  # symmetric and affine ones, say
        like = [option for option in like if replace(parsed[option], granularity=own.granularity) == own]
    return like[0] if len(like) == 1 else ""


def _parsed(text: str) -> QuantSpec | None:
    try:
        return QuantSpec.parse(text)
    except SpecError:
        return None


def _key(spec: QuantSpec) -> tuple[object, ...]:
    """The format and how many elements share a scale, wherever they lie."""
    granularity = spec.granularity.to_dict()
    return spec.format.name, granularity["kind"], granularity.get("size"), str(granularity.get("sizes"))


def _write_difference(difference: Difference) -> dict[str, object]:
    return {each.name: encode(getattr(difference, each.name)) for each in fields(Difference)}


def _read_difference(value: object) -> Difference:
    entry = table(value, "a difference", [each.name for each in fields(Difference)])
    index, scalars = entry["index"], {name: each for name, each in entry.items() if name != "index"}
    if not isinstance(index, list) or not all(type(each) is int for each in index):
        raise FileFormatError("the index of a difference is a list of integers")
    for name, each in scalars.items():
        if not isinstance(each, str | int | float | NoneType):
            raise FileFormatError(f"{name} of a difference is a number or a text, got {type(each).__name__}")
        if isinstance(each, str):
            storable(name, each)
    return Difference(**scalars, index=tuple(index))


def _read_kernel(value: object) -> Kernel:
    kinds = (str, str, int, int, int, bool)
    if not isinstance(value, list) or [type(each) for each in value] != list(kinds):
        raise FileFormatError("a kernel is a list of node, kernel, compared, differing, max_steps and saturated")
    return Kernel(*value)


_LEAVES = {
    Recipe: RECIPE_LEAF,
    Difference: Leaf(_write_difference, _read_difference),
    Kernel: Leaf(list, _read_kernel),
}


@dataclass(frozen=True)
class Report:
    """What quantization did to a model; ``build`` makes one, ``str`` is a table of the most sensitive layers.

    Attributes:
        layers: by damage, worst first; those in float come last.
        others: quantized activations that no layer reads directly.
        sizes: what the bytes of the file are.
        damage_basis: what damage is a share of: the noise at the outputs that a layer causes alone ("sensitivity"), the
            noise in results ("output"), in weights ("weight") or in inputs ("input"), each relative to its signal.
        output_sqnr_against: what outputs were compared with.
        agreement: top-1 agreement.
        facts, tables: a user's own.
        sensitivity, mix, verification: as ``qs.measure``, ``choose`` and ``dt.verify`` returned them.
        steps: what was done to keep the accuracy.
        notes: what could not be looked at.

    >>> page = Report("small", 100, 30, (Layer("fc", "Gemm", "integers", "QGemm", damage=1.0),))
    >>> print(page)
    small: 100 -> 30 bytes (0.300), 1 of 1 layers quantized, 1 in integers
    layer  type  runs as  damage   SQNR   clip
    fc     Gemm  QGemm    100.0 %  -      -
    >>> page.counts, Report.from_json(page.to_json()) == page, page.to_html()[:15]
    ((1, 1, 1), True, '<!DOCTYPE html>')
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
    sensitivity: Sensitivity | None = None
    mix: Mix | None = None
    verification: VerifyReport | None = None
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
        return worst_output(self.output_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of the worst output, None where nothing was compared."""
        return self.output_sqnr_db.get(self.worst_output)

    def to_json(self) -> str:
        """Everything, as JSON; figures that are no finite numbers are written as text."""
        document = {"kind": KIND, "version": VERSION, **encode(self, _LEAVES)}
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that ``to_json`` wrote.

        Raises:
            FileFormatError: no JSON, another version, or keys and values that a report does not have.
        """
        document = parse(text, "the report")
        kind, version = (document.pop(key, None) for key in ("kind", "version"))
        if kind != KIND:
            shown = str(kind)[:MAX_CHARS_SHOWN]
            raise FileFormatError(f"the text is no report of detent's: its kind is {shown!r}, not {KIND!r}")
        if type(version) is not int or version != VERSION:  # True and 1.0 equal 1
            shown = str(version)[:MAX_CHARS_SHOWN]
            raise FileFormatError(f"the report has version {shown}, this detent reads {VERSION}: make it again")
        try:
            return decode(cls, document, "report", _LEAVES)
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
        island = ISLAND.search(text)
        if island is None:
            raise FileFormatError(f"{source} is no page of detent's: it holds no report-data")
        return cls.from_json(island.group(1))

    def to_html(self) -> str:
        """One page that needs no network.

        Raises:
            UnsupportedError: Jinja is not installed.
        """
        from detent.report.html import render_report  # noqa: PLC0415 - imports Jinja

        return render_report(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .html or .json file, atomically: readers see the old file or the new one.

        Raises:
            FileFormatError: another suffix.
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
        rows = [_row(layer) for layer in self.layers[:MAX_LAYERS_SHOWN]]
        lines = table_lines([("layer", "type", "runs as", "damage", "SQNR", "clip"), *rows]) if rows else []
        rest = [f"and {total - MAX_LAYERS_SHOWN} more"] if total > MAX_LAYERS_SHOWN else []
        return "\n".join([head, *lines, *rest])


class Page(Protocol):
    """What can be written as a page."""

    def to_json(self) -> str: ...

    def to_html(self) -> str: ...


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Write a .html or .json file, atomically."""
    target = Path(path)
    check_suffix(target)
    text = page.to_json() if target.suffix.lower() == ".json" else page.to_html()
    storage.write_atomic(target, text.encode())


def check_suffix(path: Path) -> None:
    """Refuse files that are neither HTML nor JSON."""
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
