"""Ranks: processes that share a gloo group and run what a test sends them; one that hangs is a failure, not a wait."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from datetime import timedelta

PATIENCE = 60
COLLECTIVE = timedelta(seconds=40)


class Ranks:
    """Started once for many tests: starting takes longer than what they do."""

    def __init__(self, count, folder):
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, count, str(folder / "group"), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, function, *args):
        """What each rank returned, or the exception it raised, as (class name, message)."""
        for pipe in self.pipes:
            pipe.send((function, args))
        end = time.monotonic() + PATIENCE
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.stop()
                raise AssertionError(f"rank {rank} hangs in {function.__name__}")
            try:
                found.append(pipe.recv())
            except (EOFError, ConnectionError) as error:
                self.stop()
                raise AssertionError(f"rank {rank} died in {function.__name__}") from error
        return found

    def run(self, function, *args):
        """What each rank returned; none may raise."""
        found = self.outcomes(function, *args)
        for rank, (succeeded, value) in enumerate(found):
            assert succeeded, f"rank {rank}: {value[2]}"
        return [value for _, value in found]

    def stop(self):
        """Ends the processes that this object has started, whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()


def serve(rank, count, path, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=COLLECTIVE)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test decides
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
