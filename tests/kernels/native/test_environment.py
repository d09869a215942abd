"""Environment variables and the affinity mask, each read by a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import detent as dt
from detent.kernels import native

from .twins import OPERATIONS

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
BACKEND = """
import detent as dt
plan = dt.Plan.select("quantize", shape=(4,), dtype="float32", spec="int8")
print(plan.kernel.backend)
"""
STOCHASTIC = BACKEND.replace('"int8"', 'dt.QuantSpec("int8", rounding="stochastic")')
THREADS = "import detent as dt; print(dt.get_num_threads())"


def run(program, before="", **variables):
    """Run a program in a subprocess with these variables, and without other variables of detent."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DETENT_", "OMP_"))}
    return subprocess.run(
        [sys.executable, "-c", before + program],
        env=inherited | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed(program, before="", **variables):
    done = run(program, before, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("choice", ["reference", "native"])
def test_kernels(choice):
    assert printed(BACKEND, DETENT_KERNELS=choice) == choice


@pytest.mark.parametrize("choice", ["", "auto"])
def test_native_kernels_are_the_default(choice):
    assert printed(BACKEND, DETENT_KERNELS=choice) == "native"


def test_auto_falls_back():
    assert printed(STOCHASTIC, DETENT_KERNELS="auto") == "reference"


def test_native_refuses_what_it_cannot():
    done = run(STOCHASTIC, DETENT_KERNELS="native")
    assert done.returncode != 0
    assert "UnsupportedError: stochastic rounding has no native kernel" in done.stderr


def test_an_unknown_choice_is_refused():
    done = run(BACKEND, DETENT_KERNELS="natve")
    assert done.returncode != 0
    assert "unknown DETENT_KERNELS='natve'" in done.stderr


def test_a_block_overrides_the_variable():
    program = "import detent as dt\nwith dt.use_kernels('reference'):\n    print(dt.capabilities().kernels['quantize'])"
    assert printed(program, DETENT_KERNELS="native") == "reference"


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"DETENT_NUM_THREADS": "5"}, "5"),
        ({"OMP_NUM_THREADS": "7"}, "7"),
        ({"OMP_NUM_THREADS": "6,2"}, "6"),
        ({"DETENT_NUM_THREADS": "3", "OMP_NUM_THREADS": "7"}, "3"),
        ({"DETENT_NUM_THREADS": "", "OMP_NUM_THREADS": "4"}, "4"),
    ],
)
def test_threads(variables, count):
    assert printed(THREADS, **variables) == count


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_bad_thread_count_is_refused(value):
    done = run(THREADS, DETENT_NUM_THREADS=value)
    assert done.returncode != 0
    assert "DETENT_NUM_THREADS" in done.stderr


@pytest.mark.skipif(not CORES, reason="no affinity mask here")
def test_the_affinity_mask_limits_threads():
    before = f"import os; os.sched_setaffinity(0, {{{CORES[0]}}})\n"
    assert printed(THREADS, before) == "1"


@pytest.mark.skipif(not CORES, reason="no affinity mask here")
def test_all_cores_of_the_mask_are_used():
    assert printed(THREADS) == str(len(CORES))


@needs_proc
@pytest.mark.parametrize("count", [1, 3])
def test_no_more_threads_run_than_asked_for(count):
    program = """
import os
import numpy as np
import detent as dt
x = np.ones(1 << 20, np.float32)
with dt.use_kernels("native"):
    before = len(os.listdir("/proc/self/task"))
    dt.fake_quantize(x, dt.QuantParams.int8_symmetric())
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert printed(program, DETENT_NUM_THREADS=str(count)) == str(count - 1)


@needs_proc
def test_small_arrays_start_no_thread():
    program = """
import os
import numpy as np
import detent as dt
with dt.use_kernels("native"):
    before = len(os.listdir("/proc/self/task"))
    dt.fake_quantize(np.ones(1000, np.float32), dt.QuantParams.int8_symmetric())
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert printed(program, DETENT_NUM_THREADS="3") == "0"


def test_capabilities_name_level_and_threads():
    facts = printed("import detent as dt; print(dt.capabilities())", DETENT_NUM_THREADS="3").splitlines()[:3]
    assert facts[1:] == [f"instruction set  {native.current_level()}", "threads          3"]


def test_the_best_level_is_used():
    assert native.current_level() == [name for name, runs in native.levels().items() if runs][-1]


def test_every_operation_of_the_matrix_is_native():
    with dt.use_kernels("auto"):
        kernels = dt.capabilities().kernels
    assert {kernels[name] for name in OPERATIONS} == {"native"}
