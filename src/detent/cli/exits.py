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
from detent.errors import EXTRAS, INSTALL, DetentError, FileFormatError, SpecError, VerificationError, install_hint
from detent.storage import check_directory

__all__ = [
    "BAD_INPUT",
    "DIFFERENCE",
    "INTERRUPTED",
    "MISSING",
    "check_distinct",
    "check_free",
    "check_is_file",
    "fail",
    "guarded",
    "require",
]

DIFFERENCE, BAD_INPUT, MISSING, INTERRUPTED = 1, 2, 3, 130
P = ParamSpec("P")
R = TypeVar("R")


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Say what is wrong on stderr, and leave.

    >>> try:
    ...     fail("no such file")
    ... except typer.Exit as done:
    ...     print(done.exit_code)
    2
    """
    typer.echo(f"error: {visible(message)}", err=True)
    raise typer.Exit(code)


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """A command whose errors are messages and exit codes, and no tracebacks.

    Errors that detent does not raise on purpose keep their traceback: they are bugs.

    >>> @guarded
    ... def command():
    ...     raise SpecError("no such recipe")
    >>> try:
    ...     command()
    ... except typer.Exit as done:
    ...     print(done.exit_code)
    2
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, ImportError, DetentError, MemoryError, OSError) as error:
            message, code = _told(error)
            if kwargs.get("as_json"):  # whoever reads stdout gets a document there, whatever happens
                sys.stdout.write(failure(message, code))
            fail(message, code)

    return run


def _told(error: BaseException) -> tuple[str, int]:
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
    return "out of memory: see --dry-run, or give fewer samples at a time", BAD_INPUT


def _missing(error: ImportError) -> str:
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        raise error
    return f"this needs {module}, which is not installed: {install_hint(module)}"


def _code(error: DetentError) -> int:
    if isinstance(error, VerificationError):
        return DIFFERENCE
    return MISSING if isinstance(error.__cause__, ImportError) or INSTALL in str(error) else BAD_INPUT


def require(module: str) -> None:
    """Make sure that a module is there before anything takes long.

    >>> require("onnx")
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        error.name = error.name or module
        raise


def check_free(
    path: str | PathLike[str] | None, *, force: bool, suffixes: tuple[str, ...] = (), is_written: bool = True
) -> None:
    """Refuse a file that exists, a folder that does not or takes no file, or a name of another kind.

    Args:
        path: what is to be written, None for nothing.
        force: whether it may exist.
        suffixes: that it may have.
        is_written: False where nothing is written in the end, so that any folder will do.

    Raises:
        SpecError: with what to do.

    >>> check_free("report.txt", force=False, suffixes=(".html", ".json"))
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: report.txt: expected a name that ends in .html or .json
    """
    if path is None:
        return
    target = Path(path)
    if suffixes and target.suffix.lower() not in suffixes:
        raise SpecError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")
    if target.is_dir():
        raise SpecError(f"{path} is a folder: give the name of a file")
    check_directory(target.parent, writable=False, error=SpecError)
    if target.exists() and not force:
        raise SpecError(f"{path} exists already: give --force to replace it, or another name")
    if is_written:
        check_directory(target.parent, error=SpecError)


def check_distinct(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Refuse a file that would be written over another one, or over one that is read.

    Args:
        written, read: files by the options that name them.

    Raises:
        SpecError: with both options.

    >>> check_distinct({"--output": Path("a.json"), "--report": Path("./a.json")}, {})
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: --output and --report are the same file, a.json: give one of them another name
    """
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
    """Refuse what is no file, in the same words everywhere.

    Raises:
        FileFormatError: with what is there instead.

    >>> check_is_file(Path("nothing.onnx"))
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: nothing.onnx: there is no such file
    """
    if not path.is_file():
        raise FileFormatError(f"{path} is no file" if path.exists() else f"{path}: there is no such file")
