"""Compare the block formats of GGUF with ggml's C code: first the bytes, then the time, in turns in one process.

Quantization runs on one thread, with and without importance, and on two threads; dequantization on one thread. ggml's
``ggml_quantize_chunk`` and ``dequantize_row_*`` come from libggml-python, through ctypes. If the system permits it, the
process has real-time priority, because other processes would delay two threads more than one::

    python benchmarks/checkpoint.py --output benchmarks/results/checkpoint.json
"""

import argparse
import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from results_file import write_result
from timing import Times, time_in_turns

import detent as dt
from detent.kernels import native

COLUMNS = 2048
ROWS = {True: 128, False: 512}  # by whether the format searches scales, which takes longer
THREAD_FACTOR = 16  # on one and two threads, arrays are larger, so that the second thread has time to start
SECONDS, ROUNDS = 1.5, (5, 40)


class Ggml:
    """ggml's quantizers."""

    def __init__(self) -> None:
        spec = find_spec("libggml")
        if spec is None or spec.origin is None:
            raise SystemExit("libggml-python is not installed: pip install -c constraints.txt libggml-python")
        self._library = ctypes.CDLL(str(Path(spec.origin).parent / "lib64" / "libggml-base.so"))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def quantize(self, form: dt.BlockFormat, x: np.ndarray, importance: np.ndarray | None, out: np.ndarray) -> None:
        """Quantize rows to bytes."""
        weights = None if importance is None else importance.ctypes.data
        self._library.ggml_quantize_chunk(form.gguf_type, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)

    def dequantize(self, form: dt.BlockFormat) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return the function that dequantizes bytes to float32."""
        name = form.name.removeprefix("gguf.")
        name = name[:-1] + "K" if name.endswith("_k") else name
        function = getattr(self._library, f"dequantize_row_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        return lambda packed, out: function(packed.ctypes.data, out.ctypes.data, out.size)


class Timed:
    """A call as ``time_in_turns`` expects it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.run = call

    def prepare(self) -> None:
        """Do nothing: calls need no preparation."""


def _times(*calls: Callable[[], object]) -> list[Times]:
    return time_in_turns([Timed(call) for call in calls], SECONDS, ROUNDS)


def _thread_times(form: dt.BlockFormat, x: np.ndarray, importance: np.ndarray | None) -> list[Times]:
    """Time one and two threads in turns."""
    out = np.empty(form.nbytes(x.shape), np.uint8)

    def run(threads: int) -> None:
        dt.set_num_threads(threads)
        dt.quantize(x, form, importance=importance, out=out)

    return _times(lambda: run(1), lambda: run(2))


def _copy_ratio() -> float:
    """Return the speed of a plain copy on two threads relative to one, for an array of the same size."""
    x = np.ones((THREAD_FACTOR * ROWS[False], COLUMNS), np.float32)
    y, half = np.empty_like(x), len(x) // 2
    parts = slice(half), slice(half, None)

    def copy(part: slice) -> None:
        np.copyto(y[part], x[part])

    with ThreadPoolExecutor(2) as pool:
        single, double = _times(lambda: copy(slice(None)), lambda: list(pool.map(copy, parts)))
    return single.best / double.best


def _take_priority() -> bool:
    """Ask for real-time priority; threads that start later have it, too."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, PermissionError):
        return False
    return True


def measure(form: dt.BlockFormat, ggml: Ggml) -> dict:
    """Return speeds of both in million elements per second, after comparing all bytes and values."""
    rng = np.random.default_rng(0)
    importance = rng.chisquare(2, COLUMNS).astype(np.float32)
    row: dict = {"bits_per_weight": form.bits_per_weight, "equal": True}
    for label, weights in (("plain", None), ("weighted", importance)):
        if weights is not None and not form.uses_importance:
            continue
        searches = weights is not None or form.block_size > 32 or form.name == "iq4_nl"
        x = (rng.standard_t(4, (ROWS[searches], COLUMNS)) * 0.02).astype(np.float32)
        ours, theirs = (np.empty(form.nbytes(x.shape), np.uint8) for _ in range(2))

        def run(x: np.ndarray = x, weights: np.ndarray | None = weights, out: np.ndarray = ours) -> None:
            dt.quantize(x, form, importance=weights, out=out)

        def run_ggml(x: np.ndarray = x, weights: np.ndarray | None = weights, out: np.ndarray = theirs) -> None:
            ggml.quantize(form, x, weights, out)

        dt.set_num_threads(1)
        one, other = _times(run, run_ggml)
        row["equal"] &= np.array_equal(ours, theirs)
        row[label] = {"detent": x.size / one.best / 1e6, "ggml": x.size / other.best / 1e6}
        single, double = _thread_times(form, np.tile(x, (THREAD_FACTOR, 1)), weights)
        row[label]["two_threads"] = single.best / double.best
    dt.set_num_threads(1)
    values, expected = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    tensor, decode = dt.BlockTensor(theirs, form, x.shape), ggml.dequantize(form)
    one, other = _times(lambda: tensor.dequantize(out=values), lambda: decode(theirs, expected))
    row["equal"] &= values.tobytes() == expected.tobytes()
    row["dequantize"] = {"detent": x.size / one.best / 1e6, "ggml": x.size / other.best / 1e6}
    return row


def main() -> None:
    """Measure all formats and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", default=list(dt.gguf.BLOCK_FORMATS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ggml = Ggml()
    has_priority = _take_priority()
    rows = {}
    for name in arguments.formats:
        rows[name] = measure(dt.gguf.get_block_format(name), ggml)
        print(name, rows[name], flush=True)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "level": native.current_level(),
        "cores": os.cpu_count(),
        "real_time_priority": has_priority,
        "copy_on_two_threads": _copy_ratio(),
    }
    write_result({"machine": machine, "columns": COLUMNS, "formats": rows}, arguments.output)


if __name__ == "__main__":
    main()
