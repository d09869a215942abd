"""Text files of a checkpoint, and of users: UTF-8, with a limit on their size."""

from pathlib import Path

from detent.errors import FileFormatError

__all__ = ["read_text"]


def read_text(path: Path, max_bytes: int) -> str:
    """Return the content of a text file.

    Raises:
        FileFormatError: there is no such file, it is too large, or it is not UTF-8.
    """
    if not path.is_file():
        raise FileFormatError(f"{path}: there is no such file")
    size = path.stat().st_size
    if size > max_bytes:
        raise FileFormatError(f"{path} has {size:,} bytes, expected at most {max_bytes:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not UTF-8: {error}") from error
