"""Graphs that are legal and rare: each once gave a wrong file, an unhandled error or a wrong report."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import Maker, conv_chain, images, operators, rows, weights

import detent as dt
import detent.onnx as qo
from detent.evaluate import Checks, quantize_and_evaluate
from detent.onnx_model import Graph, make_session, save
from detent.onnx_model.files import load_model
from detent.onnx_model.sessions import record

INT64 = TensorProto.INT64


def quantize(model, tmp_path, data, **options):
    return qo.quantize(model, tmp_path / "q.onnx", data, progress=False, **options)


def sqnr(model, path, feed, **config):
    expected, got = (make_session(each, config=config).run(None, feed)[0] for each in (model, path))
    return dt.metrics.sqnr_db(expected, got)


def lookups(count=1, width=64):
    m = Maker(opset=13)
    table = m.constant(weights(50, width), "table")
    parts = [m.add("Gather", [table, f"i{k}"], name=f"words{k}") for k in range(count)]
    t = parts[0] if count == 1 else m.add("Add", parts)
    inputs = [(f"i{k}", [1, "n"], INT64) for k in range(count)]
    return m.model(inputs, [m.matmul(t, width, 8, name="fc")])


def ids(count=1):
    return {f"i{k}": np.arange(20).reshape(1, -1) + k for k in range(count)}


def test_two_lookups_share_one_table(tmp_path):
    report = quantize(lookups(2), tmp_path, [ids(2)])
    graph = Graph(qo.load(report.output))
    assert len([name for name in graph.constants if graph.shape(name) == (50, 64)]) == 1
    assert report.output_sqnr_db > 30


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ("int8/axis0", 35),
        ("uint8/axis0/affine", 35),
        ("int8/axis0/affine", 35),
        ("int16/axis0", 60),
        ("int8/axis1", 30),
        ("int4/group32", 14),
        ("uint4/group32/affine", 14),
        ("int8", 30),
    ],
)
def test_tables_of_any_spec(spec, least, tmp_path):
    model = lookups()
    recipe = dt.Recipe([dt.Rule(types="Embedding", weight=spec)])
    report = quantize(model, tmp_path, None, recipe=recipe)
    assert sqnr(model, report.output, ids()) > least


def test_weight_only_presets_quantize_embeddings(tmp_path):
    model = lookups()
    report = quantize(model, tmp_path, None, recipe="w4a16-g32")
    assert [bool(layer.reason) for layer in report.layers] == [False, False]
    config = {"session.qdq_matmulnbits_accuracy_level": "0"}
    assert sqnr(model, report.output, ids(), **config) > 14
    assert dt.verify(model, report.output, [ids()], levels=(1,)).ok


def test_a_file_may_replace_its_source(tmp_path):
    path = tmp_path / "q.onnx"
    save(conv_chain(), path)
    report = quantize(path, tmp_path, images())
    assert 20 < report.output_sqnr_db < 100


def test_layer_norm_with_a_computed_scale(tmp_path):
    m = Maker()
    scale = m.add("Abs", ["s"])
    norm = m.add("LayerNormalization", ["x", scale], axis=-1)
    model = m.model([("x", [1, "n", 16]), ("s", [16])], [m.matmul(norm, 16, 16)])
    uneven = np.logspace(0, 2, 16).astype(np.float32)
    report = quantize(model, tmp_path, [feed | {"s": uneven} for feed in rows(length=50)])
    assert report.output_sqnr_db > 25


def test_names_that_look_like_added_ones(tmp_path):
    m = Maker()
    t = m.conv("lowest_float", 8, 16, name="c1")
    t = m.conv(m.add("Relu", [t]), 16, 16, name="c2")
    model = m.model([("lowest_float", [2, 8, 8, 8])], [m.conv(m.add("Relu", [t]), 16, 4)])
    data = [{"lowest_float": feed["x"]} for feed in images()]
    assert quantize(model, tmp_path, data, skip=["c2"]).output_sqnr_db > 25


def test_indices_of_a_pool_are_not_quantized(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16)])
    pooled, where = m.add("MaxPool", [t], outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    back = m.add("MaxUnpool", [pooled, where], kernel_shape=[2, 2], strides=[2, 2])
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(back, 16, 4)])
    assert quantize(model, tmp_path, images(batch=1)).output_sqnr_db > 25


def test_tensors_may_be_empty(tmp_path):
    m = Maker()
    kept = m.add("Compress", ["x", "keep"], axis=0)
    model = m.model([("x", ["n", 16]), ("keep", ["n"], TensorProto.BOOL)], [m.matmul(kept, 16, 8)])
    x = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    feeds = [{"x": x, "keep": np.full(6, on)} for on in (True, False, True)]
    assert quantize(model, tmp_path, feeds).output_sqnr_db > 30


def test_anchors_after_the_last_layer_are_not_embeddings():
    m = Maker()
    scores = m.matmul("x", 16, 100, name="fc")
    _, best = m.add("TopK", [scores, m.constant(np.int64([5]))], outputs=2)
    boxes = m.add("Gather", [m.constant(weights(100, 4)), best], name="anchors")
    plan = qo.plan(qo.prepare(m.model([("x", [1, 16])], [boxes])))
    assert [line.name for line in plan.layers] == ["fc"]


def test_layers_in_nested_subgraphs_are_listed():
    value = helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.eye(4, dtype=np.float32).ravel())
    product = helper.make_node("MatMul", ["x", "w"], ["inside"], name="product")
    inner = helper.make_graph([product], "inner", [], [value], [weight])
    outer_value = helper.make_tensor_value_info("outer", TensorProto.FLOAT, None)
    choice = helper.make_node("If", ["yes"], ["outer"], name="second", then_branch=inner, else_branch=inner)
    outer = helper.make_graph([choice], "outer", [], [outer_value])
    m = Maker()
    y = m.add("If", [m.constant(np.array(True), "yes")], name="first", then_branch=outer, else_branch=outer)
    plan = qo.plan(qo.prepare(m.model([("x", [1, 4])], [y])), "w8a16")
    assert plan.layers[0].name == "first/second/product"
    assert [line.reason for line in plan.layers] == [""] * 4


def test_functions_are_inlined():
    m = Maker()
    m.nodes.append(helper.make_node("Dense", ["x", m.constant(weights(16, 4))], ["y"], domain="mine"))
    model = m.model([("x", [1, 16])], ["y"], domains=["mine"])
    body = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    model.functions.append(
        helper.make_function("mine", "Dense", ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)])
    )
    assert len(qo.plan(qo.prepare(model)).quantized) == 1


def test_a_model_without_layers_is_rejected():
    m = Maker()
    with pytest.raises(dt.UnsupportedError, match="nothing to quantize"):
        qo.plan(qo.prepare(m.model([("x", [1])], [m.add("Relu", ["x"])])))


def test_constants_that_grow_do_not_affect_others():
    m = Maker()
    large = m.add("Expand", [m.constant(np.float32([1])), m.constant(np.int64([1, 4]))])
    turned = m.add("Transpose", [m.constant(weights(4, 16))], perm=[1, 0])
    model = m.model([("x", [1, 16])], [m.add("Add", [m.add("MatMul", ["x", turned], name="fc"), large])])
    assert [line.name for line in qo.plan(qo.prepare(model)).quantized] == ["fc"]


def test_an_iterator_is_accepted_if_the_budget_suffices(tmp_path):
    assert quantize(conv_chain(), tmp_path, iter(images()), memory_budget=1 << 30).output_sqnr_db > 20


def test_the_limit_of_avx2_is_for_products_that_may_saturate():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 16, 16, group=16, name="depthwise")])
    model = m.model([("x", [1, 16, 8, 8])], [m.conv(t, 16, 4, name="dense")])
    prepared = qo.prepare(model)
    limits = {line.name: line.weight.qmax for line in qo.plan(prepared, target="onnxruntime-avx2").layers}
    assert limits == {"depthwise": 127, "dense": 64}
    assert {line.weight.qmax for line in qo.plan(prepared, "w8a16", target="onnxruntime-avx2").layers} == {127}


def test_a_channel_multiplier_is_not_depthwise(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 16, 32, group=16, name="multiplied")])
    layers = qo.plan(qo.prepare(m.model([("x", [1, 16, 8, 8])], [m.conv(t, 32, 4)]))).layers_by_name
    assert not layers["multiplied"].depthwise


def test_weight_only_quantizes_layers_with_slow_integer_kernels():
    m = Maker()
    t = m.add("ConvTranspose", [m.conv("x", 3, 8, name="pixels"), m.constant(weights(8, 4, 3, 3))], name="up")
    plan = qo.plan(qo.prepare(m.model([("x", [1, 3, 8, 8])], [t])), "w8a16")
    assert [line.name for line in plan.quantized] == ["pixels", "up"]


@pytest.mark.parametrize("shape", [(16,), (1, 16), (1,), ()])
def test_biases_of_any_shape_run_on_integer_kernels(shape, tmp_path):
    m = Maker()
    t = m.add("Gemm", ["x", m.constant(weights(8, 16)), m.constant(np.full(shape, 0.3, np.float32))], name="a")
    model = m.model([("x", ["n", 8])], [m.add("Gemm", [m.add("Relu", [t]), m.constant(weights(16, 4))], name="b")])
    data = [np.random.default_rng(i).normal(size=(4, 8)).astype(np.float32) for i in range(3)]
    report = quantize(model, tmp_path, data, smooth=False, keep_float="none")
    assert report.layers[0].kernel == "QGemm"


def test_gelu_does_not_change_other_readers():
    m = Maker()
    t = m.conv("x", 8, 16)
    root, one, half = (m.constant(np.float32([value])) for value in (2**0.5, 1, 0.5))
    bent = m.add("Add", [m.add("Erf", [m.add("Div", [t, root])]), one])
    bent = m.conv(m.add("Mul", [m.add("Mul", [t, bent]), half]), 16, 16)
    beside = m.conv(t, 16, 16)
    y = m.conv(m.add("Relu", [m.add("Add", [bent, beside])]), 16, 4)
    plan = qo.plan(qo.prepare(m.model([("x", [2, 8, 8, 8])], [y])))
    counts = operators(qo.insert(plan, qo.calibrate(plan, images())))
    assert (counts["Gelu"], counts["QLinearConv"]) == (1, 3)


def test_quantized_layers_are_not_changed(tmp_path):
    first = quantize(conv_chain(), tmp_path, images())
    plan = qo.plan(qo.prepare(first.output, force=True))
    assert {line.reason for line in plan.layers} == {"its weight is quantized already"}


@pytest.mark.parametrize("recipe", ["w8a8", "w4a8", "w8a16", "w4a16-g32"])
def test_planned_bytes_are_those_of_the_file(recipe, tmp_path):
    m = Maker(opset=13)
    t = m.add("Relu", [m.conv("x", 16, 32, name="a")])
    t = m.add("Relu", [m.conv(t, 32, 32, name="b")])
    t = m.add("GlobalAveragePool", [m.conv(t, 32, 64, name="c")])
    model = m.model([("x", [2, 16, 8, 8])], [m.matmul(m.add("Flatten", [t]), 64, 64, name="d")])
    report = quantize(model, tmp_path, images(channels=16), recipe=recipe, keep_float="none", smooth=False)
    graph = Graph(qo.load(report.output))
    inputs = [
        (graph.code_constant(node.input[0]), *node.input[1:])
        for node in graph.nodes
        if node.op_type == "DequantizeLinear"
    ]
    weights = [names for names in inputs if graph.kind(names[0]) not in {TensorProto.UNDEFINED, TensorProto.INT32}]
    nbytes = sum(len(graph.constants[name].raw_data) for names in weights for name in names)
    assert nbytes == sum(line.nbytes_after for line in report.plan.quantized)


@pytest.mark.parametrize("value", ["Auto", False, None])
def test_unknown_values_of_keep_float(value, tmp_path):
    with pytest.raises(dt.SpecError, match="keep_float"):
        quantize(conv_chain(), tmp_path, images(), keep_float=value)


def of_ir_version_3(opset, *, branches=False, constant_nodes=False):
    """Two convolutions as in the ONNX model zoo: initializers are listed among the inputs."""
    m = Maker(opset=opset, ir=3)
    t = m.add("Relu", [m.conv("x", 8, 8, name="first")])
    if branches:
        flag = m.add("Cast", [m.add("ReduceSum", [t], keepdims=0)], to=TensorProto.BOOL)
        bodies = [
            helper.make_graph([helper.make_node(op, [t], [name])], op, [], [helper.make_empty_tensor_value_info(name)])
            for op, name in (("Relu", "yes"), ("Neg", "no"))
        ]
        t = m.add("If", [flag], then_branch=bodies[0], else_branch=bodies[1])
    y = m.conv(t, 8, 4, name="last")
    if constant_nodes:
        m.nodes = [helper.make_node("Constant", [], [each.name], value=each) for each in m.tensors] + m.nodes
        m.tensors = []
    model = m.model([("x", [2, 8, 8, 8])], [y])
    for each in m.tensors:
        model.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)))
    return model


@pytest.mark.parametrize("recipe", ["w8a8", "w4a8", "w8a16"])
@pytest.mark.parametrize("options", [{}, {"branches": True}, {"constant_nodes": True}], ids=str)
@pytest.mark.parametrize("opset", [7, 12])
def test_files_of_ir_version_3(opset, options, recipe, tmp_path):
    model, feeds = of_ir_version_3(opset, **options), images()
    report = quantize(model, tmp_path, feeds[:2], recipe=recipe)
    assert [layer.name for layer in report.layers if not layer.reason] == ["first", "last"]
    assert [each.name for each in qo.load(report.output).graph.input] == ["x"]
    assert sqnr(model, report.output, feeds[2]) > 25
    assert dt.verify(model, report.output, feeds[2:3]).ok


def residual_cnn():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 8, name="first")])
    t = m.add("Relu", [m.add("Add", [m.conv(t, 8, 8, name="second"), t])])
    pooled = m.add("MaxPool", [t], kernel_shape=[2, 2])
    t = m.add("Concat", [m.conv(pooled, 8, 8, name="third"), m.conv(pooled, 8, 8, group=8, name="fourth")], axis=1)
    return m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="last")]), images()


def perceptron(op):
    m = Maker()
    t = "x"
    for name in ("first", "second", "third", "last"):
        t = m.add(op, [t, m.constant(weights(16, 16, seed=len(m.nodes)))], name=name)
        t = t if name == "last" else m.add("Relu", [t])
    data = [{"x": each["x"][0]} for each in rows()]
    return m.model([("x", [6, 16])], [t]), data


@pytest.mark.parametrize("net", ["Conv", "MatMul", "Gemm"])
@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        *((recipe, "onnxruntime") for recipe in ("w4a4", "w8a4", "w3a3", "w2a2")),
        *(("w4a4", target) for target in ("onnxruntime-avx2", "openvino")),
    ],
)
def test_activations_of_few_bits_run_with_the_codes_they_promise(recipe, net, target, tmp_path):
    model, feeds = residual_cnn() if net == "Conv" else perceptron(net)
    options = {"keep_float": "none", "equalize": False, "smooth": False}
    report = quantize(model, tmp_path, feeds[:3], recipe=recipe, target=target, **options)
    bits = [0 if layer.input is None else layer.input.bits for layer in report.plan.layers]
    assert bits == [8, *[int(recipe[-1])] * (len(bits) - 2), 8]
    quantized = qo.load(report.output)
    names = {node.output[0]: node.input[0] for node in quantized.graph.node if node.op_type == "QuantizeLinear"}
    specs = {each.tensor: each.spec for each in report.decisions.placements}
    narrow = [codes for codes, x in names.items() if specs[x.removesuffix("_clipped").removesuffix("_float")].bits < 8]
    assert narrow
    for codes in record(quantized, narrow, feeds[3:]):
        assert all(array.max() < 1 << int(recipe[-1]) for array in codes.values())
    report = dt.verify(model, report.output, feeds[3:])
    assert report.ok, str(report)


def few_layers(op, count):
    """A model of one or two layers of an operator."""
    m, t = Maker(), "x"
    for k in range(count):
        t = m.add("Relu", [t]) if k else t
        if op == "Conv":
            t = m.conv(t, 8, 8, name=f"layer{k}")
        else:
            t = m.add(op, [t, m.constant(weights(8, 8, seed=k))], name=f"layer{k}")
    feeds = images() if op == "Conv" else [{"x": each["x"][0, :, :, 0]} for each in images()]
    return m.model([("x", list(feeds[0]["x"].shape))], [t]), feeds


@pytest.mark.parametrize("op", ["Conv", "MatMul", "Gemm"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("recipe", ["w4a4", "w2a2"])
def test_recipes_of_few_bits_on_graphs_of_one_and_two_layers(recipe, count, op, tmp_path):
    model, feeds = few_layers(op, count)
    result = quantize(model, tmp_path, feeds[:3], recipe=recipe, keep_float="none")
    assert [layer.reason for layer in result.layers] == [""] * count
    assert [layer.input.bits for layer in result.plan.layers] == [8] * count  # the first and the last layer
    report = dt.verify(model, result.output, feeds[3:])
    assert report.ok, str(report)
    assert report.compared_codes > 64 * count
    assert report.output_sqnr_db > 25


@pytest.mark.parametrize("recipe", ["w8a8", "w4a4", "w8a16"])
@pytest.mark.parametrize("op", ["Conv", "Gemm"])
def test_tensors_named_like_added_ones(op, recipe, tmp_path):
    m = Maker(opset=13)
    attributes = {"pads": [1, 1, 1, 1]} if op == "Conv" else {}
    shape = (8, 8, 3, 3) if op == "Conv" else (8, 8)
    named = (  # output, weight, bias and node
        ("x_codes", "w0", "b0", "w0_dq_node"),
        ("w0_codes", "w0_scale", "b0_scale", "x_codes_1_node"),
        ("x_dq", "x_scale", "b0_codes", "x_dq_1_node"),
        ("y", "x_clipped", "x_zero_point", "w0_scale_dq_node"),
    )
    t = "x"
    for k, (output, weight, bias, node) in enumerate(named):
        inputs = [t, m.constant(weights(*shape, seed=k), weight), m.constant(weights(8, 1, seed=k + 9).ravel(), bias)]
        m.nodes.append(helper.make_node(op, inputs, [f"{output}_made"], name=node, **attributes))
        m.nodes.append(helper.make_node("Relu", [f"{output}_made"], [output], name=f"{output}_node"))
        t = output
    feeds = images() if op == "Conv" else [{"x": each["x"][0, :, :, 0]} for each in images()]
    model = m.model([("x", list(feeds[0]["x"].shape))], ["y"])
    result = quantize(model, tmp_path, feeds[:3], recipe=recipe, keep_float="none")
    assert [layer.reason for layer in result.layers] == [""] * 4
    graph = qo.load(result.output).graph
    nodes, tensors = [node.name for node in graph.node], [name for node in graph.node for name in node.output]
    assert len(set(nodes)) == len(nodes)
    assert len({*tensors, *(each.name for each in graph.initializer)}) == len(tensors) + len(graph.initializer)
    assert {"x_codes", "w0_codes", "x_dq"} <= set(tensors)
    report = dt.verify(model, result.output, feeds[3:])
    assert report.ok, str(report)
    assert report.output_sqnr_db > 8


@pytest.mark.parametrize("recipe", ["w4a4", "w4a8"])
def test_presets_with_rules_for_the_first_layer_need_none_that_can_be_quantized(recipe):
    m = Maker()
    y = m.add("MatMul", ["x", m.add("Transpose", ["x"], perm=[0, 2, 1])], name="scores")
    plan = qo.plan(qo.prepare(m.model([("x", [1, 6, 16])], [y])), recipe)
    assert [layer.reason for layer in plan.layers] == ["a matmul of two activations"]


def test_a_multiple_of_a_multiple_has_the_codes_of_both(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 8, name="first")])
    t = m.add("Add", [m.conv(t, 8, 8, name="second"), t])
    half = m.add("Mul", [t, m.constant(np.float32(0.5))])
    tenth = m.add("Mul", [half, m.constant(np.float32(0.2))])
    parts = [m.conv(half, 8, 8, name="third"), m.conv(tenth, 8, 8, name="fourth")]
    y = m.conv(m.add("Relu", [m.add("Add", parts)]), 8, 4, name="last")
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    report = quantize(model, tmp_path, feeds[:3])
    assert {each.tensor: each.source_tensor for each in report.decisions.placements if each.source_tensor} == {
        half: t,
        tenth: half,
    }
    assert sqnr(model, report.output, feeds[3]) > 25
    assert dt.verify(model, report.output, feeds[3:]).ok


def test_a_tensor_with_the_codes_of_a_multiple(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 8, name="first")])
    t = m.add("Add", [m.conv(t, 8, 8, name="second"), t])
    half = m.add("Mul", [t, m.constant(np.float32(0.5))])
    pooled = m.add("MaxPool", [half], kernel_shape=[2, 2], strides=[2, 2])
    y = m.conv(pooled, 8, 4, name="last")
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    report = quantize(model, tmp_path, feeds[:3])
    assert half in {each.group for each in report.decisions.placements if each.tensor == pooled}
    assert dt.verify(model, report.output, feeds[3:]).ok


def with_outputs(m, outputs, shape=(2, 8, 8, 8), inputs=()):
    """A model whose outputs have unusual types."""
    model = m.model([("x", list(shape)), *inputs], [name for name, _ in outputs])
    for value, (_, kind) in zip(model.graph.output, outputs, strict=True):
        value.type.tensor_type.elem_type = kind
    return model


@pytest.mark.parametrize("way", ["initializer", "node", "computed"])
@pytest.mark.parametrize("labels_only", [False, True])
def test_class_labels_are_strings(way, labels_only, tmp_path):
    m = Maker()
    pooled = m.add("Flatten", [m.add("GlobalAveragePool", [m.conv("x", 8, 8, name="first")])])
    scores = m.add("Gemm", [pooled, m.constant(weights(8, 3))], name="last")
    names = np.array(["cat", "dog", "bird"], object)
    if way == "node":
        labels = m.add("Constant", [], value=numpy_helper.from_array(names))
    else:
        labels = m.constant(names, "labels")
    if way == "computed":
        labels = m.add("Reshape", [labels, m.constant(np.int64([3]))])
    label = m.add("Gather", [labels, m.add("ArgMax", [scores], axis=1, keepdims=0)])
    outputs = (
        [(label, TensorProto.STRING)] if labels_only else [(scores, TensorProto.FLOAT), (label, TensorProto.STRING)]
    )
    model, feeds = with_outputs(m, outputs), images()
    report = quantize(model, tmp_path, feeds[:3])
    assert [layer.reason for layer in report.layers] == ["", ""]
    assert list(report.outputs_sqnr_db) == ([] if labels_only else [scores])
    assert set(make_session(report.output).run([label], feeds[3])[0]) <= set(names)
    assert load_model(model).digest == load_model(model).digest
    assert dt.verify(model, report.output, feeds[3:]).ok
    other = qo.load(model)
    tensors = [*other.graph.initializer, *(each.t for node in other.graph.node for each in node.attribute)]
    next(each for each in tensors if each.string_data).string_data[1] = b"cow"
    assert load_model(other).digest != load_model(model).digest


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL])
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("opset", [13, 11])
def test_outputs_of_other_types(kind, is_alone, opset, tmp_path):
    m = Maker(opset=opset if kind != TensorProto.BFLOAT16 else 13)
    t = m.conv(m.add("Relu", [m.conv("x", 8, 8, name="first")]), 8, 4, name="last")
    outputs = [(m.add("Cast", [t], to=kind), kind), *([] if is_alone else [(t, TensorProto.FLOAT)])]
    model, feeds = with_outputs(m, outputs), images(24)
    evaluation = quantize_and_evaluate(
        model, tmp_path / "q.onnx", feeds, checks=Checks(verify=False, time=False, sensitivity=False), progress=None
    )
    assert [layer.reason for layer in evaluation.result.layers] == ["", ""]
    compared = [name for name, each in outputs if each not in {TensorProto.BFLOAT16, TensorProto.BOOL}]
    assert list(evaluation.result.outputs_sqnr_db) == compared
    assert list(evaluation.accuracy.outputs_sqnr_db) == compared


def test_outputs_that_are_sequences(tmp_path):
    m = Maker()
    t = m.conv("x", 8, 8, name="first")
    model = m.model([("x", [2, 8, 8, 8])], [m.add("SequenceConstruct", [t, t])])
    model.graph.output[0].CopyFrom(helper.make_tensor_sequence_value_info(model.graph.output[0].name, 1, None))
    report = quantize(model, tmp_path, images(2))
    assert report.output_sqnr_db is None
    assert dt.verify(model, report.output, images(1)).ok


@pytest.mark.parametrize("shape", [(8, 0), (0, 8)])
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_an_empty_weight_is_kept_in_float(op, shape, tmp_path):
    m = Maker()
    rows_of = m.add("Flatten", [m.add("GlobalAveragePool", ["x"])])
    if not shape[0]:
        none = m.add("Slice", [rows_of, *(m.constant(np.int64([each])) for each in (0, 0, 1))])
        empty = m.add(op, [none, m.constant(np.zeros(shape, np.float32))], name="empty")
    else:
        empty = m.add(op, [rows_of, m.constant(np.zeros(shape, np.float32))], name="empty")
    full = m.add(op, [rows_of, m.constant(weights(8, 4))], name="full")
    model, feeds = m.model([("x", [2, 8, 8, 8])], [m.add("Concat", [empty, full], axis=1)]), images()
    report = quantize(model, tmp_path, feeds)
    assert [layer.reason for layer in report.layers] == [f"its weight is empty (shape {shape})", ""]
    assert sqnr(model, report.output, feeds[0]) > 30


def test_a_constant_that_cannot_be_computed_does_not_affect_others():
    m = Maker()
    scaled = m.add("Mul", [m.constant(weights(8, 8, 3, 3), "w"), m.constant(np.float32(2))])
    y = m.add("Conv", ["x", scaled], name="conv")
    as_bfloat = m.add("Cast", [m.constant(np.float32([1]))], to=TensorProto.BFLOAT16)  # NumPy has no such type
    kept = m.add("Reshape", [as_bfloat, "shape"])
    model = with_outputs(m, [(y, 1), (kept, TensorProto.BFLOAT16)], inputs=[("shape", [1], INT64)])
    prepared = qo.prepare(model)
    assert [node.op_type for node in prepared.graph.node] == ["Conv", "Cast", "Reshape"]
    assert [layer.reason for layer in qo.plan(prepared).layers] == [""]


def test_constants_after_outputs_can_be_computed(tmp_path):
    m = Maker()
    root = m.add("Sqrt", [m.constant(np.float32([4]))])
    outputs = [m.add("Mul", [m.conv("x", 8, 8, name="first"), root]), m.add("Exp", [m.add("Neg", [root])])]
    model, feeds = m.model([("x", [2, 8, 8, 8])], outputs), images()
    report = quantize(model, tmp_path, feeds[:3])
    old, new = (make_session(each).run(None, feeds[3]) for each in (model, report.output))
    np.testing.assert_array_equal(old[1], new[1])
    assert dt.metrics.sqnr_db(old[0], new[0]) > 30


def test_a_sequence_of_constants_is_not_a_constant(tmp_path):
    m = Maker()
    parts = m.add("SequenceConstruct", [m.constant(np.float32([2])), m.constant(weights(8, 8))])
    y = m.add("Mul", [m.conv("x", 8, 8, name="first"), m.add("SequenceAt", [parts, "i"])])
    model = m.model([("x", [2, 8, 8, 8]), ("i", [], INT64)], [y])
    feeds = [{**each, "i": np.array(0)} for each in images()]
    assert sqnr(model, quantize(model, tmp_path, feeds).output, feeds[0]) > 30


@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-dynamic"])
def test_a_resize_may_take_its_size_from_the_shape_of_a_layer(recipe):
    m = Maker()
    y = m.matmul(m.add("Sigmoid", [m.matmul("x", 8, 32, name="a")]), 32, 64, name="b")
    sides = m.add("Slice", [m.add("Shape", [y]), *(m.constant(np.int64([each])) for each in (2, 4, 0))])
    sizes = m.add("Concat", [m.constant(np.int64([1, 8])), sides], axis=0)
    resized = m.add("Resize", ["x", "", "", sizes], mode="linear")
    model = m.model([("x", [1, 8, 8, 8])], [m.add("Sigmoid", [y]), resized])
    feeds = images(4, batch=1)
    decisions = qo.decide(model, feeds, recipe, progress=False, keep_float="none")
    assert dt.verify(model, qo.rewrite(model, decisions), feeds[:1]).ok
