"""Any number of threads, detent's or the caller's, gives the same bits. Code that could hang runs in a subprocess."""

import os
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE, Popen, TimeoutExpired

import numpy as np
import pytest

import detent as dt

from .twins import OPERATIONS, Trial, at, difference, native_result, reference_result

SECONDS = 100
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
LARGE = (300, 1001)
PREPARE = """
    import os, sys, threading
    import numpy as np
    import detent as dt

    dt.set_num_threads(3)
    x = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    params = dt.QuantParams.from_data(dt.QuantSpec("int8", dt.PerAxis(0)), x)
    with dt.use_kernels("reference"):
        expected = dt.fake_quantize(x, params).tobytes()

    def right():
        with dt.use_kernels("native"):
            return dt.fake_quantize(x, params).tobytes() == expected
"""


def outcome(body):
    """Run a program in a subprocess and return its output; a hang fails after the time limit."""
    program = textwrap.dedent(PREPARE) + textwrap.dedent(body)
    command = [sys.executable, "-W", "ignore", "-c", program]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process:
        try:
            printed, errors = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # including its child processes
            raise
    assert process.returncode == 0, errors
    return printed.split()


@needs_fork
def test_a_hang_is_noticed(monkeypatch):
    """Check that the other tests of this file can fail: a child process that never ends is killed."""
    monkeypatch.setattr(f"{__name__}.SECONDS", 3)
    with pytest.raises(TimeoutExpired):
        outcome("""
            pid = os.fork()
            threading.Event().wait() if pid == 0 else os.waitpid(pid, 0)
        """)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerAxis(1), dt.PerGroup(7)], ids=str)
def test_the_number_of_threads_changes_nothing(granularity, operation):
    trial = Trial(operation, granularity=granularity, shape=LARGE)
    with at(threads=1):
        alone = native_result(trial)
    for threads in (2, 3, 4, 7, 16):
        with at(threads=threads):
            assert difference(native_result(trial), alone) is None, threads


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_thread_count_may_change_between_runs_of_a_plan(operation):
    trial = Trial(operation, shape=LARGE)
    expected = reference_result(trial)
    with at(threads=1):
        for threads in (3, 1, 2, 5, 1):
            dt.set_num_threads(threads)
            assert difference(native_result(trial), expected) is None, threads


def test_eight_threads_at_once():
    trials = [Trial(OPERATIONS[i % len(OPERATIONS)], granularity=dt.PerAxis(0), shape=LARGE, seed=i) for i in range(8)]
    expected = [reference_result(trial) for trial in trials]

    def differing(i):
        return [d for _ in range(20) if (d := difference(native_result(trials[i]), expected[i])) is not None]

    with at(threads=3), ThreadPoolExecutor(8) as pool:
        assert list(pool.map(differing, range(8))) == [[]] * 8


def test_eight_threads_share_one_plan_and_hang_never():
    printed = outcome("""
        results, start = [], threading.Barrier(8)

        def work():
            start.wait()
            results.extend(right() for _ in range(30))

        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(len(results), all(results))
    """)
    assert printed == ["240", "True"]


def test_the_caller_may_leave_while_others_work():
    """Daemon threads inside kernels do not keep the process from ending, nor crash it."""
    printed = outcome("""
        def forever():
            while True:
                right()

        for _ in range(4):
            threading.Thread(target=forever, daemon=True).start()
        print(right(), flush=True)
        os._exit(0)
    """)
    assert printed == ["True"]


FORK = """
    pid = os.fork()
    if pid == 0:
        os._exit(0 if right() and right() else 3)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@needs_fork
def test_fork_after_use():
    body = textwrap.dedent("statuses = [] if right() else None") + textwrap.dedent(FORK)
    assert outcome(body + "print(*statuses, right())") == ["0", "True"]


@needs_fork
def test_fork_of_a_fork():
    printed = outcome("""
        assert right()
        pid = os.fork()
        if pid == 0:
            assert right()
            inner = os.fork()
            if inner == 0:
                os._exit(0 if right() else 3)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), right())
    """)
    assert printed == ["0", "True"]


@needs_fork
def test_fork_while_another_thread_is_inside_a_kernel():
    printed = outcome("""
        stop = threading.Event()

        def busy():
            while not stop.is_set():
                right()

        worker = threading.Thread(target=busy)
        worker.start()
        codes = []
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if right() and right() else 3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        stop.set()
        worker.join()
        print(*codes, right())
    """)
    assert printed == ["0"] * 10 + ["True"]


@needs_fork
def test_inside_the_workers_of_a_data_loader():
    pytest.importorskip("torch")
    printed = outcome("""
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return torch.tensor([right(), os.getpid() != parent])

        parent = os.getpid()
        assert right()
        torch.ones(1 << 20).sum()  # torch's own threads are running too
        loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
        print(torch.cat(list(loader)).all().item(), right())
    """)
    assert printed == ["True", "True"]


def test_torch_and_detent_take_turns():
    pytest.importorskip("torch")
    printed = outcome("""
        import torch

        tensor = torch.randn(1 << 20)
        for _ in range(20):
            tensor.exp().sum().item()
            assert right()
        print("done")
    """)
    assert printed == ["done"]


def test_a_result_is_seen_whole():
    """When a run returns, every part of the result has been written."""
    x = np.ones(1 << 18, np.float32)
    params = dt.QuantParams.int8_symmetric()
    with at(threads=3), dt.use_kernels("native"):
        plan = dt.Plan.select("fake_quantize", shape=x.shape, dtype="float32", spec="int8")
        for _ in range(200):
            out = np.zeros_like(x)
            plan.run(x, params, out=out)
            assert out.all()
