"""Tests of GPU kernels use the helpers of the tests of the PyTorch frontend, and can record what they compared.

If the environment variable DETENT_GPU_RECORD names a file, one line of JSON is added to it for each test that passes
and has recorded a property: its name and its properties. Tests that are in the file already are left out, so that a
long run can be continued. ``benchmarks/gpu_checks.py`` adds the lines up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


def _record() -> Path | None:
    name = os.environ.get("DETENT_GPU_RECORD")
    return Path(name) if name else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = _record()
    if path is None or not path.exists():
        return
    done = {json.loads(line)["test"] for line in path.read_text(encoding="utf-8").splitlines()}
    config.hook.pytest_deselected(items=[item for item in items if item.name in done])
    items[:] = [item for item in items if item.name not in done]


class _Recorder:
    """Writes results as they arrive; with several processes, in the first one only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and report.user_properties:
            row = {"test": report.nodeid.rpartition("::")[2], **dict(report.user_properties)}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    path = _record()
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path))
