"""Exits: exit codes, and the one line that an error becomes."""

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
    """Turn the errors of a command into messages and exit codes; what is a bug keeps its traceback."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, ImportError, DetentError, MemoryError, OSError) as error:
            message, code = _message_and_code(error)
            if kwargs.get("as_json"):  # whoever reads stdout gets a document there, whatever happens
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
        if error.errno == errno.EPIPE:  # a pager that was left: typer knows what to do
            raise error
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror or error}", BAD_INPUT
    return "out of memory: estimate with --dry-run, or lower --batch-size", BAD_INPUT


def _missing(error: ImportError) -> str:
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        raise error
    return f"this needs {module}, which is not installed: {install_hint(module)}"


def _code(error: DetentError) -> int:
    if isinstance(error, VerificationError) or str(error).startswith(NOTHING_QUANTIZED):
        return DIFFERENCE
    return MISSING if isinstance(error.__cause__, ImportError) or INSTALL in str(error) else BAD_INPUT


def require(*modules: str) -> None:
    """Import modules, so that a missing one is reported before anything takes long."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            error.name = error.name or module
            raise


def check_can_write(
    path: str | PathLike[str] | None, *, force: bool, suffixes: tuple[str, ...] = (), is_written: bool = True
) -> None:
    """Reject a file that exists, a directory that does not or is not writable, or another suffix.

    With ``is_written`` False any directory will do.
    """
    if path is None:
        return
    target = Path(path)
    if suffixes and target.suffix.lower() not in suffixes:
        raise SpecError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")
    if target.is_dir():
        raise SpecError(f"{path} is a directory: give the name of a file")
    check_directory(target.parent, writable=False, error=SpecError)
    if target.exists() and not force:
        raise SpecError(f"{path} exists already: give --force to replace it, or another name")
    if is_written:
        check_directory(target.parent, error=SpecError)


def check_report_path(path: Path | None, *, force: bool, is_written: bool = True) -> None:
    """Reject a report that cannot be written, or not without Jinja."""
    check_can_write(path, force=force, suffixes=(".html", ".json"), is_written=is_written)
    if path is not None and path.suffix.lower() == ".html":
        require("jinja2")


def check_distinct(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Reject a file that would be written over another one, or over one that is read."""
    names = [(option, path) for option, path in written.items() if path is not None]
    others = [(option, path) for option, path in read.items() if path is not None]
    for i, (option, path) in enumerate(names):
        for other, taken in (*names[i + 1 :], *others):
            if _is_same(path, taken):
                raise SpecError(f"{option} and {other} are the same file, {path}: give one of them another name")


def _is_same(a: Path, b: Path) -> bool:
    if os.path.realpath(a) == os.path.realpath(b):  # Path.resolve raises where links form a circle
        return True
    return a.exists() and b.exists() and a.samefile(b)  # links, and systems that take A for a


def check_is_file(path: Path) -> None:
    """Reject what is not a file."""
    if not path.is_file():
        raise FileFormatError(f"{path} is not a file" if path.exists() else f"{path}: there is no such file")
