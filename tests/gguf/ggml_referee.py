"""ggml's own quantizer through ctypes, and data on which block formats are compared with it."""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

KINDS = 17  # of data
TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
    "gguf.mxfp4",
)


def ggml():
    """Return ggml's library, or skip the test."""
    spec = find_spec("libggml")
    if spec is None or spec.origin is None:
        pytest.skip("libggml-python is not installed")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib64" / "libggml-base.so"))
    pointer = ctypes.c_void_p
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]
    return library


def quantized_by_ggml(form, x, importance=None):
    """Return the bytes (rows, bytes) of ggml_quantize_chunk."""
    rows, columns = x.shape
    out = np.zeros((rows, form.row_bytes(columns)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32).ctypes.data
    x = np.ascontiguousarray(x, np.float32)
    written = ggml().ggml_quantize_chunk(form.gguf_type, x.ctypes.data, out.ctypes.data, 0, rows, columns, weights)
    assert written == out.size
    return out


def dequantized_by_ggml(form, blocks):
    """Return the float32 values of ggml's dequantize_row function."""
    values = np.empty(blocks.size // form.block_bytes * form.block_size, np.float32)
    name = form.type_name.lower()
    name = name[:-1] + name[-1].upper() if name.endswith("_k") else name
    function = getattr(ggml(), f"dequantize_row_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    blocks = np.ascontiguousarray(blocks)
    function(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


def data_sets(count, seed=0, columns=512):
    """Return arrays (rows, columns), about ``count`` elements in all: usual weights, and numbers that are hard."""
    rng = np.random.default_rng(seed)
    rows = max(2, count // columns // KINDS)
    shape = (rows, columns)
    normal = rng.normal(size=shape)
    steps = rng.integers(-9, 9, shape) + 0.5
    scales = rng.choice([0.0123, 0.3, 0.017], (rows, 1))
    ties = (steps * scales).astype(np.float32)
    near = np.nextafter(ties, np.where(rng.random(shape) < 0.5, np.inf, -np.inf).astype(np.float32))
    sets = {
        "normal": normal * 0.05,
        "heavy_tailed": rng.standard_t(2, shape) * 0.02,
        "outliers": normal * np.where(rng.random(shape) < 0.01, 30, 0.02),
        "zero": np.zeros(shape),
        "partly_zero": normal * (rng.random(shape) < 0.1),
        "tiny": normal * 1e-7,
        "vanishing": normal * 1e-16,
        "subnormal": normal * 1e-41,
        "huge": normal * 1e4,
        "too_large": normal * 1e9,
        "ties": np.where(rng.random(shape) < 0.5, ties, near),
        "grid": np.round(normal * 4) / 8,
        "positive": np.abs(normal) + 0.5,
        "negative": -np.abs(normal) - 0.5,
        "constant": np.broadcast_to(rng.normal(size=(rows, 1)), shape),
        "wide": normal * np.exp(rng.normal(size=shape) * 8),
        "signed_zeros": np.where(rng.random(shape) < 0.5, 0.0, -0.0) + np.where(rng.random(shape) < 0.02, normal, -0.0),
    }
    return {name: np.ascontiguousarray(array, np.float32) for name, array in sets.items()}


def importances(columns, seed=0):
    """Return kinds of importance: usual ones, very uneven ones, and some with zeros."""
    rng = np.random.default_rng(seed + 1)
    usual = rng.chisquare(2, columns)
    kinds = {
        "usual": usual,
        "uneven": np.exp(rng.normal(size=columns) * 4),
        "ones": np.ones(columns),
        "some_zeros": usual * (rng.random(columns) < 0.5),
        "zeros": np.zeros(columns),
    }
    return {name: array.astype(np.float32) for name, array in kinds.items()}


def first_difference(form, ours, theirs):
    """Describe the first block that differs, or return None."""
    a, b = (each.reshape(-1, form.block_bytes) for each in (ours, theirs))
    differs = (a != b).any(axis=1)
    if not differs.any():
        return None
    at = int(differs.argmax())
    places = np.flatnonzero(a[at] != b[at])
    return (
        f"{form.name}: {int(differs.sum())} of {len(a)} blocks differ, first block {at} at bytes {places[:8]}: "
        f"{a[at][places][:8]} != {b[at][places][:8]}"
    )
