"""GgufModel and TargetTensor: what a GGUF file of a model contains, before types and bytes are chosen.

A target tensor names its source tensors and a layout. The layout is plain data that says which source row becomes which
target row, so a tensor is computed in parts: ``rows`` reads no more than the rows that it returns, plus at most two
attention heads where heads are reordered. Values are float32; bfloat16 and float16 convert exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from detent.checkpoint_files.tensor_source import ELEMENT_TYPES, SourceTensor, float_rows
from detent.errors import FileFormatError, ShapeError

__all__ = [
    "Constant",
    "ExpertRows",
    "Experts",
    "GgufModel",
    "HeadPairs",
    "Layout",
    "MetadataEntry",
    "SourceRows",
    "TargetTensor",
    "Transposed",
]

Floats: TypeAlias = NDArray[np.float32]
TRANSPOSE_BYTES = 1 << 24  # of the source that are read at a time to transpose rows


class MetadataEntry(NamedTuple):
    """A metadata entry of a GGUF file.

    Attributes:
        key: name, such as "llama.block_count".
        type: type of the value: "uint32", "float32", "string", ..., or "array:string" for an array of strings.
        value: the value; a sequence for arrays.
    """

    key: str
    type: str
    value: Any


@dataclass(frozen=True)
class SourceRows:
    """Target row i is source row ``first`` + i."""

    first: int = 0

    def rows(self, tensors: tuple[SourceTensor, ...], columns: int, start: int, stop: int) -> Floats:
        """Return target rows."""
        (tensor,) = tensors
        if len(tensor.shape) == 1:
            return tensor.dequantize().reshape(1, columns)[start:stop]
        return tensor.dequantize(self.first + start, self.first + stop).reshape(stop - start, columns)


@dataclass(frozen=True)
class HeadPairs:
    """Rows of each attention head, reordered from halves to pairs: 0, d/2, 1, d/2 + 1, ...

    llama.cpp rotates neighboring rows of the query and key weights of some architectures; transformers rotates row i
    with row i + d/2. A bias is one row whose elements are reordered.
    """

    heads: int

    def rows(self, tensors: tuple[SourceTensor, ...], columns: int, start: int, stop: int) -> Floats:
        """Return target rows."""
        (tensor,) = tensors
        if len(tensor.shape) == 1:
            values = tensor.dequantize()
            return values[self._source_index(np.arange(columns), columns)].reshape(1, columns)[start:stop]
        index = self._source_index(np.arange(start, stop), tensor.shape[0])
        if not index.size:
            return np.empty((0, columns), np.float32)
        low = int(index.min())
        return tensor.dequantize(low, int(index.max()) + 1)[index - low]

    def _source_index(self, targets: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        head = size // self.heads
        within = targets % head
        return targets - within + within % 2 * (head // 2) + within // 2


@dataclass(frozen=True)
class Experts:
    """Matrices of all experts, one source tensor each, stacked to (experts, rows, columns)."""

    def rows(self, tensors: tuple[SourceTensor, ...], columns: int, start: int, stop: int) -> Floats:
        """Return target rows, counted over all experts."""
        out = np.empty((stop - start, columns), np.float32)
        per_expert = tensors[0].shape[0]
        for expert, low, high in _expert_parts(per_expert, start, stop):
            begin = expert * per_expert + low - start
            out[begin : begin + high - low] = tensors[expert].dequantize(low, high)
        return out


@dataclass(frozen=True)
class ExpertRows:
    """Rows ``first`` to ``first`` + ``count`` of every expert, from one source tensor (experts, rows, columns)."""

    first: int
    count: int

    def rows(self, tensors: tuple[SourceTensor, ...], columns: int, start: int, stop: int) -> Floats:
        """Return target rows, counted over all experts."""
        (tensor,) = tensors
        out = np.empty((stop - start, columns), np.float32)
        for expert, low, high in _expert_parts(self.count, start, stop):
            begin = expert * self.count + low - start
            out[begin : begin + high - low] = _matrix_rows(tensor, expert, self.first + low, self.first + high)
        return out


@dataclass(frozen=True)
class Transposed:
    """Target row i is source column i."""

    def rows(self, tensors: tuple[SourceTensor, ...], columns: int, start: int, stop: int) -> Floats:
        """Return target rows; the source is read in parts."""
        (tensor,) = tensors
        out = np.empty((stop - start, columns), np.float32)
        step = max(1, TRANSPOSE_BYTES // (4 * tensor.shape[1]))
        for low in range(0, columns, step):
            high = min(low + step, columns)
            out[:, low:high] = tensor.dequantize(low, high)[:, start:stop].T
        return out


@dataclass(frozen=True)
class Constant:
    """One row of values that are computed from the configuration, without a source tensor."""

    values: tuple[float, ...]

    def rows(self, tensors: tuple[SourceTensor, ...], columns: int, start: int, stop: int) -> Floats:  # noqa: ARG002
        """Return target rows."""
        return np.array(self.values, np.float32).reshape(1, columns)[start:stop]


Layout: TypeAlias = SourceRows | HeadPairs | Experts | ExpertRows | Transposed | Constant


@dataclass(frozen=True)
class TargetTensor:
    """A tensor of a GGUF file and the source tensors that it is computed from.

    Attributes:
        name: name in the GGUF file, such as "blk.0.attn_q.weight".
        shape: shape in the order of NumPy; the last axis is a row.
        sources: names of the source tensors; several for stacked experts, none for constants.
        layout: which source rows become which target rows.
        offset: number that is added to every value.

    >>> from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource
    >>> source = TensorSource([ArrayTensor("w", np.arange(8, dtype=np.float32).reshape(4, 2))])
    >>> tensor = TargetTensor("blk.0.attn_q.weight", (4, 2), ("w",), HeadPairs(1))
    >>> tensor.rows(source, 1, 3).tolist(), tensor.row_count
    ([[4.0, 5.0], [2.0, 3.0]], 4)
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    layout: Layout = field(default_factory=SourceRows)
    offset: float = 0.0

    @property
    def columns(self) -> int:
        """The number of elements in a row."""
        return self.shape[-1]

    @property
    def row_count(self) -> int:
        """The number of rows, over all leading axes; 1 for a tensor with one axis."""
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def rows(self, source: Mapping[str, SourceTensor], start: int = 0, stop: int | None = None) -> Floats:
        """Return rows of the tensor as float32, shape (rows, columns).

        Raises:
            ShapeError: the range exceeds the rows of the tensor.
        """
        stop = self.row_count if stop is None else stop
        if not 0 <= start <= stop <= self.row_count:
            raise ShapeError(f"got rows {start} to {stop} of {self.name}, expected a range within its {self.row_count}")
        tensors = tuple(source[name] for name in self.sources)
        values = self.layout.rows(tensors, self.columns, start, stop)
        return values + np.float32(self.offset) if self.offset else values


@dataclass(frozen=True)
class GgufModel:
    """Content of a GGUF file, before types are chosen.

    Attributes:
        architecture: name of the architecture in GGUF files, such as "llama".
        metadata: all entries, except file type and quantization version, which depend on the types.
        tensors: all tensors, in the order of llama.cpp: tensors outside of blocks, then block by block, by name.
    """

    architecture: str
    metadata: tuple[MetadataEntry, ...]
    tensors: tuple[TargetTensor, ...]

    def value(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - metadata have different types
        """Return the value of a metadata entry; ``{arch}`` in the key stands for the architecture."""
        name = key.replace("{arch}", self.architecture)
        return next((entry.value for entry in self.metadata if entry.key == name), default)

    @property
    def block_count(self) -> int:
        """The number of transformer blocks."""
        return _first(self.value("{arch}.block_count", 0))

    @property
    def expert_count(self) -> int:
        """The number of experts, 0 for models without experts."""
        return _first(self.value("{arch}.expert_count", 0))

    @property
    def heads(self) -> tuple[int, int]:
        """The number of attention heads, and of heads for keys and values, of the first block."""
        heads = _first(self.value("{arch}.attention.head_count", 0))
        return heads, _first(self.value("{arch}.attention.head_count_kv", heads))


def _first(value: Any) -> int:  # noqa: ANN401 - a number, or one per block
    flat = np.ravel(value)
    if not flat.size or flat.dtype.kind not in "iu":
        raise FileFormatError(f"the metadata have {value!r:.60} as a number of blocks, experts or heads")
    return int(flat[0])


def _expert_parts(per_expert: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Divide a range of rows at the boundaries of experts: expert, first row, end row."""
    parts = []
    while start < stop:
        expert, low = divmod(start, per_expert)
        high = min(per_expert, low + stop - start)
        parts.append((expert, low, high))
        start += high - low
    return parts


def _matrix_rows(tensor: SourceTensor, expert: int, start: int, stop: int) -> Floats:
    """Return rows of one matrix of a tensor with three axes; convert only these rows if elements are plain."""
    if tensor.dtype in ELEMENT_TYPES and getattr(tensor, "scale", None) is None:
        return float_rows(tensor.name, tensor.read(expert, expert + 1)[0, start:stop])
    return tensor.dequantize(expert, expert + 1)[0, start:stop]
