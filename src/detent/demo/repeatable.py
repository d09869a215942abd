"""Repeatable: PyTorch set up so that a machine computes the same numbers each time, and as before afterwards."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from detent.kernels import get_num_threads, set_num_threads

__all__ = ["repeatable"]


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """One thread, deterministic algorithms, float32 on the CPU, gradients, and random numbers from the seed.

    One thread is no sacrifice for a small network, and the number of cores then has no part in the numbers.

    >>> before = torch.get_rng_state()
    >>> draws = []
    >>> for _ in range(2):
    ...     with repeatable(7):
    ...         draws.append((torch.rand(1).item(), torch.get_num_threads()))
    >>> draws[0] == draws[1], draws[0][1], torch.equal(before, torch.get_rng_state())
    (True, 1, True)
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.use_deterministic_algorithms, strict, warn_only=warns)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_num_threads, threads)
        stack.callback(set_num_threads, get_num_threads())
        if torch.get_default_device().type != "cpu":  # such a context slows every operation down
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        torch.set_num_threads(1)
        set_num_threads(1)  # for speed alone: two would wait for each other
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices, which are not given back
        yield
