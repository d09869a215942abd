"""Parts: what a report is made of, as plain values that JSON can hold.

None stands for what is not known: without data there is no clip fraction, without the float weight no SQNR of a
weight. Nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from detent.errors import SpecError

__all__ = ["Histogram", "Layer", "Reproduction", "Size", "Table", "Tensor"]

Status = Literal["integers", "quantized", "float"]
BINS = 64


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of one width.

    Attributes:
        low: where the first bin begins.
        width: of a bin.
        counts: at most 64.
        of: what was counted: "values", or "codes" less their zero point.

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
        name: in the file.
        spec: format and granularity.
        shape: of a weight; () of activations, whose shapes vary.
        elements: how many were looked at.
        minimum, maximum: of the values that were seen; of weights as they are decoded.
        clip_low, clip_high: what the quantizer can hold, where that is the same for all elements; in the units of the
            histogram.
        sqnr_db: of quantizing this tensor alone.
        clip_fraction: the share of elements beyond the range.
        codes_used, codes_available: how many codes occur, of how many that there are.
        code_low, code_high: the smallest and the largest code that occur, less the zero point.
        digest: of codes, scales and zero points, so that two weights can be told apart; "" of activations.
        scales: how many there are.
        histogram: of the values of activations, of the codes of weights.
        note: what else there is to know.

    >>> Tensor("w", "int8/axis0", codes_used=64, codes_available=256).code_usage
    0.25
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
            float, "float" where it was left alone.
        kernel: the operator that computes it in ONNX Runtime on this machine.
        reason: why it was left in float.
        note: what else there is to know.
        weight, input: its quantized tensors.
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
    """A part of the file.

    >>> Size("codes of weights", 1024).nbytes
    1024
    """

    name: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise SpecError(f"the part {self.name!r} has {self.nbytes} bytes, expected at least 0")


@dataclass(frozen=True)
class Table:
    """A table of a user's own, which the summary shows.

    Attributes:
        title: above it.
        columns: its head.
        rows: cells of text; a column of numbers is set flush right.

    >>> Table("Accuracy", ("model", "top 1"), (("float", "98.1 %"), ("w8a8", "98.0 %"))).title
    'Accuracy'
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
        target: what it was made for.
        recipe: its name.
        recipe_toml: all of it.
        data: a hash of the calibration data.
        sha256: of the file.
        command: the command line, where it is known.
        versions: of the packages that made this report.
        machine, level: the processor family, and the CPU level of the kernels.
        origin: "onnx" of files that ``qo.quantize`` wrote, "torch" of those of ``qt.export_onnx``.

    >>> Reproduction(recipe="w8a8").target
    ''
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
