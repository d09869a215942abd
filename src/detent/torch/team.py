"""Team: our kernels on PyTorch's own threads.

PyTorch computes with OpenMP, whose threads stay awake for a while after their work. A second pool on the same
processors would wait for them at every turn, and they for it. So kernels run on the same team, where PyTorch's runtime
can be found, and on no more of them than it says, which is ``torch.set_num_threads``. (A thread that has not used
PyTorch yet has the runtime's default.)
"""

import ctypes
import re
from pathlib import Path

from detent.kernels import join_team

__all__ = ["find_runtime", "join_torch"]

RUNTIMES = re.compile(r"lib(gomp|iomp5|omp)[-.][^/]*$")
MAPS = Path("/proc/self/maps")


def find_runtime() -> str | None:
    """The file of the one OpenMP runtime that is loaded; None where there is none, or more than one.

    >>> find_runtime() is None or "omp" in find_runtime()
    True
    """
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    found = sorted(path for path in paths if RUNTIMES.search(path))
    return found[0] if len(found) == 1 else None


def join_torch() -> bool:
    """Let native kernels run on PyTorch's threads. Returns whether they do.

    >>> join_torch() in (True, False)
    True
    """
    path = find_runtime()
    if path is None:
        return False
    try:
        runtime = ctypes.CDLL(path)
        entries = (runtime.GOMP_parallel, runtime.omp_get_max_threads)
    except (OSError, AttributeError):
        return False
    join_team(*(ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in entries))
    return True


join_torch()
