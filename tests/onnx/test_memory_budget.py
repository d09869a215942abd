"""Arrays above the memory budget are in temporary files; files and decisions are the same."""

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx_graphs import Maker, conv_chain, images, rows

import detent.onnx as qo
from detent.array_store import ArrayStore
from detent.onnx import layer_error, metric_search, samples

TIMEOUT = 1200


def dense_chain():
    m = Maker()
    t = m.add("Relu", [m.matmul("x", 16, 32, name="fc1")])
    return m.model([("x", ["n", 6, 16])], [m.matmul(t, 32, 4, name="fc2")])


def mean(outputs):
    return -float(np.mean([np.abs(each).mean() for each in outputs.values()]))


FEEDS = images(12, batch=1)
JOBS = {
    "convolutions": (conv_chain, FEEDS, {}),
    "skip": (conv_chain, FEEDS, {"skip": "second"}),
    "matmuls": (dense_chain, rows(12), {}),
    "groups": (dense_chain, rows(12), {"recipe": "w4a16"}),
    "built-in metric": (conv_chain, FEEDS, {"max_drop": 0.0, "metric": "cosine"}),
    "metric": (conv_chain, FEEDS, {"max_drop": 0.0, "metric": mean}),
}


def quantized(job, folder, **options):
    make, feeds, own = JOBS[job]
    qo.save(make(), folder / "m.onnx")
    report = qo.quantize(folder / "m.onnx", folder / "q.onnx", feeds, progress=False, **own, **options)
    return hashlib.sha256(report.output.read_bytes()).hexdigest(), report.decisions, report.metric


@pytest.mark.parametrize("job", JOBS)
def test_the_budget_changes_nothing(job, tmp_path):
    expected = quantized(job, tmp_path)
    for budget in (1, 50_000):
        assert quantized(job, tmp_path, memory_budget=budget) == expected


@pytest.mark.parametrize("job", ["convolutions", "metric"])
def test_the_budget_changes_nothing_on_workers(job, tmp_path):
    expected = quantized(job, tmp_path)
    with ThreadPoolExecutor(2) as executor:
        assert quantized(job, tmp_path, memory_budget=1, executor=executor, work_directory=tmp_path) == expected


@pytest.mark.parametrize("budget", [5_000, None])
def test_arrays_above_the_budget_are_in_files(budget, monkeypatch, tmp_path):
    stores = {}
    for module in (layer_error, metric_search, samples):
        kept = stores[module] = []

        class Recorded(ArrayStore):
            def __init__(self, budget, kept=kept):
                super().__init__(budget)
                kept.append(self)

        monkeypatch.setattr(module, "ArrayStore", Recorded)
    quantized("metric", tmp_path, memory_budget=budget)
    for module, each in stores.items():
        assert any(store.nbytes_in_file for store in each) == (budget is not None), module
        assert all(budget is None or store._nbytes <= budget for store in each)


SCRIPT = """
import json, sys
import numpy as np
import detent.onnx as qo

def status(name):
    lines = open("/proc/self/status", encoding="ascii").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))

model, data, output, budget = sys.argv[1:]
before = status("VmRSS")
metric = lambda outputs: float(len(outputs[next(iter(outputs))]))  # reads no pages of the file
qo.quantize(model, output, data, progress=False, metric=metric, memory_budget=json.loads(budget))
print(status("VmHWM") - before)
"""


def growth(folder, budget):
    """Return by how much a job in a fresh process raises the peak of resident memory."""
    paths = [str(folder / name) for name in ("m.onnx", "data", "q.onnx")]
    command = [sys.executable, "-c", SCRIPT, *paths, json.dumps(budget)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.time_limit(TIMEOUT)
def test_large_outputs_take_little_memory(tmp_path):
    m = Maker()
    t = m.conv(m.add("Relu", [m.conv("x", 8, 16)]), 16, 16)
    t = m.add("Resize", [t, "", m.constant(np.float32([1, 1, 8, 8]))], mode="nearest")
    qo.save(m.model([("x", ["n", 8, 32, 32])], [t]), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for i, feed in enumerate(images(32, side=32, batch=1)):
        np.savez(tmp_path / "data" / f"{i:03}.npz", **feed)
    nbytes = 32 * 16 * 256 * 256 * 4  # outputs of all samples
    unlimited, limited = (growth(tmp_path, budget) for budget in (None, nbytes // 8))
    # Half of the limit is needed by the library and the sessions; one copy of all outputs would exceed it.
    assert limited < 1.5 * nbytes < 3 * nbytes < unlimited, (limited, unlimited)
