"""Timing: tools take turns, so disturbances of the machine affect all of them.

A sample is the mean of enough consecutive calls to exceed the clock's resolution. Before each sample the process sleeps
briefly, so the threads of the previous tool go idle, and one untimed call warms the caches.

Other processes disturb tools that use all cores the most. A sample in which another process used a core is discarded if
enough samples remain. Results contain the number of undisturbed samples. ``await_quiet`` waits for an idle machine.
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from case import Tool

SAMPLE_SECONDS = 4e-3  # well above the resolution of the clock
SLEEP_SECONDS = 2e-3  # enough for idle threads to stop spinning
MIN_UNDISTURBED = 5  # with fewer undisturbed samples, the quartiles use all samples
MAX_BUSY_SHARE = 0.15  # busy share of all cores; below this the machine counts as idle
PROBE_SECONDS = 0.3  # seconds during which the load is measured
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Sample:
    """Mean seconds of a few consecutive calls, and whether another process used a core during these calls."""

    seconds: float
    disturbed: bool


@dataclass(frozen=True)
class Times:
    """Seconds per call (median, quartiles, best), and numbers of samples, undisturbed samples, and calls per sample."""

    median: float
    lower: float
    upper: float
    best: float
    samples: int
    undisturbed: int
    calls: int


def time_in_turns(tools: Sequence[Tool], seconds: float, rounds: tuple[int, int]) -> list[Times]:
    """Time tools in turns until each has used its share of the seconds.

    ``rounds`` is the smallest and the largest number of samples per tool. Slow tools finish after few samples, so there
    is time for more samples of fast tools, whose times vary more.
    """
    calls = [_calls(one) for one in tools]
    samples: list[list[Sample]] = [[] for _ in tools]
    fewest, most = rounds
    share = seconds / len(tools)
    for done in range(most):
        for one, count, taken in zip(tools, calls, samples, strict=True):
            if done < fewest or sum(sample.seconds for sample in taken) * count < share:
                taken.append(_sample(one, count))
    return [_summary(taken, count) for taken, count in zip(samples, calls, strict=True)]


def _calls(one: Tool) -> int:
    """Return the number of calls per sample; the calls also warm up the tool."""
    one.prepare()
    one.run()
    start = time.perf_counter()
    one.run()
    return max(1, min(1000, int(SAMPLE_SECONDS / (time.perf_counter() - start))))


def _sample(one: Tool, calls: int) -> Sample:
    one.prepare()
    time.sleep(SLEEP_SECONDS)
    run = one.run
    run()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - start
    return Sample(taken / calls, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw > switches)


def _summary(taken: list[Sample], calls: int) -> Times:
    everything = [sample.seconds for sample in taken]
    undisturbed = [sample.seconds for sample in taken if not sample.disturbed]
    used = undisturbed if len(undisturbed) >= MIN_UNDISTURBED else everything
    lower, _, upper = quantiles(used, n=4, method="inclusive")
    return Times(median(used), lower, upper, min(used), len(taken), len(undisturbed), calls)


def await_quiet(patience: float) -> float:
    """Wait at most ``patience`` seconds until other processes leave the cores idle; return the seconds left."""
    end = time.monotonic() + patience
    while time.monotonic() < end and _busy_share() > MAX_BUSY_SHARE:
        pass
    return max(0.0, end - time.monotonic())


def _busy_share() -> float:
    """Return the busy share of all cores while this process sleeps; 0 if the system does not report it."""
    if not _STAT.exists():
        return 0.0
    before = _ticks()
    time.sleep(PROBE_SECONDS)
    busy, total = (b - a for a, b in zip(before, _ticks(), strict=True))
    return busy / max(total, 1)


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
