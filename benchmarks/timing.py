"""Timing: contestants take turns, so that whatever disturbs the machine disturbs all of them alike.

A sample is the mean of enough calls in a row to be well above the clock's resolution. Before each sample the machine
rests for a moment, so that the threads of whoever ran before go to sleep, and one call warms the caches, untimed.

Other processes disturb most where all cores are used. A sample in which one of them took a core from us is left out
where enough others remain. Results count them, since a busy machine is harder on those who use all cores, and
``await_quiet`` waits a while for the others to finish.
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from case import Contestant

SAMPLE = 4e-3
REST = 2e-3
ENOUGH = 5
QUIET_SHARE, LOOK = 0.15, 0.3
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Sample:
    """The mean seconds of a few calls in a row, and whether another process took a core from us meanwhile."""

    seconds: float
    disturbed: bool


@dataclass(frozen=True)
class Times:
    """Seconds per call: median, quartiles, fastest; how often was measured, and how often without disturbance."""

    median: float
    lower: float
    upper: float
    best: float
    samples: int
    undisturbed: int
    calls: int


def race(contestants: Sequence[Contestant], seconds: float, rounds: tuple[int, int]) -> list[Times]:
    """The times of contestants that take turns until each has used up its share of the seconds.

    Everybody takes part in the first rounds and nobody in more than the last, so that the slow ones step out early and
    leave the time to the fast ones, whose noise is larger.
    """
    calls = [_calls(one) for one in contestants]
    samples: list[list[Sample]] = [[] for _ in contestants]
    fewest, most = rounds
    share = seconds / len(contestants)
    for done in range(most):
        for one, count, taken in zip(contestants, calls, samples, strict=True):
            if done < fewest or sum(sample.seconds for sample in taken) * count < share:
                taken.append(_sample(one, count))
    return [_summary(taken, count) for taken, count in zip(samples, calls, strict=True)]


def _calls(one: Contestant) -> int:
    """How many calls make a sample long enough; the first calls also warm up."""
    one.prepare()
    one.run()
    start = time.perf_counter()
    one.run()
    return max(1, min(1000, int(SAMPLE / (time.perf_counter() - start))))


def _sample(one: Contestant, calls: int) -> Sample:
    one.prepare()
    time.sleep(REST)
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
    calm = [sample.seconds for sample in taken if not sample.disturbed]
    used = calm if len(calm) >= ENOUGH else everything
    lower, _, upper = quantiles(used, n=4, method="inclusive")
    return Times(median(used), lower, upper, min(used), len(taken), len(calm), calls)


def await_quiet(patience: float) -> float:
    """Wait until the other processes leave the cores alone, at most so many seconds; gives the patience left."""
    end = time.monotonic() + patience
    while time.monotonic() < end and _busy_share() > QUIET_SHARE:
        pass
    return max(0.0, end - time.monotonic())


def _busy_share() -> float:
    """The busy part of all cores over a moment in which we sleep; 0 where the system does not say."""
    if not _STAT.exists():
        return 0.0
    before = _ticks()
    time.sleep(LOOK)
    busy, total = (b - a for a, b in zip(before, _ticks(), strict=True))
    return busy / max(total, 1)


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
