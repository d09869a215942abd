"""The benchmark of calibration: speed against peers, and what the ranges are worth.

::

    python benchmarks/calibration.py [--output FILE] [--seconds S]

Contestants are timed interleaved in one process. Then, the mean squared error of 4-bit ranges on a million numbers of
several distributions, and the signal-to-noise ratio of 8- and 4-bit ranges on the activations of real models.
``benchmarks/render_calibration.py`` renders the tables of docs/benchmarks.md from the file.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from case import Contestant
from onnxruntime.quantization.calibrate import HistogramCollector
from run import surroundings
from timing import race
from torch.ao.quantization.observer import HistogramObserver

import detent as dt
from detent.kernels import minmax
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Observer, Percentile
from detent.observers.entropy import least_divergence
from zoo import MODELS, record

BINS, CODES = 2048, 128
RUNS = 4
OBSERVERS: dict[str, Callable[[], Observer]] = {
    "MinMax": MinMax,
    "EMAMinMax": EMAMinMax,
    "Percentile": Percentile,
    "Entropy": Entropy,
    "MSE": MSE,
}


def distributions(size: int) -> dict[str, np.ndarray]:
    """What ranges are searched for."""
    rng = np.random.default_rng(0)
    half = size // 2
    found = {
        "normal": rng.normal(size=size),
        "Laplace": rng.laplace(size=size),
        "uniform": rng.uniform(-0.9, 0.9, size),
        "bimodal": np.concatenate((rng.normal(-1.0, 0.25, half), rng.normal(1.3, 0.15, size - half))),
        "one-sided": np.abs(rng.normal(size=size)),
        "heavy-tailed": rng.standard_t(2.5, size),
    }
    return {name: x.astype(np.float32) for name, x in found.items()}


def race_times(contestants: list[Contestant], seconds: float) -> dict[str, float]:
    """Median microseconds per call."""
    found = race(contestants, seconds, (5, 200))
    return {one.name: times.median * 1e6 for one, times in zip(contestants, found, strict=True)}


def speed(seconds: float) -> dict[str, dict[str, float]]:
    """Entropy thresholds, and observation at two sizes."""
    x = distributions(2**20)["normal"]
    largest = np.abs(x).max()
    counts, edges = np.histogram(x, bins=BINS, range=(-largest, largest))
    collector = HistogramCollector("entropy", True, BINS, CODES, 99.9, None)
    as_floats = counts.astype(np.float64)
    entropy = [
        Contestant("detent", lambda: least_divergence(as_floats, CODES)),
        Contestant("onnxruntime", lambda: collector.get_entropy_threshold((counts, edges, x.min(), x.max()), CODES)),
    ]
    rows = {"entropy threshold, 2048 bins": race_times(entropy, seconds)}
    for size in (2**20, 2**24):
        data = x if size == x.size else np.tile(x, size // x.size)
        tensor, tiling = torch.from_numpy(data), dt.PerTensor().tiling(data.shape)
        mine, theirs = MSE(), HistogramObserver()
        observe = [
            Contestant("detent", lambda mine=mine, data=data: mine.observe(data)),
            Contestant("detent min-max", lambda data=data, tiling=tiling: minmax(data, tiling)),
            Contestant("torch", lambda theirs=theirs, tensor=tensor: theirs(tensor)),
        ]
        rows[f"histogram of 2^{size.bit_length() - 1} numbers"] = race_times(observe, seconds)
    return rows


def torch_range(x: np.ndarray, *, symmetric: bool) -> tuple[float, float]:
    """The 4-bit range that torch's HistogramObserver finds, as the range of its levels."""
    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    low, high = (-8, 7) if symmetric else (0, 15)
    kind = torch.qint8 if symmetric else torch.quint8
    observer = HistogramObserver(dtype=kind, qscheme=scheme, quant_min=low, quant_max=high)
    observer(torch.from_numpy(x))
    scale, zero = (float(part) for part in observer.calculate_qparams())
    return (low - zero) * scale, (high - zero) * scale


def errors() -> dict[str, dict[str, float]]:
    """The mean squared error of 4-bit ranges, over that of detent's MSE."""
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
            found = {kind: dt.metrics.mse(x, dt.fake_quantize(x, params)) for kind, params in ranges.items()}
            rows[f"{name}, {'symmetric' if symmetric else 'affine'}"] = {
                kind: error / found["MSE"] for kind, error in found.items()
            }
    return rows


def activations() -> dict[str, dict[str, float]]:
    """The median over a model's activations of the signal-to-noise ratio in decibels, for each observer and width."""
    rows = {}
    for name, model in MODELS.items():
        watched: dict[str, dict[str, Observer]] = {}
        kept: dict[str, list[np.ndarray]] = {}
        chosen = None
        for run in range(RUNS):
            feeds = list(model.feeds(RUNS))[run : run + 1]
            found = next(record(model.path, feeds, chosen))
            sized = {key: x for key, x in found.items() if x.size >= 1024 and np.ptp(x) > 0}
            chosen = chosen or list(sized)[:: max(1, len(sized) // 60)]
            for key in chosen:
                if key in sized:
                    watched.setdefault(key, {kind: make() for kind, make in OBSERVERS.items()})
                    kept.setdefault(key, []).append(sized[key])
                    for observer in watched[key].values():
                        observer.observe(sized[key])
        for spec in ("uint8/tensor/affine", "uint4/tensor/affine"):
            ratios: dict[str, list[float]] = {kind: [] for kind in OBSERVERS}
            for key, observers in watched.items():
                x = np.concatenate([part.ravel() for part in kept[key]])
                for kind, observer in observers.items():
                    ratios[kind].append(dt.metrics.sqnr_db(x, dt.fake_quantize(x, observer.params(spec))))
            rows[f"{name}, {len(watched)} activations, {spec.split('/')[0]}"] = {
                kind: float(np.median(values)) for kind, values in ratios.items()
            }
    return rows


def main() -> None:
    """Run everything and write the file."""
    parser = argparse.ArgumentParser(description="Calibration: speed, errors, real activations.")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to time each race")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    result = surroundings()
    for name, measure in (("speed", lambda: speed(chosen.seconds)), ("errors", errors), ("activations", activations)):
        print(f"measuring {name}", file=sys.stderr)
        result[name] = measure()
        print(json.dumps(result[name], indent=1))
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
