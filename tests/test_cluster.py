"""Executors of processes and of Ray: results, dead workers, errors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import detent as dt
from detent.cluster import cluster_nodes, process_executor, ray_executor
from detent.work_items import Environment, run_items


def plain():
    return Environment((("detent", dt.__version__),))


def double(x):
    return 2 * x


def fail(x):
    raise ValueError(f"no {x}")


def die_once(argument):
    """Kill the worker the first time; the file says that it happened."""
    path, value = argument
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_compute_in_order():
    with process_executor(2) as executor:
        assert list(run_items(executor, double, range(20), plain)) == list(range(0, 40, 2))


def test_errors_of_calls_are_those_of_the_future():
    with process_executor(1) as executor, pytest.raises(ValueError, match="no 3"):
        executor.submit(fail, 3).result(timeout=60)


def test_items_of_a_process_that_dies_run_again_and_count_once(tmp_path):
    with process_executor(2) as executor:
        items = [(str(tmp_path / "died"), i) for i in range(12)]
        assert list(run_items(executor, die_once, items, plain)) == list(range(12))


def test_items_that_nobody_waits_for_do_not_run():
    with process_executor(1) as executor:
        executor.submit(double, 1).result()
        start = time.monotonic()
        futures = [executor.submit(time.sleep, 0.5) for _ in range(20)]
        for future in futures:
            future.cancel()
    assert time.monotonic() - start < 5


def test_a_process_that_always_dies_ends_the_job():
    with process_executor(1, retries=1) as executor, pytest.raises(dt.WorkerError, match="a worker of ProcessExecutor"):
        list(run_items(executor, die, [1], plain))


def test_after_shutdown_nothing_can_be_submitted():
    executor = process_executor(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(double, 1)


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2"])
def test_a_bad_number_of_workers(workers):
    with pytest.raises(dt.DetentError, match="workers"):
        process_executor(workers)


def test_without_ray_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(dt.UnsupportedError, match=r"Ray is not installed: pip install 'detent\[ray\]'"):
        ray_executor()


def test_ray_and_dask_are_not_imported_by_detent(root):
    code = "import sys, detent, detent.cluster; print({'ray', 'dask', 'distributed'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert shown.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_ray_computes_in_order_and_reruns_items_of_dead_workers(ray_cluster, tmp_path):
    with ray_executor(ray_cluster.address) as executor:
        assert executor.workers == 3
        assert list(run_items(executor, double, range(30), plain)) == list(range(0, 60, 2))
        items = [(str(tmp_path / "died"), i) for i in range(6)]
        assert list(run_items(executor, die_once, items, plain)) == list(range(6))
        with pytest.raises(dt.WorkerError, match="failed with ValueError: no 1"):
            list(run_items(executor, fail, [1], plain))


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_a_removed_node_does_not_end_the_job(ray_cluster):
    node = ray_cluster.add_node(num_cpus=2)
    with ray_executor(ray_cluster.address) as executor:
        results = run_items(executor, slow_double, range(24), plain)
        assert next(results) == 0
        ray_cluster.remove_node(node)
        assert list(results) == list(range(2, 48, 2))


def slow_double(x):
    time.sleep(0.3)
    return 2 * x


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_nodes_say_what_they_lack(ray_cluster, tmp_path):
    with ray_executor(ray_cluster.address) as executor:
        nodes = cluster_nodes(executor, plain, (str(tmp_path), "/nothing/here"))
    assert len(nodes) == 3
    assert all(problems == ["/nothing/here is missing"] for problems in nodes.values())


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_an_address_where_nothing_answers_fails_within_seconds():
    pytest.importorskip("ray")
    code = "from detent.cluster import ray_executor; ray_executor('127.0.0.1:1')"
    start = time.monotonic()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "WorkerError" in shown.stderr.splitlines()[-1]
    assert "127.0.0.1:1" in shown.stderr.splitlines()[-1]
    assert time.monotonic() - start < 60
