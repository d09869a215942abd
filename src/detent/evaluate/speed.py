"""Speed of two models in ONNX Runtime.

Runs of the two models alternate, so that other load on the machine slows both. With one thread, CPU time is measured,
which does not count time in which other processes run. With several threads, wall time is measured. The median times
of the two models are compared. The spread is computed from the ratios of adjacent runs: the time of the first model
divided by that of the second. Loading and the first run, which allocates memory, are not timed.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import SpecError, closest
from detent.onnx_model.files import ModelSource, load_model
from detent.onnx_model.model_inputs import Feed, InputInfo
from detent.onnx_model.sessions import SPINNING, make_session, ort_errors
from detent.tables import counted

__all__ = ["Timing", "duration_text", "dynamic_shape_notes", "parse_shapes", "random_inputs", "time_models"]

MIN_RUNS, MAX_RUNS = 3, 50  # timed runs per model
SAME_SPEED = 1.05  # two run times count as equal if their ratio is smaller than this
MAX_MS_AS_MICROSECONDS = 0.1
DEFAULT_SIZE = 1  # size of dynamic axes
MAX_RANDOM_ELEMENTS = 1 << 28  # largest number of elements of a random input; generating them takes 2 GiB
MAX_CHARS_SHOWN = 80  # a message quotes at most this many characters of an argument
RANDOM_INTEGERS = 2  # random integers are 0 or 1, because they may be indices of a small table
_SIZE = re.compile("0*[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class Timing:
    """Run times of two models, usually float and quantized.

    Attributes:
        first_ms: median time of a run of the first model in milliseconds.
        second_ms: median time of a run of the second model in milliseconds.
        runs: timed runs per model.
        threads: threads per model; 0 for all cores.
        spread: half the interquartile range of the ratios of adjacent runs, divided by the median of these ratios.

    >>> str(Timing(4.0, 2.0, 10, 1)), Timing(4.0, 3.9, 10, 1).speed_text
    ('4.00 ms -> 2.00 ms (2.0x faster, 1 thread, 10 runs)', 'equally fast')
    >>> str(Timing(0.05, 0.08, 1000, 2))
    '50.0 µs -> 80.0 µs (1.6x slower, 2 threads, 1,000 runs)'
    """

    first_ms: float
    second_ms: float
    runs: int
    threads: int
    spread: float = 0.0

    @property
    def ratio(self) -> float:
        """Run time of the first model divided by that of the second; above 1, the second model is faster."""
        return self.first_ms / max(self.second_ms, 1e-9)

    @property
    def threads_text(self) -> str:
        """Number of threads as text."""
        return f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else "all threads"

    @property
    def is_faster(self) -> bool:
        """Whether the second model is at least 5 % faster."""
        return self.ratio >= SAME_SPEED

    @property
    def is_slower(self) -> bool:
        """Whether the second model is slower by more than 5 %, and by more than the spread of the runs."""
        return self.ratio * max(SAME_SPEED, 1 + self.spread) < 1

    @property
    def speed_text(self) -> str:
        """The ratio as text, such as "2.0x faster"."""
        if self.is_faster:
            return f"{self.ratio:,.1f}x faster"
        return "equally fast" if self.ratio > 1 / SAME_SPEED else f"{1 / self.ratio:,.1f}x slower"

    def __str__(self) -> str:
        times = f"{duration_text(self.first_ms)} -> {duration_text(self.second_ms)}"
        spread = f", ±{100 * self.spread:.0f} %" if self.spread else ""
        return f"{times} ({self.speed_text}, {self.threads_text}, {counted(self.runs, 'run', ',')}{spread})"


def duration_text(ms: float) -> str:
    """Format a duration in ms; below 0.1 ms, in µs."""
    return f"{1000 * ms:.1f} µs" if ms < MAX_MS_AS_MICROSECONDS else f"{ms:,.2f} ms"


def time_models(
    first: ModelSource,
    second: ModelSource,
    feeds: Sequence[Feed],
    *,
    threads: int = 1,
    repeat: int | None = None,
    seconds: float = 2.0,
    progress: Callable[[int, int | None], None] | None = None,
) -> Timing:
    """Time two models on the same batches, with alternating runs.

    Args:
        first: the first model, usually the float one.
        second: the second model, usually the quantized one.
        feeds: batches, each a dict from input names to arrays; the runs use the batches in turn.
        threads: threads per model; 0 uses all cores.
        repeat: runs per model; if None, as many as fit into ``seconds``, but at least 3 and at most 50.
        seconds: approximate time of all runs of both models; ignored if ``repeat`` is given.
        progress: callback f(done, total) with the numbers of runs per model.

    Raises:
        UnsupportedError: ONNX Runtime cannot run one of the models.

    >>> from onnx import parser
    >>> model = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Abs(x) }')
    >>> time_models(model, model, [random_inputs(model)], repeat=4).runs
    4
    """
    sessions = [make_session(model, threads=threads, config={SPINNING: "1"}) for model in (first, second)]
    times: tuple[list[float], list[float]] = [], []
    clock = time.thread_time if threads == 1 else time.perf_counter
    warm_up = sum(_run_ms(session, feeds[0], time.perf_counter) for session in sessions)
    count = repeat or max(MIN_RUNS, min(MAX_RUNS, int(1000 * seconds / max(warm_up, 1e-3))))
    for i in range(count):
        for session, taken in zip(sessions, times, strict=True):
            taken.append(_run_ms(session, feeds[i % len(feeds)], clock))
        if progress is not None:
            progress(i + 1, count)
    return Timing(median(times[0]), median(times[1]), count, threads, _spread(*times))


def _spread(first: Sequence[float], second: Sequence[float]) -> float:
    """Return half the interquartile range of the ratios of adjacent runs, divided by the median of these ratios."""
    ratios = [a / max(b, 1e-9) for a, b in zip(first, second, strict=True)]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return float((high - low) / 2 / max(middle, 1e-9))


def _run_ms(session: Any, feed: Feed, clock: Callable[[], float]) -> float:  # noqa: ANN401 - no type annotations
    with ort_errors():
        start = clock()
        session.run(None, feed)
        return 1000 * (clock() - start)


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Parse arguments of --shape, such as "NAME=1,3,224,224"; return a dict from input names to shapes."""
    shapes = {}
    for text in texts:
        name, sign, sizes = text.rpartition("=")
        parts = [part.strip() for part in sizes.replace("x", ",").split(",")]
        if not sign or not all(_SIZE.fullmatch(part) for part in parts):
            raise SpecError(
                f"invalid --shape {text[:MAX_CHARS_SHOWN]!r}: expected NAME=1,3,224,224 with sizes of 1 to 10 digits"
            )
        shapes[name] = tuple(int(part) for part in parts)
    return shapes


def random_inputs(model: ModelSource, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Feed:
    """Return random inputs for a model: normally distributed floats, and integers 0 or 1.

    The seed is fixed, so repeated calls return the same values.

    Args:
        model: the model.
        shapes: maps input names to shapes. An input that is not listed has the shape that the model declares, with size
            1 for dynamic axes.

    Raises:
        SpecError: a name in ``shapes`` is unknown, or an input has an unknown rank, a non-numeric type or too many
            elements.
        ShapeError: a shape does not fit the model.

    >>> from onnx import parser
    >>> random_inputs(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Abs(x) }'))["x"].shape
    (1, 3)
    """
    inputs, by_name = load_model(model).inputs, dict(shapes or {})
    names = [info.name for info in inputs]
    for name in by_name:
        if name not in names:
            raise SpecError(
                f"--shape: the model has no input {name!r}{closest(name, names)} its inputs are {', '.join(names)}"
            )
    rng = np.random.default_rng(0)
    return {info.name: _random_array(info, by_name.get(info.name), rng) for info in inputs}


def dynamic_shape_notes(model: ModelSource, shapes: Mapping[str, tuple[int, ...]] | None = None) -> list[str]:
    """Return a note for each random input with a dynamic axis after the first whose shape is not in ``shapes``."""
    notes = []
    for info in load_model(model).inputs:
        if info.name not in (shapes or {}) and info.shape is not None and None in info.shape[1:]:
            sizes = "x".join(str(size or DEFAULT_SIZE) for size in info.shape)
            notes.append(
                f"input {info.name!r} has shape {info.shape_text}: random inputs have {sizes}; for real sizes, pass "
                f"--shape {info.name}=SIZES, such as {sizes}, or --data"
            )
    return notes


def _random_array(info: InputInfo, shape: tuple[int, ...] | None, rng: np.random.Generator) -> NDArray[Any]:
    if shape is None:
        if info.shape is None:
            raise SpecError(
                f"the model does not declare the rank of input {info.name!r}: pass --shape {info.name}=SIZES"
            )
        shape = tuple(size or DEFAULT_SIZE for size in info.shape)
    info.check(info.dtype, shape, "--shape")
    if prod(shape) > MAX_RANDOM_ELEMENTS:
        raise SpecError(
            f"input {info.name!r} of shape {'x'.join(map(str, shape))} has {prod(shape):,} elements, too many for "
            f"random inputs (at most {MAX_RANDOM_ELEMENTS:,}): pass a smaller --shape"
        )
    if info.dtype.kind == "f":
        return rng.normal(size=shape).astype(info.dtype)
    if info.dtype.kind in "iub":
        return rng.integers(0, RANDOM_INTEGERS, size=shape).astype(info.dtype)
    raise SpecError(f"cannot generate random {info.dtype} values for input {info.name!r}: pass --data")
