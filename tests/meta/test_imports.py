"""`import detent` stays light: frameworks and file libraries load on use, never on import.

Two independent checks: `sys.modules` after the import, and the log of `python -X importtime`. Each is also tested with
a stand-in package named torch, which it must detect.
"""

import os
import subprocess
import sys

import pytest

HEAVY = frozenset({"PIL", "jax", "onnx", "onnxruntime", "openvino", "safetensors", "scipy", "tokenizers", "torch"})
TIMEOUT = 60


def run(*arguments, path=None):
    """Run Python with warnings as errors and `path` first in sys.path; return the process."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=TIMEOUT)


def roots(names):
    return {name.strip().partition(".")[0] for name in names}


def loaded_by_modules(statement, path=None):
    """Top-level packages in sys.modules after the statement."""
    return roots(run("-c", f"{statement}; import sys; print(*sys.modules, sep='\\n')", path=path).stdout.splitlines())


def loaded_by_importtime(statement, path=None):
    """Top-level packages that `python -X importtime` reports for the statement."""
    lines = run("-X", "importtime", "-c", statement, path=path).stderr.splitlines()
    return roots(line.rpartition("|")[2] for line in lines if line.startswith("import time:"))


PROBES = pytest.mark.parametrize("loaded", [loaded_by_modules, loaded_by_importtime])


@PROBES
def test_import_detent_loads_nothing_heavy(loaded):
    names = loaded("import detent")
    assert {"detent", "numpy", "ml_dtypes"} <= names
    assert not names & HEAVY


def test_data_of_files_load_their_packages_on_use():
    assert not loaded_by_modules("import detent.onnx_model.batches") & {"PIL", "tokenizers", "torch"}


@PROBES
def test_probe_sees_a_heavy_import(loaded, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert loaded("import detent, torch", path=tmp_path) & HEAVY == {"torch"}


@PROBES
def test_probe_sees_a_heavy_import_behind_another(loaded, tmp_path):
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "innocent.py").write_text("import torch\n")
    assert loaded("import innocent", path=tmp_path) & HEAVY == {"torch"}


def test_detent_leaves_its_test_tools_alone():
    names = run("-c", "import detent, sys; print(*sys.modules, sep='\\n')").stdout.splitlines()
    assert not [name for name in names if name.startswith("detent.testing")]
