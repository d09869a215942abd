"""GPU kernels on the CPU: a copy of the kernels that Triton's interpreter runs, used by ``launch``.

The interpreter runs a program with NumPy, so large programs are fast. Two slow parts are replaced here. It reduces
an axis by combining single elements in Python, 60 us each; here, a reduction combines halves of arrays. On a GPU, the
order of a reduction is not defined either; reductions in the kernels do not depend on it (two terms, separate bits,
minimum and maximum). And at each call of a function in a kernel, it patches ``triton.language`` again, which the launch
has done already.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton: make test-gpu")

import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction, ReduceOps

from detent.torch.gpu import kernels, launch

__all__ = ["interpreted", "large_programs", "load_kernels"]

_directory = tempfile.TemporaryDirectory()  # Triton reads the sources of functions from files


def load_kernels(*, interpret: bool, replace: tuple[str, str] | None = None) -> ModuleType:
    """Load a copy of the kernels, to interpret or to compile them; ``replace`` is a change of the source."""
    path = Path(kernels.__file__)
    if replace is not None:
        source = path.read_text(encoding="utf-8")
        assert replace[0] in source, replace
        path = Path(_directory.name, f"mutant{abs(hash(replace))}.py")
        path.write_text(source.replace(*replace), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"copy_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = interpret
        spec.loader.exec_module(module)
    return module


@contextmanager
def interpreted(module: ModuleType | None = None) -> Iterator[None]:
    """Let ``launch`` run interpreted kernels on CPU tensors."""
    with (
        mock.patch.object(launch, "kernels", load_kernels(interpret=True) if module is None else module),
        mock.patch.object(ReduceOps, "generic_reduce", _reduce_by_halves),
        mock.patch.object(InterpretedFunction, "__call__", _call_function),
    ):
        yield


def _call_function(function: InterpretedFunction, *arguments: object, **options: object) -> object:
    return function.rewrite()(*arguments, **options)


def _reduce_by_halves(operation: ReduceOps, inputs: tuple[tl.tensor]) -> list[tl.tensor]:
    """Combine the lower half of an axis with the upper half, until one element is left; lengths are powers of two."""
    (whole,) = inputs
    data = np.moveaxis(whole.handle.data, operation.axis, 0)
    while len(data) > 1:
        halves = (operation.to_tensor(half, whole.dtype) for half in np.split(data, 2))
        data = operation.combine_fn.fn(*halves).handle.data
    return [operation.to_tensor(data[0], whole.dtype)]


@contextmanager
def large_programs(elements: int) -> Iterator[None]:
    """Let one program process this many elements, more than on a GPU, because each program takes 10 ms."""
    launch._call.cache_clear()
    block = 1 << (elements - 1).bit_length()
    with mock.patch.multiple(launch, BLOCK=block, MAX_COLUMNS=block):
        yield
    launch._call.cache_clear()
