"""Digests of the library's results, to compare before and after a change that must not change a bit.

::

    python tests/tools/digests.py before.json                      everything
    python tests/tools/digests.py before.json --quick              small models and few graphs, minutes
    python tests/tools/digests.py before.json --only core,torch    some groups
    python tests/tools/digests.py before.json --resume             continue after an interruption
    python tests/tools/digests.py --compare before.json after.json [--common]

Run it with the Python of each tree, on one machine, with the same versions of torch and ONNX Runtime. Only public names
of detent are used, and the zoo of real models, so the same file runs on both trees. A quick run computes some of the
digests of a full run, under the same keys: ``--compare --common`` compares only the keys that both files have.

========== ===========================================================================================================
core       codes, scales, values, gradients, files and texts over formats, granularities, conventions and dtypes, on
           both kinds of kernels; data next to ties; NaN, infinities, empty and strided arrays
observers  bytes and parameters of observers, alone and merged
quantizer  ``dt.FakeQuantize``: results, gradients and state by scale mode
torch      prepared models, calibrated and trained: outputs, gradients, state, exported weights, health
export     bytes of the files that ``qt.export_onnx`` writes
zoo        bytes of the files that ``qo.quantize`` writes for real models, by preset and target
graphs     bytes of the files that ``qo.quantize`` writes for random graphs
sensitivity  measured noise, chosen and refined mixes
========== ===========================================================================================================

A digest is the first 16 hexadecimal digits of a SHA-256. Where the library raises a DetentError, the name of its type
replaces the digest; messages and other prose are not hashed. Files have two digests: one of the bytes, one of the graph
without its metadata.

Sums of floats depend on the number of threads. Therefore every worker is bound to one processor before it imports
anything; all thread pools respect that.
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Digests = dict[str, str]

SIGNS = 16
DTYPES = ("float16", "bfloat16", "float32", "float64")
KERNELS = ("auto", "reference")
SHAPE = (6, 64)
TARGETS = ("onnxruntime", "onnxruntime-avx2", "onnxruntime-vnni", "openvino", "openvino-vnni")
PRESETS = ("w8a8", "w4a8", "w4a4", "w8a16", "w4a16")
TORCH_PRESETS = ("w8a8", "w4a8", "w4a4", "w2a8", "fp8", "w8a16", "w4a16", "w4a16-g32", "w4a16-g64")
GRAPH_PRESETS = (*PRESETS, "w6a6", "w4a16-g32")
SMALL_MODELS = ("silero-vad", "magika", "basic-pitch")
BATCHES = 4  # calibration batches for each model of the zoo
GRAPHS, FEW_GRAPHS = 200, 40
VERIFIED = 10  # one in so many files of random graphs is verified
SINGLE = {  # one thread per library, and the same order of Python sets in every run
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
SCRATCH = Path(tempfile.gettempdir())  # directory of temporary files; each run removes its own


# Digests


def digest(*values: object) -> str:
    """Digest of values: arrays, tensors, texts, numbers, and lists and dicts of them."""
    hasher = sha256()
    for part in _parts(values):
        hasher.update(part)
    return hasher.hexdigest()[:SIGNS]


def _parts(value: Any) -> Iterator[bytes]:
    """A value as bytes, with its type and length, so that different values give different bytes."""
    if isinstance(value, bytes):
        yield f"bytes {len(value)} ".encode()
        yield value
    elif isinstance(value, Mapping):
        yield f"dict {len(value)} ".encode()
        for key in sorted(value, key=str):
            yield from _parts((str(key), value[key]))
    elif isinstance(value, list | tuple):
        yield f"list {len(value)} ".encode()
        for each in value:
            yield from _parts(each)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield f"array {array.dtype.name} {array.shape} ".encode()
        yield array.tobytes()
    elif value is None or isinstance(value, str | bool | int | float):
        yield f"{type(value).__name__} {value!r} ".encode()
    else:
        yield from _parts(_plain(value))


def _plain(value: Any) -> object:
    """Values of torch and detent as arrays, numbers and texts."""
    kind = type(value).__name__
    if kind == "QuantParams":
        return "params", value.to_json(), value.scale, value.zero_point
    if kind == "QuantizedTensor":
        return "quantized", str(value.dtype), value.shape, value.codes, value.params
    if hasattr(value, "detach"):  # a tensor; NumPy has no bfloat16
        plain = value.detach().cpu().contiguous()
        bits = plain.view(import_module("torch").uint8) if plain.ndim else plain.reshape(1)
        return "tensor", str(plain.dtype), tuple(plain.shape), bits.numpy() if plain.ndim else repr(plain.item())
    raise TypeError(f"no digest of a {kind}")


class Collector:
    """Digests under keys with a common prefix; for an error of detent, its type."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.digests: Digests = {}

    def put(self, key: str, *values: object) -> None:
        """Store the digest of these values."""
        full = f"{self.prefix}/{key}" if key else self.prefix
        if full in self.digests:
            raise KeyError(f"key {full} occurs twice")
        self.digests[full] = digest(*values)

    def attempt(self, key: str, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Store the digest of what a function returns, or the type of its error."""
        with self.errors(key):
            self.put(key, function(*args, **options))

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Store the type of an error that detent raises, which ends the block."""
        from detent import DetentError

        try:
            yield
        except DetentError as error:
            full = f"{self.prefix}/{key}" if key else self.prefix
            self.digests[full] = f"raises {type(error).__name__}"


def rng_of(*words: object) -> np.random.Generator:
    """Random generator that depends only on these words."""
    return np.random.default_rng(list(" ".join(map(str, words)).encode()))


# The core, on arrays

GRANULARITIES = ("tensor", "axis0", "axis1", "token", "group16", "group48", "block2x16", "block4x24")
FEW_FORMATS = ("int2", "int4", "int8", "int16", "uint2", "uint4", "uint8", "uint16", "float8_e4m3fn", "nf4")
BLOCK_SPECS = ("mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4")
CONVENTION_FORMATS = ("int4", "int8", "uint8", "int16")


def _data(key: str, dtype: str, shape: tuple[int, ...] = SHAPE) -> Array:
    """Heavy-tailed numbers with a mean that is not zero."""
    import ml_dtypes

    x = rng_of("data", key, dtype).standard_t(4, shape) * 0.7 + 0.1
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _near_ties(params: Any, x: Array) -> Array:
    """Numbers halfway between two values, and their neighbors on both sides."""
    import detent as dt

    spec = params.spec
    here = dt.quantize(x, params)
    if spec.format.is_integer:
        after = np.minimum(here.codes.astype(np.int64) + 1, int(spec.qmax))
        low, high = here.dequantize("float64"), dt.dequantize(after, params, dtype="float64")
    else:
        levels = np.unique(here.dequantize("float64"))
        low, high = np.resize(levels[:-1], x.shape), np.resize(levels[1:], x.shape)
    middle = ((low + high) / 2).astype(x.dtype)
    side = np.arange(x.size).reshape(x.shape) % 3
    ends = np.array([np.inf, -np.inf]).astype(x.dtype)
    return np.where(side == 0, middle, np.nextafter(middle, ends[side - 1])).astype(x.dtype)


def _operations(out: Collector, key: str, spec: Any, dtype: str) -> None:
    """Store all operations of one spec, on random data and on data near ties."""
    import detent as dt

    with out.errors(key):
        x, g = _data(key, dtype), _data(f"{key} gradient", dtype)
        params = dt.QuantParams.from_data(spec, x)
        out.put(f"{key}/params", params)
        inputs = (x, _near_ties(params, x))
        tensors = [dt.quantize(each, params, step=3) for each in inputs]
        out.put(f"{key}/codes", tensors, [each.packed for each in tensors])
        out.put(f"{key}/values", [each.dequantize() for each in tensors], dt.dequantize_backward(g, params))
        out.put(f"{key}/fake", [dt.fake_quantize(each, params, step=3) for each in inputs])
        out.put(f"{key}/masked", [dt.fake_quantize_masked(each, params, step=3) for each in inputs])
        backward = [dt.fake_quantize_backward(g, each, params, step=3) for each in inputs]
        out.put(f"{key}/gradients", backward, [dt.quantize_backward(g, each, params, step=3) for each in inputs])
        out.put(f"{key}/learned", [dt.fake_quantize_learned_backward(g, each, params, step=3) for each in inputs])
        out.put(f"{key}/dynamic", dt.fake_quantize_dynamic(x, spec))
        out.put(f"{key}/file", _saved(tensors[0]))


def _saved(tensor: Any) -> bytes:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        path = Path(directory, "tensor.safetensors")
        tensor.save(path)
        return path.read_bytes()


def _on_kernels(out: Collector, names: Iterable[str], make: Callable[[str], Any], dtypes: Sequence[str]) -> None:
    """Store all operations of some specs; for an invalid spec, the type of its error."""
    import detent as dt

    for name, dtype, kernels in product(names, dtypes, KERNELS):
        key = f"{name}/{dtype}/{kernels}"
        with out.errors(key), dt.use_kernels(kernels):
            _operations(out, key, make(name), dtype)


def core_formats(out: Collector) -> None:
    """Store all formats, per tensor and per channel."""
    import detent as dt

    names = [f"{form}/{grain}" for form in dt.formats.FORMATS for grain in ("tensor", "axis0")]
    _on_kernels(out, names, dt.QuantSpec.parse, ["float32"])
    _on_kernels(out, BLOCK_SPECS, lambda name: getattr(dt, name), DTYPES)


def core_granularities(out: Collector, dtype: str) -> None:
    """Store some formats in all granularities, symmetric and affine."""
    import detent as dt

    names = ["/".join(parts) for parts in product(FEW_FORMATS, GRANULARITIES, ("symmetric", "affine"))]
    _on_kernels(out, names, dt.QuantSpec.parse, [dtype])


def core_conventions(out: Collector, dtype: str) -> None:
    """Store some formats in all conventions."""
    import detent as dt

    parts = product(CONVENTION_FORMATS, ("tensor", "axis0", "group16"), ("symmetric", "affine"), dt.convention.PRESETS)
    names = ["/".join(each) for each in parts]
    _on_kernels(out, names, dt.QuantSpec.parse, [dtype])


def core_roundings(out: Collector) -> None:
    """Store all roundings, and custom code ranges."""
    import detent as dt

    roundings = ("half_even", "half_away", "floor", "stochastic(7)")
    specs = {f"{form}/{each}": dt.QuantSpec(form, rounding=each) for form in ("int4", "uint8") for each in roundings}
    specs["int8/64"] = dt.QuantSpec("int8", granularity="axis0", qmin=-64, qmax=64)
    specs["uint8/7"] = dt.QuantSpec("uint8", qmin=3, qmax=100)
    _on_kernels(out, specs, specs.__getitem__, DTYPES)


def core_estimators(out: Collector) -> None:
    """Store gradients by all straight-through estimators."""
    import detent as dt

    clipped = [dt.ste.Clipped(on, bounds) for on in ("code", "value") for bounds in ("inclusive", "exclusive")]
    estimators: list[Any] = [*clipped, dt.ste.Identity(), dt.ste.HardTanh(), dt.ste.Tanh(), dt.ste.Tanh("step")]
    specs = ("int4", "uint4/axis0", "int8/group16", "float8_e4m3fn", "nf4", "int4/tensor/symmetric/oxicuda")
    for text, ste, dtype, kernels in product(specs, estimators, DTYPES, KERNELS):
        key = f"{text}/{ste}/{dtype}/{kernels}"
        with out.errors(key), dt.use_kernels(kernels):
            x, g = _data(key, dtype), _data(f"{key} gradient", dtype)
            params = dt.QuantParams.from_range(text, -1.0, 0.8, shape=x.shape)
            learned = dt.fake_quantize_learned_backward(g, x, params, ste=ste, grad_scale=0.5)
            out.put(key, dt.fake_quantize_backward(g, x, params, ste=ste), learned)


def core_ranges(out: Collector) -> None:
    """Store parameters from ranges of all kinds, in all conventions."""
    import detent as dt

    ranges = ((0.0, 0.0), (1.0, 1.0), (-3.0, -1.0), (0.5, 4.0), (-1e-30, 1e-30), (-1e30, 3e37), (-1.0, 1e-9))
    forms = ("int8", "uint8", "int4", "uint4", "int1", "uint16", "float8_e4m3fn", "float4_e2m1fn", "nf4")
    for form, symmetry, rules in product(forms, ("symmetric", "affine"), dt.convention.PRESETS):
        for lo, hi in ranges:
            text = f"{form}/tensor/{symmetry}/{rules}"
            out.attempt(f"{text}/{lo}..{hi}", _range_figures, text, lo, hi)


def _range_figures(text: str, lo: float, hi: float) -> list[object]:
    """Parameters with float32 and float64 scales, and values derived from them."""
    import detent as dt

    params = [dt.QuantParams.from_range(text, lo, hi, dtype=dtype) for dtype in ("float32", "float64")]
    figures = [
        (each.quantization_error_bound(), each.compression_ratio(), each.min_val, each.max_val) for each in params
    ]
    return [params, figures]


def core_special(out: Collector) -> None:
    """Store results for NaN, infinities, subnormals; for empty, scalar, strided and large arrays; with ``out``."""
    import detent as dt

    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3e38, 0.5, 1.5, 2.5, -0.5])
    for text, dtype, kernels in product(("int8", "uint4", "float8_e5m2", "nf4", "int16"), DTYPES, KERNELS):
        x = np.resize(odd, (5, 12)).astype(_data("", dtype).dtype)
        params = dt.QuantParams.from_range(text, -2.0, 2.0)
        for nan in ("raise", "zero_point", "qmin", "propagate"):
            key = f"{text}/{dtype}/{kernels}/nan {nan}"
            with dt.use_kernels(kernels):
                out.attempt(f"{key}/codes", dt.quantize, x, params, nan=nan)
                out.attempt(f"{key}/fake", dt.fake_quantize, x, params, nan=nan)
    for kernels in KERNELS:
        with dt.use_kernels(kernels):
            _odd_shapes(out, kernels)


def _odd_shapes(out: Collector, kernels: str) -> None:
    import detent as dt

    whole = _data("shapes", "float32", (8, 12, 10))
    arrays = {"empty": whole[:0], "scalar": whole[0, 0, 0], "strided": whole[::2, ::-1, 1::3], "turned": whole.T}
    arrays |= {"large": _data("large", "float32", (301, 1003)), "row": whole[0, 0]}
    for (name, x), text in product(arrays.items(), ("int8", "uint4/axis0", "int4/group16", "int8/token", "int3")):
        key = f"{name}/{text}/{kernels}"
        with out.errors(key):
            params = dt.QuantParams.from_range(text, -2.0, 1.5, shape=np.shape(x))
            codes = dt.quantize(x, params)
            buffer = np.empty(codes.packed.shape, np.uint8)
            dt.quantize(x, params, out=buffer)
            out.put(key, codes, buffer, dt.fake_quantize(x, params), dt.fake_quantize_backward(x, x, params))
            out.attempt(f"{key}/dynamic", dt.fake_quantize_dynamic, x, text)
            out.attempt(f"{key}/slice", codes.__getitem__, slice(1, 3))


def core_packing(out: Collector) -> None:
    """Store all packing layouts and bit widths."""
    import detent as dt

    for layout, bits in product(dt.packing.LAYOUTS, range(1, 17)):
        codes = rng_of("codes", bits).integers(0, 1 << bits, 64).astype(np.uint16 if bits > 8 else np.uint8)
        key = f"{layout}/{bits}"
        with out.errors(key):
            packed = dt.packing.pack(codes, bits, layout)
            signed = dt.packing.unpack(packed, bits, 64, signed=True, layout=layout)
            out.put(key, packed, signed, dt.packing.packed_size(61, bits, layout))


def core_metrics(out: Collector) -> None:
    """Store metrics of quantized data, to the last bit."""
    import detent as dt

    for text, dtype in product(("int8", "uint4/axis0", "int4/group16", "float8_e4m3fn"), DTYPES):
        x = _data("metrics", dtype)
        params = dt.QuantParams.from_range(text, -1.5, 1.5, shape=x.shape)
        q = dt.quantize(x, params)
        pairs = [
            getattr(dt.metrics, name)(x, q.dequantize()) for name in ("mse", "mae", "max_error", "sqnr_db", "cosine")
        ]
        others = [dt.metrics.clip_fraction(x, params), dt.metrics.code_usage(q), dt.metrics.entropy_bits(q)]
        out.put(f"{text}/{dtype}", pairs, others)


def _spec_texts(text: str) -> list[str]:
    import detent as dt

    spec = dt.QuantSpec.parse(text)
    return [str(spec), spec.to_json(), repr(spec)]


def core_texts(out: Collector) -> None:
    """Store the texts that files contain: specs, conventions, modes and recipes."""
    import detent as dt

    for parts in product(dt.formats.FORMATS, GRANULARITIES, ("symmetric", "affine"), dt.convention.PRESETS):
        text = "/".join(parts)
        out.attempt(f"spec/{text}", _spec_texts, text)
    for name in BLOCK_SPECS:
        out.put(f"spec/{name}", str(getattr(dt, name)), getattr(dt, name).to_json())
    for name, convention in dt.convention.PRESETS.items():
        out.put(f"convention/{name}", json.dumps(convention.to_dict()), repr(convention))
    for preset, mode in product(TORCH_PRESETS, (None, dt.EMA(0.9), dt.PerBatch(), dt.Fixed(), dt.Learned())):
        recipe = dt.Recipe.preset(preset, mode=mode, observer="mse" if mode else None, ste="clipped" if mode else None)
        out.put(f"recipe/{preset}/{mode}", recipe.to_json(), recipe.to_toml())
    rules = [dt.Rule(types=("Linear", "Conv2d"), weight="int4/axis0", input="uint8/tensor/affine", output="int8")]
    recipe = dt.Recipe([*rules, dt.Rule("head*", skip=True), dt.Rule("re:x[0-9]", weight="int3/group48", mode="ema")])
    out.put("recipe/rules", recipe.to_json(), recipe.to_toml())
    makers = ("int8_symmetric", "uint8_asymmetric", "int4_symmetric")
    placeholders = [getattr(dt.QuantParams, name)() for name in makers]
    placeholders += [dt.QuantParams.channel_wise(5, dt.int8), dt.QuantParams.block_wise(128, dt.int8)]
    out.put("placeholders", placeholders, [each.from_statistics(-2.0, 3.0) for each in placeholders])


# Observers

OBSERVERS: dict[str, tuple[str, dict[str, float]]] = {
    "MinMax": ("MinMax", {}),
    "EMAMinMax": ("EMAMinMax", {"decay": 0.8}),
    "Percentile": ("Percentile", {}),
    "Percentile(1, 97)": ("Percentile", {"lower": 1.0, "upper": 97.0}),
    "MSE": ("MSE", {}),
    "MSE(2.4)": ("MSE", {"norm": 2.4}),
    "MSE(precision=6)": ("MSE", {"precision": 6}),
    "Entropy": ("Entropy", {}),
}
OBSERVED = ("tensor", "axis0", "token", "group16", "block2x16")
OBSERVED_AS = ("int8", "uint8", "int4", "uint2", "float8_e4m3fn")
SLOW_SEARCHES = ("MSE(2.4)", "Entropy")  # slow searches, with fewer granularities


def _batches(kind: str, dtype: str) -> list[Array]:
    """Three batches of one kind of data."""
    rng = rng_of("batches", kind, dtype)
    makers: dict[str, Callable[[], Array]] = {
        "normal": lambda: rng.normal(0.2, 1, SHAPE),
        "one-sided": lambda: np.maximum(rng.normal(0, 1, SHAPE), 0),
        "heavy": lambda: rng.standard_t(2, SHAPE),
        "tiny": lambda: rng.normal(0, 1e-6, SHAPE),
        "holes": lambda: np.where(rng.random(SHAPE) < 0.05, np.nan, rng.normal(0, 1, SHAPE)),
        "constant": lambda: np.full(SHAPE, 0.75),
    }
    return [makers[kind]().astype(_data("", dtype).dtype) for _ in range(3)]


def observers(out: Collector, name: str) -> None:
    """Store one kind of observer on all data and granularities."""
    grains = OBSERVED[:2] if name in SLOW_SEARCHES else OBSERVED
    for grain, kind in product(grains, ("normal", "one-sided", "heavy", "tiny", "holes", "constant")):
        for dtype in DTYPES if kind == "heavy" else ("float32",):
            _observed(out, name, grain, f"{kind}/{dtype}")


def _observed(out: Collector, name: str, grain: str, data: str) -> None:
    import detent as dt

    kind, settings = OBSERVERS[name]
    batches, key = _batches(*data.split("/")), f"{grain}/{data}"
    first, second, weighted = (getattr(dt.observers, kind)(granularity=grain, **settings) for _ in range(3))
    for batch in batches:
        first.observe(batch)
    second.observe(batches[0] * 2)
    out.put(f"{key}/bytes", first.to_bytes(), first.count, first.nonfinite)
    for form in OBSERVED_AS[::2] if name in SLOW_SEARCHES else OBSERVED_AS:
        out.attempt(f"{key}/params/{form}", first.params, f"{form}/{grain}")
    out.attempt(f"{key}/range", lambda: list(first.range()))
    out.attempt(f"{key}/merged", lambda: second.merge(first).to_bytes())
    weights = np.arange(SHAPE[-1], dtype=np.float32) / 32
    out.attempt(f"{key}/weighted", lambda: weighted.observe(batches[0], weights).to_bytes())
    out.attempt(f"{key}/weighted params", weighted.params, f"int4/{grain}")


# The stateful operator


def quantizer(out: Collector) -> None:
    """Store five training steps and one evaluation, by scale mode, spec and straight-through estimator."""
    import detent as dt

    modes = (dt.PerBatch(), dt.EMA(0.8), dt.Fixed(), dt.Learned())
    estimators: tuple[Any, ...] = (None, "tanh", "identity")
    specs = ("int8", "uint8", "int4/axis0", "uint4/axis0", "int8/token", "uint4/group16", "int8/tensor/affine/torch")
    named = [(text, dt.QuantSpec.parse(text)) for text in specs]
    named.append(("stochastic", dt.QuantSpec("int4", rounding="stochastic(5)")))
    for (name, spec), mode, ste, dtype in product(named, modes, estimators, ("float32", "float64")):
        key = f"{name}/{mode}/{ste}/{dtype}"
        with out.errors(key):
            _used(out, key, dt.FakeQuantize(spec, mode=mode, ste=ste), dtype)


def _used(out: Collector, key: str, fq: Any, dtype: str) -> None:
    rng = rng_of("used", key)
    seen: list[object] = []
    for _ in range(5):
        x, g = (rng.normal(0.1, 1, SHAPE).astype(dtype) for _ in range(2))
        seen += [fq.forward_with_calibration(x), fq.backward(g), fq.backward_clamped(g, x), fq.quantization_noise(x)]
        if fq.scale_grad is not None:
            seen += [fq.scale_grad, fq.zero_point_grad]
            moved = None if fq.zero_point_grad is None else fq.zero_point - 0.1 * fq.zero_point_grad
            fq.update_params(fq.scale - 1e-4 * fq.scale_grad, moved)
    out.put(f"{key}/results", seen)
    out.put(f"{key}/state", fq.state_dict(), fq.float_range(), fq.num_levels)
    loaded = type(fq)(fq.spec, mode=fq.mode, ste=fq.ste).load_state_dict(fq.state_dict())
    out.put(f"{key}/evaluation", loaded.eval()(rng.normal(0, 1, SHAPE).astype(dtype)))


# PyTorch


def _mlp() -> tuple[Any, Any]:
    import torch
    from torch import nn

    layers = (nn.Linear(32, 130), nn.ReLU(), nn.Linear(130, 64), nn.Tanh(), nn.Linear(64, 8))
    return nn.Sequential(*layers), lambda: torch.randn(12, 32)


def _cnn() -> tuple[Any, Any]:
    import torch
    from torch import nn

    layers = (
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.1)),
        *(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 8)),
    )
    return nn.Sequential(*layers), lambda: torch.randn(6, 3, 8, 8)


def _grouped() -> tuple[Any, Any]:
    import torch
    from torch import nn

    layers = (
        *(nn.Conv2d(4, 12, 3, groups=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU6()),
        *(nn.Conv2d(12, 12, 3, groups=12, padding=1), nn.BatchNorm2d(12), nn.Hardswish()),
        *(nn.Conv2d(12, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8)),
    )
    return nn.Sequential(*layers), lambda: torch.randn(6, 4, 6, 6)


def _transformer() -> tuple[Any, Any]:
    import torch
    from torch import nn

    import detent.torch as qt

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
            self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
            self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            self.left, self.right = qt.Quantizer(), qt.Quantizer()

        def forward(self, x: Any) -> Any:
            h = self.first(x)
            scores = self.left(self.query(h)) @ self.right(self.key(h)).transpose(-1, -2) / 32**0.5
            x = x + self.out(scores.softmax(-1) @ self.value(h))
            return x + self.body(self.second(x))

    return nn.Sequential(Block(), nn.Linear(32, 8)), lambda: torch.randn(4, 5, 32)


def _embedding() -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.hidden, self.head = nn.Embedding(40, 32), nn.Linear(32, 16), nn.Linear(16, 8)

        def forward(self, ids: Any) -> Any:
            return self.head(self.hidden(self.table(ids)).relu().mean(1))

    return Words(), lambda: torch.randint(40, (6, 7))


def _attention() -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 8)

        def forward(self, x: Any) -> Any:
            return self.head(self.inner(x, x, x, need_weights=False)[0])

    return Attention(), lambda: torch.randn(4, 5, 32)


def _others() -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv1d(4, 8, 3, padding=1), nn.ConvTranspose1d(8, 8, 2, stride=2)
            self.norm, self.memory = nn.BatchNorm1d(8), nn.GRU(8, 16, batch_first=True)
            self.pair = nn.Bilinear(16, 16, 8)

        def forward(self, x: Any) -> Any:
            h = self.up(self.norm(self.conv(x)).relu()).transpose(1, 2)
            last = self.memory(h)[0][:, -1]
            return self.pair(last, last)

    return Others(), lambda: torch.randn(4, 4, 6)


TORCH_MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "grouped": _grouped,
    "transformer": _transformer,
    "embedding": _embedding,
    "attention": _attention,
    "others": _others,
}
MODES = ("ema", "per_batch", "fixed", "learned")


def _trained(model_name: str, recipe: Any, *, calibrated: bool = True) -> tuple[Any, Any, list[object]]:
    """Prepare, calibrate and train a model for three steps; return it, its inputs and the results on the way."""
    import torch

    import detent.torch as qt

    torch.manual_seed(len(model_name))
    model, batch = TORCH_MODELS[model_name]()
    qt.prepare(model, recipe)
    if calibrated:
        with qt.calibrating(model):
            for _ in range(2):
                model(batch())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    seen: list[object] = []
    for _ in range(3):
        optimizer.zero_grad()
        result = model(batch())
        loss = torch.nn.functional.cross_entropy(result.flatten(0, -2), torch.randint(8, result.shape[:-1]).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        seen += [result, loss, {name: each.grad for name, each in model.named_parameters()}]
        optimizer.step()
    return model, batch, seen


def _finished(out: Collector, key: str, model: Any, batch: Callable[[], Any], seen: list[object]) -> None:
    """All results of a trained model; freezes it."""
    import torch

    import detent.torch as qt

    out.put(f"{key}/training", seen)
    out.put(f"{key}/state", dict(model.state_dict()))
    x = batch()
    with torch.no_grad():
        out.put(f"{key}/evaluation", model.eval()(x))
        out.attempt(f"{key}/health", lambda: [_health_figures(each) for each in qt.health(model, [x]).quantizers])
        qt.freeze(model)
        out.put(f"{key}/frozen", model(x), dict(model.state_dict()))
    out.attempt(f"{key}/shipped", lambda: qt.quantized_state(model))


def _health_figures(each: Any) -> list[object]:
    names = ("name", "spec", "mode", "source", "elements", "clip_fraction", "code_usage", "drift", "saturated")
    return [getattr(each, name) for name in names]


def torch_training(out: Collector, model_name: str) -> None:
    """Store a model with all presets and scale modes."""
    import detent as dt

    for preset, mode in product(TORCH_PRESETS, MODES):
        key = f"{preset}/{mode}"
        with out.errors(key):
            _finished(out, key, *_trained(model_name, dt.Recipe.preset(preset, mode=mode)))


def torch_recipes(out: Collector) -> None:
    """Store recipes with estimators, observers, conventions, granularities and roundings that no preset uses."""
    import detent as dt

    rules: dict[str, list[Any]] = {
        ste: [dt.Rule(weight="int4/axis0", input="uint4", ste=ste)] for ste in ("identity", "hard_tanh", "tanh")
    }
    for observer in ("minmax", "percentile", "mse", "entropy"):
        rules[observer] = [dt.Rule(weight="int4/axis0", input="uint8", observer=observer, mode="fixed")]
    for convention in ("torch", "torch_fused", "compressed_tensors", "rlx"):
        texts = f"int8/axis0/symmetric/{convention}", f"uint8/tensor/affine/{convention}"
        rules[convention] = [dt.Rule(weight=texts[0], input=texts[1], mode="learned")]
    rules["token"] = [dt.Rule(weight="int8/group16", input="int8/token", mode="per_batch")]
    rules["output"] = [
        dt.Rule(weight="int8/axis0", input="uint8", output="uint8/tensor/affine"),
        dt.Rule("0", skip=True),
    ]
    rules["formats"] = [dt.Rule(weight="nf4/group16"), dt.Rule("0", weight="mxfp4"), dt.Rule("4", weight="int3/axis0")]
    stochastic = dt.QuantSpec("int4", granularity="axis0", rounding="stochastic(3)")
    rules["stochastic"] = [dt.Rule(weight=stochastic, input="uint8")]
    for (name, each), model_name in product(rules.items(), ("mlp", "cnn")):
        with out.errors(f"{model_name}/{name}"):
            _finished(out, f"{model_name}/{name}", *_trained(model_name, dt.Recipe(each)))


def torch_other_ways(out: Collector) -> None:
    """Store models without calibration, scheduled, watched, compiled, under autocast, and converted back to float."""
    import torch

    import detent as dt
    import detent.torch as qt

    for name, mode in product(("mlp", "cnn", "grouped", "embedding"), MODES):
        key = f"uncalibrated/{name}/{mode}"
        with out.errors(key):
            _finished(out, key, *_trained(name, dt.Recipe.preset("w4a8", mode=mode), calibrated=False))
    for name, mode in product(("mlp", "cnn", "transformer"), ("ema", "learned")):
        model, batch, _ = _trained(name, dt.Recipe.preset("w8a8", mode=mode))
        _scheduled(out, f"scheduled/{name}/{mode}", model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            out.put(f"autocast/{name}/{mode}", model(batch()))
        _traced(out, f"traced/{name}/{mode}", model, batch)
        qt.unprepare(model)
        out.put(f"unprepared/{name}/{mode}", dict(model.state_dict()), model(batch()))


def _scheduled(out: Collector, key: str, model: Any, batch: Callable[[], Any]) -> None:
    import torch

    import detent.torch as qt

    schedule = qt.Schedule(model, delay=1, observe_until=2, freeze_norms=3, freeze_scales=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with qt.watch(model):
        for _ in range(5):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
            schedule.step()
    figures = [(_health_figures(each), each.oscillation) for each in qt.health(model).quantizers]
    out.put(key, dict(model.state_dict()), figures)


def _traced(out: Collector, key: str, model: Any, batch: Callable[[], Any]) -> None:
    import torch

    model.zero_grad()
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager")
    result = compiled(batch())
    result.square().mean().backward()
    out.put(key, result, {name: each.grad for name, each in model.named_parameters()})


def torch_operator(out: Collector) -> None:
    """Store ``qt.fake_quantize`` and ``qt.FakeQuantize`` on tensors of all dtypes."""
    import torch

    import detent as dt
    import detent.torch as qt

    specs = ("int8", "uint8", "int4/axis0", "uint4/axis0", "int8/token", "int4/group16", "float8_e4m3fn", "nf4")
    estimators: tuple[Any, ...] = (None, "identity", "tanh", "hard_tanh")
    for text, dtype, ste in product(specs, DTYPES, estimators):
        key = f"{text}/{dtype}/{ste}"
        torch.manual_seed(0)
        x = torch.randn(SHAPE, dtype=torch.float64).to(getattr(torch, dtype)).requires_grad_()
        params = dt.QuantParams.from_range(text, -1.2, 1.0, shape=SHAPE)
        scale = torch.tensor(params.scale).requires_grad_()
        zero_point = torch.tensor(params.zero_point, dtype=torch.float32).requires_grad_()
        with out.errors(f"{key}/fixed"):
            y = qt.fake_quantize(x, params, ste=ste)
            out.put(f"{key}/fixed", y, torch.autograd.grad(y.square().sum(), x))
        with out.errors(f"{key}/learned"):
            y = qt.fake_quantize(x, params, scale=scale, zero_point=zero_point, ste=ste)
            given = (x, scale, zero_point)
            out.put(f"{key}/learned", y, torch.autograd.grad(y.square().sum(), given, allow_unused=True))
    for text, mode in product(specs, MODES):
        with out.errors(f"module/{text}/{mode}"):
            _module(out, f"module/{text}/{mode}", qt.FakeQuantize(text, mode=mode, shape=SHAPE))


def _module(out: Collector, key: str, module: Any) -> None:
    import torch

    torch.manual_seed(1)
    seen: list[object] = []
    for _ in range(3):
        x = torch.randn(SHAPE, requires_grad=True)
        y = module(x)
        y.square().sum().backward()
        seen += [y, x.grad, [each.grad for each in module.parameters()]]
    out.put(key, seen, dict(module.state_dict()), module.eval()(torch.randn(SHAPE)))


# Files: exported, and quantized


def _file_digests(out: Collector, key: str, path: Path) -> None:
    """Store digests of a file: its bytes, its graph, and the weights that ``load_quantized`` reads."""
    import onnx

    import detent.onnx as qo

    beside = [each for each in sorted(path.parent.glob(f"{path.name}*")) if each != path]
    out.put(f"{key}/file", path.read_bytes(), [each.read_bytes() for each in beside])
    model = onnx.load(path)
    out.put(
        f"{key}/graph", model.graph.SerializeToString(deterministic=True), [str(each) for each in model.opset_import]
    )
    out.attempt(f"{key}/weights", lambda: qo.load_quantized(path).weights)


def _verified(out: Collector, key: str, source: Any, path: Path, data: Sequence[Any]) -> None:
    import detent as dt

    with out.errors(key):
        report = dt.verify(source, path, data)
        runs = {
            name: (each.compared_codes, each.differing_codes, each.max_steps)
            for name, each in report.end_to_end.items()
            if name != "openvino"  # OpenVINO starts its own threads
        }
        kernels = [(each.kernel, each.compared, each.differing, each.saturated) for each in report.kernels]
        codes = (report.ok, report.compared_codes, report.differing_codes, report.first_difference is None)
        out.put(key, codes, runs, kernels)


def _export_recipe(preset: str, mode: str) -> Any:
    """A preset, for AVX2 with weight codes from -64 to 64."""
    import detent as dt

    if preset != LIMITED:
        return dt.Recipe.preset(preset, mode=mode)
    weight = dt.QuantSpec("int8", granularity="axis0", qmin=-64, qmax=64)
    return dt.Recipe([dt.Rule(weight=weight, input="uint8/tensor/affine", mode=mode)], LIMITED)


def export(out: Collector, model_name: str, preset: str, mode: str, targets: Sequence[str]) -> None:
    """Store the files that a trained model exports."""
    import detent.torch as qt

    with out.errors("training"), tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        model, batch, _ = _trained(model_name, _export_recipe(preset, mode))
        example = batch()
        for target in targets:
            path = Path(directory, f"{target}.onnx")
            with out.errors(target):
                qt.export_onnx(model, example, path, target=target)
                _file_digests(out, target, path)
        if preset == "w8a8" and mode == "ema":
            path = Path(directory, "bytes.onnx")
            with out.errors("opset 18"):
                qt.export_onnx(model, example, path, opset=18, container="int8")
                _file_digests(out, "opset 18", path)
                _verified(out, "verify", model, path, [example.numpy()])


def _zoo() -> Mapping[str, Any]:
    """Real models from the tree that detent is installed from, in its present or former module."""
    import detent

    root = str(Path(detent.__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)
    before = ".".join(("detent", "testing", "zoo"))  # in parts, so that renaming by search leaves it alone
    models: Mapping[str, Any] = import_module("zoo" if Path(root, "zoo").is_dir() else before).ZOO
    return models


def _zoo_source(name: str) -> Path:
    """Path of a model's file; from an exported file, metadata is removed because it contains paths."""
    import onnx

    model = _zoo()[name]
    if model.writer is None:
        return Path(model.write(SCRATCH))
    path = SCRATCH / f"{name}.onnx"
    if not path.is_file():
        exported = onnx.load(model.write(SCRATCH / "written"))
        for part in (
            exported,
            exported.graph,
            *exported.graph.node,
            *exported.graph.value_info,
            *exported.graph.initializer,
        ):
            del part.metadata_props[:]
        partial = SCRATCH / f"{name}.{os.getpid()}.onnx"
        onnx.save(exported, partial)
        partial.replace(path)
    return path


def zoo_inputs(out: Collector, name: str) -> None:
    """Store the model and its data: they are inputs, and must be equal in both runs."""
    out.put("source", _zoo_source(name).read_bytes())
    out.put("feeds", list(_zoo()[name].feeds(BATCHES + 1)))


def zoo_quantized(out: Collector, name: str, preset: str, target: str) -> None:
    """Quantize a real model and store the results."""
    feeds = list(_zoo()[name].feeds(BATCHES + 1))
    options: dict[str, Any] = {"force": True} if name == "smart-turn" else {}
    held_out = feeds[BATCHES:] if preset == "w8a8" and target == "onnxruntime" and name in SMALL_MODELS else []
    _quantized(out, _zoo_source(name), feeds[:BATCHES], preset, target, options, held_out)


def _quantized(
    out: Collector,
    source: Any,
    feeds: list[Any],
    preset: str,
    target: str,
    options: Mapping[str, Any],
    held_out: list[Any],
) -> None:
    """Store the file and the report of ``qo.quantize``, and its verification if ``held_out`` is not empty."""
    import detent.onnx as qo

    with out.errors(""), tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        path = Path(directory, "quantized.onnx")
        report = qo.quantize(source, path, feeds, preset, target=target, progress=False, **options)
        _file_digests(out, "out", path)
        layers = [
            (each.name, each.type, each.weight, each.input, each.kernel, not each.reason) for each in report.layers
        ]
        out.put("layers", layers, report.nbytes_before, report.nbytes_after, len(report.steps), len(report.hints))
        out.put("sqnr", {name: repr(value) for name, value in report.outputs_sqnr_db.items()})
        if held_out:
            _verified(out, "verify", source, path, held_out)


def graph_quantized(out: Collector, seed: int) -> None:
    """Quantize a random graph with all presets; targets and options take turns."""
    from random_graphs import random_model

    options: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"observer": "mse"},
        {"keep_float": "none"},
        {"equalize": False, "smooth": False},
        {"bias_correction": False, "observer": "minmax"},
        {"keep_float": "none", "observer": "entropy"},
    )
    model, feeds = random_model(seed)
    for turn, preset in enumerate(GRAPH_PRESETS, seed):
        target = TARGETS[turn * 2 % len(TARGETS)]
        proof = feeds[:2] if (3 * seed + turn) % VERIFIED == 0 else []
        part = Collector(f"{out.prefix}/{preset}/{target}")
        _quantized(part, model, feeds, preset, target, options[(turn + seed // 5) % len(options)], proof)
        out.digests |= part.digests


# Sensitivity


def sensitivity_onnx(out: Collector) -> None:
    """Measure the sensitivity of a random graph."""
    from random_graphs import random_model

    model, feeds = random_model(6)
    _measured(out, model, feeds)


def sensitivity_torch(out: Collector) -> None:
    """Measure the sensitivity of a convolutional network."""
    import torch

    torch.manual_seed(0)
    model, batch = _cnn()
    _measured(out, model.eval(), [batch() for _ in range(3)])


def _measured(out: Collector, model: Any, data: list[Any]) -> None:
    import detent.sensitivity as qs

    given: dict[str, dict[str, Any]] = {
        "widths": {"widths": (2, 4, 8, "int4/group16")},
        "packed": {"widths": (3, 4, 6), "storage": "packed"},
    }
    for name, options in (given | {"recipe": {"recipe": "w4a8"}}).items():
        with out.errors(name):
            sensitivity = qs.measure(model, data, progress=False, **options)
            noise = [
                (each.name, {key: repr(value) for key, value in each.noise.items()}) for each in sensitivity.layers
            ]
            out.put(f"{name}/noise", noise, [each.nbytes for each in sensitivity.layers], sensitivity.to_json())
            sizes = [each for each, _ in sensitivity.curve()]
            out.put(f"{name}/curve", sizes)
            budget = sizes[len(sizes) // 2]
            mix = qs.run_mix(model, data, sensitivity.choose(budget))
            out.put(f"{name}/choice", dict(mix.options), mix.nbytes, repr(mix.measured_sqnr_db), mix.recipe.to_json())
            refined = qs.refine(model, data, sensitivity, budget, runs=12, progress=False)
            out.put(f"{name}/refined", dict(refined.options), repr(refined.measured_sqnr_db))


# Items of work


class Item(NamedTuple):
    """One piece of work: the group and name of its keys, and a function of this module with its arguments."""

    group: str
    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    quick: bool = True

    @property
    def key(self) -> str:
        """Prefix of the item's keys."""
        return f"{self.group}/{self.name}"


# Targets per preset of a large model, in turns; other models run with all targets.
FEW_TARGETS = {"layout": 2, "deface": 3, "ocr-detector": 2, "ocr-recognizer": 2, "minilm": 1, "smart-turn": 1}
LIMITED = "limited"
QUICK_EXPORTS = ("mlp", "cnn", "grouped", "transformer", "embedding")


def core_items() -> Iterator[Item]:
    """Items of group core."""
    plain = (core_formats, core_roundings, core_estimators, core_ranges, core_special, core_packing, core_metrics)
    for function in (*plain, core_texts):
        yield Item("core", function.__name__.removeprefix("core_"), function)
    for dtype in DTYPES:
        yield Item("core", f"granularities/{dtype}", core_granularities, (dtype,))
    for dtype in ("float32", "float64"):
        yield Item("core", f"conventions/{dtype}", core_conventions, (dtype,))


def torch_items() -> Iterator[Item]:
    """Items of group torch."""
    for name in TORCH_MODELS:
        yield Item("torch", f"model {name}", torch_training, (name,))
    for function in (torch_recipes, torch_other_ways, torch_operator):
        yield Item("torch", function.__name__.removeprefix("torch_"), function)


def export_items() -> Iterator[Item]:
    """Items of group export: all targets for some models, targets in turns for the others."""
    for turn, (name, preset, mode) in enumerate(product(TORCH_MODELS, TORCH_PRESETS, MODES)):
        whole = preset == "w8a8" and mode == "ema"
        targets = TARGETS if whole else (TARGETS[turn % len(TARGETS)],)
        quick = name in QUICK_EXPORTS and (whole or (mode == "ema" and turn // len(MODES) % 2 == 0))
        yield Item("export", f"{name}/{preset}/{mode}", export, (name, preset, mode, targets), quick)
    for name in TORCH_MODELS:
        given = (name, LIMITED, "ema", ("onnxruntime-avx2",))
        yield Item("export", f"{name}/{LIMITED}/ema", export, given, name in QUICK_EXPORTS)


def zoo_items(chosen: Sequence[str]) -> Iterator[Item]:
    """Items of group zoo; models that must be exported come first."""
    models = [name for name in _zoo() if not chosen or name in chosen]
    for name in sorted(models, key=lambda name: _zoo()[name].writer is None):
        yield Item("zoo", f"{name}/inputs", zoo_inputs, (name,), name in SMALL_MODELS)
    for name in models:
        count = FEW_TARGETS.get(name, len(TARGETS))
        for turn, preset in enumerate(PRESETS):
            for target in (TARGETS[(turn * count + i) % len(TARGETS)] for i in range(count)):
                yield Item(
                    "zoo", f"{name}/{preset}/{target}", zoo_quantized, (name, preset, target), name in SMALL_MODELS
                )


def items(groups: Sequence[str], graphs: int, models: Sequence[str]) -> Iterator[Item]:
    """All items of these groups."""
    lists: dict[str, Callable[[], Iterable[Item]]] = {
        "core": core_items,
        "observers": lambda: [Item("observers", name, observers, (name,)) for name in OBSERVERS],
        "quantizer": lambda: [Item("quantizer", "numpy", quantizer)],
        "torch": torch_items,
        "sensitivity": lambda: [
            Item("sensitivity", "onnx", sensitivity_onnx),
            Item("sensitivity", "torch", sensitivity_torch),
        ],
        "export": export_items,
        "graphs": lambda: [
            Item("graphs", f"{seed:04d}", graph_quantized, (seed,), seed < FEW_GRAPHS) for seed in range(graphs)
        ],
        "zoo": lambda: zoo_items(models),
    }
    for name, make in lists.items():
        if name in groups:
            yield from make()


GROUPS = ("core", "observers", "quantizer", "torch", "export", "zoo", "graphs", "sensitivity")


# Workers


class Outcome(NamedTuple):
    """Result of an item; ``crash`` is the traceback of an error that is not a DetentError."""

    digests: Digests
    seconds: float
    crash: str = ""


def start_worker(places: Any, directory: str) -> None:
    """Bind this process to one processor, and every library to one thread."""
    global SCRATCH  # noqa: PLW0603 - set once, before any work
    SCRATCH = Path(directory)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.sched_setaffinity(0, {places.get()})
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    import detent as dt

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    dt.set_num_threads(1)


def _end_with(parent: int) -> None:
    """End this process when its parent is killed; a process pool does not do that."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def work(item: Item) -> Outcome:
    """Compute the digests of an item."""
    start, out = time.perf_counter(), Collector(item.key)
    try:
        item.function(out, *item.arguments)
    except Exception:  # noqa: BLE001 - one that fails must not stop the others
        return Outcome(out.digests, time.perf_counter() - start, traceback.format_exc())
    return Outcome(out.digests, time.perf_counter() - start)


# The results file


def about() -> dict[str, str]:
    """Versions and processor: everything else that digests depend on."""
    import detent as dt

    versions = {"detent": str(Path(dt.__file__).parent), "python": platform.python_version(), "processor": _processor()}
    for package in ("numpy", "ml_dtypes", "torch", "onnx", "onnxruntime", "onnxscript", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


class Results:
    """The results file, rewritten every few seconds."""

    PAUSE = 5.0

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        old = json.loads(path.read_text(encoding="utf-8")) if resume and path.is_file() else {}
        self.seconds: dict[str, float] = old.get("seconds", {})
        self.digests: Digests = old.get("digests", {})
        self.crashes: dict[str, str] = {}
        self._written = time.monotonic()

    def add(self, item: Item, outcome: Outcome) -> None:
        """Add the result of an item; ``--resume`` repeats items that crashed."""
        self.digests |= outcome.digests
        if outcome.crash:
            self.crashes[item.key] = outcome.crash
        else:
            self.seconds[item.key] = round(outcome.seconds, 2)
        if time.monotonic() - self._written > self.PAUSE:
            self.write()

    def write(self) -> None:
        """Replace the file in one step."""
        plain = {"about": about(), "seconds": self.seconds, "digests": dict(sorted(self.digests.items()))}
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_text(json.dumps(plain | {"crashes": self.crashes}, indent=1), encoding="utf-8")
        partial.replace(self.path)
        self._written = time.monotonic()


def run(todo: Sequence[Item], results: Results, jobs: int) -> None:
    """Run all items in worker processes, and print progress."""
    context = get_context("spawn")
    places = context.Queue()
    processors = sorted(os.sched_getaffinity(0))
    for i in range(jobs):
        places.put(processors[i % len(processors)])
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="digests-") as directory,
        ProcessPoolExecutor(jobs, context, start_worker, (places, directory)) as pool,
    ):
        waiting = {pool.submit(work, item): item for item in todo}
        try:
            for i, done in enumerate(as_completed(waiting), 1):
                item, outcome = waiting[done], done.result()
                results.add(item, outcome)
                crash = f"  CRASHED\n{outcome.crash}" if outcome.crash else ""
                place = f"{time.monotonic() - start:6.0f} s  {i:4}/{len(todo)}  {outcome.seconds:6.1f} s"
                print(f"{place}  {item.key}{crash}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    results.write()


# Comparison


def compare(first: Path, second: Path, *, common: bool) -> int:
    """Print the differences between two files; return 1 if there are any."""
    a, b = (json.loads(path.read_text(encoding="utf-8")) for path in (first, second))
    for name in sorted(set(a["about"]) | set(b["about"])):
        old, new = a["about"].get(name), b["about"].get(name)
        if old != new and name != "detent":
            print(f"note: {name} is {old} in {first}, {new} in {second}")
    before, after = a["digests"], b["digests"]
    lines = [
        f"differs: {key}  {before[key]} -> {after[key]}" for key in before if after.get(key, before[key]) != before[key]
    ]
    missing = [f"only in {first}: {key}" for key in before if key not in after]
    missing += [f"only in {second}: {key}" for key in after if key not in before]
    if not common:
        lines += missing
    for line in lines:
        print(line)
    both = len(set(before) & set(after))
    differing = sum(line.startswith("differs") for line in lines)
    print(f"{differing} of {both} digests differ; {len(missing)} are in one file only")
    return 1 if lines or not both else 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, help="the file of results")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two files of results")
    parser.add_argument("--common", action="store_true", help="compare only what both files have")
    parser.add_argument("--only", type=_words, default=list(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="small models, few graphs and exports")
    parser.add_argument("--graphs", type=int, default=GRAPHS, help="how many random graphs")
    parser.add_argument("--models", type=_words, default=[], help="some models of the zoo")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes")
    parser.add_argument("--resume", action="store_true", help="keep what the file has")
    given = parser.parse_args(arguments)
    if (given.output is None) == (given.compare is None):
        parser.error("give either a file to write, or --compare with two files")
    if unknown := set(given.only) - set(GROUPS):
        parser.error(f"unknown groups: {', '.join(sorted(unknown))}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or compare."""
    given = parsed(arguments)
    if given.compare:
        return compare(*given.compare, common=given.common)
    os.environ.update(SINGLE)  # before workers start
    results = Results(given.output, resume=given.resume)
    every = [item for item in items(given.only, given.graphs, given.models) if item.quick or not given.quick]
    run([item for item in every if item.key not in results.seconds], results, given.jobs)
    for key in results.crashes:
        print(f"crashed: {key}")
    print(f"{len(results.digests)} digests in {given.output}")
    return 1 if results.crashes else 0


if __name__ == "__main__":
    sys.exit(main())
