"""Labels of evaluation samples, from files: one label per sample, in the order of the data.

============ =====================================================================================================
file         labels
============ =====================================================================================================
.npy         an array; the first axis counts samples
.npz         one array, or the array with the name "labels"
.txt, .csv   one number per line; the first line of a .csv file may be a title
============ =====================================================================================================

Files are untrusted: sizes are checked before memory is allocated, and nothing is unpickled or evaluated.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import FileFormatError, SpecError
from detent.onnx_model.array_data import ArrayFile
from detent.tables import bytes_text

__all__ = ["read_labels"]

Array = NDArray[Any]
MAX_TEXT_BYTES = 64 << 20
MAX_CHARS_SHOWN = 40


def read_labels(path: str | PathLike[str]) -> Array:
    """Read labels from an .npy, .npz, .txt or .csv file.

    Raises:
        FileFormatError: the file does not exist, is damaged, or has a line that is not a number.
        SpecError: the suffix is not supported, or an .npz file has several arrays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory, "labels.csv")
    ...     np.savetxt(path, [3, 1], fmt="%d", header="class", comments="")
    ...     read_labels(path)
    array([3, 1])
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in {".npy", ".npz"}:
        return _from_arrays(path)
    if suffix not in {".txt", ".csv"}:
        raise SpecError(f"{path}: expected labels in an .npy, .npz, .txt or .csv file")
    return _from_text(path)


def _from_arrays(path: Path) -> Array:
    file = ArrayFile(path)
    names = list(file.headers)
    name = names[0] if len(names) == 1 else "labels"
    if name not in names:
        raise SpecError(f"{path} has the arrays {', '.join(names)}: expected one array, or one with the name labels")
    return file.read()[name]


def _from_text(path: Path) -> Array:
    if not path.is_file():
        raise FileFormatError(f"{path}: there is no such file")
    if path.stat().st_size > MAX_TEXT_BYTES:
        size = bytes_text(MAX_TEXT_BYTES)
        raise FileFormatError(f"{path} is larger than {size}: save the labels with numpy.save, as an .npy file")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not text: pass one number per line, or an .npy file") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if path.suffix.lower() == ".csv" and lines and _number(lines[0]) is None:
        del lines[0]
    numbers = [_number(line) for line in lines]
    if None in numbers:
        first = numbers.index(None)
        text = lines[first][:MAX_CHARS_SHOWN]
        raise FileFormatError(f"{path}: expected one number per line, got {text!r} as label {first}")
    labels = np.array(numbers)
    if labels.dtype.kind not in "if":
        raise FileFormatError(f"{path}: a label is too large, or there are none: pass one number per line")
    return labels


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
