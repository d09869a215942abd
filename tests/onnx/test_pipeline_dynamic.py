"""qo.quantize with dynamic quantization: the file computes the range of each input when it runs."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto
from onnx_graphs import Maker, operators, weights

import detent as dt
import detent.onnx as qo
from detent.errors import FileFormatError, NotCalibratedError, SpecError, UnsupportedError
from detent.onnx.decisions import Decisions
from detent.onnx_model import Graph, make_session
from detent.onnx_model.sessions import kernels_of

RECIPE = "w8a8-dynamic"
TOKENS = [{"tokens": np.random.default_rng(i).integers(0, 32, (2, 5))} for i in range(3)]


def attention():
    """An embedding, three projections of one tensor, a matmul of activations, and a Gemm with a bias."""
    m = Maker()
    x = m.add("Gather", [m.constant(weights(32, 16)), "tokens"], name="words")
    query, key, value = (m.matmul(x, 16, 16, name=name) for name in ("query", "key", "value"))
    scores = m.add("MatMul", [query, m.add("Transpose", [key], perm=[0, 2, 1])], name="scores")
    mixed = m.add("MatMul", [m.add("Softmax", [scores], axis=-1), value], name="mix")
    pooled = m.add("ReduceMean", [mixed], axes=[1], keepdims=0)
    y = m.add("Gemm", [pooled, m.constant(weights(6, 16)), m.constant(weights(6, 1).ravel())], name="head", transB=1)
    return m.model([("tokens", ["n", 5], TensorProto.INT64)], [y])


def written(decisions=None, **options):
    return qo.rewrite(attention(), decisions or qo.decide(attention(), recipe=RECIPE, **options))


def test_one_quantizer_for_all_readers_and_no_data():
    model = written()
    count = Counter(node.op_type for node in model.graph.node)
    assert (count["DynamicQuantizeLinear"], count["MatMulInteger"]) == (2, 4)
    assert count["QuantizeLinear"] == count["DequantizeLinear"] == 0
    names = {node.name for node in model.graph.node if node.op_type == "MatMulInteger"}
    assert names == {"query", "key", "value", "head"}


def test_onnx_runtime_fuses_the_nodes():
    fused = operators(written())
    assert (fused["MatMulIntegerToFloat"], fused["DynamicQuantizeMatMul"], fused["MatMulInteger"]) == (3, 1, 0)
    kernels = kernels_of(written())
    assert {kernels[name] for name in ("query", "key", "value")} == {"MatMulIntegerToFloat"}
    assert kernels["head"] == "DynamicQuantizeMatMul"


def test_report_and_verification(tmp_path):
    model = attention()
    report = qo.quantize(model, tmp_path / "q.onnx", recipe=RECIPE, progress=False)
    rows = {layer.name: layer for layer in report.layers}
    assert rows["query"].input == "uint8/tensor/affine/onnx dynamic"
    assert rows["query"].runs_on_integer_kernel
    assert rows["head"].runs_on_integer_kernel
    assert (rows["words"].input, rows["words"].reason) == ("", "")
    assert rows["scores"].reason == "a matmul of two activations"
    verified = dt.verify(model, report.output, TOKENS)
    assert verified.ok
    assert verified.segments.compared_codes > 0
    assert [row.kernel for row in verified.kernels].count("DynamicQuantizeLinear") == 1
    assert all(row.compared and not row.differing for row in verified.kernels)
    assert "4 layers with dynamic quantization" in str(verified)
    expected, got = (make_session(each).run(None, TOKENS[0])[0] for each in (model, report.output))
    assert dt.metrics.sqnr_db(expected, got) > 25


@pytest.mark.parametrize(
    ("options", "kind", "limit", "zero"),
    [
        ({}, TensorProto.INT8, 64, None),
        ({"target": "onnxruntime-avx2"}, TensorProto.INT8, 64, None),
        ({"target": "onnxruntime-vnni"}, TensorProto.INT8, 127, None),
        ({"prefer": "accuracy"}, TensorProto.UINT8, 255, 128),
    ],
)
def test_codes_of_targets(options, kind, limit, zero, tmp_path):
    model = written(**options)
    graph = Graph(model)
    node = next(node for node in graph.nodes if node.name == "query")
    codes = graph.constants[node.input[1]]
    assert codes.data_type == kind
    assert graph.array(codes.name).max() <= limit
    assert [int(graph.array(name)) for name in node.input[3:]] == ([] if zero is None else [zero])
    path = tmp_path / "q.onnx"
    qo.save(model, path)
    assert dt.verify(attention(), path, TOKENS).ok


def test_convolutions_are_kept_in_float():
    m = Maker()
    t = m.add("Flatten", [m.add("Relu", [m.conv("x", 8, 4, name="conv")])])
    model = m.model([("x", [2, 8, 8, 8])], [m.matmul(t, 256, 4, name="fc")])
    conv, fc = qo.plan(qo.prepare(model), RECIPE).layers
    assert conv.reason == "dynamic quantization would make a Conv slower than float: only MatMul and Gemm have it"
    assert (fc.dynamic_input, fc.input) == (dt.QuantSpec("uint8"), None)
    assert "uint8/tensor/affine/onnx dynamic" in str(qo.plan(qo.prepare(model), RECIPE))


def test_data_is_optional_and_measures_the_outputs(tmp_path):
    report = qo.quantize(attention(), tmp_path / "q.onnx", TOKENS, RECIPE, progress=False)
    assert report.output_sqnr_db > 25
    assert report.samples == 6
    assert dt.verify(attention(), report.output, TOKENS).ok


def test_smoothquant_with_data(tmp_path):
    rng = np.random.default_rng(0)
    weight, spread = weights(32, 16), np.where(np.arange(32) % 8 == 0, 60.0, 1.0).astype(np.float32)
    m = Maker()
    model = m.model([("x", [4, 32])], [m.matmul("x", 32, 16, name="fc", weight=weight / spread[:, None])])
    data = [{"x": (rng.normal(size=(4, 32)) * spread).astype(np.float32)} for _ in range(12)]
    reports = [
        qo.quantize(model, tmp_path / f"{smooth}.onnx", data, RECIPE, smooth=smooth, keep_float="none", progress=False)
        for smooth in (False, True)
    ]
    assert [len(each.decisions.smoothed) for each in reports] == [0, 1]
    assert reports[1].output_sqnr_db > reports[0].output_sqnr_db + 3
    assert reports[1].decisions.layers[0].dynamic_input == dt.QuantSpec("uint8")
    assert not reports[1].decisions.placements
    assert dt.verify(model, reports[1].output, data).ok


def test_static_and_dynamic_layers_in_one_file(tmp_path):
    static = dt.Rule("head", weight="int8/channel", input="uint8/tensor/affine", mode="fixed")
    recipe = dt.Recipe([*dt.Recipe.preset(RECIPE).rules, static])
    with pytest.raises(NotCalibratedError, match="needs calibration data"):
        qo.decide(attention(), recipe=recipe)
    report = qo.quantize(attention(), tmp_path / "q.onnx", TOKENS, recipe, progress=False)
    lines = {line.name: line for line in report.decisions.layers}
    assert (lines["head"].dynamic_input, lines["head"].input) == (None, dt.QuantSpec("uint8"))
    assert lines["query"].dynamic_input == dt.QuantSpec("uint8")
    assert dt.verify(attention(), report.output, TOKENS).ok


def test_a_layer_whose_output_is_a_model_output(tmp_path):
    m = Maker()
    hidden = m.matmul("x", 8, 8, name="up")
    y = m.matmul(m.add("Relu", [hidden]), 8, 4, name="down")
    model = m.model([("x", [3, 8])], [hidden, y])
    report = qo.quantize(model, tmp_path / "q.onnx", recipe=RECIPE, progress=False)
    data = [{"x": np.random.default_rng(i).normal(size=(3, 8)).astype(np.float32)} for i in range(2)]
    verified = dt.verify(model, report.output, data)
    assert verified.ok
    assert verified.segments.compared_outputs == 4


@pytest.mark.parametrize("value", [np.zeros((3, 8)), np.full((3, 8), -2.5), np.full((3, 8), 3e38)])
def test_unusual_inputs(value, tmp_path):
    m = Maker()
    model = m.model([("x", [3, 8])], [m.matmul("x", 8, 4, name="fc")])
    report = qo.quantize(model, tmp_path / "q.onnx", recipe=RECIPE, progress=False)
    verified = dt.verify(model, report.output, [{"x": value.astype(np.float32)}], levels=(1, 2))
    assert verified.differing_codes == 0


def test_specs_that_onnx_runtime_cannot_compute():
    prepared = qo.prepare(attention())
    for spec, match in (("int8/tensor", "needs an input of uint8/tensor/affine"), ("uint8/token", "needs an input of")):
        recipe = dt.Recipe([dt.Rule(weight="int8/channel", input=spec, mode=dt.PerBatch())])
        assert match in qo.plan(prepared, recipe).layers[1].reason
    recipe = dt.Recipe([dt.Rule(types="MatMul", weight="int8/group8", input="uint8/tensor/affine", mode="per_batch")])
    assert "at most 8 bits per channel or per tensor" in qo.plan(prepared, recipe).layers[1].reason


def test_openvino_is_rejected():
    with pytest.raises(UnsupportedError, match="'openvino' does not support dynamic quantization"):
        qo.decide(attention(), recipe=RECIPE, target="openvino")
    decisions = replace(qo.decide(attention(), recipe=RECIPE), target="openvino")
    with pytest.raises(SpecError, match="dynamic_input must be None"):
        qo.rewrite(attention(), decisions)


def test_json_of_decisions_and_of_earlier_versions():
    decisions = qo.decide(attention(), recipe=RECIPE)
    assert Decisions.from_json(decisions.to_json()) == decisions
    static = qo.decide(attention(), recipe="w8a16")
    entry = json.loads(static.to_json())
    for layer in entry["layers"]:
        del layer["dynamic_input"]
    assert Decisions.from_json(json.dumps(entry)) == static
    entry["layers"] = "none"
    with pytest.raises(FileFormatError):
        Decisions.from_json(json.dumps(entry))
    layer = next(each for each in decisions.layers if each.dynamic_input is not None)
    with pytest.raises(SpecError, match="has input and dynamic_input"):
        replace(layer, input=dt.QuantSpec("uint8"))


def test_a_file_with_dynamic_quantization_is_quantized_already(tmp_path):
    report = qo.quantize(attention(), tmp_path / "q.onnx", recipe=RECIPE, progress=False)
    with pytest.raises(UnsupportedError, match="it has DynamicQuantizeLinear nodes"):
        qo.quantize(report.output, tmp_path / "again.onnx", recipe="w8a16", progress=False)
