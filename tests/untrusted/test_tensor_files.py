"""Safetensors files that are not a QuantizedTensor, or an inconsistent one."""

import json
import time
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

import detent as dt

from .craft import damaged_at, file_of, forged, header_of, tensor_file
from .refusal import check

X = np.random.default_rng(0).normal(size=(3, 37)).astype(np.float32)
SPECS = ["int4/axis0", "uint3/group8", "float8_e4m3fn", "nf4/token", "mxfp4", "nvfp4", "int16/block2x8/affine"]
ZERO_RANGE = dt.Convention.onnx.to_dict() | {"name": "mine", "zero_range": {"kind": "eps", "value": "x"}}


def load(tmp_path, data):
    path = tmp_path / "q.safetensors"
    path.write_bytes(data)
    return dt.QuantizedTensor.load(path)


def test_an_unchanged_file_is_valid(tmp_path):
    q = load(tmp_path, forged())
    assert q.codes.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert q.dequantize().tolist() == [[0.5, 1.0, 1.5], [0.75, 1.0, 1.25]]


def scale(*values, dtype=np.float32):
    return {"scale": np.array(values, dtype)}


INVALID = {
    "another version": (forged(about={"version": 2}), "version 1", "got version 2", "update detent"),
    "a version of text": (forged(about={"version": "1"}), "version 1", "'1'"),
    "a version of true": (forged(about={"version": True}), "version"),
    "a missing fact": (tensor_file({"version": 1}, {}), "dtype", "shape", "spec"),
    "an extra fact": (forged(about={"comment": "hi"}), "unexpected keys"),
    "facts in a list": (tensor_file([1], {}), "JSON object"),
    "facts that are not JSON": (tensor_file("{", {}), "not contain a QuantizedTensor"),
    "facts too deep": (tensor_file("[" * 100_000, {}), "not contain a QuantizedTensor"),
    "duplicated facts": (
        forged(rewrite=lambda facts: json.dumps(facts)[:-1] + ', "version": 1}'),
        "version",
        "duplicate keys",
    ),
    "another metadata key": (tensor_file("{}", {}, comment="hi"), "detent.QuantizedTensor", "comment"),
    "negative size": (forged(about={"shape": [2, -3]}), "-3"),
    "size of 2.0": (forged(about={"shape": [2.0, 3]}), "2.0"),
    "size NaN": (forged(about={"shape": [float("nan"), 3]}), "NaN"),
    "shape is a number": (forged(about={"shape": 6}), "got 6"),
    "another shape": (forged(about={"shape": [2, 4]}), "(2, 4)", "expected (4,)", "(3,)"),
    "another shape, same bytes": (forged(about={"shape": [3, 2]}), "(3,)", "(2,)"),
    "a huge shape": (forged(about={"shape": [2, 2**62, 2**62]}), "not contain a QuantizedTensor"),
    "a huge empty shape": (
        forged(about={"shape": [2, 2**62, 0]}, arrays={"packed": np.zeros(0, np.uint8)}),
        "not contain a QuantizedTensor",
    ),
    "a size beyond int64": (
        forged(about={"shape": [2, 2**70, 0]}, arrays={"packed": np.zeros(0, np.uint8)}),
        "not contain a QuantizedTensor",
    ),
    "too many axes": (forged(about={"shape": [2, *[1] * 70, 3]}), "not contain a QuantizedTensor"),
    "integer dtype": (forged(about={"dtype": "int8"}), "int8"),
    "no dtype": (forged(about={"dtype": None}), "None"),
    "a broken dtype": (forged(about={"dtype": "f4,("}), "f4,("),
    "a dtype of lists": (forged(about={"dtype": [["a"]]}), "a"),
    "unknown format": (forged(spec={"format": "uint99"}), "uint99"),
    "format list": (forged(spec={"format": ["uint4"]}), "uint4"),
    "spec version": (forged(spec={"version": 9}), "version 1", "9"),
    "spec text": (forged(about={"spec": "uint4"}), "keys"),
    "broken zero range": (forged(spec={"convention": ZERO_RANGE}), "'x'"),
    "axis out of range": (forged(spec={"granularity": {"kind": "axis", "axis": 2}}), "axis2", "(2, 3)"),
    "group of 0": (forged(spec={"granularity": {"kind": "group", "size": 0, "axis": 0}}), "at least 1"),
    "no packed": (forged(drop=("packed",)), "packed"),
    "no scale": (forged(drop=("scale",)), "scale"),
    "no zero point": (forged(drop=("zero_point",)), "zero_point"),
    "an extra array": (forged(arrays={"bias": np.zeros(2, np.float32)}), "bias"),
    "too few codes": (forged(arrays={"packed": np.zeros(2, np.uint8)}), "expected (3,)", "(2,)"),
    "too many codes": (forged(arrays={"packed": np.zeros(4, np.uint8)}), "expected (3,)", "(4,)"),
    "codes of int8": (forged(arrays={"packed": np.zeros(3, np.int8)}), "uint8", "int8"),
    "codes in a matrix": (forged(arrays={"packed": np.zeros((1, 3), np.uint8)}), "(1, 3)"),
    "codes outside the range": (forged(spec={"qmax": 5}), "[0, 5]", "6"),
    "zero points outside the range": (forged(spec={"qmin": 1}), "[1, 15]", "got 0"),
    "zero scale": (forged(arrays=scale(0.5, 0.0)), "positive", "0.0"),
    "negative scale": (forged(arrays=scale(-0.5, 1.0)), "positive", "-0.5"),
    "NaN scale": (forged(arrays=scale(np.nan, 1.0)), "nan"),
    "infinite scale": (forged(arrays=scale(np.inf, 1.0)), "inf"),
    "subnormal scale": (forged(arrays=scale(1e-40, 1.0)), "normal number"),
    "integer scale": (forged(arrays=scale(1, 2, dtype=np.int32)), "int32", "float32"),
    "too few scales": (forged(arrays=scale(1.0)), "(1,)", "(2,)"),
    "too many scales": (forged(arrays=scale(1.0, 1.0, 1.0)), "(3,)", "(2,)"),
    "too many zero points": (forged(arrays={"zero_point": np.zeros(2, np.uint8)}), "(1,)", "(2,)"),
}


@pytest.mark.parametrize("name", INVALID)
def test_refused(name, tmp_path):
    data, *words = INVALID[name]
    check(lambda: load(tmp_path, data), dt.FileFormatError, [str(tmp_path), *words])


@pytest.mark.parametrize(
    "metadata", [None, {"format": "np"}, {"detent.QuantizedTensor": "{}", "format": "pt"}], ids=repr
)
def test_a_file_of_the_safetensors_library_is_foreign(metadata, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"packed": np.zeros(3, np.uint8)}, path, metadata=metadata)
    check(lambda: dt.QuantizedTensor.load(path), dt.FileFormatError, ["model.safetensors", "detent.QuantizedTensor"])


@pytest.mark.parametrize("name", ["a huge shape", "a huge empty shape", "too many scales"])
def test_refused_without_taking_memory(name, tmp_path):
    check(lambda: load(tmp_path, INVALID[name][0]), dt.FileFormatError, [])  # warm up
    tracemalloc.start()
    begin = time.perf_counter()
    check(lambda: load(tmp_path, INVALID[name][0]), dt.FileFormatError, [])
    elapsed, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    assert elapsed < 1


def saved_bytes(tmp_path, spec):
    path = tmp_path / "good.safetensors"
    dt.quantize(X, dt.QuantParams.from_data(spec, X)).save(path)
    return path.read_bytes()


@pytest.mark.parametrize("spec", SPECS)
def test_truncated_anywhere(spec, tmp_path):
    data = saved_bytes(tmp_path, spec)
    for length in [*range(0, len(data), 13), len(data) - 1]:
        check(lambda length=length: load(tmp_path, data[:length]), dt.FileFormatError, [])


def damaged(rng, data):
    """Change, remove or insert random bytes; half of the changes are in the arrays."""
    start = rng.choice([0, len(data) - len(header_of(data)[1])])
    return damaged_at(rng, data, int(rng.integers(start, len(data))), first=8)


@pytest.mark.parametrize("spec", SPECS)
def test_a_damaged_file_is_refused_or_gives_a_valid_tensor(spec, tmp_path):
    rng = np.random.default_rng(11)
    data = saved_bytes(tmp_path, spec)
    survivors = 0
    for _ in range(150):
        try:
            q = load(tmp_path, damaged(rng, data))
        except dt.FileFormatError:
            continue
        survivors += 1
        q.params.validate()
        assert q.params.scale.shape == q.spec.granularity.tiling(q.shape).scale_shape
        assert dt.QuantizedTensor.from_packed(q.packed, q.params, q.shape, q.dtype) == q
    assert survivors


@pytest.mark.parametrize("exponent", [0, 255])
def test_mx_exponents_that_are_not_normal_scales(exponent, tmp_path):
    header, body = header_of(saved_bytes(tmp_path, "mxfp4"))
    begin, end = header["scale"]["data_offsets"]
    forged_body = body[:begin] + bytes([exponent]) * (end - begin) + body[end:]
    check(lambda: load(tmp_path, file_of(header, forged_body)), dt.FileFormatError, ["scale"])


@pytest.mark.parametrize("bits", [0x7F, 0xFF, 0x00, 0x80], ids=hex)
def test_nvfp4_block_scales_that_are_not_normal_scales(bits, tmp_path):
    header, body = header_of(saved_bytes(tmp_path, "nvfp4"))
    begin, end = header["block_scale"]["data_offsets"]
    forged_body = body[:begin] + bytes([bits]) * (end - begin) + body[end:]
    check(lambda: load(tmp_path, file_of(header, forged_body)), dt.FileFormatError, ["scale"])


def test_nvfp4_tensor_scale_whose_products_overflow(tmp_path):
    header, body = header_of(saved_bytes(tmp_path, "nvfp4"))
    begin, end = header["tensor_scale"]["data_offsets"]
    forged_body = body[:begin] + np.float32(3e38).tobytes() + body[end:]
    check(lambda: load(tmp_path, file_of(header, forged_body)), dt.FileFormatError, ["scale"])


def test_padding_bits_must_be_zero(tmp_path):
    """Three int4 codes leave four padding bits; without this rule one tensor could have several files."""
    q = dt.quantize(np.array([1.0, 2.0, 3.0], np.float32), dt.QuantParams.int4_symmetric())
    q.save(tmp_path / "good.safetensors")
    header, body = header_of((tmp_path / "good.safetensors").read_bytes())
    last = header["packed"]["data_offsets"][1] - 1
    forged_body = body[:last] + bytes([body[last] | 0xF0]) + body[last + 1 :]
    check(lambda: load(tmp_path, file_of(header, forged_body)), dt.FileFormatError, [])


def test_the_header_holds_the_whole_spec(tmp_path):
    header, _ = header_of(saved_bytes(tmp_path, "uint3/group8"))
    facts = json.loads(header["__metadata__"]["detent.QuantizedTensor"])
    assert facts["spec"] == dt.QuantSpec.parse("uint3/group8").to_dict()
    assert (facts["shape"], facts["dtype"], facts["version"]) == ([3, 37], "float32", 1)
