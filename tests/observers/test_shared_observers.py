"""One observer in several threads: the result is that of one thread; copies share no state."""

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Percentile
from detent.observers import histogram as histogram_module
from detent.observers import observer as observer_module

KINDS = {
    "MinMax": lambda: MinMax("axis0"),
    "EMAMinMax": lambda: EMAMinMax(0.5, "axis0"),
    "Percentile": lambda: Percentile(1, 99, "axis0"),
    "MSE": lambda: MSE(granularity="axis0"),
    "Entropy": lambda: Entropy("axis0"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_histogram = pytest.mark.parametrize("kind", ["Percentile", "MSE", "Entropy"])
THREADS, BATCHES = 4, 60
RNG = np.random.default_rng(0)
# Scales from 2^-40 to 2^40: rows of the histogram are added while other threads count.
DATA = [RNG.normal(size=(4, 97)).astype(np.float32) * np.float32(2.0) ** RNG.integers(-40, 40) for _ in range(BATCHES)]
DATA[7][0, 3] = np.nan


def at_once(*tasks):
    """Run the tasks in threads that start together; the first error is raised."""
    barrier = threading.Barrier(len(tasks))

    def run(task):
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run, task) for task in tasks]]


@pytest.fixture(autouse=True)
def _others_run_in_between(monkeypatch):
    """Let other threads run between the measurement of a batch and the update of the state."""

    def slowed(kernel):
        def run(*args):
            measured = kernel(*args)
            time.sleep(1e-4)
            return measured

        return run

    for module, name in ((observer_module, "minmax"), (histogram_module, "minmax"), (histogram_module, "histogram")):
        monkeypatch.setattr(module, name, slowed(getattr(module, name)))


def feed(observer, batches):
    def run():
        for batch in batches:
            observer.observe(batch)

    return run


def one_after_the_other(kind):
    observer = KINDS[kind]()
    feed(observer, DATA)()
    return observer


@pytest.mark.parametrize("kind", ["MinMax", "Percentile", "MSE", "Entropy"])
def test_threads_observe_as_one(kind):
    observer = KINDS[kind]()
    at_once(*(feed(observer, DATA[i::THREADS]) for i in range(THREADS)))
    assert observer.to_bytes() == one_after_the_other(kind).to_bytes()


@every_histogram
def test_threads_observe_weights_as_one(kind):
    """The first weights turn counts into fixed point while other threads count."""
    observer, expected = KINDS[kind](), KINDS[kind]()

    def run(batches, weight):
        for batch in batches:
            observer.observe(batch, weight)

    at_once(*(lambda i=i: run(DATA[i::THREADS], 0.5 if i % 2 else None) for i in range(THREADS)))
    for i in range(THREADS):
        for batch in DATA[i::THREADS]:
            expected.observe(batch, 0.5 if i % 2 else None)
    assert observer.to_bytes() == expected.to_bytes()


def test_a_moving_average_uses_every_batch():
    """All batches are equal, because the average depends on their order; only counts could be lost."""
    observer, alike = KINDS["EMAMinMax"](), np.ones((4, 5), np.float32)
    at_once(*[feed(observer, [alike] * 300)] * THREADS)
    assert observer.batches == 300 * THREADS
    assert observer.count == 300 * THREADS * alike.size
    assert observer.range().hi.tolist() == [1.0] * 4


@every_kind
def test_a_state_read_meanwhile_is_one_that_was(kind):
    """Bytes taken while other threads observe contain whole batches: consistent counts, sums and bounds."""
    observer, done = KINDS[kind](), threading.Event()
    observer.observe(DATA[0])

    def read():
        while not done.is_set():
            again = type(observer).from_bytes(observer.to_bytes())  # rejects inconsistent counts
            assert (again.count + again.nonfinite) % DATA[0].size == 0
            copied = copy.copy(observer)
            assert (copied.count + copied.nonfinite) % DATA[0].size == 0
            assert type(observer).from_bytes(copied.to_bytes()).count == copied.count
            observer.range()

    def write():
        try:
            feed(observer, DATA[1:])()
        finally:
            done.set()

    at_once(read, write)
    assert observer.count + observer.nonfinite == BATCHES * DATA[0].size


@every_kind
def test_two_observers_merge_into_each_other_at_once(kind):
    """Two merges in opposite directions do not deadlock; either order is right."""
    for _ in range(50):
        a, b = KINDS[kind]().observe(DATA[0]), KINDS[kind]().observe(DATA[1])
        at_once(lambda a=a, b=b: a.merge(b), lambda a=a, b=b: b.merge(a))
        sizes = sorted((a.count, b.count))
        assert sizes == [2 * DATA[0].size, 3 * DATA[0].size]


@every_kind
def test_merging_while_observed_loses_nothing(kind):
    whole, part = KINDS[kind]().observe(DATA[0]), KINDS[kind]().observe(DATA[1])
    at_once(feed(whole, DATA[2:40]), *[lambda: [whole.merge(part) for _ in range(20)]] * 2)
    assert whole.count + whole.nonfinite == (1 + 38 + 40) * DATA[0].size


@every_kind
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_share_nothing(kind, again):
    observer = KINDS[kind]().observe(DATA[0])
    before = observer.to_bytes()
    copied = again(observer)
    assert (type(copied), repr(copied), copied.to_bytes()) == (type(observer), repr(observer), before)
    copied.observe(DATA[0]).observe(DATA[1])
    assert observer.to_bytes() == before
    after = copied.to_bytes()
    observer.observe(DATA[2]).reset()
    assert copied.to_bytes() == after


@every_kind
def test_an_error_lets_other_threads_go_on(kind):
    observer = KINDS[kind]().observe(DATA[0])
    with pytest.raises(ValueError, match="earlier batches gave"):
        observer.observe(np.ones((3, 5), np.float32))
    assert at_once(lambda: observer.observe(DATA[1]).count + observer.nonfinite) == [2 * DATA[0].size]
