"""Work items run on any executor, in order, with little in flight; wrong workers and files are refused."""

import os
import pickle
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import pytest

import detent as dt
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
    assert [workers_of(each) for each in (Recording(), ThreadPoolExecutor(3), object())] == [2, 3, 8]


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


def test_stamps_and_environments_are_small(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(10**6))
    assert len(pickle.dumps((FileStamp.of(path), PLAIN))) < 500
