"""Copies of the case's array, as a measure of memory speed: with NumPy on one thread, and with torch on all threads."""

from collections.abc import Iterator

import numpy as np
import torch
from case import Case, Tool


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield the copies of a case's array."""
    x = case.x if case.dtype != "bfloat16" else case.x.view(np.uint16)
    y = np.empty_like(x)
    yield Tool("copy", lambda: np.copyto(y, x))
    source, target = torch.from_numpy(x), torch.from_numpy(np.empty_like(x))
    yield Tool("copy, all threads", lambda: target.copy_(source))
