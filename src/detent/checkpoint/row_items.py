"""Row items: rows of one tensor, from the source's bytes to the bytes of the new file.

An item is a small description that can be pickled. It names the files and rows to read, and the position to write, so a
worker needs nothing else. ``load``, ``encode`` and ``write`` are its three steps.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent import __version__
from detent.block_tensor import ScalePolicy, quantize_blocks
from detent.checkpoint_files.gguf_writer import PlacedTensor
from detent.checkpoint_files.target_model import TargetTensor
from detent.checkpoint_files.tensor_source import ELEMENT_TYPES, SourceTensor, as_elements
from detent.checks import first_nonfinite
from detent.errors import NaNError, ParamsError, RangeError
from detent.gguf import get_block_format
from detent.work_items import Environment

__all__ = ["ItemDone", "RowItem", "encode", "item_environment", "load", "run_item", "write_at"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class RowItem:
    """Rows of a tensor that are quantized and written together.

    Attributes:
        tensor: index of the tensor in the file.
        target: the tensor; computes its rows from the source.
        sources: the source tensors that it needs.
        place: position and type in the new file.
        start: first row, counted over all leading axes.
        stop: row after the last one.
        importance: one weight per column, or None.
        scales: whether scales that float16 cannot represent raise an error.
        partial: path of the file to write to.
    """

    tensor: int
    target: TargetTensor
    sources: Mapping[str, SourceTensor] = field(repr=False)
    place: PlacedTensor
    start: int
    stop: int
    importance: Floats | None = field(repr=False)
    scales: ScalePolicy
    partial: str

    @property
    def offset(self) -> int:
        """The position of the first byte in the new file."""
        return self.place.offset + self.start * self.place.row_bytes

    @property
    def nbytes(self) -> int:
        """The number of bytes in the new file."""
        return (self.stop - self.start) * self.place.row_bytes


class ItemDone(NamedTuple):
    """Result of an item: index of the tensor, rows, checksum of the bytes, and a warning or ""."""

    tensor: int
    start: int
    stop: int
    checksum: int
    warning: str = ""


def load(item: RowItem) -> Floats:
    """Return the rows of an item as float32."""
    return item.target.rows(item.sources, item.start, item.stop)


def encode(item: RowItem, rows: Floats) -> tuple[Bytes, str]:
    """Return the bytes of rows in the type of the tensor, and a warning or "".

    Raises:
        NaNError: NaN in the weights.
        RangeError: infinities in the weights, or values above the range of the type.
        ParamsError: scales that float16 cannot represent, unless the item keeps them.
    """
    dtype = item.place.type.dtype
    if dtype in ELEMENT_TYPES:
        values, at = as_elements(rows, dtype)
        if at is not None:
            raise _not_finite(item, rows, at)
        return values.view(np.uint8).reshape(-1), ""
    form = get_block_format(dtype)
    try:
        return quantize_blocks(rows, form, importance=item.importance, scales="raise").packed, ""
    except (NaNError, RangeError) as error:
        raise _not_finite(item, rows, first_nonfinite(rows)) from error
    except ParamsError as error:
        text = f"tensor {item.place.name}, rows {item.start} to {item.stop - 1}: {error}"
        if item.scales == "raise":
            raise ParamsError(text) from error
        warning = text.partition(": rescale the data")[0]
    return quantize_blocks(rows, form, importance=item.importance, scales="keep").packed, warning


def _not_finite(item: RowItem, rows: Floats, at: tuple[int, ...]) -> NaNError | RangeError:
    """Return an error with the index in the tensor of the first value that is not finite, given its index in rows."""
    flat = (item.start + at[0]) * item.place.shape[-1] + at[1]
    index = tuple(int(i) for i in np.unravel_index(flat, item.place.shape))
    label = f"tensor {item.place.name}, made from {', '.join(item.target.sources[:2])},"
    if np.isnan(rows[at]):
        count = int(np.isnan(rows).sum())
        return NaNError(f"{label} contains NaN at {index}: repair the checkpoint", count, index)
    if np.isfinite(rows[at]):
        return RangeError(f"{label} contains {rows[at]:g} at {index}, which {item.place.type.name} cannot represent")
    return RangeError(f"{label} contains {rows[at]} at {index}: repair the checkpoint")


def write_at(path: str | Path, offset: int, data: Bytes) -> None:
    """Write bytes into an existing file."""
    with Path(path).open("r+b", buffering=0) as file:
        file.seek(offset)
        rest = data.data
        while rest:
            rest = rest[file.write(rest) :]


def run_item(item: RowItem) -> ItemDone:
    """Read, quantize and write the rows of an item; called by workers."""
    data, warning = encode(item, load(item))
    write_at(item.partial, item.offset, data)
    return ItemDone(item.tensor, item.start, item.stop, zlib.crc32(data.data), warning)


def item_environment() -> Environment:
    """Return the version of detent; its bytes are the same on all machines and with all kernels."""
    return Environment((("detent", __version__),))
