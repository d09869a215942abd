"""Evaluate quantized files against the float model: SQNR, agreement, run time, and results in OpenVINO.

Outputs come from ONNX Runtime with default settings, so integer kernels are used. To measure run time, the float model
and all files take turns in one process with one thread. A sample of the float model is taken before and after each
sample of a file. A ratio is the time of the file divided by the mean of these two. A sample has as many calls as fit
into some milliseconds.
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
MAX_DB = 200.0  # stands for infinity, which JSON does not have
SAMPLE_SECONDS = 5e-3  # well above the resolution of the clock
SLEEP_SECONDS = 2e-3  # enough for idle threads to stop spinning
MAX_CALLS = 200  # calls per sample
LOG_FATAL = 4  # severity level of ONNX Runtime
MIN_PEAK = 1e-30  # avoids division by zero
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
PROCESS_DIED = "process ended"  # part of the error if OpenVINO's process died


def make_session(path: Path, threads: int = 0) -> ort.InferenceSession:
    """Create an ONNX Runtime session with default settings and ``threads`` threads; 0 means ONNX Runtime's default."""
    options = ort.SessionOptions()
    options.log_severity_level = LOG_FATAL
    options.intra_op_num_threads = threads
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def outputs(path: Path, feeds: Sequence[Feed]) -> list[Outputs]:
    """Return the outputs of a file for every batch."""
    session = make_session(path)
    return [session.run(None, feed) for feed in feeds]


def noise(expected: list[Outputs], quantized: list[Outputs]) -> list[float]:
    """Return the SQNR of every float output over all batches, in dB and clipped to [-MAX_DB, MAX_DB]."""
    decibels = []
    for i, first in enumerate(expected[0]):
        if np.asarray(first).dtype == np.float32:
            a, b = (np.concatenate([np.ravel(run[i]) for run in runs]) for runs in (expected, quantized))
            ratio = float(sqnr_db(a, b))
            decibels.append(round(float(np.clip(np.nan_to_num(ratio, nan=-MAX_DB), -MAX_DB, MAX_DB)), 2))
    return decibels


def evaluate(model: ZooModel, expected: list[Outputs], quantized: list[Outputs]) -> dict:
    """Return the SQNR of the first output, the mean SQNR of all outputs, and the agreement with the float model."""
    decibels = noise(expected, quantized)
    decisions = (np.concatenate([np.ravel(model.task(run)) for run in runs]) for runs in (expected, quantized))
    return {
        "sqnr_db": decibels[0],
        "mean_sqnr_db": round(mean(decibels), 2),
        "outputs_sqnr_db": decibels,
        "agreement": round(agreement(*decisions), 5),
    }


def time_in_turns(plain: Path, files: Mapping[str, Path], feeds: Sequence[Feed], rounds: int) -> dict[str, dict]:
    """Time files in turns with the float model; return the milliseconds and the median ratio of each file."""
    sessions = {name: make_session(path, 1) for name, path in files.items()}
    base = make_session(plain, 1)
    for session in (base, *sessions.values()):
        for feed in feeds:
            session.run(None, feed)
    start = time.perf_counter()
    base.run(None, feeds[0])
    calls = max(1, min(MAX_CALLS, int(SAMPLE_SECONDS / (time.perf_counter() - start))))
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
    time.sleep(SLEEP_SECONDS)
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


def in_openvino(path: Path, feeds: Sequence[Feed], plain: list[Outputs], quantized: list[Outputs]) -> dict:
    """Run a file in OpenVINO; return the SQNR and the largest difference from ONNX Runtime, or the error.

    The difference is relative to the largest magnitude of the output. If the process of OpenVINO crashes, the file runs
    again without AMX, because some virtual machines report AMX but do not support it.
    """
    try:
        return _compare_openvino(path, feeds, plain, quantized, "")
    except DetentError as error:
        if PROCESS_DIED not in str(error):
            return {"failed": first_line(error)}
    os.environ[ISA_VARIABLE] = "AVX512_CORE_VNNI"
    try:
        return _compare_openvino(path, feeds, plain, quantized, "AMX disabled, because the process crashed")
    except DetentError as error:
        return {"failed": first_line(error)}
    finally:
        del os.environ[ISA_VARIABLE]


def _compare_openvino(
    path: Path, feeds: Sequence[Feed], plain: list[Outputs], quantized: list[Outputs], note: str
) -> dict:
    runs = _openvino_outputs(path, feeds)
    decibels = noise(plain, runs)
    differences = [
        float(np.max(np.abs(a - b), initial=0.0)) / max(float(np.max(np.abs(c), initial=0.0)), MIN_PEAK)
        for ours, theirs, reference in zip(quantized, runs, plain, strict=True)
        for a, b, c in zip(ours, theirs, reference, strict=True)
        if np.asarray(a).dtype == np.float32
    ]
    return {
        "sqnr_db": decibels[0],
        "mean_sqnr_db": round(mean(decibels), 2),
        "largest_difference": round(max(differences), 5),
        "note": note,
    }


def _openvino_outputs(path: Path, feeds: Sequence[Feed]) -> list[Outputs]:
    openvino = OpenVino(onnx.load(path))
    results = []
    for feed in feeds:
        openvino.start(feed)
        results.append(openvino.outputs())
    openvino.close()
    return results
