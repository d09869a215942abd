"""qo.quantize with weights of 2 to 4 bits and 8-bit inputs: 4 bits in the file, 8 bits in integer kernels."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto
from onnx_graphs import Maker, images, operators, rows, weights

import detent as dt
import detent.onnx as qo
from detent.onnx_model import Graph, array_of, make_session, make_tensor
from detent.onnx_model.graph import INTEGER_KERNELS, widened_constant
from detent.onnx_model.layers import QUANTIZED_ALREADY
from detent.onnx_model.quantized_model import load_quantized
from detent.onnx_model.sessions import kernels_of
from detent.onnx_model.targets import TARGETS
from detent.report import build

INPUT = "uint8/tensor/affine"


def recipe(weight="int4/axis0"):
    return dt.Recipe([dt.Rule(weight=weight, input=INPUT)])


def matmuls():
    m = Maker()
    t = m.add("Relu", [m.matmul("x", 16, 24, name="first")])
    return m.model([("x", ["n", 6, 16])], [m.matmul(t, 24, 8, name="last")]), rows(), "MatMul"


def gemms(transposed=1):
    m = Maker()
    t = m.add("Flatten", ["x"])
    for name, before, after in (("first", 96, 24), ("last", 24, 8)):
        weight = weights(after, before) if transposed else weights(before, after)
        inputs = [t, m.constant(weight), m.constant(weights(after, 1).ravel())]
        t = m.add("Gemm", inputs, name=name, transB=transposed)
    return m.model([("x", [1, 6, 16])], [t]), rows(), "QGemm"


def convolutions(group=1):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 16, 16, group=group, name="first")])
    y = m.add("Relu", [m.conv(t, 16, 16, name="last")])
    return m.model([("x", ["n", 16, 8, 8])], [y]), images(channels=16), "QLinearConv"


LAYERS = {
    "MatMul": matmuls,
    "Gemm": gemms,
    "Gemm of a plain weight": lambda: gemms(0),
    "Conv": convolutions,
    "grouped Conv": lambda: convolutions(2),
    "depthwise Conv": lambda: convolutions(16),
}
WEIGHTS = ("int4/axis0", "int4", "int2/axis0", "uint4/axis0/affine")


def decided(model, data, weight="int4/axis0", target="onnxruntime", **options):
    decisions = qo.decide(
        model, data, recipe(weight), target=target, keep_float="none", prefer="speed", progress=False, **options
    )
    return qo.rewrite(model, decisions)


def casts(model):
    """Map the Casts that widen codes to the constants of the codes."""
    graph = Graph(model)
    pairs = ((node, widened_constant(node, graph.constants)) for node in graph.nodes)
    return {node.name: name for node, name in pairs if name}


def in_bytes(model):
    """The same model with codes that are stored in bytes."""
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = Graph(copy)
    for node in [each for each in graph.nodes if widened_constant(each, graph.constants)]:
        tensor, wide = graph.constants[node.input[0]], node.output[0]
        graph.constants[wide] = make_tensor(wide, array_of(tensor).astype(np.int64), node.attribute[0].i)
        graph.remove([node])
    graph.drop_unread()
    return graph.finish()


def stored_kinds(model):
    """Count the types of weights' codes in the file."""
    graph = Graph(model)
    return Counter(graph.kind(name) for name in load_quantized(model).weights)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_4_bits_in_the_file_and_integer_kernels(layer, weight):
    model, data, kernel = LAYERS[layer]()
    file = decided(model, data, weight)
    assert stored_kinds(file) == {TensorProto.UINT4 if weight.startswith("u") else TensorProto.INT4: 2}
    assert len(casts(file)) == 2
    running = operators(file)
    assert running["Cast"] == running["Conv"] == running["Gemm"] == running["MatMul"] == 0
    kernels = kernels_of(file)
    assert set(kernels) == {"first", "last"}
    assert set(kernels.values()) <= {kernel, "MatMulIntegerToFloat", "QLinearMatMul"} & set(INTEGER_KERNELS)
    assert operators(in_bytes(file)) == running
    report = dt.verify(model, file, data)
    assert report.ok
    assert report.differing_codes == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_are_those_of_codes_in_bytes(layer, threads):
    model, data, _ = LAYERS[layer]()
    file = decided(model, data)
    for optimize in (True, False):
        sessions = [make_session(each, threads=threads, optimize=optimize) for each in (file, in_bytes(file))]
        for feed in data:
            got, expected = (session.run(None, feed)[0] for session in sessions)
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("target", TARGETS)
def test_codes_are_the_same_for_all_targets(target):
    model, data, _ = convolutions()
    file = decided(model, data, target=target)
    assert stored_kinds(file) == {TensorProto.INT4: 2}
    assert len(casts(file)) == 2
    assert dt.verify(model, file, data).ok
    expected, got = (make_session(each).run(None, data[0])[0] for each in (model, file))
    assert dt.metrics.sqnr_db(expected, got) > 12


@pytest.mark.parametrize("layer", ["MatMul", "Gemm", "Conv", "depthwise Conv"])
def test_openvino_computes_the_same_with_codes_in_bytes(layer):
    openvino = pytest.importorskip("openvino")
    model, data, _ = LAYERS[layer]()
    file = decided(model, data, target="openvino")
    core, hints = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = [
        core.compile_model(core.read_model(each.SerializeToString()), "CPU", hints) for each in (file, in_bytes(file))
    ]
    got, expected = (np.asarray(next(iter(each(data[0]).values()))) for each in compiled)
    assert got.tobytes() == expected.tobytes()


def test_a_dynamic_input():
    m = Maker()
    t = m.add("Relu", [m.matmul("x", 16, 24, name="first")])
    model = m.model([("x", ["n", 6, 16])], [m.matmul(t, 24, 8, name="last")])
    rule = dt.Rule(weight="int4/axis0", input=INPUT, mode=dt.PerBatch())
    file = qo.rewrite(model, qo.decide(model, rows(), dt.Recipe([rule]), keep_float="none", progress=False))
    assert stored_kinds(file) == {TensorProto.INT4: 2}
    assert set(kernels_of(file).values()) <= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    assert dt.verify(model, file, rows()).ok
    got, expected = (make_session(each).run(None, rows()[0])[0] for each in (file, in_bytes(file)))
    assert got.tobytes() == expected.tobytes()


def test_layers_that_share_a_weight_share_its_cast():
    m = Maker()
    shared = m.constant(weights(16, 16))
    t = m.add("Relu", [m.add("MatMul", ["x", shared], name="first")])
    model = m.model([("x", ["n", 6, 16])], [m.add("MatMul", [t, shared], name="last")])
    file = decided(model, rows())
    assert (stored_kinds(file), len(casts(file))) == ({TensorProto.INT4: 1}, 1)
    assert set(kernels_of(file).values()) <= {"MatMulIntegerToFloat", "QLinearMatMul"}
    assert dt.verify(model, file, rows()).ok


@pytest.mark.parametrize("other", [None, "uint16/tensor/affine"], ids=["float", "16 bits"])
@pytest.mark.parametrize("layer", ["first", "last"])
def test_codes_that_one_layer_reads_in_bytes_are_stored_once(layer, other):
    m = Maker()
    shared = m.constant(weights(16, 16), "w")
    t = m.add("Relu", [m.add("MatMul", ["x", shared], name="first")])
    model = m.model([("x", ["n", 6, 16])], [m.add("MatMul", [t, shared], name="last")])
    rules = [dt.Rule(weight="int4/axis0", input=other), dt.Rule(weight="int4/axis0", input=INPUT, match=layer)]
    decisions = qo.decide(model, rows(), dt.Recipe(rules), keep_float="none", prefer="speed", progress=False)
    file = qo.rewrite(model, decisions)
    kinds = [each.data_type for each in file.graph.initializer if each.name.startswith("w_codes")]
    assert (kinds, len(casts(file))) == ([TensorProto.INT4], 1)
    assert set(kernels_of(file)) == {"first", "last"}
    assert dt.verify(model, file, rows()).ok


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (dt.Rule(weight="int4/axis0"), {TensorProto.INT4: 2}),
        (dt.Rule(weight="uint4/group8/affine"), {TensorProto.UINT4: 2}),
        (dt.Rule(weight="int4/group8", input=INPUT), {TensorProto.INT4: 2}),
        (dt.Rule(weight="int4/axis0", input="uint16/tensor/affine"), {TensorProto.INT4: 2}),
        (dt.Rule(weight="int5/axis0", input=INPUT), {TensorProto.INT8: 2}),
    ],
    ids=["weight-only", "weight-only groups", "groups", "16-bit input", "5 bits"],
)
def test_other_matmuls_read_codes_as_they_are_stored(rule, kinds):
    model, data, _ = matmuls()
    decisions = qo.decide(model, data, dt.Recipe([rule]), keep_float="none", progress=False)
    file = qo.rewrite(model, decisions)
    assert (stored_kinds(file), casts(file)) == (kinds, {})


def test_convolutions_without_a_quantized_input_take_4_bits_too():
    m = Maker()
    up = m.add("ConvTranspose", ["x", m.constant(weights(8, 8, 2, 2))], name="up", strides=[2, 2])
    model = m.model([("x", ["n", 8, 8, 8])], [m.conv(up, 8, 8, name="conv")])
    file = qo.rewrite(model, qo.decide(model, recipe=dt.Recipe([dt.Rule(weight="int4/axis0")])))
    assert stored_kinds(file) == {TensorProto.INT4: 2}
    assert dt.verify(model, file, images()).ok
    got, expected = (make_session(each).run(None, images()[0])[0] for each in (file, in_bytes(file)))
    assert got.tobytes() == expected.tobytes()


def test_sizes_of_plan_report_and_file(tmp_path):
    model, data, _ = convolutions()
    sizes = {}
    for spec in ("int8/axis0", "int4/axis0"):
        path = tmp_path / f"{spec[:4]}.onnx"
        result = qo.quantize(model, path, data, recipe(spec), keep_float="none", progress=False)
        assert all(not line.note for line in result.plan.layers)
        planned = [line.nbytes_after for line in result.plan.layers]
        stored = [layer.nbytes for layer in build(path, source=model).layers]
        assert stored == planned
        codes = sum(16 * 16 * 9 * int(spec[3]) // 8 for _ in planned)
        assert sum(planned) == codes + 2 * 16 * (4 + 1), "codes, scales and zero points"
        assert 0 <= path.stat().st_size - codes < 9000
        sizes[spec] = path.stat().st_size
    assert sizes["int8/axis0"] - sizes["int4/axis0"] > 0.8 * 16 * 16 * 9


def test_low_bits_need_opset_21():
    model, data, _ = matmuls()
    file = decided(model, data)
    assert Graph(model).opset == 17
    assert Graph(file).opset == 21


# Damage is found.


def tampered(file, change):
    copy = ModelProto()
    copy.CopyFrom(file)
    name = next(iter(casts(copy).values()))
    tensor = next(each for each in copy.graph.initializer if each.name == name)
    cast = next(node for node in copy.graph.node if node.input[:1] == [name])
    change(copy, tensor, cast)
    return copy, name


def flip_a_code(_, tensor, __):
    data = bytearray(tensor.raw_data)
    data[5] ^= 0x10
    tensor.raw_data = bytes(data)


def cut_a_clipped_bit(_, tensor, cast):
    tensor.data_type = TensorProto.UINT4


def bypass(model, tensor, cast):
    for node in model.graph.node:
        node.input[:] = [tensor.name if name == cast.output[0] else name for name in node.input]
    model.graph.node.remove(cast)


def repeat(model, tensor, cast):
    """Read other codes than those that the metadata name."""
    other = model.graph.initializer.add()
    other.CopyFrom(tensor)
    other.name = "other_codes"
    flip_a_code(model, other, cast)
    cast.input[0] = other.name


@pytest.mark.parametrize("change", [flip_a_code, cut_a_clipped_bit, bypass, repeat])
@pytest.mark.parametrize("layer", ["MatMul", "Conv"])
def test_tampered_codes_are_found(layer, change):
    model, data, _ = LAYERS[layer]()
    file = decided(model, data)
    copy, name = tampered(file, change)
    try:
        report = dt.verify(model, copy, data)
    except dt.DetentError:  # the file is invalid now
        assert change in (bypass, cut_a_clipped_bit)
        return
    assert not report.ok
    assert change is not flip_a_code or name in report.failure


def test_a_changed_code_is_found_without_decisions():
    model, data, _ = matmuls()
    file = decided(model, data)
    copy, name = tampered(file, flip_a_code)
    for each in (file, copy):
        del each.metadata_props[:]
    assert dt.verify(file, file, data).ok
    report = dt.verify(file, copy, data)
    assert not report.ok
    assert report.first_difference.tensor == name


@pytest.mark.parametrize(("level", "count"), [("DISABLE_ALL", 2), ("ENABLE_BASIC", 0), ("ENABLE_ALL", 0)])
def test_onnx_runtime_computes_casts_at_load_if_it_optimizes(level, count, tmp_path):
    model, data, _ = matmuls()
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    file = decided(model, data).SerializeToString()
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    session.run(None, data[0])
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = [event["args"]["op_name"] for event in events if event["name"].endswith("_kernel_time")]
    assert nodes.count("Cast") == count


@pytest.mark.parametrize("layer", ["MatMul", "Conv"])
def test_weights_of_4_bits_are_not_quantized_again(layer):
    model, data, _ = LAYERS[layer]()
    lines = qo.plan(qo.prepare(decided(model, data), force=True)).layers
    assert {line.name: line.reason for line in lines} == dict.fromkeys(("first", "last"), QUANTIZED_ALREADY)
