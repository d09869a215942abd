"""The options --workers and --ray: the executor that runs a job, and the workers that the progress bar shows."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, TypeVar

import typer

from detent.cli.options import WORK
from detent.cluster import process_executor, ray_executor
from detent.errors import SpecError
from detent.tables import counted
from detent.work_items import Environment

__all__ = ["Ray", "WatchedExecutor", "WorkDirectory", "Workers", "open_executor"]

ResultT = TypeVar("ResultT")
SECONDS_ALIVE = 30.0  # a worker counts as alive if it has finished an item in this time

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, metavar="N", help="Processes of this machine that share the work.", rich_help_panel=WORK
    ),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Ray cluster: HOST:PORT, auto, or local.", rich_help_panel=WORK),
]
WorkDirectory = Annotated[
    Path | None,
    typer.Option("--work-directory", metavar="DIR", help="A directory that all workers see.", rich_help_panel=WORK),
]


class WatchedExecutor(Executor):
    """An executor that counts finished items, and the workers that finished them.

    ``label`` is the text that a progress bar shows. ``on_change`` is called after each item.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.workers = getattr(executor, "workers", None)
        self.on_change: Callable[[], object] | None = None
        self._seen: dict[str, float] = {}  # the time of each worker's last item
        self._done, self._start, self._lock = 0, time.monotonic(), Lock()

    def submit(self, function: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Schedule a call; see ``concurrent.futures.Executor.submit``."""
        future = self._executor.submit(function, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def check_workers(self, environment: Callable[[], Environment]) -> None:
        """Ask all nodes for their environment, if the executor can; see ``RayExecutor.check_workers``."""
        check = getattr(self._executor, "check_workers", None)
        if check is not None:
            check(environment)

    def _count(self, future: Future[Any]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        with self._lock:
            self._done += 1
            self._seen[str(getattr(future.result(), "worker", ""))] = time.monotonic()
        if self.on_change is not None:
            self.on_change()

    @property
    def label(self) -> str:
        """Workers alive, items done, and items per second."""
        now = time.monotonic()
        with self._lock:
            alive = sum(now - last < SECONDS_ALIVE for last in self._seen.values())
        speed = self._done / max(now - self._start, 1e-9)
        return f"{counted(alive, 'worker')}, {counted(self._done, 'item', ',')}, {speed:.1f}/s"

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the executor; see ``concurrent.futures.Executor.shutdown``."""
        self._executor.shutdown(wait=wait, cancel_futures=cancel_futures)


@contextmanager
def open_executor(
    workers: int | None, ray: str | None, work_directory: Path | None
) -> Iterator[tuple[WatchedExecutor | None, dict[str, Any]]]:
    """Make the executor of --workers or --ray; yield it, and the arguments of a job. Ctrl-C cancels what was submitted.

    Raises:
        SpecError: both options are set, or --work-directory is set without them.
    """
    if workers is not None and ray is not None:
        raise SpecError("got --workers and --ray: pass one of them, because Ray has its own workers")
    if workers is None and ray is None:
        if work_directory is not None:
            raise SpecError("got --work-directory without workers: pass --workers or --ray, or drop it")
        yield None, {}
        return
    executor: Executor = ray_executor(ray) if workers is None else process_executor(workers)
    watched = WatchedExecutor(executor)
    is_done = False
    try:
        yield watched, {"executor": watched, "work_directory": work_directory}
        is_done = True
    finally:
        watched.shutdown(wait=is_done, cancel_futures=True)
