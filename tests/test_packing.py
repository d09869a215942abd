"""Packing: expected bytes, round trips for every bit width and layout, and an independent implementation."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt
from detent.kernels import reductions as bits_module
from detent.packing import LAYOUTS, pack, packed_size, unpack

GOLDEN = {
    "ONNX int4": ([1, -2, 3], 4, "low_first", "e103"),
    "ONNX int2": ([1, -2, 0, -1, 1], 2, "low_first", "c901"),
    "ONNX uint4": ([15, 0, 7, 8], 4, "low_first", "0f87"),
    "uint1": ([1, 0, 1, 1, 0, 0, 0, 1, 1], 1, "low_first", "8d01"),
    "int3": ([1, -1, 2, -4], 3, "low_first", "b908"),
    "uint5": ([31, 0, 1], 5, "low_first", "1f04"),
    "uint6": ([63, 1, 2, 3], 6, "low_first", "7f200c"),
    "uint7": ([127, 1], 7, "low_first", "ff00"),
    "int8": ([-1, 2], 8, "low_first", "ff02"),
    "int12": ([1, -1, 0x123], 12, "low_first", "01f0ff2301"),
    "uint16": ([1, 0xABCD], 16, "low_first", "0100cdab"),
    "high_first": ([1, -2, 3], 4, "high_first", "1e30"),
    "GGUF": ([*range(16), *range(15, -1, -1)], 4, "split_half", "f0e1d2c3b4a5968778695a4b3c2d1e0f"),
    "GGUF, ragged": ([1, 2], 4, "split_half", "0102" + "00" * 14),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    codes, bits, layout, text = GOLDEN[name]
    packed = pack(np.array(codes), bits, layout)
    assert packed.tobytes().hex() == text
    assert packed.size == packed_size(len(codes), bits, layout)
    signed = min(codes) < 0
    again = unpack(packed, bits, len(codes), signed=signed, layout=layout)
    assert again.tolist() == codes
    assert again.dtype == f"{'' if signed else 'u'}int{8 if bits <= 8 else 16}"


def packed_by_hand(codes, bits):
    """Pack all codes into one big integer; the first code is in the lowest bits."""
    whole = sum((code & ((1 << bits) - 1)) << (i * bits) for i, code in enumerate(codes))
    return whole.to_bytes(-(-len(codes) * bits // 8), "little")


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", range(1, 17))
@given(data=st.data())
def test_round_trip_of_every_width(bits, signed, data):
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    codes = data.draw(st.lists(st.integers(low, high), max_size=20))
    stored = np.array(codes, dt.formats.FORMATS[f"{'' if signed else 'u'}int{bits}"].storage)
    packed = pack(stored, bits)
    assert packed.tobytes() == packed_by_hand(codes, bits)
    again = unpack(packed, bits, len(codes), signed=signed)
    assert again.tolist() == codes
    assert again.dtype == stored.dtype


@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_are_packed_a_chunk_at_a_time(bits, monkeypatch):
    """There are more codes than fit one chunk, and the last chunk ends inside a byte."""
    monkeypatch.setattr(bits_module, "CHUNK", 16)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, size=3 * 16 + 5)
    with dt.use_kernels("reference"):
        packed = pack(codes, bits)
        assert packed.tobytes() == packed_by_hand(codes.tolist(), bits)
        assert np.array_equal(unpack(packed, bits, codes.size), codes)


@given(st.lists(st.integers(0, 15), max_size=70), st.sampled_from(sorted(LAYOUTS)))
def test_round_trip_of_every_layout(codes, layout):
    packed = pack(np.array(codes, np.uint8), 4, layout)
    assert packed.size == packed_size(len(codes), 4, layout)
    assert unpack(packed, 4, len(codes), layout=layout).tolist() == codes


@pytest.mark.parametrize("count", [31, 32, 33, 64])
def test_split_half_pairs_j_with_j_plus_16(count):
    codes = np.random.default_rng(0).integers(0, 16, size=count)
    padded = np.pad(codes, (0, -count % 32)).reshape(-1, 2, 16)
    assert pack(codes, 4, "split_half").tobytes() == bytes((padded[:, 0] | padded[:, 1] << 4).ravel().tolist())


def test_codes_of_any_shape_and_layout_are_packed_in_c_order():
    codes = np.arange(12, dtype=np.int8).reshape(3, 4)
    flat = pack(codes.ravel(), 4)
    assert np.array_equal(pack(codes, 4), flat)
    assert np.array_equal(pack(np.asfortranarray(codes), 4), flat)
    assert np.array_equal(pack(codes[::-1], 4), pack(codes[::-1].copy(), 4))


def test_small_floats_are_packed_by_their_bits():
    values = np.array([1.0, -6.0, 0.5], ml_dtypes.float4_e2m1fn)
    assert pack(values, 4).tobytes().hex() == "f201"


@pytest.mark.parametrize(
    ("bits", "count", "size"), [(1, 9, 2), (3, 8, 3), (4, 0, 0), (7, 1, 1), (12, 3, 5), (16, 2, 4)]
)
def test_packed_size(bits, count, size):
    assert packed_size(count, bits) == size


def test_packed_result_owns_writable_memory():
    codes = np.zeros(4, np.uint16)
    packed = pack(codes, 16)
    packed[:] = 255
    assert not codes.any()
