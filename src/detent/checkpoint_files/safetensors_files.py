"""Safetensors checkpoints: a directory with one or many shards, or a single file.

Headers are checked before anything is mapped, by the same code that reads detent's own files (``detent.storage``): the
offsets of each shard must cover its data without holes, overlaps or trailing bytes. What remains of the format is an
offset per tensor, which ``StoredTensor`` maps.

A directory follows the conventions of Hugging Face: ``model.safetensors.index.json`` assigns tensors to shards; without
it, all ``.safetensors`` files of the directory are read. ``config.json`` describes the architecture.

Float8 tensors have scales in tensors of their own: ``<name>_scale_inv`` (one per block of rows and columns) or
``<name>_scale`` (one per tensor or per row). Both are factors of the values. They become part of the float8 tensor, and
are not names of the source. Scales of activations (``input_scale``) are left out.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from detent.checkpoint_files.tensor_source import StoredTensor, TensorSource
from detent.checkpoint_files.text_files import read_text
from detent.checks import are_sizes
from detent.codec import MAX_CHARS_SHOWN, parse
from detent.errors import FileFormatError
from detent.storage import LENGTH_BYTES, header_length, read_header

__all__ = ["open_safetensors", "read_config"]

INDEX, CONFIG, SINGLE = "model.safetensors.index.json", "config.json", "model.safetensors"
CONFIG_LIMIT = 1 << 22  # bytes of config.json
INDEX_LIMIT = 1 << 26  # bytes of an index
DEFAULT_SCALE_BLOCK = (128, 128)
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
    }
)


def open_safetensors(path: Path) -> TensorSource:
    """Open a directory of safetensors files, or one file; read only headers and config.

    Raises:
        FileFormatError: a damaged file, a missing shard, or a tensor that occurs twice.
    """
    directory = path if path.is_dir() else path.parent
    config = read_config(directory)
    shards, index = _shards(path)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        shard_tensors, shard_metadata = _read_shard(shard)
        for name in shard_tensors.keys() & tensors.keys():
            raise FileFormatError(
                f"tensor {name[:MAX_CHARS_SHOWN]!r} is in {tensors[name].path.name} and in {shard.name}, expected it "
                "in one shard: remove the shard that does not belong to the checkpoint"
            )
        tensors |= shard_tensors
        metadata |= shard_metadata
    _check_index(index, tensors, path)
    facts = [[t.name, t.dtype, t.shape, t.path.name, t.offset] for t in tensors.values()]
    digest = hashlib.sha256(json.dumps([facts, config]).encode()).hexdigest()
    scaled = _with_scales(tensors, config or {})
    return TensorSource(scaled, path=directory, files=tuple(shards), metadata=metadata, config=config, digest=digest)


def read_config(directory: Path) -> dict[str, Any] | None:
    """Return the content of ``config.json``, or None if there is no such file."""
    path = directory / CONFIG
    return _read_json(path, CONFIG_LIMIT) if path.is_file() else None


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    return parse(read_text(path, limit), str(path), limit=limit)


def _shards(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Return the files with tensors, and the file name of each tensor that an index lists."""
    if path.is_file() and path.name != INDEX:
        return [path], {}
    directory = path if path.is_dir() else path.parent
    if (directory / INDEX).is_file():
        return _indexed(directory)
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileFormatError(f"{directory} has no .safetensors files: expected {SINGLE}, or shards with {INDEX}")
    return files, {}


def _indexed(directory: Path) -> tuple[list[Path], Mapping[str, str]]:
    path = directory / INDEX
    index = _read_json(path, INDEX_LIMIT).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise FileFormatError(f"{path} has no valid weight_map, expected an object of file names by tensor name")
    files = []
    for name in sorted(set(index.values())):
        shown = name[:MAX_CHARS_SHOWN]
        if Path(name).name != name or name in {"", ".", ".."} or "\\" in name or "\0" in name:
            raise FileFormatError(f"{path} names the file {shown!r}, expected a name without a directory")
        if not (directory / name).is_file():
            raise FileFormatError(f"{path} names the file {shown!r}, which does not exist: download the missing shard")
        files.append(directory / name)
    return files, index


def _check_index(index: Mapping[str, str], tensors: Mapping[str, StoredTensor], path: Path) -> None:
    for name, file in index.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.path.name != file:
            where = "is in no shard" if tensor is None else f"is in {tensor.path.name}"
            raise FileFormatError(
                f"{path}: the index says that tensor {name[:MAX_CHARS_SHOWN]!r} is in {file[:MAX_CHARS_SHOWN]}, but it "
                f"{where}: the shards and the index belong to different checkpoints"
            )


def _read_shard(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(file.read(LENGTH_BYTES), size)
            text = file.read(length)
        entries, metadata = read_header(text, size - LENGTH_BYTES - length, DTYPES)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from error
    start = LENGTH_BYTES + length
    tensors = {
        name: StoredTensor(
            name,
            entry.shape,
            DTYPES[entry.dtype],
            path.absolute(),
            start + entry.begin,
            entry.end - entry.begin,
            file_size=size,
        )
        for name, entry in entries.items()
    }
    return tensors, metadata


def _with_scales(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Attach scales to their float8 tensors, and leave the tensors of scales out."""
    used: set[str] = set()
    result = dict(tensors)
    for name, tensor in tensors.items():
        if not tensor.dtype.startswith("float8"):
            continue
        used.add(f"{name.removesuffix('weight')}input_scale")
        for suffix in ("_scale_inv", "_scale"):
            scale = tensors.get(name + suffix)
            if scale is not None:
                result[name] = _scaled(tensor, scale, config)
                used.add(name + suffix)
                break
    return {name: tensor for name, tensor in result.items() if name not in used}


def _scaled(tensor: StoredTensor, scale: StoredTensor, config: Mapping[str, Any]) -> StoredTensor:
    rank = len(tensor.shape)
    if scale.shape in {(), (1,)}:
        return replace(tensor, scale=scale)
    if len(scale.shape) < rank and scale.shape == tensor.shape[: len(scale.shape)]:  # one per row
        shape = (*scale.shape, *(1,) * (rank - len(scale.shape)))
        scale = replace(scale, shape=shape)
    if len(scale.shape) == rank and all(
        count in {1, size} for count, size in zip(scale.shape, tensor.shape, strict=True)
    ):
        block = tuple(1 if count == size else size for count, size in zip(scale.shape, tensor.shape, strict=True))
        return replace(tensor, scale=scale, scale_block=block)
    block = _scale_block(config, rank)
    counts = tuple(-(-size // step) for size, step in zip(tensor.shape, block, strict=True))
    if scale.shape != counts:
        raise FileFormatError(
            f"tensor {scale.name[:MAX_CHARS_SHOWN]!r} has shape {scale.shape}, expected {counts}: one scale per block "
            f"of {block} elements of {tensor.shape}"
        )
    return replace(tensor, scale=scale, scale_block=block)


def _scale_block(config: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    quantization = config.get("quantization_config")
    given = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if given is None:
        given = list(DEFAULT_SCALE_BLOCK)
    if not are_sizes(given) or len(given) > rank or not all(given):
        raise FileFormatError(f"config.json has weight_block_size {given!r}, expected two sizes such as [128, 128]")
    return (*(1,) * (rank - len(given)), *given)
