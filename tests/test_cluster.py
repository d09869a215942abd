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


HIDE_DETENT = """
import sys

class Hider:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "detent":
            raise ModuleNotFoundError("No module named 'detent'", name="detent")

sys.meta_path.insert(0, Hider)
"""


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_a_node_without_detent_is_named_before_the_first_item(ray_cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE_DETENT, encoding="utf-8")
    node = ray_cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parent}"})
    try:
        with ray_executor(ray_cluster.address) as executor:
            with pytest.raises(dt.WorkerError, match=r"node \S+ \(\w+\): .*No module named 'detent'"):
                list(run_items(executor, fail, [1], plain))
            with pytest.raises(
                dt.WorkerError, match=r"^worker [\d.]+:\d+ cannot run items: .*No module named 'detent'"
            ):
                run_on(executor, node)
    finally:
        ray_cluster.remove_node(node)


def run_on(executor, node):
    """Run a call on one node, without the check of all nodes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    executor._task = executor._task.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    )
    executor.submit(double, 1).result()


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_more_cpus_than_any_node_has(ray_cluster):
    with pytest.raises(dt.SpecError, match="got num_cpus=64, but no node of the cluster has as many: pass at most 1"):
        ray_executor(ray_cluster.address, num_cpus=64)


LOCAL_RAY = """
import os
import ray
from detent.cluster import ray_executor
from detent.work_items import Environment, run_items

def plain():
    return Environment(())

def die_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), 9)
    return "survived"

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
with ray_executor() as executor:
    print(list(run_items(executor, len, ["a", "bb", ""], plain)))
    print(*run_items(executor, die_once, [PATH], plain))
    print(*run_items(executor, int, ["x"], plain))
"""


@pytest.mark.time_limit(180)
def test_a_small_ray(tmp_path):
    pytest.importorskip("ray")
    code = LOCAL_RAY.replace("PATH", repr(str(tmp_path / "died")))
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert {"[1, 2, 0]", "survived"} <= set(shown.stdout.splitlines())
    assert "WorkerError: worker" in shown.stderr
    assert "failed with ValueError: invalid literal for int()" in shown.stderr


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "no.such.host.invalid:6379"])
def test_an_address_where_nothing_answers_fails_within_seconds(address):
    pytest.importorskip("ray")
    start = time.monotonic()
    with pytest.raises(dt.WorkerError, match=r"no Ray cluster answers at \S+ \(.+\): check the address") as caught:
        ray_executor(address)
    assert address in str(caught.value)
    assert time.monotonic() - start < 30  # Ray is imported
