"""Files of data: where they are, which options say how to read them, and the batches that they become.

``DataFiles`` is what a user passes as ``data``. ``list_files`` finds the files of one kind in a directory.
``FileBatches`` is the result of opening them; the modules ``array_data``, ``image_data``, ``sound_data`` and
``text_data`` make it, one module per kind of file.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import numpy as np

from detent.checks import as_integer
from detent.errors import DtypeError, ShapeError, SpecError
from detent.onnx_model.model_inputs import Array, Feed, InputInfo
from detent.onnx_model.preprocess_options import Preprocessing

__all__ = [
    "DataFiles",
    "DataListing",
    "FileBatches",
    "batch_size_of",
    "cut",
    "labels_of",
    "left_out",
    "list_files",
    "only_input",
]


@dataclass(frozen=True)
class DataFiles:
    """A file or directory of data, and how to read it; ``data`` of ``qo.quantize`` and others may be such a value.

    Attributes:
        path: an .npz, .npy, .txt, image or .wav file, or a directory of such files.
        batch_size: samples per batch; None uses the model's fixed batch size, or 1. A directory of .npz files has one
            batch per file.
        preprocess: how images, sounds and texts become inputs; a ``Preprocessing``, or its text.
        tokenizer: path of the tokenizer.json for a .txt file.

    Raises:
        SpecError, DtypeError: a field is invalid.

    >>> DataFiles("photos", batch_size=8, preprocess="imagenet").preprocess.std
    (0.229, 0.224, 0.225)
    """

    path: str | PathLike[str]
    batch_size: int | None = None
    preprocess: Preprocessing | str | None = None
    tokenizer: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("path", "tokenizer"):
            value = getattr(self, name)
            if not isinstance(value, str | PathLike) and not (name == "tokenizer" and value is None):
                raise DtypeError(f"{name} must be a path, got {type(value).__name__}")
        if self.batch_size is not None:
            as_integer("batch_size", self.batch_size, at_least=1)
        if isinstance(self.preprocess, str):
            object.__setattr__(self, "preprocess", Preprocessing.parse(self.preprocess))
        elif not isinstance(self.preprocess, Preprocessing | None):
            raise DtypeError(f"preprocess must be a Preprocessing or text, got {type(self.preprocess).__name__}")

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing; a ``Preprocessing()`` without fields if none was given."""
        return self.preprocess if isinstance(self.preprocess, Preprocessing) else Preprocessing()

    def reject_unused(self, kind: str, *, preprocess: Sequence[str] = (), tokenizer: bool = False) -> None:
        """Raise SpecError if an option is set that this kind of data does not use.

        Args:
            kind: name of the kind, for the message.
            preprocess: fields of ``Preprocessing`` that the kind uses.
            tokenizer: whether the kind uses a tokenizer.
        """
        unused = [name for name in self.preprocessing.given if name not in preprocess]
        if unused:
            used = f"only {', '.join(preprocess)} apply" if preprocess else "no preprocessing applies"
            raise SpecError(
                f"{fspath(self.path)}: got preprocess={str(self.preprocessing)!r}, but {used} to {kind}: "
                f"remove {', '.join(unused)}"
            )
        if self.tokenizer is not None and not tokenizer:
            raise SpecError(
                f"{fspath(self.path)}: got a tokenizer (--tokenizer), but it applies only to a .txt file: remove it"
            )


@dataclass(frozen=True)
class DataListing:
    """Files of one kind in sorted order; sub-directories are classes, also those without files of this kind.

    Attributes:
        root: the file or directory that was given.
        paths: the files.
        classes: names of the classes, sorted; () if the files are not in sub-directories.
        class_numbers: index in ``classes`` of each file's class.
    """

    root: Path
    paths: tuple[Path, ...]
    classes: tuple[str, ...] = ()
    class_numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class FileBatches:
    """Batches in files.

    Attributes:
        name: start of error messages.
        count: number of batches.
        read: callback that yields the batches with these indices, in ascending order; None yields all batches.
        labels: one array per batch with the class number of each sample; () without classes.
        classes: names of the classes.
        note: one line on what was read and how it is preprocessed; "" if there is nothing to say.
    """

    name: str
    count: int
    read: Callable[[Sequence[int] | None], Iterator[Feed]]
    labels: tuple[Array, ...] = ()
    classes: tuple[str, ...] = ()
    note: str = ""

    def __iter__(self) -> Iterator[Feed]:
        return self.read(None)


def list_files(root: Path, suffixes: frozenset[str]) -> DataListing:
    """List the files with these suffixes in a directory, or else in its sub-directories, which name classes.

    Every visible sub-directory counts as a class, also if it is empty, as in ``torchvision.datasets.ImageFolder``.
    Hidden files are left out. A file stands for itself.

    Raises:
        SpecError: some files are in sub-directories, and others are not.
    """
    if not root.is_dir():
        return DataListing(root, (root,))
    visible = sorted((path for path in root.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    direct = tuple(path for path in visible if path.suffix.lower() in suffixes)
    by_class = {path.name: _files_below(path, suffixes) for path in visible if path not in direct and path.is_dir()}
    filled = [name for name, paths in by_class.items() if paths]
    if not filled:
        return DataListing(root, direct)
    if direct:
        raise SpecError(
            f"{fspath(root)} holds {direct[0].name} and the sub-directory {filled[0]}: expected all files "
            "in the directory itself, or all in sub-directories by class"
        )
    numbers = [number for number, paths in enumerate(by_class.values()) for _ in paths]
    paths = tuple(path for paths in by_class.values() for path in paths)
    return DataListing(root, paths, tuple(by_class), tuple(numbers))


def _files_below(directory: Path, suffixes: frozenset[str]) -> list[Path]:
    paths = list[Path]()
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]  # os.walk skips the others
        paths += [
            Path(parent, name) for name in names if Path(name).suffix.lower() in suffixes and not name.startswith(".")
        ]
    return sorted(paths, key=lambda path: path.parts)


def only_input(inputs: Sequence[InputInfo], where: str, kind: str) -> InputInfo:
    """Return the model's only input; raise SpecError if it has several."""
    if len(inputs) != 1:
        names = ", ".join(info.name for info in inputs)
        raise SpecError(
            f"{where}: {kind} fill one input, but the model has {len(inputs)} inputs ({names}): pass a directory "
            "with one .npz per batch"
        )
    return inputs[0]


def batch_size_of(inputs: Sequence[InputInfo], requested: int | None, where: str) -> tuple[int, bool]:
    """Return the number of samples per batch, and whether the model fixes it.

    The size is the one that the model fixes, or the requested size, or 1.

    Raises:
        ShapeError: the inputs share no batch axis, or the requested size is not the fixed size.
    """
    fixed = {info.shape[0] if info.shape else 0 for info in inputs if info.shape is not None} - {None}
    if len(fixed) > 1 or 0 in fixed:
        raise ShapeError(
            f"{where}: the inputs share no batch axis, so the file cannot be split into samples: "
            "pass a directory with one .npz per batch"
        )
    size = next((int(size) for size in fixed if size), requested or 1)
    if requested not in {None, size} or size < 1:
        raise ShapeError(f"{where}: got a batch size of {requested}, but the model expects {size}: omit the batch size")
    return size, bool(fixed)


def cut(count: int, size: int, *, is_fixed: bool, what: str, where: str) -> list[range]:
    """Divide ``count`` items into batches; return the indices of the items of each batch.

    If the model fixes the batch size, items that do not fill a batch are left out.

    Raises:
        ShapeError: there are fewer items than the model's batch size.
    """
    end = count - count % size if is_fixed else count
    if not end:
        raise ShapeError(
            f"{where}: got {count} {what}, but the model's batch size is {size}: add {size - count} {what}, or export "
            "the model with a smaller batch size"
        )
    return [range(begin, min(begin + size, end)) for begin in range(0, end, size)]


def left_out(count: int, batches: Sequence[range]) -> str:
    """Return the end of a note: how many of ``count`` items do not fill a batch, or ""."""
    rest = count - batches[-1].stop
    return f"; {rest} of {count} left out, because the model's batch size is {len(batches[0])}" if rest else ""


def labels_of(numbers: Sequence[int], batches: Sequence[range]) -> tuple[Array, ...]:
    """Return one array of labels per batch; () if the items have no class numbers."""
    if not numbers:
        return ()
    labels = np.asarray(numbers, np.int64)
    return tuple(labels[batch.start : batch.stop] for batch in batches)
