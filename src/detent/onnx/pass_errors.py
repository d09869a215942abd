"""Passes of ``qo.quantize``: the time that each pass takes, and error messages that name the pass.

Two kinds of errors name the pass and, if known, the layer, node or tensor:

- Bugs, which become DetentErrors. A bug is an exception that was not raised on purpose. DetentErrors, system errors
  (memory, disk) and errors in the caller's code, such as data that fails to load, are not bugs.
- Errors of ONNX Runtime and of workers. They keep their class and cause; only the message changes.

Passes name the layer or tensor of each step with ``error_places.at``. Otherwise it is the one that was passed to the
innermost function with such an argument.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_tb
from types import FrameType

from onnx import NodeProto

from detent.error_places import place_of
from detent.errors import DetentError, WorkerError
from detent.onnx_model import batches
from detent.onnx_model.graph import describe
from detent.onnx_model.sessions import ORT_FAILED

__all__ = ["announce", "listening", "running"]

_log = logging.getLogger(__name__)

_listeners: ContextVar[tuple[Callable[[str, float], object], ...]] = ContextVar("_listeners", default=())
_readers: ContextVar[tuple[Callable[[str], object], ...]] = ContextVar("_readers", default=())

_DELIBERATE = (DetentError, OSError, MemoryError, ImportError, Warning)
_CALLED = frozenset({"numpy", "onnx", "onnxruntime", "google", *sys.stdlib_module_names})  # packages that detent calls
_ARGUMENTS = {"node": "node", "layer": "layer", "line": "layer", "placement": "tensor", "tensor": "tensor"}


@contextmanager
def listening(
    listener: Callable[[str, float], object], reader: Callable[[str], object] | None = None
) -> Iterator[None]:
    """Call ``listener(name, seconds)`` after each pass inside the with block, and ``reader(text)`` for announcements.

    >>> with listening(lambda name, seconds: print(name, seconds < 60)), running("calibration"):
    ...     pass
    calibration True
    """
    tokens = (
        _listeners.set((*_listeners.get(), listener)),
        _readers.set((*_readers.get(), *([] if reader is None else [reader]))),
    )
    try:
        yield
    finally:
        _listeners.reset(tokens[0])
        _readers.reset(tokens[1])


def announce(text: str) -> None:
    """Log a text about the passes that follow, and pass it to the readers of ``listening``.

    >>> with listening(print, print):
    ...     announce("this takes about 9 s")
    this takes about 9 s
    """
    _log.info("%s", text)
    for reader in _readers.get():
        reader(text)


@contextmanager
def running(name: str) -> Iterator[None]:
    """Name the pass in errors, convert bugs to DetentError, and log the time that the pass takes.

    >>> with running("calibration"):
    ...     {}["t1"]
    Traceback (most recent call last):
    ...
    detent.errors.DetentError: calibration failed with KeyError: 't1'. This is a bug in detent: please report it, with \
the model if you can share it
    """
    start = time.perf_counter()
    try:
        yield
        seconds = time.perf_counter() - start
        _log.info("%s took %.2f s", name, seconds)
        for listener in _listeners.get():
            listener(name, seconds)
    except WorkerError as error:
        _name_pass(name, error)
        raise
    except _DELIBERATE as error:
        if str(error).startswith(ORT_FAILED):
            _name_pass(name, error)
        raise
    except Exception as error:
        _, body, *inner = (frame for frame, _ in walk_tb(error.__traceback__))
        own = [body, *(frame for frame in inner if _module(frame) == "detent")]
        below = inner[inner.index(own[-1]) + 1 :] if len(own) > 1 else inner
        is_of_caller = own[-1].f_globals.get("__name__") == batches.__name__
        if is_of_caller or any(_module(frame) not in _CALLED for frame in below):
            raise
        raise DetentError(
            f"{name} failed{_where(error)} with {type(error).__name__}: {error}. This is a bug in detent: please "
            "report it, with the model if you can share it"
        ) from error


def _module(frame: FrameType) -> str:
    """Return the top-level package of a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _name_pass(name: str, error: BaseException) -> None:
    """Put a pass, and the layer, node or tensor, before the message of an error."""
    error.args = (f"while {name}{_where(error)}: {error}",)


def _where(error: BaseException) -> str:
    """Return where a pass failed, such as " at layer 'conv1'", or "" if this is unknown."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__) if _module(frame) == "detent")
    place = place_of(error) or next(filter(None, map(_argument_place, reversed([*frames]))), "")
    return f" at {place}" if place else ""


def _argument_place(frame: FrameType) -> str:
    """Describe the node, layer or tensor among a function's arguments, or return an empty text."""
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in filter(_ARGUMENTS.__contains__, arguments):
        value = frame.f_locals.get(name)
        if isinstance(value, NodeProto):
            return describe(value)
        text = value if isinstance(value, str) else getattr(value, "name", getattr(value, "tensor", None))
        if isinstance(text, str) and text:
            return f"{_ARGUMENTS[name]} {text!r}"
    return ""
