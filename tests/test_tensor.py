"""QuantizedTensor: contents, comparison, printing, and shared memory."""

import dataclasses
import re
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.tensor import code_histogram

X = np.array([[0.5, -1.0, 0.25], [3.0, -3.0, 0.1]], np.float32)
P = dt.QuantParams("int4", 0.25)
Q = dt.quantize(X, P)


def test_contents():
    assert Q.codes.tolist() == [[2, -4, 1], [7, -7, 0]]
    assert Q.packed.tobytes().hex() == "c27109"
    assert (Q.shape, Q.size, len(Q), Q.dtype, Q.params, Q.spec) == ((2, 3), 6, 2, np.float32, P, P.spec)
    assert Q.dequantize().tolist() == [[0.5, -1.0, 0.25], [1.75, -1.75, 0.0]]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int3", np.int8),
        ("uint8", np.uint8),
        ("int9", np.int16),
        ("uint16", np.uint16),
        ("nf4", np.uint8),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("float4_e2m1fn", ml_dtypes.float4_e2m1fn),
    ],
)
def test_code_dtype(name, dtype):
    assert dt.quantize(X, dt.QuantParams(name, 1.0)).codes.dtype == dtype


def test_codes_and_packed_are_read_only():
    fresh = dt.quantize(X, P)
    for array in (fresh.codes, fresh.packed, dt.QuantizedTensor.from_packed(Q.packed, P, (2, 3)).codes):
        assert not array.flags.writeable


def test_codes_given_are_copied():
    codes = np.array([1, 2, 3])
    q = dt.QuantizedTensor.from_codes(codes, P)
    packed = np.array([0x21, 0x03], np.uint8)
    p = dt.QuantizedTensor.from_packed(packed, P, (3,))
    codes[0], packed[0] = 7, 0x77
    assert q.codes.tolist() == p.codes.tolist() == [1, 2, 3]


def test_out_is_shared():
    out, packed = np.empty((2, 3), np.int8), np.empty(3, np.uint8)
    assert np.shares_memory(dt.quantize(X, P, out=out).codes, out)
    q = dt.quantize(X, P, out=packed)
    assert np.shares_memory(q.packed, packed)
    assert q == Q
    assert out.flags.writeable
    assert packed.flags.writeable


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dequantizes_to_the_datas_type_or_the_one_asked_for(dtype):
    q = dt.quantize(X.astype(dtype), P)
    assert q.dtype == q.dequantize().dtype == np.dtype(dtype)
    assert Q.dequantize(dtype).dtype == np.dtype(dtype)
    assert np.array_equal(Q.dequantize(dtype).astype(np.float32), Q.dequantize())


def test_float64_is_computed_in_float64():
    q = dt.quantize(np.array([0.3]), dt.QuantParams("int8", np.float64(0.1)))
    assert q.dequantize().item() == 3 * 0.1
    assert q.dequantize("float32").item() == np.float32(3) * np.float32(0.1)


def test_equality_and_hash():
    same = dt.QuantizedTensor.from_codes(Q.codes, P)
    assert same == Q
    assert hash(same) == hash(Q)
    others = [
        dt.QuantizedTensor.from_codes(Q.codes, P, "float64"),
        dt.QuantizedTensor.from_codes(Q.codes.reshape(3, 2), P),
        dt.QuantizedTensor.from_codes(-Q.codes, P),
        dt.QuantizedTensor.from_codes(Q.codes, dt.QuantParams("int4", 0.5)),
        "tensor",
    ]
    assert all(other != Q for other in others)


def test_negative_zero_is_another_code_of_a_small_float():
    params = dt.QuantParams("float8_e4m3fn", 1.0)
    assert dt.quantize(np.array([0.0]), params) != dt.quantize(np.array([-0.0]), params)


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        ("int4", 3 + 4),
        ("uint3", 3 + 4 + 1),
        ("int8/axis0", 6 + 8),
        ("uint4/axis0", 3 + 8 + 1),
        ("mxfp4/group2", 3 + 4),
        ("nvfp4/group2", 3 + 4 + 4),
    ],
)
def test_nbytes_are_the_bytes_in_the_file(spec, nbytes, tmp_path):
    q = dt.quantize(X, dt.QuantParams.from_data(spec, X))
    assert q.nbytes == nbytes
    q.save(tmp_path / "q")
    data = (tmp_path / "q").read_bytes()
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == nbytes


def test_repr_says_what_it_is():
    assert repr(Q) == ("QuantizedTensor(shape=(2, 3), dtype=float32, spec='int4/tensor', 7 bytes, 3.4x smaller)")
    assert "shape=(0,)" in repr(dt.quantize(X[0, :0], P))


FORMATS = ["int4", "uint8/axis0", "int12", "float8_e4m3fn", "float4_e2m1fn", "nf4", "mxfp4", "int2"]


@pytest.mark.parametrize("spec", FORMATS)
def test_histogram_counts_every_code_once(spec):
    x = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    q = dt.quantize(x, spec)
    counts, lo, hi = code_histogram(q.codes, q.spec)
    assert sum(counts) == x.size
    assert 2 <= len(counts) <= 64
    assert (lo, hi) == ((0, 15) if spec == "nf4" else (q.spec.qmin, q.spec.qmax))


def test_histogram_bins_lie_over_the_range():
    q = dt.QuantizedTensor.from_codes([-7, -7, 0, 7], dt.QuantParams.int4_symmetric())
    assert code_histogram(q.codes, q.spec) == ([2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1], -7, 7)
    wide = dt.QuantizedTensor.from_codes([-127, -124, -123, 127], dt.QuantParams.int8_symmetric())
    counts, _, _ = code_histogram(wide.codes, wide.spec)
    assert (len(counts), counts[0], counts[1], counts[-1]) == (64, 2, 1, 1)


def test_histogram_of_a_large_tensor_counts_a_sample():
    q = dt.QuantizedTensor.from_codes(np.zeros((3 << 20) + 5, np.int8), dt.QuantParams.int8_symmetric())
    assert (1 << 19) < sum(code_histogram(q.codes, q.spec)[0]) <= 1 << 20


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_html_is_a_table_and_a_picture(shape):
    q = dt.quantize(np.ones(shape, np.float32), dt.QuantParams.int8_symmetric())
    root = ElementTree.fromstring(f"<div>{q._repr_html_()}</div>")
    cells = [cell.text for cell in root.iter("td")]
    assert cells[:3] == [str(shape), "int8/tensor", "1"]
    assert cells[4].endswith("smaller than float32")
    assert [text.text for text in root.iter("text")] == ["-127", "127"]


def test_html_of_a_tensor_escapes_names_and_loads_nothing():
    spec = dt.QuantSpec("int8", convention=dataclasses.replace(dt.Convention.onnx, name="mine"), qmin=-3)
    html = dt.quantize(np.ones(3), spec)._repr_html_()
    assert "mine [qmin=-3]" in html
    assert not re.search(r"http|src=|href|script|url\(", html)


def test_slices_are_tensors_of_their_own():
    part = Q[1:, ::2]
    assert isinstance(part, dt.QuantizedTensor)
    assert (part.shape, part.codes.tolist(), part.dtype) == ((1, 2), [[7, 0]], np.float32)
    assert not np.shares_memory(part.codes, Q.codes)
    assert Q[...] == Q[:] == Q


def test_dequantize_function_takes_tensors_and_codes():
    assert np.array_equal(dt.dequantize(Q), Q.dequantize())
    assert np.array_equal(dt.dequantize(Q.codes.tolist(), P), Q.dequantize())
    assert dt.dequantize(Q, dtype="float16").dtype == np.float16
    out = np.empty((2, 3), np.float64)
    assert dt.dequantize(Q.codes, P, dtype="float64", out=out) is out
