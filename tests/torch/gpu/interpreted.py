"""GPU kernels on the CPU: a copy of the kernels that Triton's interpreter runs, used by ``launch``."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from triton import knobs

from detent.torch.gpu import kernels, launch

__all__ = ["interpreted", "load_kernels"]

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
    with mock.patch.object(launch, "kernels", load_kernels(interpret=True) if module is None else module):
        yield
