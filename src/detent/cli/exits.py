"""Exit codes, one-line error messages, and checks of paths before any computation."""

import errno
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import typer

from detent.cli.entry import failure
from detent.cli.screen import visible
from detent.errors import (
    EXTRAS,
    INSTALL,
    NOTHING_QUANTIZED,
    DetentError,
    FileFormatError,
    SpecError,
    VerificationError,
    install_hint,
)
from detent.storage import check_directory

__all__ = [
    "BAD_INPUT",
    "DIFFERENCE",
    "INTERRUPTED",
    "MISSING",
    "check_can_write",
    "check_distinct",
    "check_is_file",
    "check_report_path",
    "fail",
    "report_errors",
    "require",
]

DIFFERENCE, BAD_INPUT, MISSING, INTERRUPTED = 1, 2, 3, 130
P = ParamSpec("P")
R = TypeVar("R")


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Print an error on stderr, and exit."""
    typer.echo(f"error: {visible(message)}", err=True)
    raise typer.Exit(code)


def report_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: print an expected error as one line and exit. Unexpected exceptions keep their traceback."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, ImportError, DetentError, MemoryError, OSError) as error:
            message, code = _message_and_code(error)
            if kwargs.get("as_json"):  # with --json, stdout has a document even after an error
                sys.stdout.write(failure(message, code))
            fail(message, code)

    return run


def _message_and_code(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, ImportError):
        return _missing(error), MISSING
    if isinstance(error, DetentError):
        return str(error), _code(error)
    if isinstance(error, OSError):
        if error.errno == errno.EPIPE:  # the program that reads stdout has ended; typer handles this error
            raise error
        prefix = f"{error.filename}: " if error.filename else ""
        return f"{prefix}{error.strerror or error}", BAD_INPUT
    return "out of memory: lower --batch-size, or estimate the memory with detent quantize --dry-run", BAD_INPUT


def _missing(error: ImportError) -> str:
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        raise error
    return f"this command needs {module}, which is not installed: {install_hint(module)}"


def _code(error: DetentError) -> int:
    if isinstance(error, VerificationError) or str(error).startswith(NOTHING_QUANTIZED):
        return DIFFERENCE
    return MISSING if isinstance(error.__cause__, ImportError) or INSTALL in str(error) else BAD_INPUT


def require(*modules: str) -> None:
    """Import modules early, so that a missing module is reported before any work begins."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            error.name = error.name or module
            raise


def check_can_write(
    path: str | PathLike[str] | None, *, force: bool, suffixes: tuple[str, ...] = (), is_written: bool = True
) -> None:
    """Reject a path that has a wrong suffix, is in a missing or read-only directory, or already exists.

    If ``force`` is True, the file may exist. If ``is_written`` is False, the directory may be read-only.
    """
    if path is None:
        return
    target = Path(path)
    if suffixes and target.suffix.lower() not in suffixes:
        raise SpecError(f"{path}: expected a file name that ends in {' or '.join(suffixes)}")
    if target.is_dir():
        raise SpecError(f"{path} is a directory: pass a file name")
    check_directory(target.parent, writable=False, error=SpecError)
    if target.exists() and not force:
        raise SpecError(f"{path} already exists: pass --force to replace it, or choose another name")
    if is_written:
        check_directory(target.parent, error=SpecError)


def check_report_path(path: Path | None, *, force: bool, is_written: bool = True) -> None:
    """Reject a report path that cannot be written, and an .html report if Jinja is missing."""
    check_can_write(path, force=force, suffixes=(".html", ".json"), is_written=is_written)
    if path is not None and path.suffix.lower() == ".html":
        require("jinja2")


def check_distinct(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Reject an output path that is also an input or another output."""
    outputs = [(option, path) for option, path in written.items() if path is not None]
    inputs = [(option, path) for option, path in read.items() if path is not None]
    for i, (option, path) in enumerate(outputs):
        for other_option, other_path in (*outputs[i + 1 :], *inputs):
            if _is_same(path, other_path):
                raise SpecError(f"{option} and {other_option} are the same file, {path}: change one of the two paths")


def _is_same(a: Path, b: Path) -> bool:
    if os.path.realpath(a) == os.path.realpath(b):  # not Path.resolve, which raises on circular links
        return True
    return a.exists() and b.exists() and a.samefile(b)  # for hard links, and for file systems that ignore case


def check_is_file(path: Path) -> None:
    """Reject a path that does not exist or is not a file."""
    if not path.is_file():
        raise FileFormatError(f"{path} is not a file" if path.exists() else f"{path}: there is no such file")
