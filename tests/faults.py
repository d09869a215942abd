"""Executors that make a worker or a node of a job die in the middle; workers import this module."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from threading import Lock
from typing import Any


def kill_self_once(marker: str, function: Callable[..., Any], /, *args: Any) -> Any:
    """Call a function; the first time, die by SIGKILL before the result is returned."""
    result = function(*args)
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return result
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process cannot survive SIGKILL")


class Middle(Executor):
    """An executor that passes calls on to another one, and does something in the middle of the calls of a function.

    Attributes:
        calls: number of calls of the function.
    """

    def __init__(self, executor: Executor, function: Callable[..., Any], number: int) -> None:
        self.executor, self.workers = executor, getattr(executor, "workers", 2)
        self.calls, self._function, self._number, self._lock = 0, function, number, Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Schedule a call."""
        if args[0] is not self._function:
            return self.executor.submit(function, *args)
        self.calls += 1
        return self._submit(function, *args)

    def _submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        raise NotImplementedError


class DyingWorker(Middle):
    """Kills the worker that runs the call with this number, after its work and before its result is returned."""

    def __init__(self, executor: Executor, function: Callable[..., Any], number: int, marker: Path) -> None:
        super().__init__(executor, function, number)
        self._marker = marker

    def _submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        if self.calls != self._number:
            return self.executor.submit(function, *args)
        return self.executor.submit(kill_self_once, str(self._marker), function, *args)


class AfterResults(Middle):
    """Calls ``action`` once, after this number of results, in the thread that delivers them."""

    def __init__(
        self, executor: Executor, function: Callable[..., Any], number: int, action: Callable[[], object]
    ) -> None:
        super().__init__(executor, function, number)
        self._action, self._results = action, 0

    def _submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future = self.executor.submit(function, *args)
        future.add_done_callback(self._count)
        return future

    def _count(self, _future: Future[Any]) -> None:
        with self._lock:
            self._results += 1
            is_time = self._results == self._number
        if is_time:
            self._action()
