"""Untrusted JSON: for any content, reading returns or raises a FileFormatError, quickly and in little memory."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import detent as dt
from detent import codec
from detent.errors import DetentError, FileFormatError, SpecError
from detent.observers import MSE, EMAMinMax, MinMax

from .craft import file_of, header_of
from .craft_json import BAD_VALUES, places, replaced

MAX_SECONDS = 10.0
MAX_MESSAGE = 2100


@dataclass(frozen=True)
class Inner:
    whole: int
    part: float


@dataclass(frozen=True)
class Checked:
    """A class whose constructor raises errors."""

    bits: int

    def __post_init__(self):
        if self.bits == 1:
            raise SpecError("one bit")
        if self.bits == 2:
            [].pop()
        if self.bits == 3:
            raise OverflowError("too much")


@dataclass(frozen=True)
class Document:
    name: str
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[int, float]
    table: Mapping[str, float]
    values: NDArray[np.float64]
    kind: Literal["x", "y"]
    maybe: int | None
    flag: bool
    checked: Checked


GOOD = Document(
    name="n",
    inner=Inner(1, 2.0),
    many=(Inner(3, float("inf")),),
    pair=(4, 0.5),
    table={"a": 1.5},
    values=np.array([[1.0, -0.0], [np.nan, -np.inf]], np.float32),
    kind="x",
    maybe=None,
    flag=True,
    checked=Checked(8),
)
ENCODED = codec.encode(GOOD)


def attempt(read, text, error):
    """Read the text; check that an error has that type and a short message, and that reading is fast."""
    start, message = time.process_time(), ""  # not the clock: other programs may use the CPU
    try:
        read(text)
    except error as fault:
        message = str(fault)
    assert len(message) <= MAX_MESSAGE
    assert time.process_time() - start < MAX_SECONDS


def read_document(text):
    return codec.decode(Document, codec.parse(text, "doc"), "doc")


def test_round_trip():
    again = read_document(json.dumps(ENCODED))
    assert again.values.tobytes() == GOOD.values.tobytes()
    assert again.values.dtype == GOOD.values.dtype
    assert codec.encode(again) == ENCODED


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_at_every_place(name):
    for path in places(ENCODED):
        attempt(read_document, replaced(ENCODED, path, BAD_VALUES[name]), FileFormatError)


VALUES = {
    "QuantSpec": (
        dt.QuantSpec("uint4", dt.PerAxis(0), convention="torch", rounding="stochastic(3)"),
        dt.QuantSpec.from_json,
    ),
    "block format": (dt.QuantSpec.parse("nvfp4"), dt.QuantSpec.from_json),
    "ScaleMode": (dt.EMA(0.5), dt.ScaleMode.from_json),
    "QuantParams": (dt.QuantParams.from_range("uint8/axis0", [-1.0, 0.0], [1.0, 2.0]), dt.QuantParams.from_json),
    "Recipe": (dt.Recipe.preset("w4a16-g128"), dt.Recipe.from_json),
}


def slow_but(*kept, among):
    """Parameters for pytest; the kept ones, which contain the others' fields, always run."""
    return [kind if kind in kept else pytest.param(kind, marks=pytest.mark.slow) for kind in among]


@pytest.mark.parametrize("kind", slow_but("QuantParams", "Recipe", "ScaleMode", among=VALUES))
def test_bad_values_at_every_place_of_the_core(kind):
    value, read = VALUES[kind]
    text = value.to_json()
    assert read(text) == value
    data = json.loads(text)
    for bad in BAD_VALUES.values():
        for path in places(data):
            attempt(read, replaced(data, path, bad), DetentError)


X = np.array([[1.0, -2.0], [0.5, 0.25]], np.float32)
FILES = {
    "MinMax": (MinMax("axis0").observe(X).to_bytes(), MinMax.from_bytes),
    "EMAMinMax": (EMAMinMax(0.5, "axis0").observe(X).to_bytes(), EMAMinMax.from_bytes),
    "MSE": (MSE(granularity="axis0", precision=1).observe(X).to_bytes(), MSE.from_bytes),
}


@pytest.mark.parametrize("kind", slow_but("MSE", among=FILES))
def test_bad_values_at_every_place_of_a_file(kind):
    """Replace values in the header and in the JSON of the metadata."""
    data, read = FILES[kind]
    header, body = header_of(data)
    assert read(file_of(header, body)).to_bytes() == data
    ((name, text),) = header["__metadata__"].items()
    about = json.loads(text)
    for bad in BAD_VALUES.values():
        for path in places(header):
            attempt(read, file_of(replaced(header, path, bad).encode(), body), FileFormatError)
        for path in places(about):
            inside = {**header, "__metadata__": {name: replaced(about, path, bad)}}
            attempt(read, file_of(inside, body), FileFormatError)


def test_bad_values_at_every_place_of_a_tensor_file(tmp_path):
    path = tmp_path / "q"
    q = dt.quantize(X, dt.QuantParams.from_data("uint4/axis0", X))
    q.save(path)
    header, body = header_of(path.read_bytes())
    ((name, text),) = header["__metadata__"].items()
    about = json.loads(text)

    def read(data):
        path.write_bytes(data)
        return dt.QuantizedTensor.load(path)

    assert read(file_of(header, body)) == q
    for bad in BAD_VALUES.values():
        for place in places(about):
            inside = {**header, "__metadata__": {name: replaced(about, place, bad)}}
            attempt(read, file_of(inside, body), FileFormatError)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_arrays_of_anything(anything):
    for key in ("dtype", "shape", "values"):
        array = {"dtype": "float32", "shape": [1], "values": [1.0], key: anything}
        try:
            codec.decode_array(array, "array")
        except FileFormatError:
            continue


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 1, 2)])
def test_arrays_survive(dtype, shape):
    array = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    again = codec.decode_array(json.loads(json.dumps(codec.encode_array(array))), "array")
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    ("values", "dtype"), [([300], "uint8"), ([-1], "uint8"), ([0.5], "int32"), ([2**31], "int32"), ([1e39], "float32")]
)
def test_numbers_that_do_not_fit_their_type(values, dtype):
    with pytest.raises(FileFormatError, match="do not fit"):
        codec.decode_array({"dtype": dtype, "shape": [1], "values": values}, "array")


@pytest.mark.parametrize("values", [[2**53 + 1], [float("inf")], [True], [None], ["1"], [[1.0]], [10**400]])
def test_numbers_that_no_float_holds(values):
    with pytest.raises(FileFormatError, match="numbers that float64 stores exactly"):
        codec.decode_array({"dtype": "float64", "shape": [1], "values": values}, "array")


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_what_a_constructor_raises_is_a_file_format_error(bits):
    with pytest.raises(FileFormatError, match=r"doc\.checked: "):
        read_document(replaced(ENCODED, ("checked", "bits"), str(bits)))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": [' + "[]," * 600_000 + "[]]}", "600003 lists and objects, expected at most 524288"),
        ('{"a": [' + "1," * 9_000_000 + "1]}", "9000000 values, expected at most 8388608"),
        ('{"a": "' + "x" * (1 << 26) + '"}', "characters, expected at most"),
    ],
    ids=["lists", "values", "characters"],
)
def test_texts_that_are_too_large_are_not_parsed(text, match, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(FileFormatError, match=match):
        codec.parse(text, "doc")


# The largest texts that are parsed, by their content.
FULLEST = {
    "empty lists": "[" + "[]," * ((1 << 19) - 3) + "[]]",
    "objects": "[" + '{"a":1},' * ((1 << 19) - 3) + "{}]",
    "numbers": "[" + "9999," * ((1 << 23) - 1) + "1]",
    "texts": "[" + '"ab",' * ((1 << 23) - 1) + "1]",
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.parametrize("full_of", FULLEST)
def test_the_fullest_text_takes_bounded_memory_and_time(full_of):
    script = (
        "import resource, sys; from detent import codec\n"
        "text = sys.stdin.read(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "codec.parse(text, 'doc')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], input=f'{{"a": {FULLEST[full_of]}}}', capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1 << 20  # KiB
    assert time.monotonic() - start < 60


def test_memory_that_runs_out_is_a_file_format_error(monkeypatch):
    def loads(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr(json, "loads", loads)
    with pytest.raises(FileFormatError, match="doc"):
        codec.parse("{}", "doc")
    with pytest.raises(FileFormatError, match="complaint"), codec.reading("complaint"):
        raise MemoryError
