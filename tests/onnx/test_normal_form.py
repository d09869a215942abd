"""Normal form: the outputs of a model stay the same."""

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx_graphs import Maker, conv_chain, images, weights

import detent as dt
import detent.onnx as qo
from detent.onnx_model import Graph, make_session


def kinds(model):
    return [node.op_type for node in model.graph.node]


def assert_same(before, after, feeds, tolerance=1e-5):
    for feed in feeds:
        for old, new in zip(make_session(before).run(None, feed), make_session(after).run(None, feed), strict=True):
            np.testing.assert_allclose(new, old, rtol=0, atol=tolerance * np.abs(old).max())


def with_norm(op="Conv"):
    m = Maker()
    if op == "Conv":
        t = m.conv("x", 8, 6, bias=False)
    else:
        t = m.add("ConvTranspose", ["x", m.constant(weights(8, 3, 3, 3))], group=1)
    channels = 6 if op == "Conv" else 3
    parts = [m.constant(np.random.default_rng(i).uniform(0.5, 2, channels).astype(np.float32)) for i in range(4)]
    t = m.add("BatchNormalization", [t, *parts])
    t = m.add("Mul", [t, m.constant(np.float32(0.5))])
    t = m.add("Sub", [t, m.constant(np.arange(channels, dtype=np.float32).reshape(1, -1, 1, 1))])
    return m.model([("x", [2, 8, 8, 8])], [m.add("Relu", [t])])


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_arithmetic_with_constants_moves_into_the_layer_before_it(op):
    model = with_norm(op)
    prepared = qo.prepare(model)
    assert kinds(prepared) == [op, "Relu"]
    assert_same(model, prepared, images())


def test_grouped_transposed_convolutions_fold_by_group():
    m = Maker()
    t = m.add("ConvTranspose", ["x", m.constant(weights(4, 3, 3, 3))], group=2)
    parts = [m.constant(np.random.default_rng(i).uniform(0.5, 2, 6).astype(np.float32)) for i in range(4)]
    model = m.model([("x", [2, 4, 8, 8])], [m.add("BatchNormalization", [t, *parts])])
    prepared = qo.prepare(model)
    assert kinds(prepared) == ["ConvTranspose"]
    assert_same(model, prepared, images(channels=4))


def test_nothing_is_folded_into_a_result_that_others_read():
    m = Maker()
    t = m.conv("x", 8, 6)
    scaled = m.add("Mul", [t, m.constant(np.float32(2))])
    model = m.model([("x", [2, 8, 8, 8])], [m.add("Add", [t, scaled])])
    assert "Mul" in kinds(qo.prepare(model))


def test_constants_of_all_kinds_become_initializers():
    m = Maker()
    m.nodes.append(helper.make_node("Constant", [], ["two"], value_float=2.0))
    m.nodes.append(helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weights(8, 6, 1, 1), "w")))
    m.nodes.append(helper.make_node("Identity", ["w"], ["copy"]))
    turned = m.add("Transpose", ["copy"], perm=[1, 0, 2, 3])
    t = m.add("Conv", ["x", turned], name="layer")
    model = m.model([("x", [2, 8, 8, 8])], [m.add("Mul", [t, "two"])])
    model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [1]))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "unused"))
    prepared = qo.prepare(model)
    assert kinds(prepared) == ["Conv"]
    assert [value.name for value in prepared.graph.input] == ["x"]
    assert "unused" not in Graph(prepared).constants
    assert_same(model, prepared, images())


def test_nodes_get_names_of_their_own():
    model = conv_chain()
    for node in model.graph.node:
        node.name = "same"
    names = [node.name for node in qo.prepare(model).graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("opset", "low_bits", "expected"), [(11, False, 13), (17, False, 17), (17, True, 21)])
def test_opsets_are_raised_only_if_qdq_nodes_need_it(opset, low_bits, expected):
    model = conv_chain()
    model.opset_import[0].version = opset
    prepared = qo.prepare(model, low_bits=low_bits, feed=images()[0])
    assert Graph(prepared).opset == expected
    assert prepared.ir_version <= 10
    assert_same(model, prepared, images(1))


def test_foreign_domains_are_kept():
    model = conv_chain()
    model.opset_import.append(helper.make_opsetid("Paddle", 1))
    model.opset_import[0].version = 11
    assert {entry.domain for entry in qo.prepare(model).opset_import} == {"", "Paddle"}


def test_the_source_is_not_changed():
    model = with_norm()
    before = model.SerializeToString()
    qo.prepare(model)
    assert model.SerializeToString() == before


def test_quantized_models_are_rejected_unless_forced():
    plan = qo.plan(qo.prepare(conv_chain()))
    quantized = qo.insert(plan, qo.calibrate(plan, images()))
    with pytest.raises(dt.UnsupportedError, match=r"already quantized.*force=True"):
        qo.prepare(quantized)
    assert qo.prepare(quantized, force=True).graph.node


def test_bfloat16_models_are_rejected():
    m = Maker()
    t = m.add("MatMul", ["x", m.constant(weights(4, 4).astype(ml_dtypes.bfloat16))])
    model = m.model([("x", [1, 4], TensorProto.BFLOAT16)], [t])
    with pytest.raises(dt.UnsupportedError, match=r"bfloat16 \(tensor 'c0'\), expected float32 or float16"):
        qo.prepare(model)


def test_transposed_weights_are_stored_as_matmul_weights():
    m = Maker()
    y = m.add("Gemm", ["x", m.constant(weights(5, 16))], transB=1)
    model = m.model([("x", ["n", 16])], [y])
    prepared = qo.prepare(model)
    assert Graph(prepared).array(prepared.graph.node[0].input[1]).shape == (16, 5)
    assert_same(model, prepared, [{"x": np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)}])


def test_layers_that_share_a_weight_and_a_batch_norm_still_share_it():
    m = Maker()
    shared = [m.constant(weights(8, 8, 3, 3)), m.constant(weights(8, 1).ravel())]
    norm = [m.constant(np.abs(weights(8, 1, seed=seed)).ravel() + 0.5) for seed in range(4)]
    towers = [m.add("Conv", [x, *shared], pads=[1, 1, 1, 1], name=f"tower_{x}") for x in ("x", "y")]
    results = [m.add("BatchNormalization", [t, *norm]) for t in towers]
    other = m.add("BatchNormalization", [m.add("Conv", ["x", *shared], pads=[1, 1, 1, 1]), *norm[::-1]])
    model = m.model([("x", ["n", 8, 8, 8]), ("y", ["n", 8, 8, 8])], [*results, other])
    prepared = qo.prepare(model)
    first, second, third = (node.input[1] for node in prepared.graph.node)
    assert first == second != third
    assert_same(model, prepared, [{"x": images(1)[0]["x"], "y": images(2)[1]["x"]}])


@pytest.mark.parametrize(("width", "expected"), [(4, ["MatMul", "Add"]), (64, ["Gather", "MatMul", "Add"])])
def test_computed_constants_that_would_enlarge_the_file_stay_nodes(width, expected):
    m = Maker()
    places = m.constant(np.arange(64, dtype=np.int32).reshape(8, 8) % 4)
    bias = m.add("Gather", [m.constant(weights(4, width)), places])  # 1 KiB or 16 KiB
    model = m.model([("x", [1, 8, 8, width])], [m.add("Add", [m.matmul("x", width, width), bias])])
    prepared = qo.prepare(model)
    assert sorted(kinds(prepared)) == sorted(expected)
    feed = {"x": np.random.default_rng(0).normal(size=(1, 8, 8, width)).astype(np.float32)}
    assert_same(model, prepared, [feed])


def test_a_computed_weight_becomes_a_constant_even_if_it_grows():
    m = Maker()
    places = m.constant(np.arange(64, dtype=np.int32) % 4)
    weight = m.add("Gather", [m.constant(weights(4, 64)), places])
    prepared = qo.prepare(m.model([("x", [1, 64])], [m.add("MatMul", ["x", weight])]))
    assert kinds(prepared) == ["MatMul"]


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16"])
def test_a_model_of_a_new_opset_with_an_old_ir_version(recipe):
    """Converters of opsets leave the IR version as it was."""
    text = """<ir_version: 8, opset_import: ["" : 21]>
        g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {3.0, 1.0}> { [fc] y = MatMul(x, w) }"""
    model, data = parser.parse_model(text), [np.float32([[1.0, 0.5]])]
    decisions = qo.decide(model, data, recipe, progress=False)
    assert decisions.ir_version == 10
    assert dt.verify(model, qo.rewrite(model, decisions), data).ok


def padded(widths, *, value=None, op="Conv", mode="constant", axes=None, computed=False, auto_pad="NOTSET", opset=18):
    """A Pad before a layer that already pads its input by 1."""
    m = Maker(opset=opset)
    pads = m.constant(np.int64(widths))
    if computed:  # as torch's exporter writes them
        filled = m.add(
            "ConstantOfShape", [m.constant(np.int64([len(widths)]))], value=helper.make_tensor("v", 7, [1], [0])
        )
        pads = m.add("Add", [pads, filled])
    extra = ["" if value is None else m.constant(np.float32(value))]
    extra += [m.constant(np.int64(axes))] if axes is not None else []
    t = m.add("Pad", ["x", pads, *extra], mode=mode)
    own = {"auto_pad": auto_pad} if auto_pad != "NOTSET" else {"pads": [1, 1, 1, 1]}
    if op == "Conv":
        y = m.add("Conv", [t, m.constant(weights(4, 8, 3, 3))], **own)
    else:
        y = m.add(op, [t], kernel_shape=[3, 3])
    return m.model([("x", [1, 8, 6, 6])], [y])


@pytest.mark.parametrize(
    "options",
    [
        {"widths": [0, 0, 0, 1, 0, 0, 2, 0]},
        {"widths": [0, 0, 0, 1, 0, 0, 2, 0], "value": 0.0, "computed": True},
        {"widths": [1, 0, 0, 2], "axes": [-1, 2]},
        {"widths": [0] * 8, "op": "MaxPool"},
        {"widths": [0] * 8, "auto_pad": "SAME_UPPER"},
    ],
)
def test_a_pad_with_zeros_is_merged_into_the_convolution(options):
    model, feed = padded(**options), images(1, side=6, batch=1)[0]
    prepared = qo.prepare(model)
    assert [node.op_type for node in prepared.graph.node] == [options.get("op", "Conv")]
    (before,), (after,) = (make_session(each).run(None, feed) for each in (model, prepared))
    assert np.array_equal(before, after)


@pytest.mark.parametrize(
    "options",
    [
        {"widths": [0, 0, 1, 1, 0, 0, 1, 1], "value": 0.5},
        {"widths": [0, 0, 1, 1, 0, 0, 1, 1], "mode": "edge"},
        {"widths": [0, 0, -1, 1, 0, 0, 1, 1]},
        {"widths": [0, 0, 1, 1, 0, 0, 1, 1], "op": "MaxPool"},
        {"widths": [0, 0, 1, 1, 0, 0, 1, 1], "auto_pad": "SAME_UPPER"},
        {"widths": [0, 0, 1, 1, 1, 0, 1, 1]},
    ],
)
def test_other_pads_stay(options):
    prepared = qo.prepare(padded(**options))
    assert [node.op_type for node in prepared.graph.node] == ["Pad", options.get("op", "Conv")]


def test_a_pad_that_another_operator_reads_stays():
    m = Maker()
    t = m.add("Pad", ["x", m.constant(np.int64([0, 0, 1, 1, 0, 0, 1, 1]))])
    model = m.model([("x", [1, 8, 6, 6])], [m.conv(t, 8, 4), m.add("Relu", [t])])
    assert [node.op_type for node in qo.prepare(model).graph.node] == ["Pad", "Conv", "Relu"]
