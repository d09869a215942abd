"""Jobs on processes, Ray, Dask and MPI give the file of one process, also if workers, nodes or the driver die."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from executor_job import digest, quantized, write_job
from faults import AfterResults, DyingWorker

from detent import storage
from detent.cluster import process_executor, ray_executor
from detent.observers import passes
from detent.onnx import calibration_items

MANY_BATCHES = 600  # enough to die in the middle, after the first save


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


@contextmanager
def dask_executor(workers):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


def dies_in_the_middle(job, executor):
    """Quantize while a worker is killed; return the digest."""
    dying = DyingWorker(executor, calibration_items._observe, 5, job / "died")
    result = quantized(job, dying)
    assert (job / "died").exists()
    assert dying.calls > 8
    return result


@pytest.mark.time_limit(120)
def test_a_killed_process_does_not_change_the_file(job):
    with process_executor(2) as executor:
        assert dies_in_the_middle(job, executor) == quantized(job)


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_a_killed_worker_of_ray_does_not_change_the_file(job, ray_cluster):
    expected = quantized(job)
    with ray_executor(ray_cluster.address) as executor:
        assert quantized(job, executor) == expected
        assert dies_in_the_middle(job, executor) == expected


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_a_removed_node_does_not_change_the_file(job, ray_cluster):
    expected, node = quantized(job), ray_cluster.add_node(num_cpus=1)
    removed = []
    with ray_executor(ray_cluster.address) as executor:
        assert executor.workers == 4
        losing = AfterResults(
            executor, calibration_items._observe, 3, lambda: removed.append(ray_cluster.remove_node(node))
        )
        assert quantized(job, losing) == expected
    assert len(removed) == 1
    assert len(ray_cluster.list_all_nodes()) == 3


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_dask_gives_the_same_file(job):
    with dask_executor(2) as executor:
        assert quantized(job, executor) == quantized(job)


MPI_DRIVER = """
import sys
import detent.onnx as qo
from mpi4py.futures import MPIPoolExecutor

if __name__ == "__main__":
    job = sys.argv[1]
    with MPIPoolExecutor() as executor:
        qo.quantize(f"{job}/m.onnx", f"{job}/mpi.onnx", data=f"{job}/data", progress=False, executor=executor)
"""


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_mpi_gives_the_same_file(job):
    pytest.importorskip("mpi4py")
    if shutil.which("mpiexec") is None:
        pytest.skip("MPI is not installed")
    script = job / "mpi_driver.py"
    script.write_text(MPI_DRIVER, encoding="utf-8")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in a container
    command = ["mpiexec", "-n", "3", "--oversubscribe", sys.executable, "-m", "mpi4py.futures", script, job]
    subprocess.run(command, check=True, env={**os.environ, **as_root})
    assert digest(job / "mpi.onnx") == quantized(job)


DRIVER = """
import sys
import detent.onnx as qo
from detent.cluster import process_executor, ray_executor
from detent.observers import passes

passes.SECONDS_BETWEEN_SAVES = 0.0
if __name__ == "__main__":
    job, address = sys.argv[1:]
    with ray_executor(address) if address else process_executor(2) as executor:
        qo.quantize(f"{job}/m.onnx", f"{job}/killed.onnx", data=f"{job}/data", progress=False, executor=executor,
                    resume_file=f"{job}/state")
"""


def kill_driver(job, address):
    """Start a driver, kill it after its first save, and return the number of batches that the resume file has."""
    script, state = job / "driver.py", job / "state"
    script.write_text(DRIVER, encoding="utf-8")
    driver = subprocess.Popen([sys.executable, script, job, address], start_new_session=True)
    try:
        while not state.exists():
            assert driver.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert not (job / "killed.onnx").exists()
    _, metadata = storage.read(state)
    batches = int(metadata[passes.METADATA].split('"batches": ')[1].split(",")[0])
    assert 0 < batches < MANY_BATCHES
    return batches


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_a_killed_driver_is_resumed_with_the_same_file(tmp_path):
    job = write_job(tmp_path, MANY_BATCHES)
    done = kill_driver(job, "")
    with process_executor(3) as executor:
        assert resumed(job, executor, done) == quantized(job)


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_a_killed_driver_is_resumed_on_ray_with_the_same_file(tmp_path, ray_cluster):
    job = write_job(tmp_path, MANY_BATCHES)
    done = kill_driver(job, ray_cluster.address)
    with ray_executor(ray_cluster.address) as executor:
        assert resumed(job, executor, done) == quantized(job)


def resumed(job, executor, done):
    """Go on after the batches that were done; return the digest."""
    progress = []
    result = quantized(
        job, executor, resume_file=job / "state", progress=lambda batches, _total: progress.append(batches)
    )
    assert progress[0] > done
    assert progress[-1] == MANY_BATCHES
    return result


ZOO_MODELS = ("magika", "silero-vad", "basic-pitch")


@pytest.fixture(params=ZOO_MODELS)
def zoo_job(request, tmp_path):
    from zoo import ZOO

    model = ZOO[request.param]
    if not model.is_installed:
        pytest.skip("not installed")
    (tmp_path / "data").mkdir()
    for i, feed in enumerate(model.feeds(12)):
        np.savez(tmp_path / "data" / f"{i:02d}.npz", **feed)
    shutil.copy(model.write(tmp_path), tmp_path / "m.onnx")
    return tmp_path


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_zoo_models_have_the_same_file_on_all_executors(zoo_job, ray_cluster):
    digests = {"one process": quantized(zoo_job)}
    for workers in (2, 3):
        with process_executor(workers) as executor:
            digests[f"{workers} processes"] = quantized(zoo_job, executor)
    with dask_executor(2) as executor:
        digests["Dask"] = quantized(zoo_job, executor)
    with ray_executor(ray_cluster.address) as executor:
        digests["Ray"] = quantized(zoo_job, executor)
    assert len(set(digests.values())) == 1, digests
