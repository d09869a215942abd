"""Executors for jobs that run beyond one process: processes of this machine, and the nodes of a Ray cluster.

Every heavy job of detent takes ``executor=``, anything with the interface of ``concurrent.futures.Executor``:

====================================== =======================================================================
executor                               runs on
====================================== =======================================================================
``process_executor(4)``                processes of this machine; the items of a process that dies run again
``ray_executor()``                     a Ray cluster, with retries (extra ``ray``)
``ProcessPoolExecutor(4)``             processes of this machine; a process that dies ends the job
``dask.distributed.Client``            a Dask cluster: pass ``client.get_executor()``
``mpi4py.futures.MPIPoolExecutor()``   MPI processes
====================================== =======================================================================

The engine schedules the work; this module only gives it the interface of an executor.
Ray is imported when ``ray_executor`` is called.
"""

import logging
import multiprocessing
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from typing import Any, NamedTuple, TypeVar

from detent.checks import as_integer
from detent.errors import SpecError, UnsupportedError, WorkerError, install_hint
from detent.work_items import Environment

__all__ = ["ProcessExecutor", "RayExecutor", "cluster_nodes", "process_executor", "ray_executor"]

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
CONNECT_SECONDS = 60.0  # in which a cluster whose address accepts connections must answer, also if it is busy
PROBE_SECONDS = 5.0  # in which an address must accept a connection
POLL_SECONDS = 0.05
NO_ANSWER = "the node does not answer"
_WORKER = re.compile(r"pid=(?P<process>\d+), ip=(?P<host>[^,)]+)")  # in the errors of Ray
TASKS_PER_WORKER = 2  # one runs, the other hides the latency of Ray


def process_executor(workers: int, *, retries: int = 3) -> "ProcessExecutor":
    """Return an executor with ``workers`` processes of this machine.

    Args:
        workers: number of processes.
        retries: how often the pool is started again after a process died.

    >>> with process_executor(2) as executor:
    ...     executor.workers
    2
    """
    return ProcessExecutor(workers, retries=retries)


class ProcessExecutor(Executor):
    """A ProcessPoolExecutor that starts again if a process dies, for example because memory ran out.

    The items that were in work run again; a result that has arrived is never computed twice. Processes are spawned, not
    forked, because the driver may have threads.
    """

    def __init__(self, workers: int, *, retries: int = 3) -> None:
        self.workers = as_integer("workers", workers, at_least=1)
        self._retries = as_integer("retries", retries, at_least=0)
        self._lock = threading.RLock()
        self._pool: ProcessPoolExecutor | None = None
        self._is_shut = False

    def submit(self, function: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Schedule a call; see ``concurrent.futures.Executor.submit``."""
        future: Future[ResultT] = Future()
        self._start(future, function, args, kwargs)
        return future

    def _start(
        self, future: Future[ResultT], function: Callable[..., ResultT], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.workers, mp_context=context)
            pool = self._pool
        try:  # without our lock: the pool has its own, which it may hold while it calls ``finish``
            inner = pool.submit(function, *args, **kwargs)
        except BrokenExecutor as error:
            self._restart(pool, error)
            self._start(future, function, args, kwargs)
            return

        def finish(done: Future[ResultT]) -> None:
            if done.cancelled():
                future.cancel()
                return
            error = done.exception()
            if isinstance(error, BrokenExecutor) and not future.cancelled():
                try:
                    self._restart(pool, error)
                    self._start(future, function, args, kwargs)
                except (BrokenExecutor, RuntimeError) as final:
                    _settle(future, error=final)
            else:
                _settle(future, None if error is not None else done.result(), error)

        inner.add_done_callback(finish)
        future.add_done_callback(lambda outer: outer.cancelled() and inner.cancel())

    def _restart(self, broken: ProcessPoolExecutor, error: BaseException) -> None:
        """Forget a broken pool, so that the next call starts a new one; raise the error after too many retries."""
        with self._lock:
            if self._pool is not broken:
                return  # another future has done it
            if self._retries == 0:
                raise error
            self._retries -= 1
            _log.warning("a worker process died; its items run again (%d more retries)", self._retries)
            self._pool = None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the processes; see ``concurrent.futures.Executor.shutdown``."""
        with self._lock:
            self._is_shut = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)


def _settle(future: Future[Any], result: object = None, error: BaseException | None = None) -> None:
    """Set the result or the error of a future, unless it was canceled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def ray_executor(
    address: str | None = None, *, num_cpus: float = 1, retries: int = 3, workers: int | None = None
) -> "RayExecutor":
    """Return an executor whose items are tasks of a Ray cluster.

    Args:
        address: address of the cluster, such as "10.0.0.1:6379", "auto" for the cluster of this machine, or "local" to
            start Ray in this process. None uses the cluster that this process is connected to, or does what
            ``ray.init()`` does: look for a cluster, and start Ray if there is no cluster.
        num_cpus: CPUs that Ray reserves for each item.
        retries: how often Ray runs an item again if its worker or node dies.
        workers: number of workers to expect; at most twice as many items are tasks of Ray at a time. None for the CPUs
            of the cluster.

    Raises:
        UnsupportedError: Ray is not installed.
        SpecError: no node has ``num_cpus`` CPUs, or this process is connected to another cluster.
        WorkerError: no cluster answers at the address.
    """
    as_integer("retries", retries, at_least=0)
    ray = _import_ray()
    _connect(ray, address)
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    largest = max(cpus, default=0)
    if num_cpus > largest:
        raise SpecError(f"got num_cpus={num_cpus}, but no node of the cluster has as many: pass at most {largest:g}")
    if workers is None:
        workers = max(1, int(sum(cpus) / max(num_cpus, 1e-3)))
    return RayExecutor(ray, num_cpus, retries, as_integer("workers", workers, at_least=1))


def _import_ray() -> Any:  # noqa: ANN401 - a module without types
    try:
        import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415 - optional
    except ImportError as error:
        raise UnsupportedError(f"Ray is not installed: {install_hint('ray')}") from error
    return ray


def _connect(ray: Any, address: str | None) -> None:  # noqa: ANN401 - a module without types
    """Connect to a cluster; fail within seconds if none answers."""
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in {None, "auto", connected}:
            raise SpecError(
                f"this process is connected to the Ray cluster {connected}, got {address}: call ray.shutdown() first"
            )
        return
    result: list[BaseException | None] = []

    def call() -> None:
        try:
            ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
            result.append(None)
        except BaseException as error:  # noqa: BLE001 - passed on to the calling thread
            result.append(error)

    if address is None or address == "local":
        call()
    else:
        _check_answers(address)
        thread = threading.Thread(target=call, daemon=True)  # ray.init retries for a minute and cannot be interrupted
        thread.start()
        thread.join(CONNECT_SECONDS)
        if not result:
            raise _no_answer(address, f"within {CONNECT_SECONDS:.0f} s")
    error = result[0]
    if isinstance(error, Exception):
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkerError(
            f"cannot connect to the Ray cluster {address or 'of this machine'}: {first[0]}; start one with: "
            "ray start --head"
        ) from error
    if error is not None:
        raise error


def _check_answers(address: str) -> None:
    """Reject an address HOST:PORT at which no program listens; ray.init would try it for a minute."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in host:
        return  # such as "auto"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS):
            return
    except (OSError, OverflowError) as error:
        raise _no_answer(address, f"({getattr(error, 'strerror', None) or error})") from error


def _no_answer(address: str, reason: str) -> WorkerError:
    return WorkerError(
        f"no Ray cluster answers at {address} {reason}: check the address (ray status), or start one with: "
        "ray start --head"
    )


class RayExecutor(Executor):
    """An executor whose calls are tasks of a Ray cluster; made by ``ray_executor``.

    Ray runs a task again if its worker or its node dies, so a result counts once. Only a few calls per worker become
    tasks at once; the others wait here, where they can be canceled. Tasks are not canceled, because a task that ends
    at the moment of its cancellation may abort the driver (https://github.com/ray-project/ray/pull/54798).
    """

    def __init__(self, ray: Any, num_cpus: float, retries: int, workers: int) -> None:  # noqa: ANN401 - a module
        self.workers = workers
        self._ray = ray
        self._task = ray.remote(num_cpus=num_cpus, max_retries=retries)(_call)
        self._waiting: deque[_Waiting] = deque()
        self._flying: dict[Any, Future[Any]] = {}  # by the references of tasks
        self._lock = threading.RLock()  # a callback of a future may submit the next call
        self._wake = threading.Event()
        self._is_shut = False
        self._checked = set[Callable[[], Environment]]()
        self._thread = threading.Thread(target=self._watch, name="detent-ray", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Schedule a call; see ``concurrent.futures.Executor.submit``."""
        future: Future[ResultT] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append(_Waiting(future, function, args, kwargs))
            self._start_tasks()
        self._wake.set()
        return future

    def _start_tasks(self) -> None:
        """Make tasks of the calls that wait, while there are few tasks. The caller has the lock."""
        while self._waiting and len(self._flying) < TASKS_PER_WORKER * self.workers:
            call = self._waiting.popleft()
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                reference = self._task.remote(call.function, call.args, call.kwargs)
            except Exception as error:  # noqa: BLE001 - the call cannot be sent
                call.future.set_exception(error)
            else:
                self._flying[reference] = call.future

    def _watch(self) -> None:
        """Pass results of tasks on to their futures."""
        while True:
            self._wake.wait()
            with self._lock:
                references = list(self._flying)
                if not references:
                    self._wake.clear()
                    if self._is_shut:
                        return
                    continue
            try:
                ready, _ = self._ray.wait(references, num_returns=1, timeout=POLL_SECONDS, fetch_local=True)
            except Exception as error:  # noqa: BLE001 - nobody else would tell those who wait
                self._fail(WorkerError(f"the connection to Ray failed: {error}"))
                continue
            with self._lock:
                finished = [(self._flying.pop(reference), reference) for reference in ready]
                self._start_tasks()
            for future, reference in finished:
                self._finish(future, reference)

    def _finish(self, future: Future[Any], reference: Any) -> None:  # noqa: ANN401 - an object reference of Ray
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # raised by the call, or before it
            future.set_exception(self._call_error(error))
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]  # the last line has the cause
            future.set_exception(WorkerError(f"Ray gave up on an item: {lines[-1].strip()}"))
        except Exception as error:  # noqa: BLE001 - the result cannot be read
            future.set_exception(error)
        else:
            future.set_result(result)

    def _call_error(self, error: Any) -> Exception:  # noqa: ANN401 - an error of Ray
        """Return the error of a call; if Ray could not make the call, return an error that names the worker."""
        cause = error.cause
        if not isinstance(cause, self._ray.exceptions.RayError | ImportError):
            return cause if isinstance(cause, Exception) else WorkerError(str(error))
        match = _WORKER.search(str(error))
        worker = f"worker {match['host']}:{match['process']}" if match else "a worker"
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        return WorkerError(f"{worker} cannot run items: {lines[-1].strip()}; install detent and its extras there")

    def check_workers(self, environment: Callable[[], Environment]) -> None:
        """Ask every node for its environment, once; ``run_items`` calls this before the first item.

        Raises:
            WorkerError: a node differs from the driver, or cannot import what it needs.
        """
        if environment in self._checked:
            return
        for node, problems in cluster_nodes(self, environment).items():
            if problems == [NO_ANSWER]:
                _log.warning("node %s did not answer within %.0f s", node, CONNECT_SECONDS)
            elif problems:
                raise WorkerError(f"node {node}: {'; '.join(problems)}; give all nodes the same software and CPU")
        self._checked.add(environment)

    def _fail(self, error: Exception) -> None:
        """End all calls with an error."""
        with self._lock:
            self._is_shut = True
            waiting, flying = list(self._waiting), list(self._flying.values())
            self._waiting.clear()
            self._flying.clear()
        for future in (*flying, *(call.future for call in waiting if call.future.set_running_or_notify_cancel())):
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop accepting calls; see ``concurrent.futures.Executor.shutdown``. The connection to the cluster stays."""
        with self._lock:
            self._is_shut = True
            waiting = list(self._waiting) if cancel_futures else []
        for call in waiting:
            call.future.cancel()
        self._wake.set()
        if wait:
            self._thread.join()


class _Waiting(NamedTuple):
    """A call that is not yet a task."""

    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _call(function: Callable[..., ResultT], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResultT:
    return function(*args, **kwargs)


def cluster_nodes(
    executor: "RayExecutor", environment: Callable[[], Environment], paths: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Ask every node of a Ray cluster what it lacks; return the problems by node, none for a node that fits.

    Args:
        executor: a Ray executor.
        environment: a function of a module that returns the environment of a process.
        paths: files or directories that every node must see.
    """
    ray, driver = executor._ray, environment()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    alive = [node for node in ray.nodes() if node["Alive"]]
    check = ray.remote(num_cpus=0, max_retries=0)(_check_node)
    references = {
        f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})": check.options(
            scheduling_strategy=strategy(node["NodeID"], soft=False)
        ).remote(environment, paths)
        for node in alive
    }
    problems: dict[str, list[str]] = {}
    end = time.monotonic() + CONNECT_SECONDS
    for name, reference in references.items():
        try:
            there, missing = ray.get(reference, timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            problems[name] = [NO_ANSWER]
        except Exception as error:  # noqa: BLE001 - anything that a node without detent raises
            problems[name] = [(str(error).strip().splitlines() or [type(error).__name__])[-1]]
        else:
            problems[name] = [*driver.differences(there), *(f"{path} is missing" for path in missing)]
    return problems


def _check_node(environment: Callable[[], Environment], paths: tuple[str, ...]) -> tuple[Environment, list[str]]:
    from pathlib import Path  # noqa: PLC0415 - runs on a node

    return environment(), [path for path in paths if not Path(path).exists()]
