"""Work items run on any executor, in order, with little in flight; wrong workers and files are refused."""

import os
import pickle
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

import detent as dt
from detent import work_items
from detent.work_items import Environment, FileStamp, as_executor, run_items, worker_name, workers_of

PLAIN = Environment((("detent", "1"),))


def plain():
    return PLAIN


def newer():
    """The environment of the driver differs from that of workers: the process id is part of it."""
    return Environment((("detent", "1"), ("CPU level", str(os.getpid()))))


def double(x):
    return 2 * x


def fail_at_three(x):
    if x == 3:
        raise dt.NaNError("tensor 't' contains 1 NaN", 1, (0,))
    return x


def crash(x):
    raise KeyError(x)


def die(x):
    os._exit(1)


class Recording(Executor):
    """Runs calls at once, and records how many results were in flight."""

    workers = 2

    def __init__(self):
        self.submitted = 0

    def submit(self, function, /, *args, **kwargs):
        self.submitted += 1
        future = Future()
        future.set_result(function(*args, **kwargs))
        return future


def test_results_come_in_the_order_of_the_items():
    with ThreadPoolExecutor(3) as executor:
        assert list(run_items(executor, double, range(50), plain)) == [2 * i for i in range(50)]


def test_few_items_are_in_flight_and_items_are_read_as_needed():
    executor, read = Recording(), []
    results = run_items(executor, double, (read.append(i) or i for i in range(1000)), plain)
    assert next(results) == 0
    assert executor.submitted == len(read) <= 4 * executor.workers + 1
    assert len(list(results)) == 999


def test_no_items_give_no_results():
    assert list(run_items(Recording(), double, [], plain)) == []


def test_the_callback_hears_of_every_item():
    done = []
    list(run_items(Recording(), double, range(3), plain, on_done=lambda *each: done.append(each)))
    assert done == [(i, worker_name()) for i in (1, 2, 3)]


def test_an_error_of_detent_keeps_its_type_and_stops_the_job():
    executor = Recording()
    results = run_items(executor, fail_at_three, range(1000), plain)
    with pytest.raises(dt.NaNError, match="tensor 't' contains 1 NaN") as caught:
        list(results)
    assert caught.value.first_index == (0,)
    assert executor.submitted < 20


def test_another_error_names_the_worker():
    with pytest.raises(dt.WorkerError, match=r"worker \S+:\d+ failed with KeyError: 7"):
        list(run_items(Recording(), crash, [7], plain))


def test_another_environment_is_refused_with_both_values():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with pytest.raises(dt.WorkerError, match=r"worker \S+:(\d+) has CPU level \1, but \d+ on the driver"):
            list(run_items(executor, double, [1], newer))
        assert list(run_items(executor, double, [1], plain)) == [2]


def test_a_worker_that_dies_is_an_error_with_advice():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(dt.WorkerError, match=r"a worker of ProcessPoolExecutor died.*resume_file") as caught,
    ):
        list(run_items(executor, die, [1], plain))
    assert isinstance(caught.value.__cause__, BrokenProcessPool)


def test_a_function_that_cannot_be_sent_is_an_error():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(dt.WorkerError, match="ProcessPoolExecutor cannot send work to its workers"),
    ):
        list(run_items(executor, lambda x: x, [1], plain))


def test_leaving_early_cancels_what_was_submitted():
    class Never(Recording):
        def __init__(self):
            super().__init__()
            self.futures = []

        def submit(self, function, /, *args, **kwargs):
            if not self.futures:
                self.futures.append(super().submit(function, *args, **kwargs))
            else:
                self.futures.append(Future())
            return self.futures[-1]

    executor = Never()
    results = run_items(executor, double, range(9), plain)
    next(results)
    results.close()
    assert all(future.cancelled() for future in executor.futures[1:])
    assert len(executor.futures) > 2


@pytest.mark.parametrize("value", [None, 3, "processes", [1]])
def test_something_else_is_no_executor(value):
    with pytest.raises(dt.SpecError, match="expected an object with the method submit"):
        as_executor(value)


def test_the_number_of_workers():
    dask = SimpleNamespace(_client=SimpleNamespace(nthreads=lambda: {"tcp://a": 4, "tcp://b": 2}))
    starting = SimpleNamespace(_client=SimpleNamespace(nthreads=dict))
    executors = Recording(), ThreadPoolExecutor(3), object(), dask, starting
    assert [workers_of(each) for each in executors] == [2, 3, 8, 6, 8]


def test_a_stamp_accepts_the_same_file_only(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    stamp = FileStamp.of(path)
    assert stamp.check() == path
    path.write_bytes(b"two!")
    with pytest.raises(
        dt.WorkerError, match=r"sees another file at .*a\.bin: SHA-256 \w{12}\.\.\., but \w{12}\.\.\. on"
    ):
        stamp.check()
    path.unlink()
    with pytest.raises(dt.WorkerError, match=r"cannot read .*a\.bin \(No such file or directory\).*work_directory="):
        stamp.check()


def test_a_stamp_covers_the_parts_of_a_file(tmp_path):
    model, data = tmp_path / "a.onnx", tmp_path / "a.onnx.data"
    model.write_bytes(b"model")
    data.write_bytes(b"weights")
    stamp = FileStamp.of(model, [data])
    assert stamp.check() == model
    assert FileStamp.from_dict(asdict(stamp)) == stamp
    data.write_bytes(b"changed")
    with pytest.raises(dt.WorkerError, match=r"sees another file at .*a\.onnx\.data"):
        stamp.check()


@pytest.mark.parametrize("content", [None, b"on"])
def test_a_file_that_appears_late_is_awaited(tmp_path, content, monkeypatch):
    """As on a network file system, where other nodes see a new file with a delay, or a part of it."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    stamp = FileStamp.of(path)
    path.unlink() if content is None else path.write_bytes(content)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            path.write_bytes(b"one")

    monkeypatch.setattr(work_items.time, "sleep", sleep)
    assert stamp.check() == path
    assert waits == [0.05, 0.1, 0.2]


def test_a_missing_file_is_not_awaited_for_long(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    stamp = FileStamp.of(path)
    path.unlink()
    monkeypatch.setattr(work_items, "SECONDS_TO_APPEAR", 0.1)
    with pytest.raises(dt.WorkerError, match="cannot read"):
        stamp.check()


def test_equal_items_are_different_calls():
    """Dask takes calls with equal arguments for one call, and cancels them together."""
    calls = []

    class Noting(Recording):
        def submit(self, function, /, *args, **kwargs):
            calls.append(args)
            return super().submit(function, *args, **kwargs)

    for _ in range(2):
        assert list(run_items(Noting(), double, [1, 1], plain)) == [2, 2]
    assert len(set(calls)) == 4


def test_an_executor_may_check_its_workers_before_the_first_item():
    class Checking(Recording):
        def check_workers(self, environment):
            raise dt.WorkerError(f"node 7 has {environment().facts}")

    executor = Checking()
    with pytest.raises(dt.WorkerError, match="node 7 has"):
        list(run_items(executor, double, [1], plain))
    assert not executor.submitted


def test_stamps_and_environments_are_small(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(10**6))
    assert len(pickle.dumps((FileStamp.of(path), PLAIN))) < 500
