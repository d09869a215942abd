"""Calibration benchmark: the speed of detent's observers compared with other tools, and the quality of their ranges.

::

    python benchmarks/calibration.py [--output FILE] [--seconds S]

Tools are timed in turns in one process. Then the quality of ranges is measured in two ways: the mean squared error of
4-bit ranges on a million values of several distributions, and the SQNR of 8- and 4-bit ranges on activations of real
models. ``benchmarks/render_calibration.py`` renders the tables of docs/benchmarks.md from FILE.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from case import Tool
from onnxruntime.quantization.calibrate import HistogramCollector
from run import environment
from timing import time_in_turns
from torch.ao.quantization.observer import HistogramObserver

import detent as dt
from detent.kernels import minmax
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Observer, Percentile
from detent.observers.entropy import least_divergence
from zoo import MODELS, record

BINS, CODES = 2048, 128  # as in ONNX Runtime's entropy calibration
RUNS = 4  # batches of each real model
OBSERVERS: dict[str, Callable[[], Observer]] = {
    "MinMax": MinMax,
    "EMAMinMax": EMAMinMax,
    "Percentile": Percentile,
    "Entropy": Entropy,
    "MSE": MSE,
}


def distributions(size: int) -> dict[str, np.ndarray]:
    """Draw random data from several distributions."""
    rng = np.random.default_rng(0)
    half = size // 2
    samples = {
        "normal": rng.normal(size=size),
        "Laplace": rng.laplace(size=size),
        "uniform": rng.uniform(-0.9, 0.9, size),
        "bimodal": np.concatenate((rng.normal(-1.0, 0.25, half), rng.normal(1.3, 0.15, size - half))),
        "one-sided": np.abs(rng.normal(size=size)),
        "heavy-tailed": rng.standard_t(2.5, size),
    }
    return {name: x.astype(np.float32) for name, x in samples.items()}


def median_times(tools: list[Tool], seconds: float) -> dict[str, float]:
    """Return the median time per call in microseconds, by tool."""
    timings = time_in_turns(tools, seconds, (5, 200))
    return {one.name: times.median * 1e6 for one, times in zip(tools, timings, strict=True)}


def speed(seconds: float) -> dict[str, dict[str, float]]:
    """Time the entropy threshold search, and observing arrays of two sizes."""
    x = distributions(2**20)["normal"]
    largest = np.abs(x).max()
    counts, edges = np.histogram(x, bins=BINS, range=(-largest, largest))
    collector = HistogramCollector("entropy", True, BINS, CODES, 99.9, None)
    as_floats = counts.astype(np.float64)
    entropy = [
        Tool("detent", lambda: least_divergence(as_floats, CODES)),
        Tool("onnxruntime", lambda: collector.get_entropy_threshold((counts, edges, x.min(), x.max()), CODES)),
    ]
    rows = {"entropy threshold, 2048 bins": median_times(entropy, seconds)}
    for size in (2**20, 2**24):
        data = x if size == x.size else np.tile(x, size // x.size)
        tensor, tiling = torch.from_numpy(data), dt.PerTensor().tiling(data.shape)
        mine, theirs = MSE(), HistogramObserver()
        observe = [
            Tool("detent", lambda mine=mine, data=data: mine.observe(data)),
            Tool("detent min-max", lambda data=data, tiling=tiling: minmax(data, tiling)),
            Tool("torch", lambda theirs=theirs, tensor=tensor: theirs(tensor)),
        ]
        rows[f"histogram of 2^{size.bit_length() - 1} numbers"] = median_times(observe, seconds)
    return rows


def torch_range(x: np.ndarray, *, symmetric: bool) -> tuple[float, float]:
    """Return the 4-bit range of torch's HistogramObserver: the values of the smallest and the largest code."""
    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    qmin, qmax = (-8, 7) if symmetric else (0, 15)
    kind = torch.qint8 if symmetric else torch.quint8
    observer = HistogramObserver(dtype=kind, qscheme=scheme, quant_min=qmin, quant_max=qmax)
    observer(torch.from_numpy(x))
    scale, zero = (float(part) for part in observer.calculate_qparams())
    return (qmin - zero) * scale, (qmax - zero) * scale


def errors() -> dict[str, dict[str, float]]:
    """Return the mean squared error with 4-bit ranges, divided by the error with detent's MSE observer."""
    rows = {}
    for name, x in distributions(10**6).items():
        for symmetric in (True, False):
            spec = dt.QuantSpec(
                "int4" if symmetric else "uint4", symmetric=symmetric, convention="torch", qmin=-8 if symmetric else 0
            )
            lo, hi = torch_range(x, symmetric=symmetric)
            ranges = {kind: make().observe(x).params(spec) for kind, make in OBSERVERS.items()}
            if symmetric:
                ranges["torch HistogramObserver"] = dt.QuantParams(spec, scale=np.float32(hi / 7))
            else:
                ranges["torch HistogramObserver"] = dt.QuantParams.from_range(spec, lo, hi)
            mse = {kind: dt.metrics.mse(x, dt.fake_quantize(x, params)) for kind, params in ranges.items()}
            rows[f"{name}, {'symmetric' if symmetric else 'affine'}"] = {
                kind: error / mse["MSE"] for kind, error in mse.items()
            }
    return rows


def activations() -> dict[str, dict[str, float]]:
    """Return the median SQNR in dB over the activations of each model, by observer and bit width."""
    rows = {}
    for name, model in MODELS.items():
        observers_by_tensor: dict[str, dict[str, Observer]] = {}
        values: dict[str, list[np.ndarray]] = {}
        chosen = None
        for run in range(RUNS):
            feeds = list(model.feeds(RUNS))[run : run + 1]
            tensors = next(record(model.path, feeds, chosen))
            usable = {key: x for key, x in tensors.items() if x.size >= 1024 and np.ptp(x) > 0}
            chosen = chosen or list(usable)[:: max(1, len(usable) // 60)]
            for key in chosen:
                if key in usable:
                    observers_by_tensor.setdefault(key, {kind: make() for kind, make in OBSERVERS.items()})
                    values.setdefault(key, []).append(usable[key])
                    for observer in observers_by_tensor[key].values():
                        observer.observe(usable[key])
        for spec in ("uint8/tensor/affine", "uint4/tensor/affine"):
            ratios: dict[str, list[float]] = {kind: [] for kind in OBSERVERS}
            for key, observers in observers_by_tensor.items():
                x = np.concatenate([part.ravel() for part in values[key]])
                for kind, observer in observers.items():
                    ratios[kind].append(dt.metrics.sqnr_db(x, dt.fake_quantize(x, observer.params(spec))))
            rows[f"{name}, {len(observers_by_tensor)} activations, {spec.split('/')[0]}"] = {
                kind: float(np.median(decibels)) for kind, decibels in ratios.items()
            }
    return rows


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Calibration: speed, errors, real activations.")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds to time each operation")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    result = environment()
    for name, measure in (
        ("speed", lambda: speed(arguments.seconds)),
        ("errors", errors),
        ("activations", activations),
    ):
        print(f"measuring {name}", file=sys.stderr)
        result[name] = measure()
        print(json.dumps(result[name], indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
