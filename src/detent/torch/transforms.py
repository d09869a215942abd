"""Transforms of ``torch.func``: update the state of a module inside a differentiated or vectorized function.

``torch.func`` forbids writes to tensors that a transformed function has captured, and buffers of quantizers are
captured unless they are arguments. Ranges need no derivatives. So a range is lifted out of the transforms that the
buffer is not part of, and then written to the buffer. Lifting a range out of ``grad``, ``vjp`` or ``jvp`` does not
change its value. Lifting out of ``vmap`` merges the ranges of all samples. The state changes once per call, the same as
without transforms.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

__all__ = ["is_batched_beyond", "lifted", "outside"]


def _is_transformed() -> bool:
    return not torch.compiler.is_compiling() and bool(torch._C._are_functorch_transforms_active())


def _level(x: Tensor) -> int:
    """Return the level of the innermost ``torch.func`` transform that x is part of; less than 1 for a plain tensor."""
    level: int = torch._C._functorch.maybe_get_level(x)
    return level


def lifted(x: Tensor, buffer: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Unwrap x from the transforms that the buffer is not part of; ``reduce`` merges the samples of ``vmap``."""
    if not _is_transformed():
        return x
    functorch = torch._C._functorch
    while _level(x) > max(_level(buffer), 0):
        axis = functorch.maybe_get_bdim(x)
        inner: Tensor = functorch.get_unwrapped(x)
        with outside(inner):
            x = inner if axis < 0 else reduce(inner, axis)
    return x


def is_batched_beyond(x: Tensor, buffer: Tensor) -> bool:
    """Return whether x has a ``vmap`` axis that the buffer does not have."""
    if not _is_transformed():
        return False
    while _level(x) > max(_level(buffer), 0):
        if torch._C._functorch.maybe_get_bdim(x) >= 0:
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


@contextmanager
def outside(buffer: Tensor) -> Iterator[None]:
    """Leave the ``torch.func`` transforms that the buffer is not part of, so that the buffer can be written to."""
    if not _is_transformed():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack  # noqa: PLC0415 - rarely needed

    with ExitStack() as stack:
        while (torch._C._functorch.maybe_current_level() or 0) > max(_level(buffer), 0):
            stack.enter_context(temporarily_pop_interpreter_stack())
        with torch.no_grad():
            yield
