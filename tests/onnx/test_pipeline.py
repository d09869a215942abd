"""qo.quantize: a float model and data in, a quantized file and a report out."""

import json
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_graphs import Maker, conv_chain, images, operators, rows, weights

import detent as dt
import detent.onnx as qo
from detent.errors import FileFormatError, SpecError
from detent.onnx import accuracy_passes
from detent.onnx_model import TARGETS, Graph, Provenance, load_model, make_session, save, sessions

FEEDS = images(6)


def quantize(model, tmp_path, data=FEEDS, **options):
    return qo.quantize(model, tmp_path / "q.onnx", data, progress=False, **options)


def codes_of(path):
    model = qo.load(path)
    graph, provenance = Graph(model), Provenance.read(model)
    return {layer: graph.constants[name] for name, layer in provenance.weights.items()}, graph


def mlp(width=16):
    m = Maker(opset=13)
    t = m.add("Relu", [m.matmul("x", width, 32, name="up")])
    return m.model([("x", [1, "n", width])], [m.matmul(t, 32, 8, name="down")])


def test_report_and_file(tmp_path):
    model = conv_chain()
    save(model, tmp_path / "float.onnx")
    report = quantize(tmp_path / "float.onnx", tmp_path)
    assert report.output == tmp_path / "q.onnx"
    assert report.nbytes_after == report.output.stat().st_size
    assert [layer.kernel for layer in report.layers] == ["QLinearConv"] * 3
    assert [layer.runs_on_integer_kernel for layer in report.layers] == [True] * 3
    assert report.output_sqnr_db > 30
    assert report.seconds > 0
    plain = json.loads(report.to_json())
    assert plain["layers"][0]["runs_on_integer_kernel"] is True
    assert plain["target"] == "onnxruntime"
    assert "3 on integer kernels" in str(report)
    provenance = Provenance.read(qo.load(report.output))
    assert provenance.target == "onnxruntime"
    assert provenance.made_by == dt.__version__
    assert dt.Recipe.from_json(provenance.recipe) == dt.Recipe.preset("w8a8")
    assert len(provenance.data) == 64
    assert provenance.options == ""


def test_the_file_records_its_options(tmp_path):
    options = {"skip": ["last"], "observer": "minmax", "smooth": False, "seed": 3}
    quantize(conv_chain(), tmp_path, **options)
    provenance = Provenance.read(qo.load(tmp_path / "q.onnx"))
    assert json.loads(provenance.options) == {**options, "observer": "minmax"}


def test_a_rule_chooses_the_observer_of_every_input():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    model = m.model([("x", ["n", 8, 8, 8])], [m.conv(t, 16, 8, name="second")])
    rule = dt.Rule(weight="int8/axis0", input="uint8/tensor/affine", observer="percentile(1, 99)")
    seen = qo.calibrate(qo.plan(qo.prepare(model), dt.Recipe([rule])), images())
    assert {type(each).__name__ for each in seen.observers.values()} == {"Percentile"}


def test_numbers_that_are_not_integers_are_rejected(tmp_path):
    plan = qo.plan(qo.prepare(conv_chain()), "fp8")
    assert {"use w8a8" in layer.reason for layer in plan.layers} == {True}


def test_dense_weights_are_unsigned_around_128_in_every_channel(tmp_path):
    m = Maker()
    dead = weights(16, 8, 3, 3)
    dead[5] = 0
    t = m.add("Relu", [m.conv("x", 8, 16, weight=dead, name="dense")])
    t = m.add("Relu", [m.conv(t, 16, 16, group=16, name="depthwise")])
    y = m.conv(t, 16, 4, name="last")
    quantize(m.model([("x", [2, 8, 8, 8])], [y]), tmp_path, keep_float="none", prefer="accuracy")
    tensors, graph = codes_of(tmp_path / "q.onnx")
    assert tensors["dense"].data_type == TensorProto.UINT8
    assert tensors["depthwise"].data_type == TensorProto.INT8
    zeros = next(graph.array(node.input[2]) for node in graph.nodes if node.input[0] == tensors["dense"].name)
    assert (zeros == 128).all()
    assert zeros.shape == (16,)


@pytest.mark.parametrize("prefer", ["speed", "balanced", "accuracy"])
@pytest.mark.parametrize("target", TARGETS)
def test_targets(target, prefer, tmp_path):
    report = quantize(conv_chain(), tmp_path, target=target, prefer=prefer)
    tensors, graph = codes_of(report.output)
    for tensor in tensors.values():
        codes = graph.array(tensor.name).astype(int)
        if tensor.data_type == TensorProto.UINT8:
            assert target in {"onnxruntime", "openvino"}
            assert prefer != "speed"
            assert np.abs(codes - 128).max() == 127
        else:
            is_wide = target.endswith("-vnni")
            assert is_wide or prefer != "accuracy" or target == "onnxruntime-avx2"
            assert np.abs(codes).max() == (127 if is_wide else 64)
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear":
            assert graph.kind(node.input[2]) == TensorProto.UINT8
    assert report.output_sqnr_db > 25


def test_openvino_runs_the_file(tmp_path):
    openvino = pytest.importorskip("openvino")
    report = quantize(conv_chain(), tmp_path, target="openvino")
    compiled = openvino.Core().compile_model(report.output, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for feed in FEEDS:
        expected = make_session(conv_chain()).run(None, feed)[0]
        got = next(iter(compiled(feed).values()))
        assert dt.metrics.sqnr_db(expected, np.asarray(got)) > 25


@pytest.mark.parametrize(
    ("recipe", "opset", "kind"),
    [("w8a16", 13, TensorProto.UINT8), ("w4a16-g32", 21, TensorProto.UINT4), ("w4a8", 21, TensorProto.INT8)],
)
def test_recipes_determine_the_opset(recipe, opset, kind, tmp_path):
    m = Maker(opset=13)
    t = m.add("Relu", [m.matmul("x", 64, 64, name="up")])
    t = m.add("Relu", [m.matmul(t, 64, 64, name="middle")])
    model = m.model([("x", [1, "n", 64])], [m.matmul(t, 64, 8, name="down")])
    data = None if recipe.endswith("16") or "16-" in recipe else rows(width=64)
    report = quantize(model, tmp_path, data, recipe=recipe)
    quantized = qo.load(report.output)
    assert Graph(quantized).opset == opset
    assert quantized.ir_version <= 10
    tensors, _ = codes_of(report.output)
    assert tensors["up"].data_type == kind
    feed = rows(width=64)[0]
    config = {"session.qdq_matmulnbits_accuracy_level": "0"}
    expected, got = make_session(model).run(None, feed)[0], make_session(quantized, config=config).run(None, feed)[0]
    assert dt.metrics.sqnr_db(expected, got) > (12 if "w4" in recipe else 35)


def test_weight_only_reminds_of_the_accuracy_level(tmp_path):
    m = Maker()
    model = m.model([("x", [1, "n", 64])], [m.matmul("x", 64, 64, name="fc")])
    report = quantize(model, tmp_path, None, recipe="w4a16-g32")
    assert report.layers[0].kernel == "MatMulNBits"
    assert "qdq_matmulnbits_accuracy_level" in str(report)
    assert report.output_sqnr_db is None


def test_plans_note_that_16_bits_run_in_float():
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input="uint16/tensor/affine")])
    plan = qo.plan(qo.prepare(mlp(), low_bits=True), recipe)
    assert "float" in plan.layers[0].note


def test_biases_that_would_overflow_widen_their_channel(tmp_path):
    m = Maker()
    weight, bias = weights(16, 8, 3, 3), np.zeros(16, np.float32)
    weight[0] *= 1e-7
    bias[0] = 1e4
    t = m.add("Conv", ["x", m.constant(weight), m.constant(bias)], pads=[1] * 4, name="first")
    y = m.conv(m.add("Relu", [t]), 16, 4)
    report = quantize(m.model([("x", [2, 8, 8, 8])], [y]), tmp_path, keep_float="none", bias_correction=False)
    assert report.output_sqnr_db > 20


def test_tiny_channels_have_normal_scales(tmp_path):
    m = Maker()
    weight = weights(16, 8, 3, 3)
    weight[3] *= 1e-37
    t = m.add("Relu", [m.conv("x", 8, 16, weight=weight, name="first")])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="last")])
    report = quantize(model, tmp_path, keep_float="none")
    assert dt.verify(model, report.output, FEEDS[:1], levels=(1, 3)).ok
    assert report.output_sqnr_db > 25


def test_layers_that_share_a_weight_share_its_codes(tmp_path):
    m = Maker()
    shared = m.constant(weights(16, 16), "shared")
    t = m.add("Relu", [m.add("MatMul", ["x", shared], name="a")])
    model = m.model([("x", [1, "n", 16])], [m.add("MatMul", [t, shared], name="b")])
    report = quantize(model, tmp_path, rows(), smooth=False)
    assert report.output_sqnr_db > 30
    constants = Graph(qo.load(report.output)).constants
    assert "shared" not in constants
    assert len([name for name in constants if name.endswith("_codes")]) == 1
    assert all(layer.runs_on_integer_kernel for layer in report.layers)


def test_layers_in_branches_of_an_if_are_listed():
    m = Maker()
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["inside"], name="product")],
        "then",
        [],
        [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.eye(4, dtype=np.float32).ravel())],
    )
    y = m.add("If", [m.constant(np.array(True))], name="choice", then_branch=inner, else_branch=inner)
    plan = qo.plan(qo.prepare(m.model([("x", [1, 4])], [y])), "w8a16")
    assert [(line.name, line.reason) for line in plan.layers] == [("choice/product", ""), ("choice/product_1", "")]


def test_a_generator_is_enough_data(tmp_path):
    report = quantize(conv_chain(), tmp_path, iter(FEEDS))
    assert report.output_sqnr_db == quantize(conv_chain(), tmp_path, FEEDS).output_sqnr_db


def test_the_same_file_every_time(tmp_path):
    first = quantize(conv_chain(), tmp_path).output.read_bytes()
    assert quantize(conv_chain(), tmp_path).output.read_bytes() == first


def test_budget_takes_tensors_in_groups_and_changes_nothing(tmp_path):
    whole = quantize(conv_chain(), tmp_path).output.read_bytes()
    assert quantize(conv_chain(), tmp_path, memory_budget=10_000).output.read_bytes() == whole
    with pytest.raises(dt.SpecError, match="data is a one-shot iterator"):
        quantize(conv_chain(), tmp_path, iter(FEEDS), memory_budget=10_000)


def test_all_passes_record_at_most_the_budget_or_one_tensor(tmp_path, monkeypatch):
    recorded = []
    run = sessions.Recorder.run

    def watch(recorder, feeds):
        for tensors in run(recorder, feeds):
            recorded.append([array.nbytes for name, array in tensors.items() if name != "x"])
            yield tensors

    monkeypatch.setattr(sessions.Recorder, "run", watch)
    for model, data, budget in ((conv_chain(), FEEDS, 10_000), (mlp(), rows(6), 500)):
        recorded.clear()
        quantize(model, tmp_path, data, memory_budget=budget)
        assert recorded
        assert all(sum(sizes) <= budget or len(sizes) == 1 for sizes in recorded)
        assert quantize(model, tmp_path, data).decisions == quantize(model, tmp_path, data, memory_budget=1).decisions


def test_interrupted_calibration_resumes(tmp_path):
    plan = qo.plan(qo.prepare(conv_chain()))
    file = tmp_path / "seen.safetensors"

    def interrupted():
        yield from FEEDS[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qo.calibrate(plan, interrupted(), resume_file=file)
    resumed = qo.calibrate(plan, FEEDS, resume_file=file)
    whole = qo.calibrate(plan, FEEDS)
    assert resumed.ranges == whole.ranges


def test_progress_is_reported(tmp_path):
    seen = []
    qo.quantize(conv_chain(), tmp_path / "q.onnx", FEEDS, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"data": None}, dt.NotCalibratedError, "pass data="),
        ({"data": []}, dt.SpecError, "no batches"),
        ({"data": [{"y": FEEDS[0]["x"]}]}, dt.DetentError, "no input 'y': its inputs are x"),
        ({"data": [FEEDS[0]["x"][0]]}, dt.ShapeError, "shape"),
        ({"data": [FEEDS[0]["x"].astype(np.float16)]}, dt.DtypeError, "astype"),
        ({"skip": ["frist"]}, dt.SpecError, "first"),
        ({"recipe": dt.Recipe([dt.Rule("nothing*", weight="int8/axis0")])}, dt.SpecError, "matches none"),
        ({"target": "onnxruntme"}, dt.SpecError, "onnxruntime"),
        ({"recipe": "w9a9"}, dt.SpecError, "w9a9"),
    ],
    ids=["no-data", "empty", "name", "rank", "dtype", "skip", "rule", "target", "recipe"],
)
def test_bad_arguments_are_rejected_before_anything_is_written(options, kind, words, tmp_path):
    with pytest.raises(kind, match=words):
        quantize(conv_chain(), tmp_path, **{"data": FEEDS, **options})
    assert not list(tmp_path.iterdir())


def test_nan_inside_the_model_names_tensor_and_batch(tmp_path):
    m = Maker()
    t = m.add("Log", [m.conv("x", 8, 8)])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 8, 4)])
    with pytest.raises(dt.NaNError, match=r"'t2'.*batch 0"):
        quantize(model, tmp_path)


def test_custom_operators_are_not_changed(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16)])
    m.nodes.append(helper.make_node("Gelu", [t], ["g"], name="foreign", domain="com.microsoft"))
    model = m.model([("x", [2, 8, 8, 8])], [m.conv("g", 16, 4)], domains=["com.microsoft"])
    report = quantize(model, tmp_path)
    assert "Gelu" in operators(qo.load(report.output))
    assert report.output_sqnr_db > 25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"memory_budget": "500MB"}, "memory_budget"),
        ({"memory_budget": -3}, "memory_budget"),
        ({"skip": 3}, "skip"),
        ({"skip": [3]}, "skip"),
    ],
)
def test_unusable_options_are_rejected_by_name(tmp_path, options, message):
    with pytest.raises(SpecError, match=message):
        qo.quantize(conv_chain(), tmp_path / "a.onnx", images(1), progress=False, **options)


def test_numpy_integers_are_seeds():
    assert qo.decide(conv_chain(), images(1), seed=np.int64(3), progress=False).options == '{"seed":3}'


def test_a_missing_directory_is_noticed_first(tmp_path):
    with pytest.raises(FileFormatError, match="missing is not a directory"):
        qo.quantize("nothing.onnx", tmp_path / "missing" / "a.onnx")


def test_a_resume_file_and_several_passes_are_rejected_first(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_passes, "_equalize_and_smooth", lambda *_: pytest.fail("accuracy passes ran first"))
    with pytest.raises(SpecError, match="resume_file needs a single pass"):
        qo.quantize(
            conv_chain(), tmp_path / "a.onnx", images(1), memory_budget=1, resume_file=tmp_path / "c", progress=False
        )


def test_reports_of_equal_outputs_are_valid_json(tmp_path):
    m = Maker()
    model = m.model([("x", [1, 6, 16])], [m.matmul("x", 16, 4, weight=np.zeros((16, 4), np.float32))])
    report = qo.quantize(model, tmp_path / "a.onnx", rows(1), progress=False)
    assert report.output_sqnr_db == np.inf
    assert json.loads(report.to_json(), parse_constant=pytest.fail)["output_sqnr_db"] == "inf"


def test_the_worst_of_all_outputs_counts(tmp_path):
    m = Maker()
    shown = m.add("Relu", ["x"])  # kept in float
    y = m.conv(m.add("Relu", [m.conv(shown, 8, 8, name="first")]), 8, 4, name="last")
    model, feeds = m.model([("x", [2, 8, 8, 8])], [shown, y]), images()
    report = qo.quantize(model, tmp_path / "q.onnx", feeds[:3], progress=False)
    assert list(report.outputs_sqnr_db) == [shown, y]
    assert report.outputs_sqnr_db[shown] == np.inf
    assert report.output_sqnr_db == report.outputs_sqnr_db[y] < 60
    verified = dt.verify(model, report.output, feeds[3:])
    assert verified.output_sqnr_db == verified.end_to_end["optimized"].output_sqnr_db[y] < 60


def test_where_nothing_is_quantized_no_file_is_written(tmp_path):
    m = Maker()
    t = "x"
    for i in range(7):
        t = m.matmul(t, 13, 13, name=f"layer {i} with a name that is quite long to be shown in full")
    y = m.add("MatMul", [t, m.add("Transpose", [t], perm=[0, 2, 1])], name="scores")
    model, data = m.model([("x", [1, 6, 13])], [y]), rows(1, 13)
    with pytest.raises(dt.UnsupportedError) as caught:
        qo.quantize(model, tmp_path / "q.onnx", data, "w4a16-g128", target="openvino", progress=False)
    message = str(caught.value)
    assert message.startswith(
        "no layer was quantized, so no file is written: group size 128 does not divide 13 (weight shape"
    )
    assert "(layer 0 with a name that is quite lon..., layer 1" in message
    assert "..., 4 more); a matmul of two activations (scores). Change recipe w4a16-g128, target= or skip=" in message
    with pytest.raises(dt.UnsupportedError, match="no layer was quantized"):
        qo.decide(model, data, dt.Recipe([]), progress=False)
    assert not list(tmp_path.iterdir())


def text_model(width):
    """An embedding and a linear layer whose width is ``width``."""
    m = Maker()
    words = m.add("Gather", [m.constant(weights(32, width)), "tokens"], name="words")
    y = m.matmul(words, width, 8, name="fc")
    return m.model([("tokens", [2, 5], TensorProto.INT64)], [y])


TOKENS = [{"tokens": np.arange(10, dtype=np.int64).reshape(2, 5)}]


@pytest.mark.parametrize("width", [24, 40, 96])
def test_the_last_group_of_a_matmul_may_be_shorter(width, tmp_path):
    model = text_model(width)
    report = quantize(model, tmp_path, TOKENS, recipe="w4a16-g32")
    words, fc = report.layers
    assert (words.reason, fc.reason, fc.kernel) == ("", "", "MatMulNBits")
    layer = report.decisions.layers[1]
    assert layer.weight.granularity == dt.PerGroup(32, axis=0)
    assert layer.weight_scale.shape == (-(-width // 32), 8)
    rest = width % 32
    assert fc.note == (f"the last group has {rest} of 32 values, because 32 does not divide {width}" if rest else "")
    assert dt.verify(model, report.output, TOKENS).ok


def test_groups_of_a_table_are_equal(tmp_path):
    model = text_model(40)
    report = quantize(model, tmp_path, TOKENS, recipe="w8a16-g32")
    assert report.layers[0].note == "group size 20 instead of 32, which does not divide 40"
    assert report.decisions.layers[0].weight.granularity == dt.PerGroup(20, axis=-1)
    assert dt.verify(model, report.output, TOKENS).ok


@pytest.mark.parametrize("recipe", ["w4a16", "w4a16-g32", dt.Recipe([dt.Rule(weight="int3/axis0")])])
def test_embeddings_have_at_least_8_bits(recipe):
    """ONNX files store tables in bytes, so fewer bits would only be less accurate."""
    words = qo.plan(qo.prepare(text_model(40), low_bits=True), recipe).layers[0]
    assert (words.weight.bits, words.weight.granularity) == (8, dt.PerAxis(0))
    assert words.note == "8 bits, because ONNX files store embeddings in bytes"


def test_a_rule_for_embeddings_is_obeyed(tmp_path):
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule(types="Embedding", weight="int4/axis0")])
    report = quantize(text_model(40), tmp_path, TOKENS, recipe=recipe)
    assert report.decisions.layers[0].weight.bits == 4
    assert dt.verify(text_model(40), report.output, TOKENS).ok


def test_groups_for_openvino_are_equal():
    prepared = qo.prepare(text_model(40), low_bits=True)
    fc = qo.plan(prepared, "w4a16-g32", target="openvino").layers[1]
    assert fc.note == "group size 20 instead of 32, which does not divide 40"
    assert fc.weight.granularity == dt.PerGroup(20, axis=0)
    narrow = qo.plan(qo.prepare(text_model(26), low_bits=True), "w4a16-g16", target="openvino").layers
    assert [line.reason.partition(" (")[0] for line in narrow] == ["", "group size 16 does not divide 26"]
    decisions = qo.decide(text_model(40), recipe="w4a16-g32")
    with pytest.raises(SpecError, match="layer 'fc': group size 32 does not divide 40"):
        qo.rewrite(text_model(40), replace(decisions, target="openvino"))


@pytest.mark.parametrize("spec", ["int4/axis9", "int8/axis-5", "int8/group4@4"])
def test_an_axis_that_a_weight_does_not_have(spec, tmp_path):
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("second", weight=spec)])
    with pytest.raises(SpecError, match=r"int\d/.* for the weight of 'second'.* \(16, 16, 3, 3\) has no axis -?\d"):
        qo.quantize(conv_chain(), tmp_path / "q.onnx", recipe=recipe, progress=False)
    assert not qo.plan(qo.prepare(conv_chain()), recipe, skip="second").layers[1].is_quantized


def test_layers_that_share_a_weight_have_kernels_of_their_own(tmp_path):
    m = Maker()
    weight = m.constant(weights(8, 8, 3, 3))
    t = m.add("Relu", [m.add("Conv", ["x", weight], name="on an integer kernel", pads=[1] * 4)])
    y = m.add("Conv", [t, weight], name="with a float result", pads=[1] * 4)
    model = m.model([("x", [2, 8, 8, 8])], [y])
    report = qo.quantize(model, tmp_path / "q.onnx", images(2), prefer="accuracy", progress=False)
    assert [layer.kernel for layer in report.layers] == ["QLinearConv", "Conv"]
    assert operators(qo.load(report.output))["QLinearConv"] == 1
    report = qo.quantize(model, tmp_path / "q.onnx", images(2), progress=False)
    assert [layer.kernel for layer in report.layers] == ["QLinearConv", "QLinearConv"]


def test_without_an_output_the_file_is_written_next_to_the_model(tmp_path):
    save(conv_chain(), tmp_path / "net.v2.onnx")
    report = qo.quantize(str(tmp_path / "net.v2.onnx"), data=FEEDS[:2], progress=False)
    assert report.output == tmp_path / "net.v2.w8a8.onnx"
    assert report.output.stat().st_size == report.nbytes_after
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0")], name="edge/8 bits")
    assert qo.quantize(tmp_path / "net.v2.onnx", recipe=recipe).output == tmp_path / "net.v2.edge-8 bits.onnx"
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0")])
    assert qo.quantize(load_model(tmp_path / "net.v2.onnx"), recipe=recipe).output.name == "net.v2.quantized.onnx"


def test_a_model_in_memory_needs_an_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model in (conv_chain(), load_model(conv_chain())):
        with pytest.raises(SpecError, match=r"a model in memory has no default output: pass output='quan"):
            qo.quantize(model, data=FEEDS)
    with pytest.raises(SpecError, match="expected the model as a path"):
        qo.quantize(3, data=FEEDS)
    with pytest.raises(dt.DetentError, match="recipe"):
        qo.quantize("net.onnx", data=FEEDS, recipe=5)
    assert not list(tmp_path.iterdir())


def test_data_is_rejected_as_an_output(tmp_path):
    save(conv_chain(), tmp_path / "net.onnx")
    with pytest.raises(SpecError, match=r"got list: pass calibration data by name, as in qo.quantize\(model, data="):
        qo.quantize(tmp_path / "net.onnx", FEEDS)
    data = tmp_path / "calib.npz"
    np.savez(data, x=FEEDS[0]["x"])
    content = data.read_bytes()
    with pytest.raises(SpecError, match=r"got the data file '.*calib.npz': pass .* data='.*calib.npz'"):
        qo.quantize(tmp_path / "net.onnx", str(data))
    with pytest.raises(SpecError, match="got the directory"):
        qo.quantize(tmp_path / "net.onnx", tmp_path)
    assert data.read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "calib.npz"}


def test_plans_and_reports_fit_a_notebook(tmp_path):
    m = Maker()
    name = "<script>alert('x')</script>" + "long " * 20
    model = m.model([("x", [1, 6, 16])], [m.matmul(m.matmul("x", 16, 16, name=name), 16, 4, name="last")])
    report = qo.quantize(model, tmp_path / "q.onnx", rows(2), skip=["last"], progress=False)
    plan = qo.plan(qo.prepare(model))
    for shown in (plan, report):
        html = shown._repr_html_()
        assert "<script" not in html
        assert html.count("<tr>") == 3
        assert not any(word in html for word in ("http", "src=", "<link", "<style"))
        assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" + "long " * 20 in html
        assert len(repr(shown)) < 200
        assert "..." in str(shown).splitlines()[1]
    assert (
        repr(plan) == "<GraphPlan 2 of 2 layers quantized by recipe 'w8a8' for onnxruntime; weights 1,280 -> 420 bytes>"
    )
    assert repr(report).startswith(f"<QuantizeReport {tmp_path / 'q.onnx'}: ")
    assert "skipped" in report._repr_html_()
    assert repr(report.decisions).startswith("<Decisions for onnxruntime: 1 of 2 layers quantized, 1 Q/DQ pairs")
    assert repr(qo.calibrate(plan, rows(2))) == "<Calibration of 2 tensors on 2 batches>"
