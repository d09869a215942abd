"""Inconsistent safetensors bytes: each is rejected with its own message, quickly and in little memory."""

import time
import tracemalloc

import numpy as np
import pytest

import detent as dt
from detent import storage

from .craft import entry, file_of
from .refusal import check

GOOD = storage.dumps({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.int8)}, {"k": "v"})
DEEP = 100_000


def twice(key, value):
    """A JSON object with a duplicated key."""
    return b"{" + b",".join([b'"%s":%s' % (key, value)] * 2) + b"}"


INVALID = {
    "nothing": (b"", "at least 8"),
    "half a length": (b"\x10\x00\x00", "3 bytes"),
    "length of zero": (file_of(b""), "does not start with '{'"),
    "length bomb": (file_of({}, length=2**63), "truncated", str(2**63)),
    "length beyond the file": (file_of({}, length=3), "truncated"),
    "length beyond the limit": (file_of(b"{}" + b" " * (1 << 24)), str(1 << 24)),
    "length that cuts the header": (file_of({"a": entry(0, 0)}, length=5), "not valid JSON"),
    "a leading space": (file_of(b' {"a":1}'), "does not start with '{'"),
    "a list": (file_of(b"[]"), "does not start with '{'"),
    "a pickle": (b"\x80\x04\x95" + bytes(40), "truncated or not a safetensors file"),
    "broken JSON": (file_of(b'{"a":'), "not valid JSON"),
    "two documents": (file_of(b"{}{}"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "not valid JSON"),
    "deep nesting": (file_of(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"), "not valid JSON"),
    "a huge integer": (file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'), "JSON"),
    "duplicated tensor": (
        file_of(twice(b"a", b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}')),
        "['a']",
        "duplicate",
    ),
    "duplicated metadata": (file_of(twice(b"__metadata__", b"{}")), "['__metadata__']", "duplicate"),
    "duplicated metadata key": (file_of(b'{"__metadata__":' + twice(b"k", b'"v"') + b"}"), "['k']", "duplicate"),
    "duplicated field": (
        file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "['dtype']",
        "duplicate",
    ),
    "metadata of numbers": (file_of({"__metadata__": {"k": 1}}), "strings to strings"),
    "metadata of lists": (file_of({"__metadata__": {"k": ["v"]}}), "strings to strings"),
    "metadata is a list": (file_of({"__metadata__": []}), "strings to strings"),
    "metadata is null": (file_of({"__metadata__": None}), "strings to strings"),
    "entry is a number": (file_of({"a": 1}), "'a'", "data_offsets, dtype, shape"),
    "entry without shape": (file_of({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "'a'", "shape"),
    "entry with more": (file_of({"a": entry(0, 0) | {"strides": [1]}}), "strides"),
    "unknown dtype": (file_of({"a": entry(0, 0, dtype="Q4")}), "'Q4'", "F32"),
    "dtype is a list": (file_of({"a": entry(0, 0, dtype=["U8"])}), "['U8']"),
    "dtype is null": (file_of({"a": entry(0, 0, dtype=None)}), "None"),
    "negative size": (file_of({"a": entry(0, 0, [-1])}), "[-1]", "list of sizes"),
    "size of 1.0": (file_of({"a": entry(0, 1, [1.0])}, b"x"), "[1.0]", "list of sizes"),
    "size true": (file_of({"a": entry(0, 1, [True])}, b"x"), "[True]"),
    "size NaN": (file_of(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'), "NaN"),
    "size infinite": (file_of(b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,0]}}'), "inf"),
    "size of text": (file_of({"a": entry(0, 1, ["1"])}, b"x"), "['1']"),
    "shape is a number": (file_of({"a": entry(0, 3, 3)}, b"xyz"), "shape 3"),
    "too many axes": (file_of({"a": entry(0, 1, [1] * 65)}, b"x"), "list of sizes"),
    "sizes that overflow": (file_of({"a": entry(0, 4, [2**32, 2**32])}, b"abcd"), "list of sizes"),
    "a size beyond int64": (file_of({"a": entry(0, 0, [2**63])}), "list of sizes"),
    "sizes that overflow to zero": (file_of({"a": entry(0, 0, [2**62, 0, 2**62])}), "'a'"),
    "a huge claim": (file_of({"a": entry(0, 2**50)}, b"abcd"), "truncated"),
    "offsets of one": (file_of({"a": entry(0, 0) | {"data_offsets": [0]}}), "[begin, end]"),
    "offsets reversed": (file_of({"a": entry(0, 4) | {"data_offsets": [4, 0]}}, b"abcd"), "offsets span -4"),
    "offsets negative": (file_of({"a": entry(0, 4) | {"data_offsets": [-4, 0]}}, b"abcd"), "[-4, 0]"),
    "offsets of floats": (file_of({"a": entry(0, 4) | {"data_offsets": [0.0, 4.0]}}, b"abcd"), "[0.0, 4.0]"),
    "size and offsets differ": (file_of({"a": entry(0, 4, [1], "F64")}, b"abcd"), "needs 8 bytes", "span 4"),
    "offsets beyond the size": (file_of({"a": entry(0, 4, [2])}, b"abcd"), "needs 2 bytes", "span 4"),
    "a hole": (file_of({"a": entry(0, 2), "b": entry(3, 4)}, b"abcd"), "'b'", "a hole or an overlap"),
    "a hole at the start": (file_of({"a": entry(1, 4)}, b"abcd"), "'a'", "a hole or an overlap"),
    "an overlap": (file_of({"a": entry(0, 3), "b": entry(2, 4)}, b"abcd"), "'b'", "a hole or an overlap"),
    "the same bytes twice": (file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"abcd"), "a hole or an overlap"),
    "trailing bytes": (GOOD + b"\0", "1 unexpected byte after", "damaged"),
    "a body without tensors": (file_of({}, b"abcd"), "4 unexpected bytes"),
    "body cut": (GOOD[:-1], "truncated"),
}


@pytest.mark.parametrize("name", INVALID)
def test_refused(name):
    data, *words = INVALID[name]
    check(lambda: storage.loads(data), dt.FileFormatError, words)


def test_every_truncation_is_refused():
    for length in range(len(GOOD)):
        check(lambda length=length: storage.loads(GOOD[:length]), dt.FileFormatError, [])


@pytest.mark.parametrize("name", ["length bomb", "sizes that overflow", "a huge claim", "sizes that overflow to zero"])
def test_claims_are_checked_before_memory_is_taken(name):
    data = INVALID[name][0]
    tracemalloc.start()
    begin = time.perf_counter()
    check(lambda: storage.loads(data), dt.FileFormatError, [])
    elapsed, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    assert elapsed < 1


def test_the_path_is_named(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(GOOD[:-1])
    check(lambda: storage.read(path), dt.FileFormatError, [str(path), "truncated"])
