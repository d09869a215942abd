"""What quantized files are worth beside the float model: noise, decisions, milliseconds, and a second runtime.

Outputs are those of ONNX Runtime's default session, so that its integer kernels count. For time the float model and all
files take turns in one process with one thread, a float sample before and after each of theirs: a ratio is their time
over the mean of these two. A sample is as many calls as fill some milliseconds.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_errors import first_line

from detent.errors import DetentError
from detent.metrics import sqnr_db
from detent.verification.openvino import OpenVino
from zoo import ZooModel, agreement

Feed = dict[str, NDArray[Any]]
Outputs = list[NDArray[Any]]
LOUDEST = 200.0
SAMPLE, REST, MOST = 5e-3, 2e-3, 200
SEVERE = 4
TINY = 1e-30
LEVEL, DIED = "ONEDNN_MAX_CPU_ISA", "process ended"


def make_session(path: Path, threads: int = 0) -> ort.InferenceSession:
    """As ONNX Runtime makes it by default, or with so many threads."""
    options = ort.SessionOptions()
    options.log_severity_level = SEVERE
    options.intra_op_num_threads = threads
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def outputs(path: Path, feeds: Sequence[Feed]) -> list[Outputs]:
    """Of every batch."""
    session = make_session(path)
    return [session.run(None, feed) for feed in feeds]


def noise(expected: list[Outputs], found: list[Outputs]) -> list[float]:
    """The SQNR of every float output in dB over all batches, at most 200 either way, so that JSON can hold it."""
    decibels = []
    for i, first in enumerate(expected[0]):
        if np.asarray(first).dtype == np.float32:
            a, b = (np.concatenate([np.ravel(run[i]) for run in runs]) for runs in (expected, found))
            ratio = float(sqnr_db(a, b))
            decibels.append(round(float(np.clip(np.nan_to_num(ratio, nan=-LOUDEST), -LOUDEST, LOUDEST)), 2))
    return decibels


def judged(model: ZooModel, expected: list[Outputs], found: list[Outputs]) -> dict:
    """The noise of the first output and the mean of all, and the share of decisions that are those of float."""
    decibels = noise(expected, found)
    ours, theirs = (np.concatenate([np.ravel(model.task(run)) for run in runs]) for runs in (expected, found))
    return {
        "sqnr_db": decibels[0],
        "mean_sqnr_db": round(mean(decibels), 2),
        "outputs_sqnr_db": decibels,
        "agreement": round(agreement(ours, theirs), 5),
    }


def race(plain: Path, files: Mapping[str, Path], feeds: Sequence[Feed], rounds: int) -> dict[str, dict]:
    """Milliseconds of every file and the median of its ratios to the float model."""
    sessions = {name: make_session(path, 1) for name, path in files.items()}
    base = make_session(plain, 1)
    for session in (base, *sessions.values()):
        for feed in feeds:
            session.run(None, feed)
    start = time.perf_counter()
    base.run(None, feeds[0])
    calls = max(1, min(MOST, int(SAMPLE / (time.perf_counter() - start))))
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in files}
    names = list(files)
    for turn in range(rounds):
        feed, shift = feeds[turn % len(feeds)], turn % max(1, len(names))
        before = _sample(base, feed, calls)
        for name in names[shift:] + names[:shift]:
            taken, after = _sample(sessions[name], feed, calls), _sample(base, feed, calls)
            pairs[name].append((taken, (before + after) / 2))
            before = after
    return {name: _times(taken) for name, taken in pairs.items()}


def _sample(session: ort.InferenceSession, feed: Feed, calls: int) -> float:
    time.sleep(REST)
    session.run(None, feed)
    start = time.perf_counter()
    for _ in range(calls):
        session.run(None, feed)
    return (time.perf_counter() - start) / calls


def _times(pairs: list[tuple[float, float]]) -> dict:
    lower, middle, upper = quantiles([theirs / plain for theirs, plain in pairs], n=4, method="inclusive")
    theirs, plain = zip(*pairs, strict=True)
    return {
        "rounds": len(pairs),
        "float_ms": round(median(plain) * 1e3, 3),
        "ms": round(median(theirs) * 1e3, 3),
        "ratio": round(middle, 3),
        "lower_quartile": round(lower, 3),
        "upper_quartile": round(upper, 3),
    }


def in_openvino(path: Path, feeds: Sequence[Feed], plain: list[Outputs], found: list[Outputs]) -> dict:
    """Whether OpenVINO runs the file, its noise, and the largest difference to ONNX Runtime's outputs of that file.

    The difference is a share of the output's largest value. Where OpenVINO's process dies it is tried once more without
    AMX, which some virtual machines announce and do not let it use.
    """
    try:
        return _second(path, feeds, plain, found, "")
    except DetentError as error:
        if DIED not in str(error):
            return {"failed": first_line(error)}
    os.environ[LEVEL] = "AVX512_CORE_VNNI"
    try:
        return _second(path, feeds, plain, found, "without AMX")
    except DetentError as error:
        return {"failed": first_line(error)}
    finally:
        del os.environ[LEVEL]


def _second(path: Path, feeds: Sequence[Feed], plain: list[Outputs], found: list[Outputs], note: str) -> dict:
    runs = _openvino_outputs(path, feeds)
    decibels = noise(plain, runs)
    steps = [
        float(np.max(np.abs(a - b), initial=0.0)) / max(float(np.max(np.abs(c), initial=0.0)), TINY)
        for one, other, true in zip(found, runs, plain, strict=True)
        for a, b, c in zip(one, other, true, strict=True)
        if np.asarray(a).dtype == np.float32
    ]
    return {
        "sqnr_db": decibels[0],
        "mean_sqnr_db": round(mean(decibels), 2),
        "largest_difference": round(max(steps), 5),
        "note": note,
    }


def _openvino_outputs(path: Path, feeds: Sequence[Feed]) -> list[Outputs]:
    second = OpenVino(onnx.load(path))
    found = [second.run(feed) for feed in feeds]
    second.close()
    return found
