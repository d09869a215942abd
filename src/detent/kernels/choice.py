"""Which kernels were asked for: by ``use_kernels`` in a ``with`` block, else by the environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from detent.env import KERNEL_CHOICES, default_kernels
from detent.errors import SpecError, closest

__all__ = ["current_kernels", "use_kernels"]

_choice: ContextVar[str | None] = ContextVar("detent_kernels", default=None)


def current_kernels() -> str:
    """The kernels asked for: "auto", "native" or "reference".

    >>> current_kernels() in ("auto", "native", "reference")
    True
    """
    return _choice.get() or default_kernels()


@contextmanager
def use_kernels(kernels: str) -> Iterator[None]:
    """Choose the kernels of the operators inside a ``with`` block; "native" raises where there is no native kernel.

    >>> import detent as dt, numpy as np
    >>> with use_kernels("reference"):
    ...     dt.Plan.select("quantize", shape=(4,), dtype="float32", spec="int8").kernel.backend
    'reference'
    """
    if kernels not in KERNEL_CHOICES:
        hint = closest(str(kernels), KERNEL_CHOICES)
        raise SpecError(f"unknown kernels {kernels!r}{hint} expected {', '.join(KERNEL_CHOICES)}")
    token = _choice.set(kernels)
    try:
        yield
    finally:
        _choice.reset(token)
