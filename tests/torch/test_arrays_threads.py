"""Kernels on PyTorch's own threads: the same bits, from several threads at once, and in a forked child."""

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import detent as dt
from detent.kernels import join_team
from detent.torch.arrays import find_runtime, use_torch_threads

X = np.random.default_rng(0).normal(size=(64, 8192)).astype(np.float32)
PARAMS = dt.QuantParams.from_data("int8/axis0", X)


@pytest.fixture
def team():
    if not use_torch_threads():
        pytest.skip(f"no OpenMP runtime was found: {find_runtime()}")
    yield
    use_torch_threads()


def test_results_have_the_same_bits(team):
    ours = dt.fake_quantize(X, PARAMS)
    join_team(0)
    assert np.array_equal(ours, dt.fake_quantize(X, PARAMS))
    with dt.use_kernels("reference"):
        assert np.array_equal(ours, dt.fake_quantize(X, PARAMS))


@pytest.mark.parametrize(("runtime_threads", "expected_calls"), [(1, []), (2, [2]), (64, [4])])
def test_no_more_threads_than_the_runtime_has(runtime_threads, expected_calls, team):
    calls = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(function, context, threads, flags):
        calls.append(threads)
        body(function)(context)

    size = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: runtime_threads)
    before = dt.get_num_threads()
    expected = dt.fake_quantize(X, PARAMS)
    try:
        dt.set_num_threads(4)
        join_team(*(ctypes.cast(entry, ctypes.c_void_p).value for entry in (parallel, size)))
        with dt.use_kernels("native"):
            assert np.array_equal(dt.fake_quantize(X, PARAMS), expected)
    finally:
        dt.set_num_threads(before)
        use_torch_threads()
    assert calls == expected_calls


def test_torch_sets_the_number_of_threads(team):
    before = torch.get_num_threads()
    runtime = ctypes.CDLL(find_runtime())
    try:
        torch.set_num_threads(1)
        assert runtime.omp_get_max_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_several_threads_at_once(team):
    expected, are_equal = dt.fake_quantize(X, PARAMS), []

    def work():
        are_equal.extend(np.array_equal(dt.fake_quantize(X, PARAMS), expected) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert are_equal == [True] * 20


CHILD = """
import os, sys
import numpy as np
import torch
import detent as dt
import detent.torch

x = np.random.default_rng(0).normal(size=(64, 8192)).astype(np.float32)
params = dt.QuantParams.from_data("int8/axis0", x)
before = dt.fake_quantize(x, params)
torch.ones(1 << 20).add(1)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(dt.fake_quantize(x, params), before) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], timeout=60, check=False)
    assert done.returncode == 0
