"""Decisions: quantize returns them as one value, and rewrite gives the file of quantize from it, byte for byte."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import Maker, images, rows, weights

import detent as dt
import detent.onnx as qo
import detent.sensitivity as qs
from detent.errors import DetentError, SpecError, UnsupportedError
from detent.onnx import stored_decisions
from detent.onnx.decisions import REWRITE_VERSION
from detent.onnx.stored_decisions import read_decisions
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.provenance import Provenance, fields_of
from detent.spec import QuantSpec

sys.path.append(str(Path(__file__).parents[1] / "tools"))
random_model = importlib.import_module("random_graphs").random_model


def outlying(width=32):
    """A matmul after a normalization, with outliers, and a computed constant."""
    m = Maker()
    gain = np.ones(width, np.float32)
    gain[[3, 17]] = 60
    norm = m.add("LayerNormalization", ["x", m.constant(gain), m.constant(np.zeros(width, np.float32))], axis=-1)
    offset = m.add("Exp", [m.constant(np.float32([0.3]))])
    y = m.add("Add", [m.matmul(norm, width, 16, name="fc"), offset])
    return m.model([("x", [1, "n", width])], [y]), rows(width=width, length=64)


def uneven():
    """Convolutions with channels of different ranges, for cross-layer equalization."""
    m = Maker()
    spread = np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv("x", 8, 16, 1, weight=weights(16, 8, 1, 1) * spread, name="before")])
    t = m.add("Relu", [m.conv(t, 16, 16, group=16, weight=weights(16, 1, 3, 3) / spread, name="depthwise")])
    return m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="behind")]), images()


@pytest.fixture(scope="module")
def smoothed():
    model, feeds = outlying()
    return model, qo.decide(model, feeds, progress=False)


@pytest.fixture(scope="module")
def equalized():
    model, feeds = uneven()
    return model, qo.decide(model, feeds, prefer="accuracy", progress=False)


def rewritten(model, decisions):
    return qo.rewrite(model, decisions).SerializeToString(deterministic=True)


CASES = [
    *((seed, "w8a8", "onnxruntime") for seed in range(14) if seed not in {3, 8}),  # these quantize no layer
    *((0, recipe, "onnxruntime") for recipe in ("w4a8", "w4a4", "w8a16", "w4a16-g4")),
    *(
        pytest.param(4, recipe, "onnxruntime", marks=pytest.mark.slow)
        for recipe in ("w4a8", "w4a4", "w8a16", "w4a16-g4")
    ),
    *((seed, "w8a8", target) for seed in (1, 2) for target in ("onnxruntime-avx2", "openvino-vnni")),
]


@pytest.mark.parametrize(("seed", "recipe", "target"), CASES)
def test_rewrite_makes_the_file_of_quantize(tmp_path, seed, recipe, target):
    model, feeds = random_model(seed)
    qo.quantize(model, tmp_path / "a.onnx", feeds, recipe, target=target, progress=False)
    decisions = qo.decide(model, feeds, recipe, target=target, progress=False)
    again = qo.Decisions.from_json(decisions.to_json())
    assert again == decisions
    file = onnx.load(tmp_path / "a.onnx")
    entries = [each for each in file.metadata_props if each.key != "detent.runtime"]  # depends on this machine
    assert (len(file.metadata_props) - len(entries)) == target.startswith("onnxruntime")
    del file.metadata_props[:]
    file.metadata_props.extend(entries)
    assert rewritten(model, again) == file.SerializeToString(deterministic=True)
    assert read_decisions(file, Provenance.read(file)) == (decisions, ())


def test_all_parts_are_decided(smoothed, equalized):
    assert [each.folded for each in smoothed[1].smoothed] == [True]
    assert list(smoothed[1].constants) == ["t2"], "the exponential, which rounds differently elsewhere"
    assert [(each.maker, each.readers) for each in equalized[1].equalized] == [
        ("before", ("depthwise",)),
        ("depthwise", ("behind",)),
    ]
    behind = next(each for each in equalized[1].layers if each.name == "behind")
    assert behind.bias is not None
    assert {each.group for each in equalized[1].placements} == set(equalized[1].ranges)


def test_decisions_are_values(smoothed):
    decisions = smoothed[1]
    same = qo.Decisions.from_json(decisions.to_json())
    assert same == decisions
    assert hash(same) == hash(decisions)
    assert same != replace(decisions, data="other")
    assert same.smoothed[0] == decisions.smoothed[0] != "smoothed"
    factors = decisions.smoothed[0].factors * np.float32(0.5)
    assert replace(decisions.smoothed[0], factors=factors) != decisions.smoothed[0]
    with pytest.raises(ValueError, match="read-only"):
        decisions.smoothed[0].factors[0] = 1


REWRITE = """
import sys
from pathlib import Path
import detent as dt
import detent.onnx as qo
dt.set_num_threads(int(sys.argv[3]))
model = qo.rewrite(sys.argv[1], qo.Decisions.from_json(Path(sys.argv[2]).read_text()))
sys.stdout.buffer.write(model.SerializeToString(deterministic=True))
"""


def test_threads_change_nothing(tmp_path, smoothed):
    model, decisions = smoothed
    qo.save(model, tmp_path / "model.onnx")
    (tmp_path / "decisions.json").write_text(decisions.to_json())
    results = []
    for threads in ("1", "2"):
        arguments = [str(tmp_path / "model.onnx"), str(tmp_path / "decisions.json"), threads]
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        run = subprocess.run(
            [sys.executable, "-c", REWRITE, *arguments], capture_output=True, check=True, env=environment
        )
        results.append(run.stdout)
    assert results[0] == results[1] == rewritten(tmp_path / "model.onnx", decisions)


# Frozen bytes: written by hand, independent of searches and random numbers.


def chain():
    """Conv, Relu, Conv, and a Gemm with a bias: Q/DQ pairs of activations, int32 biases, a float layer."""

    def constant(name, *shape):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        return numpy_helper.from_array((values % 7 - 3) / 8, name)

    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], name="first", pads=[1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second"),
        helper.make_node("Flatten", ["c"], ["d"], name="flat"),
        helper.make_node("Gemm", ["d", "w3", "b3"], ["y"], name="head"),
    ]
    tensors = [
        constant("w1", 6, 5, 3),
        constant("b1", 6),
        constant("w2", 5, 6, 1),
        constant("w3", 20, 3),
        constant("b3", 3),
    ]
    x, y = (helper.make_tensor_value_info(*each) for each in (("x", 1, [1, 5, 4]), ("y", 1, [1, 3])))
    graph = helper.make_graph(nodes, "chain", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    per_channel, unsigned = QuantSpec("int8", "axis0"), QuantSpec("uint8")
    factors = np.float32([1, 0.5, 0.25, 1, 0.5, 0.25])
    layers = (
        qo.LayerDecision("first", "", per_channel, unsigned, np.full(6, 0.0625, np.float32), np.zeros(6, np.int32)),
        qo.LayerDecision("second", "", per_channel, unsigned, np.full(5, 0.0625, np.float32), np.zeros(5, np.int32)),
        qo.LayerDecision("head", "kept in float by hand"),
    )
    return model, qo.Decisions(
        written_by="golden",
        opset=17,
        ir_version=8,
        recipe="{}",
        layers=layers,
        equalized=(qo.Equalized("b", "first", ("second",), factors, 1.0, 3.0),),
        placements=(
            qo.QuantizerPlacement("b", unsigned, "b", clip_min=0.0),
            qo.QuantizerPlacement("x", unsigned, "x", ("first",)),
        ),
        ranges={"b": qo.RangeDecision(0.03125, 0), "x": qo.RangeDecision(0.015625, 128, True, (-2.0, 2.0))},
    )


def lookup():
    """A table with scales per group, a smoothed 4-bit matmul with a 4-bit input, which needs a Clip."""
    values = np.arange(256, dtype=np.float32) % 11 - 5
    tensors = [
        numpy_helper.from_array(values.reshape(32, 8) / 4, "table"),
        numpy_helper.from_array(values[:64].reshape(8, 8) / 8, "w"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["rows"], name="words"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="fc"),
    ]
    given = helper.make_tensor_value_info("i", TensorProto.INT64, [1, 3])
    graph = helper.make_graph(nodes, "lookup", [given], [helper.make_tensor_value_info("y", 1, [1, 3, 8])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    grouped, few = QuantSpec("int8", dt.PerGroup(4, axis=1)), QuantSpec("uint6")
    layers = (
        qo.LayerDecision(
            "words", "", grouped, None, np.full((32, 2), 0.0625, np.float32), np.zeros((32, 2), np.int32), index_rank=2
        ),
        qo.LayerDecision(
            "fc", "", QuantSpec("int4", "axis1"), few, np.full(8, 0.25, np.float32), np.zeros(8, np.int32)
        ),
    )
    factors = np.float32([2, 1, 1, 0.5, 1, 1, 4, 1])
    return model, qo.Decisions(
        written_by="golden",
        target="onnxruntime-vnni",
        opset=21,
        ir_version=10,
        recipe="{}",
        layers=layers,
        smoothed=(qo.Smoothed("rows", ("fc",), factors, False, 0.5, 3.0),),
        placements=(qo.QuantizerPlacement("rows_smoothed", few, "rows_smoothed", ("fc",)),),
        ranges={"rows_smoothed": qo.RangeDecision(0.0625, 31)},
    )


def last():
    """A pool of float data, a corrected bias, a multiple of a tensor, and a quantized output."""
    values = np.arange(576, dtype=np.float32) % 13 - 6
    tensors = [
        numpy_helper.from_array(values.reshape(8, 8, 3, 3) / 8, "w"),
        numpy_helper.from_array(values[:64].reshape(8, 8, 1, 1) / 4, "v"),
        numpy_helper.from_array(np.float32(0.5), "half"),
    ]
    nodes = [
        helper.make_node("MaxPool", ["x"], ["pooled"], name="pool", kernel_shape=[2, 2]),
        helper.make_node("Conv", ["pooled", "w"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Mul", ["b", "half"], ["c"], name="halved"),
        helper.make_node("Conv", ["c", "v"], ["y"], name="last"),
    ]
    shapes = helper.make_tensor_value_info("x", 1, [1, 8, 6, 6]), helper.make_tensor_value_info("y", 1, [1, 8, 3, 3])
    graph = helper.make_graph(nodes, "last", [shapes[0]], [shapes[1]], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    narrow, unsigned = QuantSpec("int8", "axis0", qmin=-64, qmax=64), QuantSpec("uint8")
    stored = narrow, unsigned, np.full(8, 0.0625, np.float32), np.zeros(8, np.int32)
    layers = (
        qo.LayerDecision("first", "", *stored, np.arange(8, dtype=np.int32)),
        qo.LayerDecision("last", "", QuantSpec("int8", "axis0"), *stored[1:]),
    )
    return model, qo.Decisions(
        written_by="golden",
        opset=17,
        ir_version=8,
        recipe="{}",
        layers=layers,
        placements=(
            qo.QuantizerPlacement("b", unsigned, "b", clip_min=0.0),
            qo.QuantizerPlacement("c", unsigned, "c", source_tensor="b", factor=0.5),
            qo.QuantizerPlacement("y", unsigned, "y"),
            qo.QuantizerPlacement("pooled", unsigned, "pooled", ("first",)),
        ),
        ranges={
            "b": qo.RangeDecision(0.03125, 0),
            "y": qo.RangeDecision(0.25, 100),
            "pooled": qo.RangeDecision(0.015625, 128),
        },
    )


def looped():
    """An LSTM with groups, zero points and rows of two directions, and a matmul in a branch with its own weight."""
    values = np.arange(256, dtype=np.float32) % 11 - 5
    tensors = [
        numpy_helper.from_array(values[:128].reshape(2, 8, 8) / 8, "w"),
        numpy_helper.from_array(values[:32].reshape(2, 8, 2) / 16, "r"),
    ]
    own = numpy_helper.from_array(values[:8].reshape(2, 4) / 4, "own")
    results = [helper.make_tensor_value_info(name, 1, None) for name in ("then_out", "else_out")]
    product = helper.make_node("MatMul", ["h", "own"], ["then_out"], name="product")
    joined = helper.make_node("Concat", ["h", "h"], ["else_out"], name="joined", axis=3)
    branches = (
        helper.make_graph([product], "then", [], results[:1], [own]),
        helper.make_graph([joined], "else", [], results[1:]),
    )
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["h"], name="lstm", hidden_size=2, direction="bidirectional"),
        helper.make_node("If", ["yes"], ["y"], name="if", then_branch=branches[0], else_branch=branches[1]),
    ]
    inputs = helper.make_tensor_value_info("x", 1, [3, 1, 8]), helper.make_tensor_value_info("yes", 9, [])
    graph = helper.make_graph(nodes, "looped", inputs, [helper.make_tensor_value_info("y", 1, None)], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    layers = (
        qo.LayerDecision(
            "lstm/W",
            "",
            QuantSpec("uint4", dt.PerGroup(4, axis=2), symmetric=False),
            None,
            np.full((2, 8, 2), 0.25, np.float32),
            np.full((2, 8, 2), 7, np.int32),
        ),
        qo.LayerDecision(
            "lstm/R",
            "",
            QuantSpec("int8", dt.PerGroup(2, axis=2)),
            None,
            np.full((2, 8, 1), 0.0625, np.float32),
            np.zeros((2, 8, 1), np.int32),
        ),
        qo.LayerDecision(
            "if/product", "", QuantSpec("int8", "axis1"), None, np.full(4, 0.03125, np.float32), np.zeros(4, np.int32)
        ),
    )
    return model, qo.Decisions(written_by="golden", opset=21, ir_version=10, recipe="{}", layers=layers)


GOLDEN = {  # by rewrite_version: different bytes need a new version, and a new line
    1: {"chain": "8053dc73dec88715", "lookup": "9a5b911b1408f6e2"},
    2: {"chain": "3ec2536f89a809c1", "lookup": "85be936afdd9f625"},
    3: {"chain": "45979517ffe8cd42", "lookup": "c91c4f59f306a345", "last": "1b8e12a2328e22c4"},
    4: {"chain": "58ad02b1f419377d", "lookup": "4ec8ad3391008044", "last": "9ee16bd9bac93b2a"},
    5: {"chain": "44d1b63c7b45636a", "lookup": "aaedaec65d2e3a8d", "last": "09644c82dadff44c"},
    6: {
        "chain": "1cab369e013c5842",
        "lookup": "fcb5050bd77880ae",
        "last": "56d1009aa13863f3",
        "looped": "61d54022c7849757",
    },
    7: {
        "chain": "cbf9402c38b44896",
        "lookup": "76a676814cafc1db",
        "last": "04aa7513da601bf6",
        "looped": "59e0711147f8f1c1",
    },
}


@pytest.mark.parametrize("make", [chain, lookup, last, looped])
def test_frozen_bytes(make, monkeypatch):
    # How the metadata compress decisions has a version of its own. The digests are of version 2, without compression.
    monkeypatch.setattr(stored_decisions, "MIN_BFLOAT16", 1 << 40)
    file = qo.rewrite(*make())
    entry = next(each for each in file.metadata_props if each.key == "detent")
    entry.value = json.dumps({**fields_of(entry.value), "version": 2}, sort_keys=True, separators=(",", ":"))
    digest = sha256(file.SerializeToString(deterministic=True)).hexdigest()[:16]
    assert digest == GOLDEN[REWRITE_VERSION][make.__name__]


# Changed decisions are applied.


def test_a_changed_scale_is_written():
    model, decisions = chain()
    ranges = {**decisions.ranges, "x": qo.RangeDecision(0.5, 7)}
    changed = qo.rewrite(model, replace(decisions, ranges=ranges))
    tensors = {each.name: numpy_helper.to_array(each) for each in changed.graph.initializer}
    quantizer = next(each for each in changed.graph.node if each.op_type == "QuantizeLinear" and each.input[0] == "x")
    assert (tensors["x_scale"], tensors[quantizer.input[2]]) == (0.5, 7)


def test_a_layer_can_be_kept_in_float():
    model, decisions = chain()
    changed = decisions.with_layers_in_float(["first"], "by hand")
    assert set(changed.ranges) == {"b"}, "nobody else reads x"
    written = qo.rewrite(model, changed)
    node = next(each for each in written.graph.node if each.name == "first")
    kinds = {each.name: each.data_type for each in written.graph.initializer}
    assert kinds[node.input[1]] == TensorProto.FLOAT
    with pytest.raises(DetentError, match="unknown layers"):
        decisions.with_layers_in_float(["frist"], "by hand")


# Malformed decisions are rejected by name.


def json_with(decisions, **changes):
    return json.dumps({**json.loads(decisions.to_json()), **changes})


HUGE = {"dtype": "float32", "shape": [1 << 40], "values": [0.5]}
BAD_JSON = {
    "not JSON": (lambda d: d.to_json()[:-1], "JSON"),
    "version": (lambda d: json_with(d, version=3), "version"),
    "rewrite_version": (lambda d: json_with(d, rewrite_version=99), "rewrite_version 99.*: update detent, or call"),
    "old rewrite_version": (lambda d: json_with(d, rewrite_version=1), "rewrite_version 1,.*: call qo.decide again"),
    "unknown key": (lambda d: json_with(d, extra=1), "extra"),
    "missing key": (lambda d: json.dumps({k: v for k, v in json.loads(d.to_json()).items() if k != "data"}), "data"),
    "type": (lambda d: json_with(d, opset="17"), "opset"),
    "opset": (lambda d: json_with(d, opset=9), "opset"),
    "ir_version": (lambda d: json_with(d, ir_version=1 << 40), "ir_version"),
    "target": (lambda d: json_with(d, target="gpu"), "gpu"),
    "recipe": (lambda d: json_with(d, recipe="{"), "recipe"),
    "list as recipe": (lambda d: json_with(d, recipe="[1]"), "recipe"),
    "NaN as options": (lambda d: json_with(d, options="NaN"), "options"),
    "spec": (lambda d: d.to_json().replace('"uint8/tensor/affine"', '"uint77"'), "uint77"),
    "huge array": (lambda d: json_with(d, constants={"c": HUGE}), "shape"),
    "huge rank": (lambda d: json_with(d, constants={"c": {**HUGE, "shape": [1] * 400}}), "decisions"),
    "dtype": (lambda d: json_with(d, constants={"c": {**HUGE, "dtype": "object"}}), "expected a list of numbers"),
    "values": (lambda d: json_with(d, constants={"c": {**HUGE, "values": ["?"]}}), "1 number for shape"),
    "layers": (lambda d: json_with(d, layers={}), "layers"),
    "NaN scale": (lambda d: json_with(d, ranges={**encoded(d)["ranges"], "x": scale_of("nan")}), "'x'"),
    "no scale": (lambda d: json_with(d, ranges={**encoded(d)["ranges"], "x": scale_of(0.0)}), "'x'"),
    "float64 scale": (lambda d: json_with(d, ranges={**encoded(d)["ranges"], "x": scale_of(0.1)}), "float32"),
    "zero point": (lambda d: json_with(d, ranges={**encoded(d)["ranges"], "x": scale_of(0.5, 1 << 50)}), "'x'"),
    "missing range": (lambda d: json_with(d, ranges={}), "missing"),
    "unknown range": (lambda d: json_with(d, ranges={**encoded(d)["ranges"], "q": scale_of(0.5)}), "'q'"),
}


def encoded(decisions):
    return json.loads(decisions.to_json())


def scale_of(scale, zero_point=0):
    return {"scale": scale, "zero_point": zero_point, "clipped": False, "observed_range": None}


@pytest.mark.parametrize("case", BAD_JSON)
def test_malformed_json_is_rejected(case):
    make, message = BAD_JSON[case]
    with pytest.raises(DetentError, match=message):
        qo.Decisions.from_json(make(chain()[1]))


def layer_with(decisions, at, **changes):
    layers = list(decisions.layers)
    layers[at] = replace(layers[at], **changes)
    return replace(decisions, layers=tuple(layers))


def placement_with(decisions, at, **changes):
    placements = list(decisions.placements)
    placements[at] = replace(placements[at], **changes)
    return replace(decisions, placements=tuple(placements))


def multiple_of_input(decisions):
    b, x = decisions.placements
    placements = x, replace(b, source_tensor="x", factor=2.0)
    return replace(decisions, placements=placements, ranges={"x": decisions.ranges["x"]})


def entry_with(decisions, name, **changes):
    return replace(decisions, **{name: (replace(getattr(decisions, name)[0], **changes),)})


UNFIT = {
    "unknown layer": (lambda d: layer_with(d, 0, name="frist"), "frist"),
    "missing layer": (lambda d: replace(d, layers=d.layers[:-1]), "head"),
    "layer twice": (lambda d: replace(d, layers=(*d.layers, d.layers[0])), "twice"),
    "shape of a scale": (
        lambda d: layer_with(d, 0, weight_scale=np.ones(4, np.float32), weight_zero_point=np.zeros(4, np.int32)),
        "'first'",
    ),
    "NaN in a scale": (lambda d: layer_with(d, 0, weight_scale=np.full(6, np.nan, np.float32)), "'first'"),
    "negative scale": (lambda d: layer_with(d, 0, weight_scale=-np.ones(6, np.float32)), "'first'"),
    "double scale": (lambda d: layer_with(d, 0, weight_scale=np.full(6, 0.1)), "'first'"),
    "zero point of a symmetric weight": (lambda d: layer_with(d, 0, weight_zero_point=np.ones(6, np.int32)), "'first'"),
    "no scale": (lambda d: layer_with(d, 0, weight_scale=None), "'first'"),
    "scale of a float layer": (lambda d: layer_with(d, 2, weight_scale=np.float32(1)), "'head'"),
    "spec of a weight": (lambda d: layer_with(d, 0, weight=QuantSpec("float8_e4m3fn", "axis0")), "'first'"),
    "groups of a convolution": (
        lambda d: layer_with(
            d,
            0,
            weight=QuantSpec("int8", "group2"),
            weight_scale=np.ones((6, 5, 2), np.float32),
            weight_zero_point=np.zeros((6, 5, 2), np.int32),
        ),
        "'first'",
    ),
    "shape of a bias": (lambda d: layer_with(d, 0, bias=np.zeros(5, np.float32)), "'first'"),
    "NaN in a bias": (lambda d: layer_with(d, 0, bias=np.full(6, np.nan, np.float32)), "'first'"),
    "rank of indices": (lambda d: layer_with(d, 0, index_rank=2), "'first'"),
    "huge rank of indices": (lambda d: layer_with(d, 0, index_rank=1 << 40), "'first'"),
    "input without a placement": (
        lambda d: replace(d, placements=d.placements[:1], ranges={"b": d.ranges["b"]}),
        "'first'",
    ),
    "unknown tensor": (
        lambda d: placement_with(replace(d, ranges={"b": d.ranges["b"], "q": d.ranges["x"]}), 1, tensor="q", group="q"),
        "'q'",
    ),
    "unknown reader": (lambda d: placement_with(d, 1, readers=("first", "relu")), "relu"),
    "granularity of an activation": (lambda d: placement_with(d, 1, spec=QuantSpec("uint8", "axis0")), "'x'"),
    "unknown group": (lambda d: placement_with(d, 0, group="q"), "'q'"),
    "unknown source": (lambda d: placement_with(d, 0, source_tensor="q"), "'q'"),
    "factor": (lambda d: placement_with(d, 0, factor=np.nan), "factor"),
    "not a multiple": (multiple_of_input, "times a scalar constant"),
    "reader twice": (lambda d: placement_with(d, 1, readers=("first", "first")), "'first' occurs twice in readers"),
    "spec of a group's member": (
        lambda d: replace(placement_with(d, 1, group="b", spec=QuantSpec("uint4")), ranges={"b": d.ranges["b"]}),
        "got spec",
    ),
    "constant of a placement": (lambda d: placement_with(d, 0, constants=("w1",)), "w1"),
    "observed range": (
        lambda d: replace(d, ranges={"x": replace(d.ranges["x"], observed_range=(1.0, 0.0))}),
        "observed_range",
    ),
    "unknown constant": (lambda d: replace(d, constants={"q": np.float32([1])}), "'q'"),
    "opset of another model": (lambda d: replace(d, opset=18), "opset"),
    "another source": (lambda d: replace(d, source="0123"), "0123"),
    "equalized tensor": (lambda d: entry_with(d, "equalized", tensor="x"), "'x'"),
    "equalized maker": (lambda d: entry_with(d, "equalized", maker="second"), "'b'"),
    "number of factors": (lambda d: entry_with(d, "equalized", factors=np.ones(5, np.float32)), "factors"),
    "NaN in factors": (lambda d: entry_with(d, "equalized", factors=np.full(6, np.nan, np.float32)), "factors"),
    "readers of factors": (lambda d: entry_with(d, "equalized", readers=()), "at least one layer"),
    "gain": (lambda d: entry_with(d, "equalized", gain_db=np.inf), "finite"),
    "large factors": (lambda d: entry_with(d, "equalized", factors=np.full(6, 2, np.float32)), "factors"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_decisions_that_do_not_fit_are_rejected(case):
    change, message = UNFIT[case]
    model, decisions = chain()
    with pytest.raises(DetentError, match=message):
        qo.rewrite(model, change(decisions))


@pytest.mark.parametrize("case", ["unknown layer", "missing layer", "input without a placement", "unknown tensor"])
def test_unfit_decisions_are_not_measured(case):
    change, message = UNFIT[case]
    model, decisions = chain()
    [given] = inputs_of(model)
    data = [{given.name: np.zeros([size or 1 for size in given.shape], np.float32)}]
    with pytest.raises(DetentError, match=message):
        qs.measure(model, data, change(decisions))


def test_decisions_are_frozen():
    decisions = replace(chain()[1], constants={"c": np.ones(2, np.float32)})
    with pytest.raises(AttributeError):
        decisions.ranges.clear()
    with pytest.raises(ValueError, match="read-only"):
        decisions.constants["c"][0] = 7
    with pytest.raises(SpecError, match="opset"):
        replace(decisions, opset=13.0)


def test_layers_in_float_need_a_name_and_a_reason():
    _, decisions = chain()
    assert not decisions.with_layers_in_float("first", "by hand").layers[0].is_quantized
    with pytest.raises(SpecError, match="reason= is empty"):
        decisions.with_layers_in_float(["first"], "")


def test_a_different_version_of_onnx_is_rejected(monkeypatch):
    model = chain()[0]
    model.opset_import[0].version = 11
    decisions = qo.decide(model, recipe="w8a16")
    assert decisions.onnx_version == onnx.__version__
    qo.rewrite(model, decisions)
    monkeypatch.setattr(onnx, "__version__", "1.0.0")
    with pytest.raises(UnsupportedError, match=r"onnx 1\.0\.0"):
        qo.rewrite(model, decisions)
    assert qo.decide(chain()[0], recipe="w8a16").onnx_version == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": "q"}, "fc"),
        ({"layers": ("words",)}, "words"),
        ({"layers": ("fc", "fc")}, "twice"),
        ({"layers": ()}, "at least one layer"),
        ({"strength": np.nan}, "finite"),
        ({"factors": np.ones(7, np.float32)}, "8 input channels"),
        ({"factors": np.zeros(8, np.float32)}, "factors"),
        ({"folded": True}, "normalization"),
    ],
)
def test_smoothing_that_does_not_fit_is_rejected(changes, message):
    model, decisions = lookup()
    with pytest.raises(DetentError, match=message):
        qo.rewrite(model, entry_with(decisions, "smoothed", **changes))


def test_constants_must_fit(smoothed):
    model, decisions = smoothed
    for value, message in (
        (np.float32([1, 2]), "shape"),
        (np.float64([1]), "float64"),
        (np.float32([np.nan]), "4 ulp"),
    ):
        with pytest.raises(DetentError, match=message):
            qo.rewrite(model, replace(decisions, constants={"t2": value}))
    with pytest.raises(DetentError, match="missing"):
        qo.rewrite(model, replace(decisions, constants={}))
    with pytest.raises(DetentError, match=r"qo\.Decisions"):
        qo.rewrite(model, decisions.to_json())
