"""Damaged and inconsistent ONNX files: each is rejected with a helpful message, quickly and in little memory.

The tests write the files; a subprocess loads all of them and reports error, time and memory of each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

import detent as dt
from detent.cli import main
from detent.onnx_model import load, save
from detent.onnx_model.quantized_model import load_quantized

from .craft import damaged_at

MEGABYTE = 1 << 20
CHILD = """
import json, sys, time
from pathlib import Path
import detent as dt
from detent.onnx_model import load

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def report(name, call):
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present size
    before, begin, error, message = peak(), time.perf_counter(), None, ""
    try:
        call()
    except dt.DetentError as caught:
        error, message = type(caught).__name__, str(caught)
    except BaseException as caught:
        error, message = "!" + type(caught).__name__, str(caught)
    print(json.dumps([name, error, message, time.perf_counter() - begin, peak() - before]))

good, paths = json.load(sys.stdin)
load(good)
for name, path in paths.items():
    report(name, lambda: load(path))
report("control", lambda: bytes(b"x" * (300 << 20)))
"""


def weight(name="w", shape=(4, 3, 3, 3)):
    return numpy_helper.from_array(np.random.default_rng(0).normal(size=shape).astype(np.float32), name)


def good():
    """A valid model with a convolution, an operator of another domain, an If, and weights with and without raw data."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft": 1]>
        g (float[N, 3, 8, 8] x, bool c) => (float[N, M] y) <float[4] b = {1, 2, 3, 4}, int64[2] s = {0, -1}>
        {
            t = Conv<pads = [1, 1, 1, 1]>(x, w, b)
            u = com.microsoft.Gelu(t)
            v = If(c)<
                then_branch = a () => (float[N, 4, 8, 8] p) { p = Relu(u) },
                else_branch = e () => (float[N, 4, 8, 8] q) { q = Neg(u) }>
            y = Reshape(v, s)
        }"""
    )
    model.graph.initializer.append(weight())
    return model


def of(model, name):
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


CASES = {}


def case(name, *words, error="FileFormatError"):
    """Register an invalid file: the function gets a directory and returns a path in it, or bytes or a model."""

    def register(function):
        CASES[name] = (function, error, words)
        return function

    return register


def changed(name, *words, error="FileFormatError"):
    """Register a valid model that the function changes."""

    def register(function):
        def build(_directory):
            model = good()
            function(model)
            return model

        CASES[name] = (build, error, words)
        return function

    return register


def changed_tensor(name, *words, **fields):
    """Register a valid model with changed fields in its weight."""

    def build(_directory):
        model = good()
        tensor = of(model, "w")
        for field, value in fields.items():
            tensor.ClearField(field)
            if isinstance(value, list):
                getattr(tensor, field).extend(value)
            elif value is not None:
                setattr(tensor, field, value)
        return model

    CASES[name] = (build, "FileFormatError", ("'w'", *words))


# Not a model


for title, content in {
    "empty": b"",
    "a text": b"This is not a model.\n" * 50,
    "a zip": b"PK\x03\x04" + bytes(100),
    "zeros": bytes(5000),
    "ones": b"\xff" * 5000,
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a graph without versions": b"\x3a\x00",
    "a field of 2^62 bytes": b"\x3a" + b"\xff" * 8 + b"\x3f",
    "a number without end": b"\x08" + b"\xff" * 50,
}.items():
    case(title)(lambda _directory, content=content: content)


@case("a directory", "is not a file")
def _(directory):
    (directory / "a directory.onnx").mkdir()
    return directory / "a directory.onnx"


@case("missing", "no such file")
def _(directory):
    return directory / "missing.onnx"


@case("a pipe", "is not a file")
def _(directory):
    os.mkfifo(directory / "pipe.onnx")
    return directory / "pipe.onnx"


@case("a device", "is not a file")
def _(_directory):
    return Path("/dev/zero")


@case("unreadable names")
def _(_directory):
    return good().SerializeToString().replace(b"Conv", b"\xff\xfe\xfd\xfc")


@case("2 GB of nothing", "not an ONNX model")
def _(directory):
    with (directory / "sparse.onnx").open("wb") as file:
        file.truncate((1 << 31) - 1)
    return directory / "sparse.onnx"


@case("more than a protocol buffer holds", "bytes, expected between")
def _(directory):
    with (directory / "huge.onnx").open("wb") as file:
        file.write(good().SerializeToString())
        file.truncate(1 << 33)
    return directory / "huge.onnx"


@case("graphs nested 200 deep")
def _(_directory):
    def field(number, payload):
        size, length = len(payload), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + payload

    graph = b""
    for _ in range(200):
        graph = field(1, field(5, field(1, b"then_branch") + field(6, graph) + b"\xa0\x01\x05"))  # a node's attribute
    model = good()
    model.ClearField("graph")
    return model.SerializeToString() + field(7, graph)


# Versions


@changed("no opset", "no opset")
def _(model):
    del model.opset_import[:]


@changed("opset 0", "opset 0")
def _(model):
    model.opset_import[0].version = 0


@changed("opset of the future", "opset 99", error="UnsupportedError")
def _(model):
    model.opset_import[0].version = 99


@changed("two opsets", "two versions")
def _(model):
    model.opset_import.add(domain="ai.onnx", version=13)


@changed("a domain without opset", "com.example")
def _(model):
    model.graph.node[1].domain = "com.example"


@changed("an operator that does not exist", "Convolve")
def _(model):
    model.graph.node[0].op_type = "Convolve"


@changed("IR of the future", "IR version 99", error="UnsupportedError")
def _(model):
    model.ir_version = 99


@changed("no IR", "ir_version")
def _(model):
    model.ClearField("ir_version")


# Graphs


@changed("cyclic", "cyclic", "depends on its own output")
def _(model):
    model.graph.node[0].input[0] = "v"


@changed("a node that reads itself", "cyclic")
def _(model):
    model.graph.node[1].input[0] = "u"


@changed("cyclic inside of a branch", "cyclic")
def _(model):
    model.graph.node[2].attribute[0].g.node[0].input[0] = "p"


@changed("two writers", "two nodes write tensor 'u'", "Gelu")
def _(model):
    model.graph.node[0].output[0] = "u"


@changed("a weight that is written", "'s'")
def _(model):
    model.graph.node.append(helper.make_node("Relu", ["u"], ["s"]))


@changed("two weights of one name", "w")
def _(model):
    model.graph.initializer.append(weight())


@changed("an input of nobody", "missing")
def _(model):
    model.graph.node[0].input[0] = "missing"


@changed("an output of nobody", "missing")
def _(model):
    model.graph.output[0].name = "missing"


# Tensors


changed_tensor("2^40 elements", "bytes, but the file holds 432", dims=[1 << 40])
changed_tensor("2^120 elements", "the file holds 432", dims=[1 << 60, 1 << 60])
changed_tensor("a negative size", "shape [-4, 3, 3, 3]", dims=[-4, 3, 3, 3])
changed_tensor("two negative sizes", "shape [-4, -27]", dims=[-4, -27])
changed_tensor("raw data too short", "needs 432 bytes, but the file holds 431", raw_data=bytes(431))
changed_tensor("raw data too long", "needs 432 bytes, but the file holds 433", raw_data=bytes(433))
changed_tensor("no data at all", "needs 108 numbers, but the file holds 0", raw_data=None)
changed_tensor("too few numbers", "the file holds 3", raw_data=None, float_data=[1.0, 2.0, 3.0])
changed_tensor("numbers of another type", "the file holds 0", raw_data=None, int32_data=[1] * 108)
changed_tensor("an unknown type", "type 99", data_type=99)
changed_tensor("no type", "type 0", data_type=0)
changed_tensor("texts of 2^40 elements", "the file holds 0", data_type=8, dims=[1 << 40], raw_data=None)
changed_tensor("4 bits of 2^40 elements", "the file holds 432", data_type=TensorProto.INT4, dims=[1 << 40])


@changed("a constant that lies", "needs 4398046511104 bytes")
def _(model):
    value = TensorProto(name="k", data_type=TensorProto.FLOAT, dims=[1 << 40], raw_data=b"1234")
    model.graph.node.append(helper.make_node("Constant", [], ["k"], value=value))


@changed("a constant that lies in a branch", "needs 4398046511104 bytes")
def _(model):
    value = TensorProto(name="k", data_type=TensorProto.FLOAT, dims=[1 << 40], raw_data=b"1234")
    model.graph.node[2].attribute[0].g.node.append(helper.make_node("Constant", [], ["k"], value=value))


@changed("a sparse tensor that lies", "needs 1099511627776 numbers")
def _(model):
    sparse = model.graph.sparse_initializer.add(dims=[1 << 40])
    sparse.values.CopyFrom(TensorProto(name="sp", data_type=TensorProto.FLOAT, dims=[1 << 40]))


# External data


def external(location="w.data", content=432, **entries):
    """Build a model with external data, and its data file unless ``content`` (its size) is None."""

    def build(directory):
        model = good()
        tensor = of(model, "w")
        data = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **entries}.items():
            tensor.external_data.add(key=key, value=str(value))
        if content is not None:
            (directory / "w.data").write_bytes((data + bytes(content))[:content])
        return model

    return build


EXTERNAL_DATA = {
    "missing data": (external(content=None), "w.data", "cannot be read"),
    "data elsewhere": (external("/etc/passwd"), "/etc/passwd", "in the model's directory"),
    "data above": (external("../w.data"), "../w.data", "in the model's directory"),
    "data above by a detour": (external("a/../../w.data"), "in the model's directory"),
    "data with backslashes": (external("..\\w.data"), "in the model's directory"),
    "data on a drive": (external("c:w.data"), "in the model's directory"),
    "data without a name": (external(""), "in the model's directory"),
    "data that are the directory": (external("."), "in the model's directory"),
    "data with a zero in the name": (external("w.data\0"), "in the model's directory"),
    "data with a long name": (external("w" * 100_000), "cannot be read"),
    "data truncated": (external(content=431), "ends at byte 432", "has only 431"),
    "offset beyond the file": (external(offset=1 << 40), "ends at byte", "has only 432"),
    "length beyond the file": (external(length=1 << 40), "needs 432 bytes", str(1 << 40)),
    "length too short": (external(length=4), "needs 432 bytes", "has 4 bytes"),
    "negative offset": (external(offset=-4), "offset '-4'"),
    "negative length": (external(length=-432), "length '-432'"),
    "offset that is not a number": (external(offset="many"), "offset 'many'"),
    "length that is not a number": (external(length="4e2"), "length '4e2'"),
    "offset of 5000 digits": (external(offset="9" * 5000), "offset"),
}
for title, (builder, *words) in EXTERNAL_DATA.items():
    case(title, "'w'", *words)(builder)


@case("data through a linked directory", "symbolic link")
def _(directory):
    (directory / "real").mkdir()
    (directory / "real" / "w.data").write_bytes(bytes(432))
    (directory / "link").symlink_to(directory / "real")
    return external("link/w.data", content=None)(directory)


@case("data through a link", "symbolic link")
def _(directory):
    (directory / "real.data").write_bytes(bytes(432))
    (directory / "w.data").symlink_to(directory / "real.data")
    return external(content=None)(directory)


@case("data through a link to a device", "symbolic link")
def _(directory):
    (directory / "w.data").symlink_to("/dev/zero")
    return external(content=None)(directory)


@case("data through a link to nothing", "symbolic link")
def _(directory):
    (directory / "w.data").symlink_to(directory / "nothing")
    return external(content=None)(directory)


@case("data with two names", "hard links")
def _(directory):
    (directory / "secret").write_bytes(bytes(432))
    os.link(directory / "secret", directory / "w.data")
    return external(content=None)(directory)


@case("data that are a pipe", "expected a regular file")
def _(directory):
    os.mkfifo(directory / "w.data")
    return external(content=None)(directory)


@case("data that are a directory", "w.data")
def _(directory):
    (directory / "w.data").mkdir()
    return external(content=None)(directory)


@case("data that are a device", "w.data")
def _(directory):
    try:
        os.mknod(directory / "w.data", 0o600 | 0o020000, os.makedev(1, 5))
    except OSError:
        os.mkfifo(directory / "w.data")  # only root can create devices
    return external(content=None)(directory)


@case("external data without a type", "unknown data type")
def _(directory):
    model = external()(directory)
    of(model, "w").data_type = TensorProto.STRING
    return model


@case("a thousand tensors of the same megabyte", "4 times the size of this file")
def _(directory):
    model = good()
    (directory / "w.data").write_bytes(bytes(MEGABYTE))
    for i in range(1000):
        tensor = model.graph.initializer.add(name=f"big{i}", data_type=TensorProto.UINT8, dims=[MEGABYTE])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.data")
    return model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Load every file in a subprocess; return the error, its message, the seconds and the kilobytes of each."""
    root = tmp_path_factory.mktemp("untrusted")
    (root / "good.onnx").write_bytes(good().SerializeToString())
    paths = {}
    for i, (name, (build, *_)) in enumerate(CASES.items()):
        directory = root / str(i)
        directory.mkdir()
        content = build(directory)
        path = content if isinstance(content, Path) else directory / "model.onnx"
        if not isinstance(content, Path):
            path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        paths[name] = os.fspath(path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([os.fspath(root / "good.onnx"), paths]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="links and pipes need POSIX, measuring memory needs Linux")
@pytest.mark.parametrize("name", CASES)
def test_an_invalid_file_is_rejected_quickly_and_in_little_memory(name, results):
    _, expected, words = CASES[name]
    error, message, seconds, growth = results[name]
    assert error == expected, message
    assert not [word for word in words if word not in message], message
    assert len(message) < 2000
    assert seconds < 1
    assert growth < 200 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the measure of memory is Linux's")
def test_the_measure_sees_memory(results):
    assert results["control"][3] > 290 * 1024


def test_the_good_one_is_good():
    model = load(good())
    assert [node.op_type for node in model.graph.node] == ["Conv", "Gelu", "If", "Reshape"]
    assert [entry.domain for entry in model.opset_import] == ["", "com.microsoft"]


def test_data_beside_the_file_and_below_it_are_read(tmp_path):
    (tmp_path / "sub").mkdir()
    for location in ("w.data", "sub/w.data"):
        (tmp_path / "model.onnx").write_bytes(external(location, offset=0)(tmp_path).SerializeToString())
        (tmp_path / location).write_bytes(weight().raw_data)
        assert of(load(tmp_path / "model.onnx"), "w").raw_data == weight().raw_data


def test_a_model_in_memory_cannot_have_external_data(tmp_path):
    with pytest.raises(dt.FileFormatError, match="pass the model's path"):
        load(external()(tmp_path))


@pytest.mark.parametrize("depth", [40, 200, 3000])
def test_a_model_in_memory_that_is_nested_deep(depth):
    model = good()
    graph = model.graph
    for _ in range(depth):
        node = graph.node.add(op_type="If", input=["c"], output=["z"])
        attribute = node.attribute.add(name="then_branch", type=AttributeProto.GRAPH)
        graph = attribute.g
    with pytest.raises(dt.FileFormatError, match="nested"):
        load(model)


# Inconsistent quantizers


def quantizer(codes, scale, dtype=np.int8):
    """A DequantizeLinear node over codes and scales of these shapes."""
    return [helper.make_node("DequantizeLinear", ["w", "s"], ["y"], name="dq")], codes, scale, dtype


def table(codes, scale, *, is_grouped=False):
    """A quantized embedding: Gather nodes over codes and scales of these shapes."""
    nodes = [helper.make_node("Gather", ["w", "x"], ["r"]), helper.make_node("Cast", ["r"], ["f"], to=1)]
    nodes += [helper.make_node("Reshape", ["f", "x"], ["g"])] if is_grouped else []
    nodes += [helper.make_node("Gather", ["s", "x"], ["t"])]
    return [*nodes, helper.make_node("Mul", ["g" if is_grouped else "f", "t"], ["y"])], codes, scale, np.int8


INCONSISTENT = {
    "a scalar with two scales": (quantizer((), (2,)), "scales of shape (2,) for codes of shape ()"),
    "an int32 scalar with two scales": (quantizer((), (2,), np.int32), "scales of shape (2,) for codes of shape ()"),
    "a bias with a scale too few": (
        quantizer((2, 3), (2,), np.int32),
        "scales of shape (2,) for codes of shape (2, 3)",
    ),
    "a table without rows": (table((), (2,)), ""),
    "a table without columns": (table((2, 0), (2, 0), is_grouped=True), ""),
    "scales without columns": (table((2, 4), (2, 0), is_grouped=True), ""),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_an_inconsistent_quantizer_is_listed_as_skipped_or_ignored(name, tmp_path):
    (nodes, codes, scale, dtype), reason = INCONSISTENT[name]
    tensors = [
        numpy_helper.from_array(np.ones(codes, dtype), "w"),
        numpy_helper.from_array(np.ones(scale, np.float32), "s"),
    ]
    x, y = (helper.make_tensor_value_info(each, kind, None) for each, kind in (("x", 7), ("y", 1)))
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(model, tmp_path / "model.onnx")
    quantized = load_quantized(tmp_path / "model.onnx")
    assert (quantized.weights, quantized.biases) == ({}, {})
    assert [reason in each for each in quantized.skipped.values()] == [True] * bool(reason)
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 0


# Fuzz


def refused_or_valid(path):
    """Whether the file was loaded; any error must be a DetentError."""
    try:
        model = load(path)
    except dt.DetentError:
        return False
    assert isinstance(model, ModelProto)
    return True


def test_truncated_anywhere(tmp_path):
    data, path = good().SerializeToString(), tmp_path / "model.onnx"
    survivors = []
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        if refused_or_valid(path):
            survivors.append(length)
    assert not survivors


def damaged(rng, data):
    """Change, remove or insert random bytes."""
    return damaged_at(rng, data, int(rng.integers(len(data))))


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_gives_a_valid_model(seed, tmp_path):
    rng = np.random.default_rng(seed)
    data, path = good().SerializeToString(), tmp_path / "model.onnx"
    survivors = 0
    for _ in range(150):
        path.write_bytes(damaged(rng, data))
        survivors += refused_or_valid(path)
    assert 0 < survivors < 75


# Writing


def large():
    model = good()
    model.graph.initializer.append(weight("unread", (64, 64)))
    return model


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stop"])
@pytest.mark.parametrize("call", ["fsync", "replace", "fdopen"])
@pytest.mark.parametrize("limit", [None, 1000], ids=["one file", "external data"])
@pytest.mark.parametrize("nth", [1, 2], ids=["first call", "second call"])
@pytest.mark.parametrize("has_old", [False, True], ids=["new", "old file"])
def test_a_failure_while_writing_leaves_what_was_there(call, error, limit, nth, has_old, tmp_path, monkeypatch):
    options = {} if limit is None else {"limit": limit}
    target = tmp_path / "model.onnx"
    if has_old:
        save(good(), target, **options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    original, calls = getattr(os, call), []

    def failing(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == (nth if limit is not None and call != "fsync" else 1):
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(type(error)):
        save(large(), target, **options)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    if has_old:
        assert load(target) == good()


def test_an_interrupted_second_file_takes_the_first_with_it(tmp_path, monkeypatch):
    """The data file was written, the model file was not."""
    original, calls = os.replace, []

    def failing(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*paths)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        save(large(), tmp_path / "model.onnx", limit=1000)
    assert list(tmp_path.iterdir()) == []


def test_external_data_is_loaded(tmp_path):
    save(large(), tmp_path / "model.onnx", limit=1000)
    assert len(list(tmp_path.iterdir())) == 2
    model = load(tmp_path / "model.onnx")
    assert of(model, "unread").raw_data == weight("unread", (64, 64)).raw_data


def test_nodes_out_of_order_are_put_into_it():
    model = good()
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert [node.op_type for node in load(model).graph.node] == ["Conv", "Gelu", "If", "Reshape"]
    assert isinstance(model.graph, GraphProto)
