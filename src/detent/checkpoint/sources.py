"""Checkpoints of any supported format, opened by one function."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from detent.checkpoint_files.gguf_reader import is_gguf, open_gguf
from detent.checkpoint_files.safetensors_files import INDEX, open_safetensors
from detent.checkpoint_files.tensor_source import TensorSource
from detent.errors import DtypeError, FileFormatError

__all__ = ["files_digest", "open"]


def open(path: str | os.PathLike[str]) -> TensorSource:  # noqa: A001 - called as qc.open
    """Open a checkpoint: a lazy mapping of names to tensors.

    Args:
        path: directory with safetensors files (one or many shards) and config.json, a single safetensors file, or a
            GGUF file. Of a GGUF file that is split, pass any part.

    Returns:
        The tensors by name. ``tensor.read(start, stop)`` returns rows as stored, ``tensor.dequantize(start, stop)`` as
        float32; only then data are read, from a memory-mapped file.

    Raises:
        FileFormatError: there is no such checkpoint, or it is damaged.
        DtypeError: the argument is not a path.

    >>> import numpy as np, tempfile, pathlib
    >>> from detent import storage
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> storage.write_atomic(directory / "model.safetensors", storage.dumps({"w": np.ones((2, 3), np.float32)}, {}))
    >>> open(directory)["w"].dequantize(0, 1)
    array([[1., 1., 1.]], dtype=float32)
    """
    if not isinstance(path, str | os.PathLike):
        raise DtypeError(f"got {type(path).__name__}, expected the path of a checkpoint: a directory or a file")
    location = Path(path)
    if location.is_dir():
        return _open_directory(location)
    if not location.is_file():
        raise FileFormatError(f"{location}: there is no such file or directory")
    if is_gguf(location):
        return open_gguf(location)
    if location.suffix == ".safetensors" or location.name == INDEX:
        return open_safetensors(location)
    raise FileFormatError(
        f"{location} is not a checkpoint: expected a directory with safetensors files, a .safetensors file, or a GGUF "
        "file"
    )


def _open_directory(directory: Path) -> TensorSource:
    files = sorted(directory.glob("*.gguf"))
    if files and not any(directory.glob("*.safetensors")):
        models = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
        if len(models) != 1:
            raise FileFormatError(f"{directory} has {len(models)} GGUF models: pass the path of one of them")
        return open_gguf(models[0])
    return open_safetensors(directory)


def files_digest(files: Iterable[Path]) -> str:
    """Return a digest of names, sizes and times of change, which identifies files without reading them."""
    facts = []
    for path in files:
        status = path.stat()
        facts.append([path.name, status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
