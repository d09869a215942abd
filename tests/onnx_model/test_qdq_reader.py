"""The one reader of quantized graphs: its public view, what verification sees of it, and the layers of reports.

Every weight, in files of detent and of other programs, has the values that ONNX Runtime gives it.
"""

import json

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import detent as dt
import detent.onnx as qo
from detent.onnx_model import make_tensor
from detent.onnx_model.qdq_reader import QuantizedGraph, open_quantized
from detent.onnx_model.quantized_model import load_quantized
from detent.report.file_layers import find_layers
from zoo import ZOO

RNG = np.random.default_rng(0)
X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])


def model_of(nodes, tensors, inputs=(X,), outputs=("y",), opset=21, **options):
    """Make a model of these nodes and initializers."""
    values = [helper.make_empty_tensor_value_info(name) for name in outputs]
    for value in values:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(nodes, "g", list(inputs), values, initializer=tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **options)


def float_of(model, names):
    """Compute tensors of a model in ONNX Runtime, without optimizations."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    for name in names:
        copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        each.name: np.zeros([size if isinstance(size, int) else 1 for size in each.shape], np.float32)
        for each in session.get_inputs()
    }
    return dict(zip(names, session.run(names, feeds), strict=True))


def same_bits(a, b):
    assert a.dtype == b.dtype == np.float32
    assert a.shape == b.shape
    assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


KINDS = ["INT8", "UINT8", "INT4", "UINT4", "INT16", "UINT16", "INT32", "FLOAT8E4M3FN", "FLOAT8E5M2"]
WAYS = {
    "tensor": ((), {}),
    "one of shape 1": ((1,), {}),
    "axis 0": ((6,), {"axis": 0}),
    "axis 1": ((4,), {"axis": 1}),
    "default axis": ((4,), {}),
    "last axis": ((4,), {"axis": -1}),
    "blocks": ((3, 4), {"axis": 0, "block_size": 2}),
}


def codes_of(kind):
    if kind.startswith("FLOAT8"):
        dtype = {"FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn, "FLOAT8E5M2": ml_dtypes.float8_e5m2}[kind]
        return (RNG.normal(size=(6, 4)) * 8).astype(dtype)
    bits, signed = int(kind.lstrip("UINT")), kind.startswith("INT")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    codes = RNG.integers(low, high, (6, 4), dtype=np.int64, endpoint=True)
    codes[0, :2] = low, high
    return codes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_zero", [False, True], ids=["no zero point", "zero point"])
def test_values_are_those_of_onnx_runtime(kind, way, with_zero):
    shape, attributes = WAYS[way]
    code = getattr(TensorProto, kind)
    codes = codes_of(kind)
    scale = RNG.uniform(1e-3, 1, shape).astype(np.float32)
    is_integer = not kind.startswith("FLOAT") and kind != "INT32"
    zero = RNG.integers(0, 8, shape) if is_integer else np.zeros(shape)
    tensors = [make_tensor("w", codes, code), make_tensor("s", scale)]
    tensors += [make_tensor("z", zero, code)] if with_zero else []
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"][: 2 + with_zero], ["v"], **attributes),
        helper.make_node("Gemm", ["x", "v"], ["y"], name="layer", transB=1),
    ]
    model = model_of(nodes, tensors)
    contents = load_quantized(model)
    kept = contents.biases if kind == "INT32" else contents.weights
    if kind == "INT32" and way == "blocks":  # not supported by ONNX Runtime
        assert ("scales of shape (3, 4)" in str(contents.skipped), kept) == (True, {})
        return
    assert not contents.skipped
    assert list(kept) == ["w"]
    assert np.array_equal(np.asarray(kept["w"].codes, np.float64), codes.astype(np.float64))
    assert contents.readers["w"] == ("Gemm layer",)
    assert contents.float_nbytes == 0
    same_bits(kept["w"].dequantize(), float_of(model, ["v"])["v"])


@pytest.mark.parametrize("way", [name for name in WAYS if name != "blocks"])
@pytest.mark.parametrize("kind", ["INT4", "UINT4"])
def test_codes_of_4_bits_are_read_through_the_cast_that_widens_them(kind, way):
    shape, attributes = WAYS[way]
    narrow, wide = getattr(TensorProto, kind), getattr(TensorProto, kind.replace("4", "8"))
    codes, scale = codes_of(kind), RNG.uniform(1e-3, 1, shape).astype(np.float32)
    tensors = [make_tensor("w", codes, narrow), make_tensor("s", scale)]
    tensors += [make_tensor("z", RNG.integers(0, 8, shape), wide)]
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=wide),
        helper.make_node("DequantizeLinear", ["wide", "s", "z"], ["v"], **attributes),
        helper.make_node("Gemm", ["x", "v"], ["y"], name="layer", transB=1),
    ]
    model = model_of(nodes, tensors)
    contents = load_quantized(model)
    assert (contents.skipped, contents.readers["w"]) == ({}, ("Gemm layer",))
    weight = contents.weights["w"]
    assert weight.spec.format.name == kind.lower()
    assert weight.nbytes < 12 + 6 * 8, "two codes in a byte"
    same_bits(weight.dequantize(), float_of(model, ["v"])["v"])
    (record,) = QuantizedGraph(model).weights
    assert (record.direct, record.form) == (True, "codes")
    (layer,) = find_layers(open_quantized(model))
    assert (layer.name, layer.weight.name) == ("layer", "w")


def test_other_casts_of_codes_are_not_read():
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.UINT8),
        helper.make_node("DequantizeLinear", ["wide", "s", "z"], ["v"]),
        helper.make_node("Gemm", ["x", "v"], ["y"], name="layer", transB=1),
    ]
    tensors = [make_tensor("w", codes_of("INT4"), TensorProto.INT4), make_tensor("s", np.float32(0.5))]
    contents = load_quantized(model_of(nodes, [*tensors, make_tensor("z", np.uint8(128))]))
    assert "its codes are moved or cast" in str(contents.skipped), "negative codes become large codes"
    nodes[0] = helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.INT8)
    contents = load_quantized(model_of(nodes, [*tensors, make_tensor("z", np.int8(8))]))
    assert "the zero points of 'w' are 8 to 8, but its codes are -8 to 7" in str(contents.skipped)


def test_a_bias_with_large_codes_and_a_zero_point_is_read_as_onnx_runtime_does():
    codes = np.array([2**31 - 1, -(2**31), 2**24 + 1, -(2**25) - 3, 7], np.int32)
    scale = np.float32([1e-9, 3e-8, 0.1, 0.3, 1.0])
    tensors = [make_tensor("b", codes), make_tensor("s", scale), make_tensor("z", np.zeros(5, np.int32))]
    model = model_of(
        [
            helper.make_node("DequantizeLinear", ["b", "s", "z"], ["v"], axis=0),
            helper.make_node("Add", ["x", "v"], ["y"]),
        ],
        tensors,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5])],
    )
    contents = load_quantized(model)
    same_bits(contents.biases["b"].dequantize(), float_of(model, ["v"])["v"])
    assert contents.biases["b"].nbytes == 40
    assert not contents.weights


def test_activations_with_their_readers():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 4] x, uint8[N, 4] u) => (float[N, 4] y, uint8[N, 4] q)
        <float s = {0.5}, uint8 z = {3}, float t = {0.25}, int16 zt = {-7}>
        {
            [first] xq = QuantizeLinear(x, s, z)
            xd = DequantizeLinear(xq, s, z)
            [relu] r = Relu(xd)
            [second] q = QuantizeLinear(xd, s, z)
            rq = QuantizeLinear(r, t, zt)
            rd = DequantizeLinear(rq, t, zt)
            ud = DequantizeLinear(u, s, z)
            [sum] y = Add(rd, ud)
        }"""
    )
    contents = load_quantized(model)
    assert [(each.tensor, each.type, float(each.scale), int(each.zero_point)) for each in contents.activations] == [
        ("x", "UINT8", 0.5, 3),
        ("xd", "UINT8", 0.5, 3),
        ("r", "INT16", 0.25, -7),
        ("u", "UINT8", 0.5, 3),
    ]
    assert contents.readers["xq"] == ("Relu relu", "QuantizeLinear second")
    assert contents.readers["rq"] == contents.readers["u"] == ("Add sum",)
    assert contents.nodes["QuantizeLinear"] == 3
    assert not contents.weights
    assert contents.float_nbytes == 0


def test_a_float_weight_that_is_quantized_in_the_graph():
    weight = RNG.normal(size=(4, 3)).astype(np.float32)
    weight[0, 0] = 100
    tensors = [make_tensor("w", weight), make_tensor("s", np.float32([0.5, 0.01, 0.02]))]
    tensors.append(make_tensor("z", np.zeros(3, np.int8)))
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["v"], axis=1),
        helper.make_node("MatMul", ["x", "v"], ["y"], name="m"),
    ]
    model = model_of(nodes, tensors)
    contents = load_quantized(model)
    same_bits(contents.weights["w"].dequantize(), float_of(model, ["v"])["v"])
    assert (contents.activations, contents.float_nbytes, contents.readers["w"]) == ((), 0, ("MatMul m",))


def test_weights_in_constants_and_in_branches():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x, bool c) => (float[N, 2] y)
        <int8[2] outer = {5, -6}, float s = {0.5}>
        {
            k = Constant<value = int8[2] {1, 2}>()
            kd = DequantizeLinear(k, s)
            h = Add(x, kd)
            y = If(c)<
                then_branch = a () => (float[N, 2] p) <int8[2] inner = {3, 4}> {
                    i = DequantizeLinear(inner, s)
                    [plus] p = Add(h, i)
                },
                else_branch = e () => (float[N, 2] q) {
                    o = DequantizeLinear(outer, s)
                    [minus] q = Sub(h, o)
                }>
        }"""
    )
    contents = load_quantized(model)
    assert {name: tensor.dequantize().tolist() for name, tensor in contents.weights.items()} == {
        "k": [0.5, 1.0],
        "inner": [1.5, 2.0],
        "outer": [2.5, -3.0],
    }
    assert (contents.readers["inner"], contents.readers["outer"]) == (("Add plus",), ("Sub minus",))


@pytest.mark.parametrize("form", ["dequantized", "one scale", "scale per row"])
def test_embeddings_are_looked_up_in_codes(form):
    table = RNG.integers(-128, 128, (6, 4)).astype(np.int8)
    scale = RNG.uniform(0.1, 1, (6, 1) if form == "scale per row" else ()).astype(np.float32)
    nodes = [helper.make_node("Gather", ["w", "i"], ["rows"])]
    if form == "dequantized":
        nodes.append(helper.make_node("DequantizeLinear", ["rows", "s"], ["v"]))
    else:
        nodes.append(helper.make_node("Cast", ["rows"], ["floats"], to=TensorProto.FLOAT))
        if form == "scale per row":
            nodes.append(helper.make_node("Gather", ["s", "i"], ["factors"]))
        nodes.append(helper.make_node("Mul", ["floats", "factors" if form == "scale per row" else "s"], ["v"]))
    nodes.append(helper.make_node("Add", ["x", "v"], ["y"], name="sum"))
    tensors = [make_tensor("w", table), make_tensor("s", scale), make_tensor("i", np.arange(6))]
    model = model_of(nodes, tensors)
    contents = load_quantized(model)
    same_bits(contents.weights["w"].dequantize(), float_of(model, ["v"])["v"])
    assert (contents.readers["w"], contents.float_nbytes) == (("Add sum",), 0)


def test_unsupported_nodes_are_listed_with_a_reason():
    codes, scale = make_tensor("w", np.zeros((4, 4), np.int8)), make_tensor("s", np.float32(0.5))
    zero = make_tensor("zero", np.float32(0))
    nodes = [
        helper.make_node("Abs", ["s"], ["computed"]),
        helper.make_node("DequantizeLinear", ["w", "computed"], ["a"], name="dynamic"),
        helper.make_node("DequantizeLinear", ["w", "zero"], ["b"], name="flat"),
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], name="now"),
        helper.make_node("MatMulInteger", ["q", "w", "qz"], ["i"], name="whole"),
        helper.make_node("Cast", ["i"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Sum", ["a", "b", "c"], ["y"]),
    ]
    contents = load_quantized(model_of(nodes, [codes, scale, zero]))
    assert not contents.weights
    assert "computed" in contents.skipped["DequantizeLinear dynamic"]
    assert "scale" in contents.skipped["DequantizeLinear flat"]
    assert "MatMulInteger whole" in contents.skipped
    assert [each.x for each in contents.dynamic] == ["x"]
    assert "not read: DequantizeLinear dynamic: " in str(contents.summary())


def dynamic_nodes(zero=("z",), scale="s", swapped=False):
    """The nodes that ONNX Runtime's quantize_dynamic and detent write for a layer."""
    scales = [scale, "xs"] if swapped else ["xs", scale]
    return [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"], name="quantize"),
        helper.make_node("MatMulInteger", ["xq", "w", "xz", *zero], ["sums"], name="fc"),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", scales, ["scales"]),
        helper.make_node("Mul", ["floats", "scales"], ["y"]),
    ]


@pytest.mark.parametrize(
    ("zero", "scale"),
    [
        (None, np.float32([0.5, 0.25, 2.0])),
        (np.uint8(128), np.float32([0.5, 0.25, 2.0])),
        (np.uint8([1, 128, 3]), np.float32([0.5, 0.25, 2.0])),
        (np.uint8(128), np.float32(0.5)),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_weights_of_integer_matmuls(zero, scale, swapped):
    codes = np.arange(12).reshape(4, 3).astype(np.int8 if zero is None else np.uint8)
    tensors = [make_tensor("w", codes), make_tensor("s", scale)] + ([] if zero is None else [make_tensor("z", zero)])
    nodes = dynamic_nodes(() if zero is None else ("z",), swapped=swapped)
    contents = load_quantized(model_of(nodes, tensors))
    expected = (codes.astype(np.float32) - np.float32(0 if zero is None else zero)) * scale
    same_bits(contents.weights["w"].dequantize(), expected)
    assert contents.readers["w"] == contents.readers["xq"] == ("MatMulInteger fc",)
    assert (contents.float_nbytes, contents.skipped) == (0, {})
    assert [(row.name, row.type) for row in contents.summary().rows[1:]] == [("x", "uint8 dynamic")]


def test_codes_of_an_integer_matmul_may_be_widened():
    codes = np.arange(12).reshape(4, 3) - 6
    tensors = [make_tensor("w", codes, TensorProto.INT4), make_tensor("s", np.float32([0.5, 0.25, 2.0]))]
    nodes = dynamic_nodes(())
    nodes[1].input[1] = "wide"
    cast = helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.INT8)
    contents = load_quantized(model_of([cast, *nodes], tensors))
    assert (contents.skipped, contents.weights["w"].spec.format.name) == ({}, "int4")
    same_bits(contents.weights["w"].dequantize(), codes.astype(np.float32) * np.float32([0.5, 0.25, 2.0]))


def test_integer_matmuls_of_other_forms_are_not_read():
    tensors = [
        make_tensor("w", np.ones((4, 3), np.int8)),
        make_tensor("z", np.int8(0)),
        make_tensor("s", np.float32(2)),
    ]
    nodes = dynamic_nodes()
    other_zero = [nodes[0], helper.make_node("MatMulInteger", ["xq", "w", "", "z"], ["sums"], name="fc"), *nodes[2:]]
    two_readers = [*nodes, helper.make_node("Abs", ["floats"], ["more"])]
    no_scales = [*nodes[:3], helper.make_node("Mul", ["floats", "s"], ["y"])]
    for each in (other_zero, two_readers, no_scales):
        contents = load_quantized(model_of(each, tensors))
        assert (list(contents.weights), list(contents.skipped)) == ([], ["MatMulInteger fc"])
    wrong = [*tensors[:2], make_tensor("s", np.ones(4, np.float32))]
    assert list(load_quantized(model_of(nodes, wrong)).skipped) == ["MatMulInteger fc"]


def test_one_constant_with_two_scales():
    tensors = [
        make_tensor("w", np.ones((4,), np.int8)),
        make_tensor("s", np.float32(0.5)),
        make_tensor("t", np.float32(1)),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["b"]),
        helper.make_node("Sum", ["x", "a", "b"], ["y"]),
    ]
    contents = load_quantized(model_of(nodes, tensors))
    assert contents.weights["w"].dequantize().tolist() == [0.5] * 4
    assert "two ways" in contents.skipped["w"]


def test_weights_inside_of_functions(tmp_path):
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "own": 1]> g (float[2] x) => (float[2] y)
        <int8[2] w = {3, -4}, float s = {0.5}> { y = own.add(x, w, s) }
        <domain: "own", opset_import: ["" : 21]> add (x, w, s) => (y) { v = DequantizeLinear(w, s) y = Add(x, v) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    assert load_quantized(tmp_path / "m.onnx").weights["w"].dequantize().tolist() == [1.5, -2.0]


def test_the_summary_is_a_table_and_json():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x) => (float[N, 2] y)
        <int8[2, 2] w = {1, 2, 3, 4}, float s = {0.5}, int32[2] b = {1, 2}, float[3] other = {1, 2, 3}>
        {
            xq = QuantizeLinear(x, s)
            xd = DequantizeLinear(xq, s)
            v = DequantizeLinear(w, s)
            bd = DequantizeLinear(b, s)
            [gemm] y = Gemm(xd, v, bd)
        }"""
    )
    summary = load_quantized(model).summary()
    lines = str(summary).splitlines()
    assert lines[0] == (
        "1 weight, 9 bytes (16 as float32); 1 bias, 12 bytes; 1 activation quantizer; 12 bytes of other floats"
    )
    assert [line.split()[0] for line in lines[2:]] == ["tensor", "w", "b", "x"]
    assert all(line.endswith("Gemm gemm") for line in lines[3:])
    facts = json.loads(summary.to_json())
    assert facts["rows"][0]["shape"] == [2, 2]
    assert facts["nodes"]["DequantizeLinear"] == 3
    assert (summary.count("bias"), summary.nbytes("bias")) == (1, 12)
    quantized = load_quantized(model)
    assert repr(quantized) == f"<QuantizedModel {lines[0]}>"
    assert quantized._repr_html_() == summary._repr_html_()
    assert summary._repr_html_().count("<tr>") == 4


def test_names_in_tables_are_escaped():
    name = "<img src=x>"
    initializers = [numpy_helper.from_array(np.int8([1, 2]), name), numpy_helper.from_array(np.float32(0.5), "s")]
    nodes = [helper.make_node("DequantizeLinear", [name, "s"], ["y"])]
    html = load_quantized(model_of(nodes, initializers))._repr_html_()
    assert "&lt;img src=x&gt;" in html
    assert "<img" not in html


def test_a_damaged_file_is_rejected(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(dt.FileFormatError, match="not an ONNX model"):
        load_quantized(tmp_path / "m.onnx")


def test_smart_turn_has_the_values_of_onnx_runtime():
    entry = ZOO["smart-turn"]
    if not entry.is_installed:
        pytest.skip(f"{entry.package} is not installed")
    model = onnx.load(entry.path)
    contents = load_quantized(entry.path)
    assert (contents.nodes["QuantizeLinear"], contents.nodes["DequantizeLinear"]) == (78, 114)
    assert (len(contents.weights), len(contents.biases), len(contents.activations)) == (31, 5, 78)
    assert not contents.skipped
    behind = {node.input[0]: node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    kept = {**contents.weights, **contents.biases}
    expected = float_of(model, [behind[name] for name in kept])
    for name, tensor in kept.items():
        same_bits(tensor.dequantize(), expected[behind[name]])
        stored = next(each for each in model.graph.initializer if each.name == name)
        assert np.array_equal(numpy_helper.to_array(stored), tensor.codes)
        assert contents.readers[name]
    assert contents.summary().nbytes("weight") < 8e6


def embedding_model(width=16):
    """A table of words before a layer."""
    table, weight = RNG.normal(size=(9, width)), RNG.normal(size=(width, 4))
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["rows"], name="words"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="head"),
    ]
    tensors = [make_tensor("table", table.astype(np.float32)), make_tensor("w", weight.astype(np.float32))]
    return model_of(nodes, tensors, [helper.make_tensor_value_info("i", TensorProto.INT64, ["N", 9])])


TABLES = ["int8/tensor/symmetric", "int8/axis0/symmetric", "uint8/axis0/affine", "int8/group8", "uint4/group8/affine"]


@pytest.mark.parametrize("spec", TABLES)
def test_tables_of_detent_are_read_by_all_views(spec):
    rules = [dt.Rule(weight="int8/axis1"), dt.Rule("words", weight=spec)]
    plan = qo.plan(embedding_model(), dt.Recipe(rules), target="openvino")
    model = qo.insert(plan, qo.calibrate(plan, [np.arange(9)[None]]))
    [name] = [codes for codes, layer in qo_names(model).items() if layer == "words"]
    table = load_quantized(model).weights[name]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    head = next(node for node in copy.graph.node if node.name == "head")
    copy.graph.output.append(helper.make_tensor_value_info(head.input[0], TensorProto.FLOAT, None))
    session = ort.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    [rows] = session.run([head.input[0]], {"i": np.arange(9)[None]})
    same_bits(table.dequantize("float32"), rows[0])
    graph = open_quantized(model)
    assert {each.name for each in graph.weights if not each.is_bias} == set(load_quantized(model).weights)
    assert [layer.weight.name for layer in find_layers(graph) if layer.name == "words"] == [name]


def qo_names(model):
    return QuantizedGraph(model).provenance.weights


def test_views_of_one_model_agree():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x) => (float[N, 2] y)
        <float s = {0.5}, uint8 z = {3}, int8[2, 2] w = {1, 2, 3, 4}, int8 zw = {0}, int32[2] b = {1, 2}>
        {
            xq = QuantizeLinear(x, s, z)
            xd = DequantizeLinear(xq, s, z)
            v = DequantizeLinear(w, s, zw)
            bd = DequantizeLinear(b, s)
            [fc] y = Gemm(xd, v, bd)
        }"""
    )
    graph, public = open_quantized(model), load_quantized(model)
    assert [each.codes for each in graph.quantize_nodes] == [each.output for each in public.activations] == ["xq"]
    assert [each.name for each in graph.weights] == [*public.weights, *public.biases] == ["w", "b"]
    [layer] = find_layers(graph)
    assert (layer.weight, layer.quantizer) == (graph.weights[0], graph.quantize_nodes[0])
    assert graph.weights[0].codes is graph.weights[0].codes  # decoded once
    assert graph.parameters - {""} == {"s", "z", "zw"}


def test_parameters_in_constant_nodes_are_read_by_all_views():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) {
            s = Constant<value = float {0.5}>()
            z = Constant<value = uint8 {3}>()
            q = QuantizeLinear(x, s, z)
            y = DequantizeLinear(q, s, z)
        }"""
    )
    assert len(load_quantized(model).activations) == len(open_quantized(model).quantize_nodes) == 1
    assert dt.verify(model, model, [np.linspace(-9, 9, 50, dtype=np.float32)], levels=(1,)).compared_codes == 50


def test_codes_that_are_moved_are_read_or_listed():
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 2] x) => (float[1, 3] y)
        <float[3] s = {0.5, 1, 2}, float t = {0.5}, int8[3, 2] w = {1, 2, 3, 4, 5, 6}>
        { wt = Transpose(w) v = DequantizeLinear<axis = 1>(wt, t) y = MatMul(x, v) }"""
    one = load_quantized(parser.parse_model(text))
    assert one.weights["w"].dequantize().tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
    several = load_quantized(parser.parse_model(text.replace("wt, t)", "wt, s)")))
    assert not several.weights
    assert "moved" in several.skipped["DequantizeLinear v"]
