"""``detent inspect``: what a file holds. ONNX models, float or quantized by anyone, and detent's safetensors.

Contents: what ``detent inspect`` found in a file, whatever its kind.

Tensor contents: what a safetensors file of detent holds: a quantized tensor, or other arrays.
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
from detent.cli.exits import check_is_file, guarded, require
from detent.cli.options import AsJson, Quiet
from detent.cli.screen import Screen
from detent.errors import FileFormatError
from detent.metrics import code_usage
from detent.tables import bytes_text
from detent.tensor import QuantizedTensor

__all__ = ["Contents", "Held", "register", "span", "tensor_contents"]

LONG = 200


@dataclass(frozen=True)
class Held:
    """One tensor or quantizer of a file.

    Attributes:
        name: in the file.
        kind: weight, bias, activation, float, ...
        type: its spec or element type.
        shape: None for activations.
        nbytes: in the file.
        low, high: the ends of its values, or of what a quantizer of activations can hold; None where not known.

    >>> Held("w", "weight", "int8", (2, 3), 6, -1.0, 1.0).cells()
    ('w', 'weight', 'int8', '2x3', '6 B', '-1 .. 1')
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    nbytes: int
    low: float | None = None
    high: float | None = None

    def cells(self) -> tuple[str, ...]:
        """A row of a table."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        size = "" if self.shape is None else bytes_text(self.nbytes)
        kind = " ".join(self.type.split("/")[:2])  # the rest would not fit a line
        return self.name, self.kind, kind, shape, size, span(self.low, self.high)


def span(low: float | None, high: float | None) -> str:
    """The ends of a range in a few digits.

    >>> span(-0.123456, 2.0)
    '-0.123 .. 2'
    """
    return "" if low is None or high is None else f"{low:.3g} .. {high:.3g}"


@dataclass(frozen=True)
class Contents:
    """All that was found.

    Attributes:
        facts: what the file says of itself, by label.
        rows: its tensors and quantizers.
        document: the same for machines.

    >>> Contents({"file": "a.onnx"}, ()).show(Screen(), limit=None)
    file: a.onnx
    """

    facts: Mapping[str, str]
    rows: Sequence[Held]
    document: Mapping[str, Any] = field(default_factory=dict)

    def show(self, screen: Screen, limit: int | None) -> None:
        """Print it."""
        for name, text in self.facts.items():
            screen.say(f"{name}: {text if len(text) <= LONG else text[:LONG] + ' ...'}")
        shown = self.rows if limit is None else self.rows[:limit]
        if shown:
            columns = ("tensor", "kind", "type", "shape", "size", "range")
            screen.table(columns, [row.cells() for row in shown], right=(4,))
        if len(shown) < len(self.rows):
            screen.say(f"and {len(self.rows) - len(shown):,} more: give --all")


def tensor_contents(path: str | PathLike[str]) -> Contents:
    """Read a safetensors file.

    Raises:
        FileFormatError: damaged, or with types that detent does not write.

    >>> import detent as dt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dt.quantize(np.zeros(3, np.float32), dt.QuantParams.int8_symmetric()).save(f"{folder}/q.safetensors")
    ...     tensor_contents(f"{folder}/q.safetensors").facts["spec"]
    'int8/tensor/symmetric/onnx'
    """
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
        about = {
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
        document["quantized_tensor"] = about
        facts |= {
            "spec": str(tensor.spec),
            "tensor": f"{'x'.join(map(str, tensor.shape)) or 'scalar'}, {tensor.nbytes:,} bytes for {tensor.dtype}",
            "range": f"{low:.4g} .. {high:.4g}",
            "scales": f"{scale.size:,}, {float(scale.min()):.4g} .. {float(scale.max()):.4g}",
            "codes in use": f"{100 * float(str(about['code_usage'])):.1f} %",
        }
    document["tensors"] = [asdict(row) for row in rows]
    return Contents(facts, rows, document)


def _row(name: str, array: NDArray[Any]) -> Held:
    ends = (float(array.min()), float(array.max())) if array.size else (None, None)
    return Held(name, "array", array.dtype.name, array.shape, array.nbytes, *ends)


HELP = """Say what a file holds: formats, sizes, ranges and quantizers of an ONNX model or of detent's safetensors.

Example: [bold]detent inspect model.w8a8.onnx[/bold]"""
HEADER = 9  # bytes: a length of eight, and the brace that every header of safetensors begins with


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect", help=HELP)(guarded(_inspect))


def _inspect(
    file: Annotated[Path, typer.Argument(help="An ONNX model, or a safetensors file of detent.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="All tensors, and not only the first 40.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    screen = Screen(as_json=as_json, quiet=quiet)
    check_is_file(file)
    if _is_safetensors(file):
        found = tensor_contents(file)
    else:
        require("onnx")
        from detent.cli.model_contents import model_contents  # noqa: PLC0415 - it loads ONNX

        try:
            found = model_contents(file)
        except FileFormatError as error:
            if file.suffix.lower() == ".onnx":
                raise
            raise FileFormatError(f"{error}; inspect reads ONNX models and safetensors files") from error
    found.show(screen, limit=None if everything else 40)
    screen.emit(found.document)


def _is_safetensors(file: Path) -> bool:
    if file.suffix.lower() == ".safetensors":
        return True
    with file.open("rb") as stream:
        return stream.read(HEADER)[HEADER - 1 :] == b"{"
