"""Contents of a checkpoint for ``detent inspect``: facts, and one row per tensor."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import detent.checkpoint as qc
from detent.checkpoint_files.tensor_source import TensorSource
from detent.cli.screen import Screen
from detent.tables import bytes_text, counted

__all__ = ["CheckpointContents", "checkpoint_contents"]

MAX_METADATA_SHOWN = 24  # entries; --json has all of them, except long arrays
MAX_CHARS_SHOWN = 100
MAX_VALUES_SHOWN = 16  # of an array


@dataclass(frozen=True)
class CheckpointContents:
    """Tensors and metadata of a checkpoint."""

    source: TensorSource

    def show(self, screen: Screen, limit: int | None) -> None:
        """Print the facts, then at most ``limit`` tensors. A limit of None prints all tensors."""
        source = self.source
        elements = sum(prod(tensor.shape) for tensor in source.values())
        bits = 8 * source.nbytes / max(elements, 1)
        types = Counter(tensor.dtype for tensor in source.values())
        screen.say(f"checkpoint: {source.path}, {counted(len(source.files), 'file')}, {bytes_text(source.nbytes)}")
        screen.say(f"tensors: {len(source):,}, {elements:,} weights, {bits:.2f} bits per weight")
        screen.say(f"types: {', '.join(f'{count:,} {name}' for name, count in types.most_common())}")
        for key, value in list(self._metadata().items())[:MAX_METADATA_SHOWN]:
            text = str(value)
            screen.say(f"{key}: {text if len(text) <= MAX_CHARS_SHOWN else text[:MAX_CHARS_SHOWN] + ' ...'}")
        names = list(source) if limit is None else list(source)[:limit]
        columns = ("tensor", "type", "shape", "bits per weight", "size")
        screen.table(columns, [self._cells(name) for name in names], right=(3, 4))
        if len(names) < len(source):
            screen.say(f"and {counted(len(source) - len(names), 'more tensor', ',')}: pass --all to list all tensors")

    def _cells(self, name: str) -> tuple[str, ...]:
        tensor = self.source[name]
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        return name, tensor.dtype, shape, f"{self._bits(name):.3g}", bytes_text(tensor.nbytes)

    def _bits(self, name: str) -> float:
        tensor = self.source[name]
        return 8 * tensor.nbytes / max(prod(tensor.shape), 1)

    def _metadata(self) -> dict[str, Any]:
        """Return metadata, and the first-level values of config.json; long arrays as their length."""
        values = dict(self.source.metadata)
        values |= {f"config.{key}": value for key, value in (self.source.config or {}).items()}
        return {key: _short(value) for key, value in values.items()}

    @property
    def document(self) -> dict[str, Any]:
        """The contents as JSON-ready values."""
        return {
            "file": str(self.source.path),
            "kind": "gguf" if self.source.metadata_types else "safetensors",
            "files": [str(path) for path in self.source.files],
            "nbytes": self.source.nbytes,
            "metadata": self._metadata(),
            "tensors": [
                {
                    "name": name,
                    "type": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bits_per_weight": round(self._bits(name), 4),
                    "nbytes": tensor.nbytes,
                }
                for name, tensor in self.source.items()
            ],
        }


def _short(value: Any) -> Any:  # noqa: ANN401 - any metadata
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list) and len(value) > MAX_VALUES_SHOWN:
        return f"{len(value):,} values"
    return value


def checkpoint_contents(path: Path) -> CheckpointContents:
    """Open a checkpoint; only headers are read."""
    return CheckpointContents(qc.open(path))
