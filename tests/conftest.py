"""Fixtures and settings of all tests: the repository's root, a Ray cluster, time limits, and profiles of Hypothesis.

DETENT_HYPOTHESIS_PROFILE chooses the profile: "quick" (the default) draws the same few examples in every run,
so a failure comes from a change and not from chance; "thorough" draws many new examples in each run.
"""

import faulthandler
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: idle OpenMP threads sleep instead of spinning. Workers of pytest-xdist share the cores, and
# spinning threads of one worker would take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SECONDS_TO_CLEAN_UP = 60

SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("quick", max_examples=50, derandomize=True, **SHARED)
settings.register_profile("thorough", max_examples=1000, print_blob=True, **SHARED)
settings.load_profile(os.environ.get("DETENT_HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def root() -> Path:
    """Root directory of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fail a test with the marker ``time_limit(seconds)`` that takes longer, with its fixtures.

    If the test does not even end after the failure, print where it hangs, and end the process.
    """
    marker = item.get_closest_marker("time_limit")
    if marker is None:
        return (yield)
    (seconds,) = marker.args

    def stop(_number, _frame):
        faulthandler.dump_traceback()
        raise TimeoutError(f"the test takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + SECONDS_TO_CLEAN_UP, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray cluster of three nodes with one CPU each, on this machine; its workers can import the modules of tests."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_worker_niceness", "0")  # by default 15, with which workers starve on a busy machine
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
