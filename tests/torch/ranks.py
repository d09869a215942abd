"""Ranks: processes in a gloo group that run functions of tests; a process that hangs fails the test."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from datetime import timedelta

TIMEOUT_SECONDS = 60
COLLECTIVE_TIMEOUT = timedelta(seconds=40)


class Ranks:
    """A group of processes for many tests, because starting them takes longer than a test."""

    def __init__(self, count, directory):
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, count, str(directory / "group"), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, function, *args):
        """The result of each rank: (True, value), or (False, (class name, message, traceback)) of an exception."""
        for pipe in self.pipes:
            pipe.send((function, args))
        end = time.monotonic() + TIMEOUT_SECONDS
        outcomes = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.stop()
                raise AssertionError(f"rank {rank} hangs in {function.__name__}")
            try:
                outcomes.append(pipe.recv())
            except (EOFError, ConnectionError) as error:
                self.stop()
                raise AssertionError(f"rank {rank} died in {function.__name__}") from error
        return outcomes

    def run(self, function, *args):
        """The value that each rank returned; fails if a rank raises."""
        outcomes = self.outcomes(function, *args)
        for rank, (succeeded, value) in enumerate(outcomes):
            assert succeeded, f"rank {rank}: {value[2]}"
        return [value for _, value in outcomes]

    def stop(self):
        """Kill the processes that this object has started."""
        for process in self.processes:
            process.kill()
            process.join()


def serve(rank, count, path, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=COLLECTIVE_TIMEOUT
    )
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except Exception as error:  # noqa: BLE001 - the test checks the exception
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
