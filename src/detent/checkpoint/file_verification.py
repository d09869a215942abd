"""Verification of a GGUF file: every tensor is derived again from the source, and compared byte by byte.

A file of ``qc.quantize`` records what it was made with, so its header is derived again, too: all metadata, types and
positions must match. Of a file that another tool wrote, the types are taken from the file, and its metadata are not
compared.
"""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checkpoint.conversion import (
    CONVERSION_KEY,
    Conversion,
    ImportanceLike,
    SourceLike,
    decide_conversion,
    recorded_conversion,
)
from detent.checkpoint.row_items import RowItem, encode, load
from detent.checkpoint_files.gguf_reader import GgufFile, MetadataEntry, part_count, read_gguf
from detent.checkpoint_files.gguf_types import tensor_types
from detent.checkpoint_files.gguf_writer import entry_bytes
from detent.checkpoint_files.tensor_source import ELEMENT_TYPES, StoredTensor
from detent.codec import encode as storable
from detent.errors import DetentError, DtypeError, FileFormatError, SpecError, UnsupportedError
from detent.gguf import find_block_format
from detent.kernels import decode_blocks
from detent.metrics import SignalNoise
from detent.recipe import Recipe
from detent.tables import counted, short_name

__all__ = ["CheckpointVerification", "TensorVerification", "verify"]

CHUNK_ELEMENTS = 1 << 22
MAX_SHOWN = 8
GENERIC_MIXTURE = "gguf:Q8_0"  # for files of other tools, whose types replace those of the mixture
RECORDED_KEYS = frozenset({"version", "to", "importance", "recipe", "pre_tokenizer", "vocabulary", "scales"})


@dataclass(frozen=True)
class TensorVerification:
    """Comparison of a tensor: its type, the bytes that differ, and the SQNR of the file's values."""

    name: str
    type: str
    nbytes: int
    differing_bytes: int
    sqnr_db: float


@dataclass(frozen=True)
class CheckpointVerification:
    """Result of a verification.

    Attributes:
        file: the file.
        tensors: one entry per tensor that was compared.
        differences: mismatches of metadata, types, shapes and positions.
        first_difference: first byte that differs: tensor, index of its block, expected and actual value; or "".
        notes: differences that do not fail the verification.
    """

    file: str
    tensors: tuple[TensorVerification, ...]
    differences: tuple[str, ...] = ()
    first_difference: str = ""
    notes: tuple[str, ...] = ()

    @property
    def compared_bytes(self) -> int:
        """The number of bytes of tensors that were compared."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def differing_bytes(self) -> int:
        """The number of bytes of tensors that differ."""
        return sum(tensor.differing_bytes for tensor in self.tensors)

    @property
    def ok(self) -> bool:
        """Whether the file is what its source gives."""
        return not self.failure

    @property
    def failure(self) -> str:
        """The first mismatch, or ""."""
        return next(iter(self.differences), self.first_difference)

    @property
    def sqnr_db(self) -> dict[str, float]:
        """The SQNR of the file's values by tensor name, in dB; infinite for tensors that were copied."""
        return {tensor.name: tensor.sqnr_db for tensor in self.tensors}

    def __bool__(self) -> bool:
        raise DtypeError("a verification is neither true nor false: use .ok")

    def __str__(self) -> str:
        lines = ["ok: every tensor matches its source" if self.ok else f"not ok: {self.failure}"]
        lines.append(f"bytes that differ: {self.differing_bytes:,} of {self.compared_bytes:,}")
        quantized = [tensor for tensor in self.tensors if tensor.sqnr_db != inf]
        if quantized:
            worst = min(quantized, key=lambda tensor: tensor.sqnr_db)
            lines.append(
                f"SQNR of {counted(len(quantized), 'quantized tensor', ',')}: lowest {worst.sqnr_db:.1f} dB "
                f"({short_name(worst.name)}, {worst.type})"
            )
        others = [text for text in (*self.differences, self.first_difference) if text and text != self.failure]
        return "\n".join([*lines, *others[:MAX_SHOWN], *self.notes[:MAX_SHOWN]])

    def document(self) -> dict[str, Any]:
        """Return the result as JSON-ready values."""
        totals = {"ok": self.ok, "failure": self.failure}
        totals |= {"compared_bytes": self.compared_bytes, "differing_bytes": self.differing_bytes}
        return storable({**totals, **asdict(self)})  # type: ignore[no-any-return]  # a dict gives a dict

    def to_json(self) -> str:
        """Return the result as JSON text."""
        return json.dumps(self.document(), indent=2, allow_nan=False)


def verify(
    source: SourceLike,
    path: str | os.PathLike[str],
    *,
    importance: ImportanceLike | None = None,
) -> CheckpointVerification:
    """Derive every tensor of a GGUF file from its source, and compare all bytes.

    Args:
        source: checkpoint directory, file, or the result of ``qc.open``.
        path: the GGUF file.
        importance: the importance matrix that the file was made with.

    Raises:
        FileFormatError: a damaged file or source.
        SpecError: the file was made with an importance matrix, and none is passed.
        UnsupportedError: the file is a part of a split file, or the architecture of the source is unknown.
    """
    file = read_gguf(Path(path))
    if part_count(file) > 1:
        raise UnsupportedError(
            f"{os.fspath(path)} is a part of a split file: merge the parts with llama-gguf-split first"
        )
    recorded = recorded_conversion(file.metadata)
    if recorded is None:
        types = {tensor.name: _type_name(tensor) for tensor in file.tensors}
        conversion = decide_conversion(
            source, GENERIC_MIXTURE, importance=importance, vocabulary=False, scales="keep", types=types
        )
        notes = [f"{CONVERSION_KEY} is missing: another tool wrote the file, so its types are taken as given"]
    else:
        conversion = _recorded(source, recorded, importance)
        notes = []
    differences = list(_layout_differences(file, conversion))
    if recorded is not None:
        for text in _header_differences(file, conversion):
            # The name is that of the source's directory, which may have been renamed.
            (notes if text.startswith("metadata general.name ") else differences).append(text)
    tensors, first = _compare(file, conversion)
    return CheckpointVerification(os.fspath(path), tensors, tuple(differences), first, tuple(notes))


def _type_name(tensor: StoredTensor) -> str:
    return next(kind.name for kind in tensor_types().values() if kind.dtype == tensor.dtype)


def _recorded(source: SourceLike, recorded: dict[str, Any], importance: ImportanceLike | None) -> Conversion:
    """Decide again as the file records."""
    if set(recorded) != RECORDED_KEYS or recorded["version"] != 1:
        raise FileFormatError(f"{CONVERSION_KEY} has unexpected keys or another version: update detent")
    if recorded["importance"] and importance is None:
        raise SpecError(
            f"the file was made with an importance matrix (SHA-256 {str(recorded['importance'])[:12]}...): pass the "
            "same matrix as importance= or --importance"
        )
    recipe = recorded["recipe"]
    try:
        rules = None if recipe is None else Recipe.from_json(json.dumps(recipe))
        conversion = decide_conversion(
            source,
            recorded["to"],
            importance=importance if recorded["importance"] else None,
            recipe=rules,
            pre_tokenizer=recorded["pre_tokenizer"],
            vocabulary=recorded["vocabulary"],
            scales=recorded["scales"],
        )
    except DetentError as error:
        raise type(error)(f"deriving the file again failed: {error}") from error
    return conversion


def _layout_differences(file: GgufFile, conversion: Conversion) -> Iterator[str]:
    """Compare names, shapes and types."""
    stored = {tensor.name: tensor for tensor in file.tensors}
    expected = {tensor.name: tensor.place for tensor in conversion.tensors}
    for name in expected.keys() - stored.keys():
        yield f"tensor {name} is missing"
    for name in stored.keys() - expected.keys():
        yield f"tensor {name} is not in the source"
    for name, place in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            continue
        if tensor.shape != place.shape:
            yield f"tensor {name} has shape {tensor.shape}, expected {place.shape}"
        elif tensor.dtype != place.type.dtype:
            yield f"tensor {name} has type {_type_name(tensor)}, expected {place.type.name}"


def _header_differences(file: GgufFile, conversion: Conversion) -> Iterator[str]:
    """Compare the header and the padding of a file that detent has written."""
    layout, size = conversion.layout, file.path.stat().st_size
    if size != layout.nbytes:
        yield f"the file has {size} bytes, expected {layout.nbytes}"
        return
    data = np.memmap(file.path, np.uint8, "r")
    header = data[: len(layout.header)].tobytes()
    if header != layout.header:
        yield from _metadata_differences(file, conversion.entries)
        return
    for tensor, following in zip(layout.tensors, (*(each.offset for each in layout.tensors[1:]), size), strict=True):
        if data[tensor.offset + tensor.nbytes : following].any():
            yield f"the padding after tensor {tensor.name} is not zero"


def _metadata_differences(file: GgufFile, entries: Iterable[MetadataEntry]) -> Iterator[str]:
    """Name the metadata that differ."""
    expected, actual = ({entry[0]: entry for entry in group} for group in (entries, file.entries))
    is_same = True
    for key in [*expected, *(key for key in actual if key not in expected)]:
        if key not in actual or key not in expected or entry_bytes(actual[key]) != entry_bytes(expected[key]):
            is_same = False
            yield f"metadata {key} is {_shown(actual.get(key))}, expected {_shown(expected.get(key))}"
    if is_same:
        yield "the header differs: metadata or tensors are in another order, or at other positions"


def _shown(entry: MetadataEntry | None) -> str:
    if entry is None:
        return "missing"
    _, kind, value = entry
    text = f"an {kind} of {len(value)} values" if kind.startswith("array:") else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _compare(file: GgufFile, conversion: Conversion) -> tuple[tuple[TensorVerification, ...], str]:
    """Compare the bytes of all tensors that have the expected shape and type."""
    stored = {tensor.name: tensor for tensor in file.tensors}
    items = [
        item
        for item in conversion.items(file.path, CHUNK_ELEMENTS)
        if (tensor := stored.get(item.place.name)) is not None
        and (tensor.shape, tensor.dtype) == (item.place.shape, item.place.type.dtype)
    ]
    powers: dict[str, SignalNoise] = {}
    differing: dict[str, int] = {}
    first = ""
    with ThreadPoolExecutor(1, "detent-read") as reader:
        ahead = [reader.submit(load, items[0])] if items else []
        for number, item in enumerate(items):
            rows = ahead.pop().result()
            if number + 1 < len(items):
                ahead.append(reader.submit(load, items[number + 1]))
            name = item.place.name
            expected, _ = encode(item, rows)
            actual = _stored_bytes(stored[name], item)
            differs = expected != actual
            count = int(np.count_nonzero(differs))
            if count and not first:
                first = _first_difference(item, expected, actual, int(differs.argmax()))
            differing[name] = differing.get(name, 0) + count
            powers.setdefault(name, SignalNoise()).add(rows, _decoded(item, actual).reshape(rows.shape))
    return tuple(
        TensorVerification(name, _type_name(stored[name]), stored[name].nbytes, count, powers[name].sqnr_db)
        for name, count in differing.items()
    ), first


def _stored_bytes(tensor: StoredTensor, item: RowItem) -> NDArray[np.uint8]:
    rows = StoredTensor(tensor.name, (tensor.nbytes,), "uint8", tensor.path, tensor.offset, tensor.nbytes)
    begin = item.start * item.place.row_bytes
    return rows.read(begin, begin + item.nbytes)


def _decoded(item: RowItem, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    dtype = item.place.type.dtype
    if dtype in ELEMENT_TYPES:
        return data.view(ELEMENT_TYPES[dtype]).astype(np.float32)
    form = find_block_format(dtype)
    if form is None:
        raise FileFormatError(f"tensor {item.place.name} has type {item.place.type.name}, which cannot be decoded")
    values = np.empty((data.size // form.block_bytes, form.block_size), np.float32)
    decode_blocks(form, np.ascontiguousarray(data).reshape(-1, form.block_bytes), values)
    return values


def _first_difference(item: RowItem, expected: NDArray[np.uint8], actual: NDArray[np.uint8], at: int) -> str:
    row, byte = divmod(at, item.place.row_bytes)
    element = byte // item.place.type.block_bytes * item.place.type.block_size
    index = np.unravel_index((item.start + row) * item.place.shape[-1] + element, item.place.shape)
    place = ", ".join(str(int(i)) for i in index)
    return (
        f"tensor {item.place.name} differs in the block at [{place}], byte {byte % item.place.type.block_bytes}: "
        f"{int(actual[at]):#04x}, expected {int(expected[at]):#04x}"
    )
