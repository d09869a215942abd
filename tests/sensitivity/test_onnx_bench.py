"""Sensitivity of ONNX models: the noise is that of quantizing one layer, and allocations are applied as chosen."""

import subprocess
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import detent as dt
import detent.onnx as qo
import detent.sensitivity as qs
from detent.errors import DtypeError, NotCalibratedError, RangeError, ShapeError, SpecError, UnsupportedError
from detent.onnx.graph_plan import weight_params
from detent.onnx.layer_error import SwitchableModel
from detent.onnx_model import make_session
from detent.onnx_model.batches import open_batches
from detent.onnx_model.model_inputs import inputs_of
from detent.sensitivity.bench import OutputNoise

EXACT = {"session.qdq_matmulnbits_accuracy_level": "0"}


def tensor(name, *shape, seed=0, scale=0.3):
    return numpy_helper.from_array((scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32), name)


def build_model(nodes, weights, inputs, outputs, opset=17):
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.fixture
def network():
    """A convolution, a depthwise convolution and two matmuls; the first layer has the most noise."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], name="first[0]*", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="deep", pads=[1, 1, 1, 1], group=16),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], name="pool"),
        helper.make_node("Flatten", ["d"], ["e"], name="flat"),
        helper.make_node("Gemm", ["e", "w3", "b3"], ["f"], name="body"),
        helper.make_node("Relu", ["f"], ["h"], name="relu2"),
        helper.make_node("MatMul", ["h", "w4"], ["y"], name="head"),
    ]
    weights = [
        tensor("w1", 16, 8, 3, 3),
        tensor("b1", 16, seed=1),
        tensor("w2", 16, 1, 3, 3, seed=2),
        tensor("w3", 16, 32, seed=3),
        tensor("b3", 32, seed=4),
        tensor("w4", 32, 10, seed=5),
    ]
    return build_model(nodes, weights, [("x", ["n", 8, 6, 6])], ["y"])


@pytest.fixture
def data():
    return [{"x": np.random.default_rng(i).normal(size=(4, 8, 6, 6)).astype(np.float32)} for i in range(4)]


NAMES = ["first[0]*", "deep", "body", "head"]


def sqnr(model, other, data):
    sessions = make_session(model), make_session(other, config=EXACT)
    old, new = (np.concatenate([each.run(None, feed)[0].ravel() for feed in data]) for each in sessions)
    return -10 * np.log10(np.sum((old - new) ** 2) / np.sum(old**2))


def test_noise_of_one_layer_is_that_of_a_file_with_one_quantized_layer(network, data, tmp_path):
    sensitivity = qs.measure(network, data, widths=(4, 8), progress=False)
    assert [layer.name for layer in sensitivity.layers] == NAMES
    assert sensitivity.options == ("int4/axis0", "int8/axis0")
    assert sensitivity.samples == 16
    for layer in sensitivity.layers:
        for option, noise in layer.noise.items():
            rule = dt.Rule(layer.name if layer.name != NAMES[0] else "first[[]0][*]", weight=option)
            target = tmp_path / "one.onnx"
            qo.quantize(network, target, recipe=dt.Recipe([rule]), progress=False)
            assert qs.sqnr_of(noise) == pytest.approx(sqnr(network, target, data), abs=0.05)


def test_bytes_are_those_of_the_plan(network, data):
    sensitivity = qs.measure(network, data, widths=(3, 4, 6, 8, 12), progress=False)
    prepared = qo.prepare(network, low_bits=True)
    for option in sensitivity.options:
        lines = {line.name: line for line in qo.plan(prepared, dt.Recipe([dt.Rule(weight=option)])).layers}
        for layer in sensitivity.layers:
            assert layer.nbytes[option] == lines[layer.name].nbytes_after
            assert layer.nbytes_float == lines[layer.name].nbytes_before
    packed = qs.measure(network, data, widths=(3, 4), storage="packed", progress=False)
    assert packed.layers[0].nbytes["int3/axis0"] == 16 * 72 * 3 // 8 + 16 * 4
    with pytest.raises(SpecError, match="expected one of onnx, packed"):
        qs.measure(network, data, widths=(4,), storage="zip")


def test_a_recipe_quantizes_weight_and_input_of_the_layer(network, data):
    weights = qs.measure(network, data, "w8a16", progress=False)
    both = qs.measure(network, data, "w8a8", progress=False)
    coarse = qs.measure(
        network, data, dt.Recipe([dt.Rule(weight="int8/axis0", input="uint5/tensor/affine")]), progress=False
    )
    assert (weights.options, both.options, coarse.options) == (("w8a16",), ("w8a8",), ("recipe",))
    for alone, layer, loud in zip(weights.layers, both.layers, coarse.layers, strict=True):
        assert layer.noise["w8a8"] != alone.noise["w8a16"]
        assert layer.noise["w8a8"] < 1e-3
        assert loud.noise["recipe"] > 3 * alone.noise["w8a16"]
    rules = {rule.match: rule for rule in both.choose(10**6).recipe.rules}
    assert set(rules) == {"first[[]0][*]", "deep", "body", "head"}
    assert all(rule.input is not None for rule in rules.values())


def test_inputs_of_few_bits_are_clipped_to_their_codes(network, data):
    """A 4-bit quantizer is stored in 8-bit codes: without its Clip it would not saturate."""
    noise = [
        qs.measure(network, data, f"w8a{bits}", progress=False).layers[1].noise[f"w8a{bits}"] for bits in (3, 4, 6)
    ]
    assert noise[0] > 2 * noise[1] > 8 * noise[2]


def test_the_mix_of_a_recipe_runs(network, data):
    sensitivity = qs.measure(network, data, "w8a8", progress=False)
    ran = qs.run_mix(network, data, sensitivity.choose(10**6))
    assert abs(ran.measured_sqnr_db - ran.predicted_sqnr_db) < 3


OBSERVERS = ["minmax", "mse", "percentile(1, 99)", "entropy"]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_inputs_have_the_range_of_the_rules_observer(network, data, observer):
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input="uint8/tensor/affine", observer=observer)])
    skip = NAMES[1:]  # the first layer reads the model's input, whose range does not depend on other layers
    sensitivity = qs.measure(network, data, recipe, skip=skip, progress=False)
    mix = qs.run_mix(network, data, sensitivity.choose(10**6))
    assert mix.measured_sqnr_db == pytest.approx(mix.predicted_sqnr_db, abs=0.1)
    whole = qs.measure(network, data, recipe, progress=False)
    mix = qs.run_mix(network, data, whole.choose(10**6))
    assert mix.measured_sqnr_db == pytest.approx(mix.predicted_sqnr_db, abs=2)


def test_some_layers_may_have_float_inputs_or_inputs_of_fewer_bits(network, data):
    eight = "uint8/tensor/affine"
    rules = [dt.Rule(weight="int8/axis0"), dt.Rule("deep", input=eight), dt.Rule("head", input="uint3/tensor/affine")]
    sensitivity = qs.measure(network, data, dt.Recipe(rules), progress=False)
    alone = qs.measure(network, data, dt.Recipe([dt.Rule(weight="int8/axis0")]), progress=False)
    more = [one.worst / two.worst for one, two in zip(sensitivity.layers, alone.layers, strict=True)]
    assert more == [pytest.approx(1), pytest.approx(2, abs=1.5), pytest.approx(1), pytest.approx(more[3])]
    assert more[3] > 10


def test_layers_with_empty_inputs_are_rejected():
    """A layer may get no rows: its input has no range, and no file can be written."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="one"),
        helper.make_node("Slice", ["a", "end", "end"], ["none"], name="slice"),
        helper.make_node("MatMul", ["none", "v"], ["b"], name="two"),
        helper.make_node("Concat", ["a", "b"], ["y"], name="join", axis=0),
    ]
    weights = [tensor("w", 8, 8), tensor("v", 8, 8, seed=1), numpy_helper.from_array(np.int64([10**6]), "end")]
    model = build_model(nodes, weights, [("x", ["n", 8])], ["y"])
    with pytest.raises(NotCalibratedError, match="'none'"):
        qs.measure(model, [np.ones((2, 8), np.float32)], progress=False)
    sensitivity = qs.measure(model, [np.ones((2, 8), np.float32)], skip="two", progress=False)
    assert [layer.name for layer in sensitivity.layers] == ["one"]


def test_observers_differ(network, data):
    """A clipped input has far more noise; if observers were ignored, both would have the same noise."""
    noise = []
    for observer in ("minmax", "percentile(1, 99)"):
        recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input="uint8/tensor/affine", observer=observer)])
        noise.append(qs.measure(network, data, recipe, progress=False).layers[0].noise["recipe"])
    assert noise[1] > 10 * noise[0]


def test_predicted_and_measured_agree(network, data):
    sensitivity = qs.measure(network, data, widths=(6, 8, 10), storage="packed", progress=False)
    mix = sensitivity.choose(sensitivity.uniform("int8/axis0").nbytes)
    ran = qs.run_mix(network, data, mix)
    assert mix.measured_sqnr_db is None
    assert ran.measured_sqnr_db == pytest.approx(ran.predicted_sqnr_db, abs=2)
    assert f"{ran.measured_sqnr_db:.1f} dB measured" in str(ran)


def test_the_mix_is_what_quantize_writes(network, data, tmp_path):
    sensitivity = qs.measure(network, data, widths=(4, 6, 8, 16, "int4/group16"), progress=False)
    mix = qs.run_mix(network, data, sensitivity.choose(3000))
    report = qo.quantize(network, tmp_path / "mix.onnx", recipe=mix.recipe, progress=False)
    for layer in report.plan.layers:
        expected = dt.QuantSpec.parse(mix.options[layer.name])
        assert layer.weight.format == expected.format
        assert type(layer.weight.granularity) is type(expected.granularity)
    assert report.plan.nbytes_after == mix.nbytes
    assert sqnr(network, report.output, data) == pytest.approx(mix.measured_sqnr_db, abs=0.01)


def test_options_that_a_weight_cannot_have_are_left_out(network, data):
    sensitivity = qs.measure(network, data, widths=(4, "int4/group16"), progress=False)
    assert [list(layer.noise) for layer in sensitivity.layers] == [
        ["int4/axis0"],
        ["int4/axis0"],
        ["int4/axis0", "int4/group16"],
        ["int4/axis0", "int4/group16"],
    ]
    assert "-" in str(sensitivity)


def test_skipped_and_excluded_layers_are_not_measured(network, data):
    sensitivity = qs.measure(network, data, widths=(4,), skip="head", progress=False)
    assert [layer.name for layer in sensitivity.layers] == NAMES[:3]
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("b*", skip=True), dt.Rule("first*", skip=True)])
    for widths in (None, (4,)):
        sensitivity = qs.measure(network, data, recipe, widths=widths, progress=False)
        assert [layer.name for layer in sensitivity.layers] == ["deep", "head"]
    with pytest.raises(SpecError, match="did you mean 'head'"):
        qs.measure(network, data, widths=(4,), skip="haed")


def test_cost_is_announced_first_and_kept(network, data):
    calls = []
    sensitivity = qs.measure(
        network,
        iter(data),
        widths=(4, 8),
        samples=6,
        announce=calls.append,
        progress=lambda done, total: calls.append((done, total)),
    )
    cost = calls[0]
    assert (cost.layers, cost.options, cost.runs, cost.samples) == (4, 2, 8, 6)
    assert cost.seconds_estimate > 0
    assert calls[1:] == [(done, 8) for done in range(1, 9)]
    assert sensitivity.samples == 6


def test_batches_are_read_once_and_no_more_than_needed(network, data):
    read = []

    def stream():
        for number, batch in enumerate(data * 100):
            read.append(number)
            yield batch

    qs.measure(network, stream(), widths=(4, 8), samples=8, progress=False)
    assert read == [0, 1]


def test_the_model_does_not_change(network, data):
    before = network.SerializeToString()
    qs.measure(network, data, widths=(4,), progress=False)
    qs.measure(network, data, progress=False)
    assert network.SerializeToString() == before


def batches_of(shapes, names=("x",), sizes=((None, 2),)):
    infos = inputs_of(
        build_model(
            [helper.make_node("Identity", [names[0]], ["y"])],
            [],
            [(name, list(size)) for name, size in zip(names, sizes, strict=True)],
            ["y"],
        )
    )
    return open_batches([tuple(np.zeros(each, np.float32) for each in shape) for shape in shapes], infos)


@pytest.mark.parametrize(
    ("batches", "limit", "sizes", "count"),
    [
        (lambda: batches_of([((4, 2),)] * 3), 6, [4, 2], 6),
        (lambda: batches_of([((4, 2),)] * 3), 100, [4, 4, 4], 12),
        (lambda: batches_of([((4, 2),)] * 3, sizes=((4, 2),)), 6, [4, 4], 8),
        (lambda: batches_of([((4, 2), (2, 4))] * 3, ("x", "s"), ((None, 2), (2, None))), 6, [4, 4], 8),
    ],
    ids=["cut", "all", "fixed", "states"],
)
def test_samples_are_counted_along_the_first_axis(batches, limit, sizes, count):
    feeds, samples = batches().first_samples(limit)
    assert [len(feed["x"]) for feed in feeds] == sizes
    assert samples == count


def test_shared_weights_are_one_choice():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="one"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "w"], ["c"], name="two"),
        helper.make_node("MatMul", ["c", "v"], ["y"], name="other"),
    ]
    model = build_model(nodes, [tensor("w", 8, 8), tensor("v", 8, 4, seed=1)], [("x", ["n", 8])], ["y"])
    batch = [np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)]
    sensitivity = qs.measure(model, batch, widths=(4, 8), progress=False)
    assert [layer.names for layer in sensitivity.layers] == [("one", "two"), ("other",)]
    assert sensitivity.nbytes_float == 4 * (64 + 32)
    mix = sensitivity.choose(10**4)
    assert [rule.match for rule in mix.recipe.rules] == ["one", "two", "other"]
    assert qs.run_mix(model, batch, mix).measured_sqnr_db == pytest.approx(mix.predicted_sqnr_db, abs=3)


def test_shared_weights_with_other_rules_are_two_choices():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="one"),
        helper.make_node("MatMul", ["a", "w"], ["y"], name="two"),
    ]
    model = build_model(nodes, [tensor("w", 8, 8)], [("x", ["n", 8])], ["y"])
    recipe = dt.Recipe([dt.Rule("one", weight="int4/axis0"), dt.Rule("two", weight="int8/axis0")])
    batch = [np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)]
    sensitivity = qs.measure(model, batch, recipe, progress=False)
    assert [layer.names for layer in sensitivity.layers] == [("one",), ("two",)]
    assert sensitivity.layers[0].noise["recipe"] > 10 * sensitivity.layers[1].noise["recipe"] > 0


def test_small_floats_are_not_measured_for_files_that_cannot_hold_them(network, data):
    with pytest.raises(UnsupportedError, match="got float8_e4m3fn: use w8a8"):
        qs.measure(network, data, "fp8", progress=False)


def test_tables_are_measured_by_their_rows():
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["a"], name="words"),
        helper.make_node("MatMul", ["a", "w"], ["y"], name="fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [tensor("table", 20, 8), tensor("w", 8, 4, seed=1)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sensitivity = qs.measure(model, [np.arange(12).reshape(4, 3)], widths=(4, 8), progress=False)
    assert [layer.name for layer in sensitivity.layers] == ["words", "fc"]
    assert sensitivity.samples == 4
    assert all(layer.noise["int4/axis0"] > 10 * layer.noise["int8/axis0"] > 0 for layer in sensitivity.layers)


def test_outputs_count_alike_whatever_their_size():
    """An output a thousand times larger does not hide the noise of the other."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["small"], name="one"),
        helper.make_node("MatMul", ["x", "v"], ["large"], name="two"),
    ]
    model = build_model(
        nodes, [tensor("w", 8, 8), tensor("v", 8, 8, scale=300.0)], [("x", ["n", 8])], ["small", "large"]
    )
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    sensitivity = qs.measure(model, [batch], widths=(4,), progress=False)
    one, two = (layer.noise["int4/axis0"] for layer in sensitivity.layers)
    assert one == pytest.approx(two, rel=0.2)
    weight = numpy_helper.to_array(model.graph.initializer[0])
    rounded = dt.fake_quantize(weight, weight_params(weight, dt.QuantSpec.parse("int4/axis1")))
    expected = np.sum((batch @ (rounded - weight)) ** 2) / np.sum((batch @ weight) ** 2) / 2
    assert one == pytest.approx(expected, rel=1e-3)


def test_refining_is_at_least_as_good_as_its_starts(network, data):
    sensitivity = qs.measure(network, data, widths=(2, 3, 4, 6), storage="packed", progress=False)
    uniform, seen = sensitivity.uniform("int3/axis0"), []
    best = qs.refine(
        network,
        data,
        sensitivity,
        uniform.nbytes,
        runs=12,
        announce=seen.append,
        progress=lambda *each: seen.append(each),
    )
    assert best.nbytes <= uniform.nbytes
    assert (seen[0].runs, seen[-1]) == (12, (12, 12))
    for start in (uniform, sensitivity.choose(uniform.nbytes)):
        assert best.measured_sqnr_db >= qs.run_mix(network, data, start).measured_sqnr_db - 0.05
    assert best.measured_sqnr_db == pytest.approx(qs.run_mix(network, data, best).measured_sqnr_db, abs=0.05)


def test_refining_has_runs_for_all_its_starts(network, data):
    sensitivity = qs.measure(network, data, widths=(2, 3, 4, 6), storage="packed", progress=False)
    budget = sensitivity.uniform("int4/axis0").nbytes  # three uniform allocations fit, and the chosen one
    with pytest.raises(SpecError, match=r"runs=3 .* runs>=4"):
        qs.refine(network, data, sensitivity, budget, runs=3, progress=False)
    best = qs.refine(network, data, sensitivity, budget, runs=4, progress=False)
    for bits in (2, 3, 4):
        start = qs.run_mix(network, data, sensitivity.uniform(f"int{bits}/axis0"))
        assert best.measured_sqnr_db >= start.measured_sqnr_db - 0.05


def test_refining_needs_the_model_that_was_measured(network, data):
    layer = qs.LayerNoise("else", "Conv", 1, 4, {"int4/axis0": 0.1}, {"int4/axis0": 3})
    with pytest.raises(SpecError, match="no layer 'else'"):
        qs.refine(network, data, qs.Sensitivity((layer,), ("int4/axis0",)), 100)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"data": []}, SpecError, "no batches"),
        ({"data": None}, SpecError, "data is missing"),
        ({"data": [np.zeros((1, 8, 6, 6), np.float16)]}, DtypeError, "float16"),
        ({"data": [np.zeros((1, 7, 6, 6), np.float32)]}, ShapeError, "7"),
        ({"samples": 0}, SpecError, "samples must be an integer of at least 1"),
        ({"widths": (40,)}, SpecError, "a bit width must be an integer in 1..16"),
        ({"target": "tpu"}, SpecError, "unknown target 'tpu'"),
        ({"model": 3}, SpecError, "got a model of type int, expected a path"),
        ({"skip": "*"}, UnsupportedError, "no layer of the model can be measured"),
    ],
    ids=["empty", "none", "dtype", "shape", "samples", "width", "target", "model", "all skipped"],
)
def test_invalid_arguments_are_rejected(network, data, given, error, words):
    about = {"model": network, "data": data, "widths": (4,), "progress": False} | given
    with pytest.raises(error, match=words):
        qs.measure(about.pop("model"), about.pop("data"), **about)


@pytest.mark.parametrize(("scale", "words"), [(0.0, "all outputs"), (3e38, "NaN or infinity")], ids=["zero", "inf"])
def test_outputs_without_a_signal_are_rejected(scale, words):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")]
    model = build_model(
        nodes, [numpy_helper.from_array(np.full((8, 4), scale, np.float32), "w")], [("x", ["n", 8])], ["y"]
    )
    with pytest.raises(RangeError, match=words):
        qs.measure(model, [np.ones((2, 8), np.float32)], widths=(8,), progress=False)


def test_run_mix_rejects_other_types(network, data):
    with pytest.raises(SpecError, match="got dict, expected a Mix"):
        qs.run_mix(network, data, {"a": 4})


def test_importing_loads_no_framework():
    code = (
        "import sys, detent.sensitivity as qs\n"
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules), sorted(sys.modules)\n"
        "layer = qs.LayerNoise('a', 'Conv', 1, 4, {'int4/axis0': 0.1}, {'int4/axis0': 3})\n"
        "sensitivity = qs.Sensitivity.from_json(qs.Sensitivity((layer,), ('int4/axis0',)).to_json())\n"
        "assert sensitivity.choose(3).recipe.rules\n"
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def threads_restored():
    before = dt.get_num_threads()
    yield
    dt.set_num_threads(before)


@pytest.mark.usefixtures("threads_restored")
def test_parallel_runs_give_the_same_noise(network, data):
    results = []
    for threads in (1, 3):
        dt.set_num_threads(threads)
        results.append(qs.measure(network, data, widths=(3, 8), progress=False).to_json())
    assert results[0] == results[1]


@pytest.mark.usefixtures("threads_restored")
def test_an_error_in_one_run_ends_all(network, data, monkeypatch):
    dt.set_num_threads(2)
    run, calls = SwitchableModel.run, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise UnsupportedError("the fourth run fails")
        return run(self, *arguments)

    monkeypatch.setattr(SwitchableModel, "run", failing)
    with pytest.raises(UnsupportedError, match="fourth run"):
        qs.measure(network, data, widths=(3, 4, 5, 6, 7, 8), progress=False)


def two_products():
    nodes = [
        helper.make_node("MatMul", ["x", "u"], ["t"], name="a"),
        helper.make_node("MatMul", ["t", "v"], ["y"], name="b"),
    ]
    return build_model(nodes, [tensor("u", 16, 8), tensor("v", 8, 4, seed=1)], [("x", [None, 16])], ["y"])


def vectors(count=3, length=64):
    data = np.random.default_rng(3).normal(size=(count, length, 16)).astype(np.float32)
    return [{"x": each} for each in data]


def test_decisions_measure_the_parameters_of_the_file(tmp_path):
    model, feeds = two_products(), vectors()
    options = {"observer": "percentile(5, 95)", "keep_float": "none"}  # clips far more than min-max
    report = qo.quantize(model, tmp_path / "q.onnx", feeds, smooth=False, progress=False, **options)
    by_file = qs.measure(model, feeds, report.decisions, samples=1000, progress=False)
    by_range = qs.measure(model, feeds, "w8a8", samples=1000, progress=False)
    assert [layer.name for layer in by_file.layers] == [layer.name for layer in by_range.layers] == ["a", "b"]
    assert (by_file.options, by_file.target) == (("w8a8",), "onnxruntime")
    noise = [each.layers[0].noise["w8a8"] for each in (by_file, by_range)]
    assert noise[0] > 10 * noise[1]
    alone = report.decisions.with_layers_in_float(["b"], "alone")
    outputs = [
        [make_session(each).run(None, feed) for feed in feeds] for each in (qo.prepare(model), qo.rewrite(model, alone))
    ]
    assert OutputNoise(["y"], outputs[0]).noise(outputs[1]) == pytest.approx(noise[0], rel=0.05)


def test_decisions_reject_widths_and_unknown_layers():
    model, feeds = two_products(), vectors()
    decisions = qo.decide(model, feeds, progress=False)
    with pytest.raises(SpecError, match="got decisions and widths"):
        qs.measure(model, feeds, decisions, widths=(4,))
    with pytest.raises(SpecError, match="skip='c' matches no layer"):
        qs.measure(model, feeds, decisions, skip="c")
    in_float = decisions.with_layers_in_float(["a", "b"], "no")
    with pytest.raises(UnsupportedError, match="decisions quantize no layer"):
        qs.measure(model, feeds, in_float, progress=False)
