"""verify with an ONNX source: codes, end-to-end results and integer kernels."""

import json

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from qdq_models import chain, change, change_axis, model, weight_only

import detent as dt
from detent.onnx_model import Provenance, optimized
from detent.onnx_model.qdq_reader import open_quantized
from detent.onnx_model.sessions import Probe, Reading
from detent.verification import levels, openvino
from detent.verification.openvino import is_installed
from detent.verification.outputs import find_codes


def batches(count=2, size=16, seed=1):
    rng = np.random.default_rng(seed)
    return [(3 * rng.normal(size=(size, 3, 8, 8))).astype(np.float32) for _ in range(count)]


@pytest.fixture(scope="module")
def report():
    return dt.verify(chain(quantized=False), chain(), batches())


def test_a_file_without_decisions_is_not_replayed_and_not_ok(report):
    assert not report.ok
    assert report.differing_codes == 0
    assert report.first_difference is None
    assert report.compared_codes > 2 * 16 * (3 * 64 + 16 * 16)
    assert str(report).startswith("not ok: not replayed: the file has no decisions in its metadata")
    assert "level 2: inconclusive: without a replay, only the SQNR of outputs is measured" in str(report)
    assert dt.verify(chain(quantized=False), chain(), batches(1), levels=(3,)).ok  # replay left out, as asked
    assert not dt.verify(chain(quantized=False), chain(), batches(1), levels=(2,)).ok


def test_every_integer_kernel_is_exact(report):
    rows = {row.kernel: row for row in report.kernels}
    assert set(rows) == {"QLinearConv", "QLinearAdd", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat"}
    assert [row.node for row in report.kernels if row.kernel == "QLinearConv" and row.compared] != []
    assert sum(row.differing for row in report.kernels) == 0
    assert rows["QLinearAdd"].compared == 0  # its formula is not known
    assert "level 3 does not support QLinearAdd: 1 kernel not compared" in "".join(report.notes)
    assert report.saturation is None


def test_end_to_end(report):
    runs = report.end_to_end
    assert {"unoptimized", "optimized"} <= set(runs)
    assert runs["unoptimized"].compared_codes == 0  # a float source has no codes
    assert runs["optimized"].compared_codes > 0
    assert runs["optimized"].differing_codes <= 10
    assert 10 < report.output_sqnr_db < 60
    assert report.output_sqnr_db == runs["optimized"].output_sqnr_db["y"]
    assert 0.5 < report.agreement <= 1.0


def test_codes_are_found_where_channels_are_last():
    codes = find_codes(open_quantized(chain()), optimized(chain()))
    assert {"x_q_QuantizeLinear", "r1_q_QuantizeLinear", "c2_q_QuantizeLinear", "m_q_QuantizeLinear"} <= set(codes)
    assert codes["r1_q_QuantizeLinear"].channels_last


def test_sqnr_is_that_of_the_metric():
    data = batches(3)
    report = dt.verify(chain(quantized=False), chain(), data, levels=(2,))
    once = dt.verify(chain(quantized=False), chain(), [np.concatenate(data)], levels=(2,))
    assert report.output_sqnr_db == pytest.approx(once.output_sqnr_db, abs=1e-6)
    assert report.compared_codes == 0


def test_levels_are_those_asked_for():
    report = dt.verify(chain(quantized=False), chain(), batches(1), levels=[3])
    assert (report.levels, report.compared_codes, dict(report.end_to_end)) == ((3,), 0, {})
    assert report.kernels
    assert dt.verify(chain(quantized=False), chain(), batches(1), levels=(1,)).kernels == ()


def test_one_pass_over_an_iterator_is_enough():
    assert dt.verify(chain(quantized=False), chain(), iter(batches())).batches == 2


@pytest.mark.parametrize("make", [lambda x: {"x": x}, lambda x: (x,), lambda x: x], ids=["dict", "tuple", "array"])
def test_kinds_of_batches(make):
    assert dt.verify(chain(), chain(), [make(x) for x in batches()], levels=(1,)).ok


def test_path_as_source_and_artifact(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(chain().SerializeToString())
    assert dt.verify(path, str(path), batches(1), levels=(1, 2)).ok


# What is wrong with a file


def ulp(values, index=...):
    values[index] = np.nextafter(values[index], np.float32(np.inf))


@pytest.mark.parametrize(
    ("name", "edit", "cause"),
    [
        ("w1_s", lambda v: v.__setitem__(3, -1.0), "positive"),
        ("w1_s", lambda v: v.__setitem__(3, np.nan), "invalid parameters"),
        ("w4_s", lambda v: v.__setitem__(3, np.inf), "invalid parameters"),
        ("b1_s", lambda v: v.__setitem__(3, 0.0), "invalid parameters"),
        ("x_s", lambda v: v.__setitem__(..., -0.1), "invalid parameters"),
    ],
    ids=["negative", "nan", "inf", "bias", "activation"],
)
def test_invalid_parameters_are_named(name, edit, cause):
    report = dt.verify(chain(quantized=False), change(chain(), name, edit), batches(1), levels=(1,))
    assert not report.ok
    assert cause in report.first_difference.cause
    assert name.removesuffix("_s") in report.first_difference.tensor + report.first_difference.node


@pytest.mark.parametrize(
    ("name", "edit", "index", "cause"),
    [
        ("w1_q", lambda v: v.__setitem__((3, 1, 0, 2), v[3, 1, 0, 2] ^ 1), (3, 1, 0, 2), "1 of 432 values changed"),
        ("w2_q", lambda v: v.__setitem__((3, 0, 0, 2), v[3, 0, 0, 2] ^ 1), (3, 0, 0, 2), "1 of 144 values changed"),
        ("w4_s", lambda v: ulp(v, 3), (3,), "1 of 32 values changed"),
        ("w5_z", lambda v: v.__setitem__(3, 129), (3,), "1 of 10 values changed"),
    ],
    ids=["code", "depthwise", "ulp", "zero_point"],
)
def test_a_quantized_source_knows_its_weights(name, edit, index, cause):
    report = dt.verify(chain(), change(chain(), name, edit), batches(1), levels=(1,))
    assert not report.ok
    difference = report.first_difference
    assert (difference.tensor, difference.index, difference.cause) == (name, index, cause)


@pytest.mark.parametrize(
    ("name", "edit", "node", "cause"),
    [
        ("r1_s", ulp, "constant r1_s", "changed"),
        ("r1_z", lambda v: v.__iadd__(1), "constant r1_z", "changed"),
    ],
    ids=["ulp", "zero_point"],
)
def test_a_quantized_source_knows_its_activations(name, edit, node, cause):
    report = dt.verify(chain(), change(chain(), name, edit), batches(1), levels=(1,))
    assert not report.ok
    difference = report.first_difference
    assert (difference.node, difference.tensor, difference.index, difference.cause) == (node, name, (), cause)
    assert report.differing_codes == 16 * 16 * 16  # each code of that node


@pytest.mark.parametrize(
    ("name", "edit"),
    [("w1_s", lambda v: ulp(v, 3)), ("x_s", ulp), ("b5_s", lambda v: ulp(v, 3))],
    ids=["weight", "activation", "bias"],
)
def test_scales_of_a_file_of_detent_s_fit_each_other(name, edit):
    file = chain()
    Provenance(target="onnxruntime").write(file)
    assert dt.verify(chain(quantized=False), file, batches(1), levels=(1,)).first_difference is None
    report = dt.verify(chain(quantized=False), change(file, name, edit), batches(1), levels=(1,))
    assert not report.ok
    assert "wrong bias scale: it is not input scale times weight scale" in report.first_difference.cause


def test_codes_beyond_the_target_s_limit_are_named():
    file = chain(signed=True)
    Provenance(target="onnxruntime-avx2").write(file)
    report = dt.verify(chain(quantized=False), file, batches(1), levels=(1,))
    assert not report.ok
    assert report.first_difference.tensor == "w1_q"
    assert "beyond 64" in report.first_difference.cause


def test_a_file_that_does_not_run_after_a_difference_is_reported():
    file = change(chain(), "b1_s", lambda v: v.__setitem__(3, -1.0))
    report = dt.verify(chain(), change_axis(file, "w4_DequantizeLinear", 0), batches(1))
    assert not report.ok
    assert any("the file does not run in ONNX Runtime" in note for note in report.notes)


def test_errors_of_the_data_are_the_users_own():
    def broken():
        yield from batches(1)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match=r"^the disk is gone$"):
        dt.verify(chain(), chain(), broken())


# Weights alone


def test_both_settings_of_weight_only_products_are_shown():
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(32, 64)).astype(np.float32)]
    report = dt.verify(weight_only(quantized=False), weight_only(), data)
    assert report.differing_codes == 0
    assert report.compared_codes == 64 * 48
    fast, exact = report.end_to_end["optimized"], report.end_to_end["accuracy_level_0"]
    assert exact.output_sqnr_db["y"] > 100
    assert fast.output_sqnr_db["y"] < 70
    assert "session.qdq_matmulnbits_accuracy_level" in str(report)


# Other consumers


@pytest.mark.skipif(not is_installed(), reason="OpenVINO is not installed")
def test_openvino_is_a_second_consumer(report):
    run = report.end_to_end["openvino"]
    assert run.output_sqnr_db["y"] == pytest.approx(report.output_sqnr_db, abs=3)


@pytest.mark.skipif(not is_installed(), reason="OpenVINO is not installed")
def test_steps_of_openvino_s_outputs():
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="Q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="D"),
    ]
    ends = [("x", TensorProto.FLOAT, ["n"])], [("y", TensorProto.FLOAT, ["n"])]
    file = model(nodes, *ends, {"s": np.float32(0.0123), "z": np.uint8(100)})
    run = dt.verify(file, file, [np.random.default_rng(0).normal(size=9999).astype(np.float32)]).end_to_end["openvino"]
    assert run.compared_codes == 9999
    assert run.max_steps <= 1


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("import os; os.abort()", "failed to load the model: the subprocess ended with exit code"),
        ("print('ready', flush=True); input(); import os; os.abort()", "failed to run the model: the subprocess ended"),
        ("print('error: too new')", "failed to load the model: too new"),
    ],
    ids=["start", "run", "error"],
)
def test_a_second_consumer_may_die(worker, message, tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(worker)
    monkeypatch.setattr(openvino, "WORKER", script)
    monkeypatch.setattr(levels, "is_installed", lambda: True)
    report = dt.verify(chain(quantized=False), chain(), batches(1), levels=(2,))
    assert set(report.end_to_end) == {"unoptimized", "optimized"}
    assert message in report.notes[0]


def test_biases_that_onnxruntime_rounds_are_named():
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="Q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="D"),
        helper.make_node("DequantizeLinear", ["w_q", "s", "w_z"], ["w"], name="W"),
        helper.make_node("Conv", ["d", "w", "b"], ["c"], name="conv"),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["r"], name="R"),
        helper.make_node("DequantizeLinear", ["r", "s", "z"], ["y"], name="E"),
    ]
    rng = np.random.default_rng(0)
    constants = {"s": np.float32(0.1), "z": np.uint8(100), "w_z": np.uint8(128), "b": np.float32([0.333, -0.777])}
    constants["w_q"] = rng.integers(0, 256, (2, 3, 1, 1)).astype(np.uint8)
    ends = [("x", TensorProto.FLOAT, ["n", 3, 4, 4])], [("y", TensorProto.FLOAT, ["n", 2, 4, 4])]
    report = dt.verify(
        model(nodes, *ends, constants), model(nodes, *ends, constants), [np.ones((1, 3, 4, 4), np.float32)]
    )
    assert report.ok
    assert any("WeightBiasQuantization" in note for note in report.notes)


# Unusual types


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        (TensorProto.INT4, -3),
        (TensorProto.UINT4, 5),
        (TensorProto.INT16, -7),
        (TensorProto.UINT16, 9),
        (TensorProto.FLOAT8E4M3FN, 0),
        (TensorProto.FLOAT8E5M2, 0),
    ],
    ids=["int4", "uint4", "int16", "uint16", "e4m3fn", "e5m2"],
)
def test_codes_of_any_type(kind, zero):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="Q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="D"),
    ]
    ends = [("x", TensorProto.FLOAT, ["n"])], [("y", TensorProto.FLOAT, ["n"])]
    file = model(nodes, *ends, {"s": np.float32(0.01), "z": (np.array(zero), kind)})
    x = np.concatenate([np.linspace(-3, 3, 5001), [1e9, -1e9, 0.0]]).astype(np.float32)
    report = dt.verify(file, file, [x])
    assert report.ok
    assert report.compared_codes == x.size
    assert report.end_to_end["optimized"].differing_codes == 0


def test_channels_of_an_activation():
    scale, zero = np.float32([0.1, 0.2, 0.3]), np.uint8([0, 100, 255])
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="Q", axis=1)]
    ends = [("x", TensorProto.FLOAT, ["n", 3, 4])], [("q", TensorProto.UINT8, ["n", 3, 4])]
    file = model(nodes, *ends, {"s": scale, "z": zero})
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    assert dt.verify(file, file, [x], levels=(1,)).ok
    report = dt.verify(file, change(file, "z", lambda v: v.__setitem__(1, 101)), [x], levels=(1,))
    assert (report.first_difference.tensor, report.first_difference.index) == ("z", (1,))
    assert report.differing_codes == 5 * 4


def test_quantizers_in_bodies_are_compared_by_replay_alone():
    body = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["bq"]), helper.make_node("Identity", ["bq"], ["b"])],
        "body",
        [],
        [helper.make_tensor_value_info("b", TensorProto.UINT8, ["n"])],
    )
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="Q"),
        helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body),
    ]
    ends = [("x", TensorProto.FLOAT, ["n"])], [("q", TensorProto.UINT8, ["n"]), ("y", TensorProto.UINT8, ["n"])]
    file = model(nodes, *ends, {"s": np.float32(0.1), "z": np.uint8(3), "c": np.array(True)})
    before = ModelProto.FromString(file.SerializeToString())
    report = dt.verify(file, file, [np.float32([1, 2])], levels=(1,))
    assert report.ok
    assert report.not_compared == ()
    file.graph.node[-1].attribute[0].g.node[0].input[2] = ""
    other = dt.verify(before, file, [np.float32([1, 2])], levels=(1,))
    assert other.first_difference.node == "if/else_branch/QuantizeLinear_bq"
    assert other.not_compared == ("2 Q/DQ nodes in subgraphs of If, Loop or Scan were not compared",)


# Groups


def test_groups_of_any_size_show_the_same():
    file, seen = chain(), {}
    names = ["x_q", "r1", "r1_q", "c2_q", "y"]

    def reading(name, budget):
        return Reading((name,), lambda arrays: seen.setdefault(budget, {}).update({name: arrays[name].copy()}))

    for budget in (1, 40_000, 1 << 30):
        Probe(file, [reading(name, budget) for name in names], budget=budget).run({"x": batches(1)[0]})
    first = seen[1]
    assert list(first) == names
    assert all(np.array_equal(first[name], other[name]) for other in seen.values() for name in names)


# Bad input


@pytest.mark.parametrize(
    ("source", "artifact", "options", "error", "message"),
    [
        (chain, lambda: chain(quantized=False), {}, dt.UnsupportedError, "no QuantizeLinear"),
        (chain, chain, {"levels": (1, 4)}, dt.SpecError, "expected one or more of"),
        (chain, chain, {"levels": ()}, dt.SpecError, "expected one or more of"),
        (chain, chain, {"levels": 4}, dt.SpecError, r"levels=\[4\], expected one or more of \(1, 2, 3\)"),
        (chain, chain, {"levels": "13"}, dt.SpecError, "expected one or more of"),
        (chain, chain, {"levels": (1, "2")}, dt.SpecError, "expected one or more of"),
        (chain, chain, {"data": []}, dt.SpecError, "no batches"),
        (chain, chain, {"data": [np.zeros((1, 3, 9, 8), np.float32)]}, dt.ShapeError, "the model expects"),
        (lambda: 7, chain, {}, dt.UnsupportedError, "got int"),
        (chain, lambda: "nowhere.onnx", {}, dt.FileFormatError, "no such file"),
    ],
    ids=["float", "level", "levels", "one", "text", "mixed", "nothing", "shape", "source", "path"],
)
def test_bad_input(source, artifact, options, error, message):
    data = options.pop("data", batches(1)) if "data" in options else batches(1)
    with pytest.raises(error, match=message):
        dt.verify(source(), artifact(), data, **options)


def test_one_level_is_a_number():
    report = dt.verify(chain(), chain(), batches(1), levels=3)
    assert report.ok
    assert report.levels == (3,)


def test_raise_on_difference():
    file = change(chain(), "r1_z", lambda v: v.__iadd__(1))
    with pytest.raises(dt.VerificationError, match="r1_z is 1, expected 0") as caught:
        dt.verify(chain(), file, batches(1), levels=(1,), raise_on_difference=True)
    assert caught.value.report.differing_codes > 0
    assert isinstance(caught.value, AssertionError)
    assert dt.verify(chain(), chain(), batches(1), levels=(1,), raise_on_difference=True).ok


def test_json_holds_everything(report):
    document = json.loads(report.to_json())
    assert (document["ok"], document["version"]) == (False, 2)
    assert document["failure"] == report.failure
    assert document["replay"]["reason"] == report.replay.reason
    assert document["compared_codes"] == report.compared_codes
    assert document["kernels"][0]["node"] == report.kernels[0].node
    assert set(document["end_to_end"]) == set(report.end_to_end)
    same = json.loads(dt.verify(chain(), chain(), batches(1), levels=(2,)).to_json())
    assert same["end_to_end"]["unoptimized"]["output_sqnr_db"]["y"] == "inf"
