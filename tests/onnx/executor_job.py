"""A small job for executors: a model of three convolutions, batches in files, and the digest of the quantized file."""

import hashlib
import time

import numpy as np
from onnx_graphs import Maker

import detent.onnx as qo

BATCHES = 24


def small():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 3, 8, 3, name="first")])
    t = m.add("Relu", [m.conv(t, 8, 8, 3, name="second")])
    return m.model([("x", ["n", 3, 12, 12])], [m.conv(t, 8, 8, 1, name="last")])


def write_job(directory, batches=BATCHES):
    """Write a model, and a directory with batches of one to three samples."""
    qo.save(small(), directory / "m.onnx")
    (directory / "data").mkdir()
    rng = np.random.default_rng(0)
    for i in range(batches):
        x = (rng.normal(size=(1 + i % 3, 3, 12, 12)) * (1 + i % 5)).astype(np.float32)
        np.savez(directory / "data" / f"{i:03d}.npz", x=x)
    return directory


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def quantized(job, executor=None, **options):
    """Quantize the model of a job; return the digest of the file."""
    output = job / f"out-{time.monotonic_ns()}.onnx"
    options = {"data": job / "data", "progress": False, **options}
    qo.quantize(job / "m.onnx", output, executor=executor, **options)
    return digest(output)
