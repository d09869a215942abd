"""Models outside the zoo: networks built and trained in code, and files from packages.

``UNSEEN`` was partly used to develop detent. ``FRESH`` was not when it was chosen; docs/onnx-benchmark.md names its
models that led to changes since. Do not tune anything on it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from fresh_packages import FRESH_PACKAGE_MODELS
from networks import FRESH_NETWORKS, LARGE_NETWORKS, LIBRARY_NETWORKS, NETWORKS
from numpy.typing import NDArray
from package_models import PACKAGE_MODELS

Feed = dict[str, NDArray[Any]]


class UnseenModel(Protocol):
    """A float model with data and a task."""

    kind: str
    decide: Callable[[Sequence[NDArray[Any]]], NDArray[Any]] | None

    def write(self, path: Path) -> Path:
        """Write the float model, unless the file exists; return the path."""

    def calibration_feeds(self) -> list[Feed]:
        """Return the inputs of 32 samples."""

    def held_out_feeds(self) -> list[Feed]:
        """Return inputs that calibration does not use."""


UNSEEN: Mapping[str, UnseenModel] = MappingProxyType({**NETWORKS, **PACKAGE_MODELS})
FRESH: Mapping[str, UnseenModel] = MappingProxyType({**FRESH_NETWORKS, **FRESH_PACKAGE_MODELS, **LIBRARY_NETWORKS})
ALL_UNSEEN: Mapping[str, UnseenModel] = MappingProxyType({**UNSEEN, **FRESH, **LARGE_NETWORKS})
