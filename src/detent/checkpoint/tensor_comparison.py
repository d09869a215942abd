"""Comparison of two checkpoints, tensor by tensor: types, sizes, and the SQNR of one against the other.

Two checkpoints of one kind are compared by their own names. If one of them is a GGUF file and the other is not, the
other is converted to the names and layout of GGUF files first. So a quantized file can be compared with its source.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checkpoint.conversion import SourceLike
from detent.checkpoint.sources import open as open_checkpoint
from detent.checkpoint_files.architectures import gguf_model
from detent.checkpoint_files.target_model import ExpertRows, TargetTensor
from detent.checkpoint_files.tensor_source import TensorSource
from detent.codec import encode as storable
from detent.metrics import SignalNoise
from detent.tables import bytes_text, counted, html_table, short_name, table_lines

__all__ = ["CheckpointComparison", "TensorComparison", "compare"]

CHUNK_ELEMENTS = 1 << 22
BEYOND_FLOAT32 = ("float64", "int64", "uint64", "int32", "uint32")  # types with values that float32 cannot represent
MAX_SHOWN = 40
MAX_NAMES_SHOWN = 5


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of two checkpoints.

    Attributes:
        name: name of the tensor.
        types: type in the first and the second checkpoint.
        nbytes: bytes in the first and the second checkpoint.
        sqnr_db: SQNR of the second against the first as float32, in dB; infinite if all values are equal, None if it
            was not computed.
        note: why the SQNR was not computed, or "".
    """

    name: str
    types: tuple[str, str]
    nbytes: tuple[int, int]
    sqnr_db: float | None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row."""
        sqnr = self.note if self.sqnr_db is None else "equal" if self.sqnr_db == inf else f"{self.sqnr_db:.1f} dB"
        return short_name(self.name), *self.types, *map(bytes_text, self.nbytes), sqnr


@dataclass(frozen=True)
class CheckpointComparison:
    """Comparison of two checkpoints; ``only`` has the names that only one of them has."""

    paths: tuple[str, str]
    tensors: tuple[TensorComparison, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tensors with the same values."""
        return not any(self.only) and all(tensor.sqnr_db == inf for tensor in self.tensors)

    def _lines(self) -> list[str]:
        sizes = [bytes_text(sum(tensor.nbytes[side] for tensor in self.tensors)) for side in (0, 1)]
        equal = sum(tensor.sqnr_db == inf for tensor in self.tensors)
        count = counted(len(self.tensors), "tensor", ",")
        lines = [f"{count} in both, {sizes[0]} and {sizes[1]}; {equal:,} have equal values"]
        for path, names in zip(self.paths, self.only, strict=True):
            if names:
                more = ", ..." if len(names) > MAX_NAMES_SHOWN else ""
                shown = ", ".join(map(short_name, names[:MAX_NAMES_SHOWN]))
                lines.append(f"only in {path}: {counted(len(names), 'tensor', ',')}: {shown}{more}")
        return lines

    def _rows(self) -> list[Sequence[str]]:
        """Return the table: tensors with the lowest SQNR first."""
        ordered = sorted(self.tensors, key=lambda each: -inf if each.sqnr_db is None else each.sqnr_db)
        rows: list[Sequence[str]] = [("tensor", "type A", "type B", "size A", "size B", "SQNR")]
        return rows + [tensor.cells() for tensor in ordered[:MAX_SHOWN]]

    def __str__(self) -> str:
        more = len(self.tensors) - MAX_SHOWN
        rest = [f"and {counted(more, 'more tensor', ',')} with a higher SQNR"] if more > 0 else []
        return "\n".join([*self._lines(), *table_lines(self._rows(), right=(3, 4, 5)), *rest])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=(3, 4, 5), notes=self._lines())

    def document(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready values."""
        return storable({"is_equal": self.is_equal, **asdict(self)})  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """Return the comparison as JSON text."""
        return json.dumps(self.document(), indent=2, allow_nan=False)


def compare(first: SourceLike, second: SourceLike) -> CheckpointComparison:
    """Compare two checkpoints, tensor by tensor.

    Args:
        first: checkpoint directory, file, or the result of ``qc.open``; the reference of the SQNR.
        second: the checkpoint to compare with it.

    Raises:
        FileFormatError: a damaged checkpoint.
        UnsupportedError: one is a GGUF file, and the architecture of the other is unknown.
    """
    sources = [each if isinstance(each, TensorSource) else open_checkpoint(each) for each in (first, second)]
    is_gguf = any(source.metadata_types for source in sources)
    a, b = (_targets(source, is_gguf=is_gguf) for source in sources)
    tensors = tuple(_compared(a[name], b[name], *sources) for name in a if name in b)
    only = tuple(name for name in a if name not in b), tuple(name for name in b if name not in a)
    return CheckpointComparison((_path(sources[0]), _path(sources[1])), tensors, only)


def _path(source: TensorSource) -> str:
    return "" if source.path is None else str(source.path)


def _targets(source: TensorSource, *, is_gguf: bool) -> Mapping[str, TargetTensor]:
    """Return functions that compute rows, by the names of GGUF files or by the source's own names."""
    if is_gguf:
        return {target.name: target for target in gguf_model(source, vocabulary=False).tensors}
    return {name: _own_target(name, tensor.shape) for name, tensor in source.items()}


def _own_target(name: str, shape: tuple[int, ...]) -> TargetTensor:
    """Return the rows of a tensor of any rank: a number is one row, and axes after the third are part of a row."""
    if len(shape) == 3:
        return TargetTensor(name, shape, (name,), ExpertRows(0, shape[1]))
    return TargetTensor(name, (shape[0], prod(shape[1:])) if len(shape) > 3 else shape or (1,), (name,))


def _compared(a: TargetTensor, b: TargetTensor, first: TensorSource, second: TensorSource) -> TensorComparison:
    types = _type(a, first), _type(b, second)
    nbytes = _nbytes(a, first), _nbytes(b, second)
    shapes = _shape(a, first), _shape(b, second)
    if shapes[0] != shapes[1]:
        return TensorComparison(a.name, types, nbytes, None, f"shapes {shapes[0]} and {shapes[1]}")
    powers, is_equal = SignalNoise(), True
    step = max(1, CHUNK_ELEMENTS // max(a.columns, 1))
    for start in range(0, a.row_count, step):
        stop = min(start + step, a.row_count)
        x, y = _rows(a, first, start, stop), _rows(b, second, start, stop)
        is_equal = is_equal and bool(np.array_equal(x, y, equal_nan=True))
        with np.errstate(all="ignore"):
            powers.add(x, y)
    if is_equal and any(each in BEYOND_FLOAT32 for each in types) and not _same_values(a, b, first, second):
        return TensorComparison(a.name, types, nbytes, None, "different, but equal as float32")
    if not is_equal and not (isfinite(powers.signal) and isfinite(powers.noise)):
        return TensorComparison(a.name, types, nbytes, None, "NaN or infinities")
    return TensorComparison(a.name, types, nbytes, inf if is_equal else powers.sqnr_db)


def _same_values(a: TargetTensor, b: TargetTensor, first: TensorSource, second: TensorSource) -> bool:
    """Whether two tensors have the same values in their own types. Tensors with another layout count as equal."""
    if a.sources != (a.name,) or b.sources != (b.name,):
        return True
    x, y = first[a.name].read(), second[b.name].read()
    return np.array_equal(x, y, equal_nan=x.dtype.kind == y.dtype.kind == "f")


def _rows(target: TargetTensor, source: TensorSource, start: int, stop: int) -> NDArray[np.float32]:
    """Return rows as float32; booleans are 0 and 1."""
    if _type(target, source) != "bool":
        return target.rows(source, start, stop)
    values = source[target.sources[0]].read().astype(np.float32)
    return values.reshape(target.row_count, target.columns)[start:stop]


def _shape(target: TargetTensor, source: TensorSource) -> tuple[int, ...]:
    """Return the shape in the file, if the tensor has its own name; else the shape in GGUF files."""
    return source[target.name].shape if target.sources == (target.name,) else target.shape


def _type(target: TargetTensor, source: TensorSource) -> str:
    return source[target.sources[0]].dtype if target.sources else "computed"


def _nbytes(target: TargetTensor, source: TensorSource) -> int:
    return sum(source[name].nbytes for name in target.sources)
