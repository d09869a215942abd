"""``detent inspect``: show the contents of a file.

This module reads detent's own safetensors files; ``model_contents`` reads ONNX models, ``checkpoint_contents`` reads
checkpoints of language models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from detent import storage
from detent.cli.exits import check_is_file, require
from detent.cli.options import DATA, OUTPUT, AsJson, Quiet, Verbose
from detent.cli.screen import Screen
from detent.errors import FileFormatError
from detent.metrics import code_usage
from detent.tables import bytes_text, counted
from detent.tensor import QuantizedTensor

__all__ = ["EXAMPLE", "HELP", "Contents", "TensorRow", "run", "tensor_contents"]

HELP = """Show a file's tensors and quantizers: formats, sizes and ranges.

It reads ONNX models, checkpoints (directories, safetensors and GGUF files), and files of QuantizedTensor.save."""
EXAMPLE = "detent inspect model.w8a8.onnx"
SAFETENSORS_START_BYTES = 9  # 8 bytes for the length of the header, then the brace that begins every header
MAX_CHARS_SHOWN = 200  # so that a fact takes at most three lines
MAX_ARRAY_BYTES = 1 << 26  # the ranges of larger files are not computed
OWN_DTYPES = frozenset({"uint8", "int8", "int16", "int32", "int64", "float32", "float64"})  # of detent's own files
MAX_ROWS_SHOWN = 40  # rows without --all: about one screen


@dataclass(frozen=True)
class TensorRow:
    """A tensor or quantizer in a file."""

    name: str
    kind: str  # weight, bias, activation, constant or array
    type: str  # spec of a quantized tensor, or element type of another tensor
    shape: tuple[int, ...] | None  # None for activations
    nbytes: int
    low: float | None = None
    high: float | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        size = "" if self.shape is None else bytes_text(self.nbytes)
        kind = " ".join(self.type.split("/")[:2])  # only format and granularity, to fit on a line
        value_range = "" if self.low is None or self.high is None else f"{self.low:.3g} .. {self.high:.3g}"
        return self.name, self.kind, kind, shape, size, value_range


@dataclass(frozen=True)
class Contents:
    """Contents of a file: facts with labels, a row per tensor or quantizer, and the document that --json prints."""

    facts: Mapping[str, str]
    rows: Sequence[TensorRow]
    document: Mapping[str, Any] = field(default_factory=dict)

    def show(self, screen: Screen, limit: int | None) -> None:
        """Print the facts, then at most ``limit`` rows. A limit of None prints all rows."""
        for name, text in self.facts.items():
            screen.say(f"{name}: {text if len(text) <= MAX_CHARS_SHOWN else text[:MAX_CHARS_SHOWN] + ' ...'}")
        shown = self.rows if limit is None else self.rows[:limit]
        if shown:
            columns = ("tensor", "kind", "type", "shape", "size", "range")
            screen.table(columns, [row.cells() for row in shown], right=(4,))
        if len(shown) < len(self.rows):
            screen.say(f"and {counted(len(self.rows) - len(shown), 'more row', ',')}: pass --all to list all rows")


def tensor_contents(path: str | PathLike[str]) -> Contents:
    """Read a safetensors file."""
    arrays, metadata = storage.read(path)
    rows = [_row(name, array) for name, array in arrays.items()]
    facts = {"file": f"{fspath(path)}, {Path(path).stat().st_size:,} bytes, safetensors"}
    document: dict[str, Any] = {
        "file": fspath(path),
        "kind": "safetensors",
        "nbytes": Path(path).stat().st_size,
        "metadata": metadata,
    }
    try:
        tensor = QuantizedTensor.load(path)
    except FileFormatError:
        facts["metadata"] = ", ".join(metadata) or "none"
    else:
        values = tensor.dequantize("float32") if tensor.size else np.zeros(1, np.float32)
        low, high = float(values.min()), float(values.max())
        scale = np.asarray(tensor.params.scale, np.float32)
        summary = {
            "spec": str(tensor.spec),
            "shape": list(tensor.shape),
            "dtype": tensor.dtype.name,
            "nbytes": tensor.nbytes,
            "low": low,
            "high": high,
            "scales": int(scale.size),
            "smallest_scale": float(scale.min()),
            "largest_scale": float(scale.max()),
            "code_usage": code_usage(tensor) if tensor.size else 0.0,
        }
        document["quantized_tensor"] = summary
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        facts |= {
            "spec": str(tensor.spec),
            "tensor": f"{shape} {tensor.dtype}, quantized: {tensor.nbytes:,} bytes",
            "range": f"{low:.4g} .. {high:.4g}",
            "scales": f"{scale.size:,}, {float(scale.min()):.4g} .. {float(scale.max()):.4g}",
            "codes in use": f"{100 * float(str(summary['code_usage'])):.1f} %",
        }
    document["tensors"] = [asdict(row) for row in rows]
    return Contents(facts, rows, document)


def _row(name: str, array: NDArray[Any]) -> TensorRow:
    lo, hi = (float(array.min()), float(array.max())) if array.size else (None, None)
    return TensorRow(name, "array", array.dtype.name, array.shape, array.nbytes, lo, hi)


def run(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="File or directory to read.", show_default=False, rich_help_panel=DATA),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="List all tensors, not only the first 40.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the contents of a file; see ``HELP``."""
    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    if is_checkpoint(file) and not _is_small_safetensors(file):
        from detent.cli.checkpoint_contents import checkpoint_contents  # noqa: PLC0415 - loaded only if needed

        checkpoint = checkpoint_contents(file)
        checkpoint.show(screen, limit=None if everything else MAX_ROWS_SHOWN)
        screen.emit(checkpoint.document)
        return
    check_is_file(file)
    if _is_safetensors(file):
        contents = tensor_contents(file)
    else:
        require("onnx")
        from detent.cli.model_contents import model_contents  # noqa: PLC0415 - it loads ONNX

        try:
            contents = model_contents(file)
        except FileFormatError as error:
            if file.suffix.lower() == ".onnx":
                raise
            raise FileFormatError(f"{error}; inspect reads ONNX models, safetensors and GGUF files") from error
    contents.show(screen, limit=None if everything else MAX_ROWS_SHOWN)
    screen.emit(contents.document)


def is_checkpoint(file: Path) -> bool:
    """Return whether a path is a checkpoint: a directory, a GGUF file, or a safetensors file."""
    from detent.checkpoint_files.gguf_reader import is_gguf  # noqa: PLC0415 - loaded only if needed
    from detent.checkpoint_files.safetensors_files import INDEX  # noqa: PLC0415

    if file.is_dir() or file.name == INDEX:
        return True
    return file.is_file() and (is_gguf(file) or _is_safetensors(file))


def _is_small_safetensors(file: Path) -> bool:
    """Return whether a file can be read as arrays, to show their ranges, as those that detent writes."""
    from detent.checkpoint_files.safetensors_files import open_safetensors  # noqa: PLC0415 - loaded only if needed

    if not file.is_file() or not _is_safetensors(file):
        return False
    source = open_safetensors(file)
    return source.nbytes <= MAX_ARRAY_BYTES and all(tensor.dtype in OWN_DTYPES for tensor in source.values())


def _is_safetensors(file: Path) -> bool:
    if file.suffix.lower() == ".safetensors":
        return True
    with file.open("rb") as stream:
        return stream.read(SAFETENSORS_START_BYTES)[SAFETENSORS_START_BYTES - 1 :] == b"{"
