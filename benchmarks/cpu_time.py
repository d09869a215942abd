"""CPU time of ONNX files relative to the float model, for machines on which other processes run, too.

The float model and the files take turns. A sample is the CPU time of this process for several runs, enough to exceed
the resolution of the clock. The smallest sample of each model is used, because other processes only make samples
longer. Threads do not spin while they wait, because spinning would count as CPU time.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]
SAMPLE_SECONDS = 5e-3
MAX_CALLS = 100
LOG_FATAL = 4
FLOAT = ""  # key of the float model


def cpu_times_in_turns(
    plain: Path,
    files: Mapping[str, Path],
    feeds: Sequence[Feed],
    rounds: int,
    threads: int,
    config: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, dict]:
    """Time files and the float model in turns; return milliseconds, the ratio to float, and the spread of each file.

    ``config`` has session options of ONNX Runtime.
    ``spread`` is the median sample of a file divided by its smallest sample; it is near 1 on an idle machine.
    """
    sessions = {name: _session(path, threads, config) for name, path in {FLOAT: plain, **files}.items()}
    for session in sessions.values():
        session.run(None, feeds[0])
    calls = {name: _calls(session, feeds[0]) for name, session in sessions.items()}
    samples: dict[str, list[float]] = {name: [] for name in sessions}
    names = list(sessions)
    for turn in range(rounds):
        feed, shift = feeds[turn % len(feeds)], turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_sample(sessions[name], feed, calls[name]))
    smallest = {name: min(times) for name, times in samples.items()}
    return {
        name: {
            "ms": round(smallest[name] * 1e3, 4),
            "float_ms": round(smallest[FLOAT] * 1e3, 4),
            "ratio": round(smallest[name] / smallest[FLOAT], 3),
            "spread": round(median(samples[name]) / smallest[name], 2),
        }
        for name in files
    }


def _session(path: Path, threads: int, config: Mapping[str, str]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = LOG_FATAL
    options.intra_op_num_threads = threads
    for key, value in {"session.intra_op.allow_spinning": "0", **config}.items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _calls(session: ort.InferenceSession, feed: Feed) -> int:
    start = time.process_time()
    session.run(None, feed)
    return max(1, min(MAX_CALLS, int(SAMPLE_SECONDS / max(time.process_time() - start, 1e-6))))


def _sample(session: ort.InferenceSession, feed: Feed, calls: int) -> float:
    session.run(None, feed)
    start = time.process_time()
    for _ in range(calls):
        session.run(None, feed)
    return (time.process_time() - start) / calls
