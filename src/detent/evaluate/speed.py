"""Timing: two models side by side. Runs alternate, so that what slows the machine slows both; medians are taken."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import SpecError, closest
from detent.onnx_model import load, make_session
from detent.onnx_model.batches import InputInfo, inputs_of
from detent.onnx_model.files import ModelSource
from detent.onnx_model.sessions import refusals

__all__ = ["Timing", "duration", "made_up_feed", "parse_shapes", "race"]

Feed = dict[str, NDArray[Any]]
LEAST, BATCH = 3, 1
ALIKE = 1.05  # below this ratio two times are the same
SHORT = 0.1  # ms
MOST = 1 << 28  # elements of a random input, which take 2 GiB while they are drawn
SHOWN = 80  # characters of what was given, in a message
_SIZE = re.compile("0*[1-9][0-9]{0,9}")
SMALL_INTEGERS = 2  # indices below it are in every table


@dataclass(frozen=True)
class Timing:
    """How long two models take.

    Attributes:
        first_ms, second_ms: medians of a batch.
        runs: of each.
        threads: of each.

    >>> str(Timing(4.0, 2.0, 10, 1)), Timing(4.0, 2.0, 10, 1).ratio
    ('4.00 ms -> 2.00 ms (2.0x faster, 1 thread, 10 runs)', 2.0)
    >>> Timing(4.0, 3.9, 10, 1).is_faster, Timing(4.0, 3.9, 10, 1).speed_text
    (False, 'as fast')
    >>> str(Timing(0.05, 0.08, 1000, 2))
    '50.0 µs -> 80.0 µs (1.6x slower, 2 threads, 1,000 runs)'
    """

    first_ms: float
    second_ms: float
    runs: int
    threads: int

    @property
    def ratio(self) -> float:
        """How many times the second is as fast as the first."""
        return self.first_ms / max(self.second_ms, 1e-9)

    @property
    def threads_text(self) -> str:
        """The threads in words."""
        return f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else "all threads"

    @property
    def is_faster(self) -> bool:
        """Whether the second is faster, by more than runs differ anyway."""
        return self.ratio >= ALIKE

    @property
    def speed_text(self) -> str:
        """The ratio in words."""
        if self.is_faster:
            return f"{self.ratio:,.1f}x faster"
        return "as fast" if self.ratio > 1 / ALIKE else f"{1 / self.ratio:,.1f}x slower"

    def __str__(self) -> str:
        return (
            f"{duration(self.first_ms)} -> {duration(self.second_ms)} ({self.speed_text}, {self.threads_text}, "
            f"{self.runs:,} runs)"
        )


def duration(ms: float) -> str:
    """Milliseconds as text, of small ones microseconds.

    >>> duration(0.0421), duration(12.3), duration(4321.0)
    ('42.1 µs', '12.30 ms', '4,321.00 ms')
    """
    return f"{1000 * ms:.1f} µs" if ms < SHORT else f"{ms:,.2f} ms"


def race(
    first: str | PathLike[str],
    second: str | PathLike[str],
    feeds: Sequence[Feed],
    *,
    threads: int = 1,
    repeat: int | None = None,
    seconds: float = 2.0,
    progress: Callable[[int, int | None], None] | None = None,
) -> Timing:
    """Run two models in turn on the same batches.

    Args:
        first, second: files.
        feeds: batches, taken in turn.
        threads: of each model; 0 for all.
        repeat: how often each runs; None for as often as fits into ``seconds``.
        seconds: about how long it may take.
        progress: a function of runs done and in all.

    >>> import tempfile
    >>> from onnx import parser
    >>> from detent.onnx_model import save
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(made, f"{folder}/a.onnx")
    ...     race(f"{folder}/a.onnx", f"{folder}/a.onnx", [{"x": np.float32([1])}], repeat=4).runs
    4
    """
    sessions = [make_session(path, threads=threads) for path in (first, second)]
    taken: tuple[list[float], list[float]] = [], []
    with refusals():
        start = time.perf_counter()
        for session in sessions:
            session.run(None, feeds[0])  # the first run allocates
        once = time.perf_counter() - start
        count = repeat or max(LEAST, min(50, int(seconds / max(once, 1e-6))))
        for i in range(count):
            feed = feeds[i % len(feeds)]
            for session, times in zip(sessions, taken, strict=True):
                start = time.perf_counter()
                session.run(None, feed)
                times.append(1000 * (time.perf_counter() - start))
            if progress is not None:
                progress(i + 1, count)
    return Timing(median(taken[0]), median(taken[1]), count, threads)


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes that "NAME=1,3,224,224" gives.

    >>> parse_shapes(["x=1,3", "ids=7"])
    {'x': (1, 3), 'ids': (7,)}
    """
    found = {}
    for text in texts:
        name, sign, sizes = text.rpartition("=")
        parts = [part.strip() for part in sizes.replace("x", ",").split(",")]
        if not sign or not all(_SIZE.fullmatch(part) for part in parts):
            raise SpecError(f"--shape {text[:SHOWN]!r}: expected NAME=1,3,224,224, sizes of up to 10 digits")
        found[name] = tuple(int(part) for part in parts)
    return found


def made_up_feed(model: ModelSource, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Feed:
    """Random inputs that fit a model: sizes that vary are 1 unless given, integers are 0 or 1.

    >>> from onnx import parser
    >>> made_up_feed(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Abs(x) }'))["x"].shape
    (1, 3)
    """
    inputs = inputs_of(load(model))
    given = dict(shapes or {})
    names = [info.name for info in inputs]
    for name in given:
        if name not in names:
            raise SpecError(
                f"--shape: the model has no input {name!r}{closest(name, names)} it takes {', '.join(names)}"
            )
    rng = np.random.default_rng(0)
    return {info.name: _made_up(info, given.get(info.name), rng) for info in inputs}


def _made_up(info: InputInfo, shape: tuple[int, ...] | None, rng: np.random.Generator) -> NDArray[Any]:
    if shape is None:
        if info.shape is None:
            raise SpecError(f"the model does not say how many axes {info.name!r} has: give --shape {info.name}=...")
        shape = tuple(size or BATCH for size in info.shape)
    info.check(info.dtype, shape, "--shape")
    if prod(shape) > MOST:
        raise SpecError(
            f"input {info.name!r} of shape {'x'.join(map(str, shape))} has {prod(shape):,} elements, at most {MOST:,} "
            "are made up: give a smaller --shape"
        )
    if info.dtype.kind == "f":
        return rng.normal(size=shape).astype(info.dtype)
    if info.dtype.kind in "iub":
        return rng.integers(0, SMALL_INTEGERS, size=shape).astype(info.dtype)
    raise SpecError(f"input {info.name!r} is of type {info.dtype}, for which nothing can be made up: give --data")
