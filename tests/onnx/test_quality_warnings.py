"""Warnings about a quantized model: each appears where it should, and not on a good model."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from onnx_graphs import Maker, conv_chain, images, rows, warning_codes, weights

import detent as dt
import detent.evaluate as qe
import detent.onnx as qo
from detent import report as qr
from detent.cli import program_file
from detent.evaluate import evaluation as evaluation_module
from detent.evaluate import speed_advice
from detent.evaluate.speed import Timing
from detent.metrics import OutputComparison, wilson_interval
from detent.onnx import quality_warnings
from detent.onnx.graph_plan import plan
from detent.onnx.quality_warnings import DataSummary, QuantizeWarning, _data_warnings, accuracy_warnings

FAST = qe.Checks(verify=False, time=False, sensitivity=False)


def quantized(tmp_path, model, data, **options):
    return qo.quantize(model, tmp_path / "q.onnx", data, progress=False, **options)


def codes(result):
    return [each.code for each in result.warnings]


def text_of(result, code):
    (text,) = [each.text for each in result.warnings if each.code == code]
    return text


def chain(*, channels=8, scale=1.0):
    """Three convolutions, large enough for a smaller file."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", channels, 32, name="first", weight=scale * weights(32, channels, 3, 3))])
    t = m.add("Relu", [m.conv(t, 32, 32, name="second")])
    return m.model([("x", ["n", channels, 8, 8])], [m.conv(t, 32, 32, name="last")])


def test_a_good_model_has_no_warning(tmp_path):
    assert codes(quantized(tmp_path, chain(), images(16, batch=2))) == []


def compared(outputs, changed):
    comparison = OutputComparison(["y"])
    for x, y in zip(outputs, changed, strict=True):
        comparison.add([x], [y], len(x))
    return comparison


def test_low_accuracy_is_a_warning_with_samples_and_intervals():
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=(4, 10)).astype(np.float32) for _ in range(8)]
    noisy = [each + rng.normal(size=each.shape).astype(np.float32) for each in scores]
    comparison = compared(scores, noisy)
    sqnr, agreement = accuracy_warnings(comparison)
    assert (sqnr.code, agreement.code) == ("low-sqnr", "low-agreement")
    low, high = comparison.sqnr_interval_db("y")
    assert low < comparison.sqnr_db["y"] < high
    assert f"on 32 samples (95 % confidence: {low:.1f} to {high:.1f} dB)" in sqnr.text
    equal, total = comparison.agreement_counts
    assert total == 32
    assert comparison.agreement_interval == wilson_interval(equal, total)
    assert f"on 32 samples (95 % confidence: {100 * wilson_interval(equal, total)[0]:.1f} to" in agreement.text
    assert list(accuracy_warnings(compared(scores, [np.float32(1.01) * each for each in scores]))) == []


def test_low_accuracy_of_rows_that_may_have_changed_places():
    rng = np.random.default_rng(0)
    boxes = [rng.normal(size=(count, 4)).astype(np.float32) for count in (3, 5, 2, 4)]
    comparison = OutputComparison(["boxes"])
    for i, x in enumerate(boxes):
        comparison.add([x], [x[1:] if i % 2 else x[::-1]], 1)
    (warning,) = accuracy_warnings(comparison)
    assert " dB on 2 of 4 samples" in warning.text
    assert "rows may have changed places: measure the accuracy with --metric module:function" in warning.text
    assert "--skip" not in warning.text
    fixed = compared(boxes[:1] * 4, [each[::-1] for each in boxes[:1] * 4])
    (text,) = [each.text for each in accuracy_warnings(fixed) if each.code == "low-sqnr"]
    assert " dB on 12 samples" in text
    assert "--skip" in text
    assert "places" not in text


def test_rows_that_vary_with_the_data_have_no_classes():
    rng = np.random.default_rng(0)
    varying, fixed = OutputComparison(["y"]), OutputComparison(["y"])
    for count in (3, 5, 2):
        x = rng.normal(size=(count, 4)).astype(np.float32)
        varying.add([x], [x], 1)
        fixed.add([x], [x], count)
    assert (varying.agreement, varying.scores["y"].measure) == (None, "relative error")
    assert (fixed.agreement, fixed.scores["y"].measure) == (1.0, "top-1 agreement")


def test_low_accuracy_on_held_out_batches(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 32, name="first")])
    t = m.add("Relu", [m.conv(t, 32, 32, name="second")])
    model = m.model([("x", ["n", 8, 8, 8])], [m.add("Flatten", [m.conv(t, 32, 32, name="last")])])
    for recipe, expected in (("w2a8", ["low-sqnr", "low-agreement"]), ("w8a8", [])):
        data, path = images(40, batch=1), tmp_path / "e.onnx"
        evaluation = qe.quantize_and_evaluate(model, path, data, recipe, checks=FAST, keep_float="none")
        assert evaluation.split.is_held_out
        assert [code for code in codes(evaluation) if code.startswith("low-")] == expected
        if expected:
            assert "on 4 samples (95 % confidence: " in text_of(evaluation, "low-sqnr")
            assert "on 4 samples (95 % confidence: " in text_of(evaluation, "low-agreement")


def test_the_interval_of_the_sqnr_shrinks_with_more_samples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8)).astype(np.float32)
    y = x + 0.2 * rng.normal(size=x.shape).astype(np.float32)
    widths = []
    for count in (16, 100, 400):
        low, high = compared([x[:count]], [y[:count]]).sqnr_interval_db("y")
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]
    assert compared([x[:1]], [y[:1]]).sqnr_interval_db("y") is None
    assert compared([x], [x]).sqnr_interval_db("y") is None


def test_a_larger_file(tmp_path):
    m = Maker()
    small = m.model([("x", [1, 6, 16])], [m.matmul("x", 16, 2)])
    report = quantized(tmp_path, small, rows(32))
    assert report.nbytes_after > report.nbytes_before
    assert text_of(report, "larger-file").startswith("the quantized file is larger than the float file: ")
    assert json.loads(report.to_json())["warnings"] == [each._asdict() for each in report.warnings]
    assert f"warning: {report.warnings[0]}" in str(report)


@pytest.mark.parametrize(
    ("recipe", "size", "expected"), [("w8a16", 2, True), ("w8a8", 2, False), ("w8a16", 512, False)]
)
def test_a_larger_file_without_integer_kernels_is_no_gain(tmp_path, recipe, size, expected):
    m = Maker()
    model = m.model([("x", [1, 6, 16])], [m.matmul("x", 16, size, name="fc")])
    report = quantized(tmp_path, model, rows(32), recipe=recipe)
    assert (report.nbytes_after > report.nbytes_before) == (size == 2)
    assert report.layers[0].runs_on_integer_kernel == (recipe == "w8a8")
    assert ("no-gain" in codes(report)) == expected
    if expected:
        start = "the file is larger, and no layer runs on an integer kernel: use the float model. fc: "
        assert text_of(report, "no-gain").startswith(start)


def test_few_samples(tmp_path):
    assert text_of(quantized(tmp_path, chain(), images(15, batch=2)), "few-samples").startswith("only 30 samples: ")
    assert "few-samples" not in codes(quantized(tmp_path, chain(), images(15, batch=2), recipe="w8a16"))
    held_out = qe.quantize_and_evaluate(chain(), tmp_path / "e.onnx", images(32, batch=1), checks=FAST)
    assert held_out.result.samples < 32, "some are held out"
    assert codes(held_out.result) == ["few-samples"]
    assert codes(held_out) == []


def test_repeated_samples_count_once(tmp_path):
    once = images(1, batch=1)
    report = quantized(tmp_path, chain(), once * 40)
    assert text_of(report, "few-samples").startswith("only 1 distinct sample in 40: pass at least 32")
    assert report.samples == 40
    held_out = qe.quantize_and_evaluate(chain(), tmp_path / "e.onnx", images(20, batch=1) * 2, checks=FAST)
    assert text_of(held_out, "few-samples").startswith("only 20 distinct samples in 40: ")
    mixed = qe.quantize_and_evaluate(chain(), tmp_path / "e.onnx", images(33, batch=1) + once * 20, checks=FAST)
    assert "few-samples" not in codes(mixed), "33 are distinct"


def test_distinct_samples_of_parts_are_those_of_the_whole():
    feeds = [{"x": np.float32([[i % 7], [i % 5]])} for i in range(20)]
    whole = DataSummary()
    for feed in feeds:
        whole.add(feed)
    assert (whole.samples, whole.distinct) == (40, 7)
    for order in (range(20), range(19, -1, -1)):
        merged = DataSummary()
        for i in order:
            part = DataSummary()
            part.add(feeds[i])
            merged.merge(part)
        assert (merged.samples, merged.distinct, merged.digests) == (40, 7, whole.digests)
        assert (merged.ranges, merged.sizes) == (whole.ranges, whole.sizes)
    many = DataSummary()
    many.add({"x": np.arange(50, dtype=np.float32)})
    merged.merge(many)
    many.merge(whole)
    assert merged.distinct == merged.samples == 90
    assert vars(merged) == vars(many), "the order has no influence"


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_constant_data(tmp_path, value):
    data = [{"x": np.full((1, 8, 8, 8), value, np.float32)}] * 32
    assert f"the inputs are constant in all samples (x is {value:g})" in text_of(
        quantized(tmp_path, chain(), data), "constant-data"
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (np.zeros((1, 4), np.float32), "the largest input is constant in all samples (state is 0): pass real data"),
        (np.zeros((1, 2), np.float32), None),
        (np.zeros((1, 1), np.float32), None),
        (np.zeros((1, 4), np.int64), None),
        (np.float32([[0, 0, 0, 1]]), None),
    ],
    ids=["large", "equal", "small", "integers", "varying"],
)
def test_a_constant_input_beside_one_that_varies(state, expected):
    summary = DataSummary()
    summary.add({"x": np.float32([1, 2]), "state": state})
    m = Maker()
    model = m.model([("x", [2])], [m.matmul(m.add("Add", ["x", "x"]), 2, 2)])
    texts = [each.text for each in _data_warnings(plan(qo.prepare(model)), summary) if each.code == "constant-data"]
    assert texts == ([] if expected is None else [f"{expected} for calibration"])


def test_a_float_mask_of_ones_beside_token_ids_is_no_warning():
    summary = DataSummary()
    summary.add({"ids": np.array([[1, 7]]), "mask": np.ones((1, 2), np.float32)})
    m = Maker()
    graph_plan = plan(qo.prepare(m.model([("mask", [1, 2])], [m.matmul("mask", 2, 2)])))
    assert [each.code for each in _data_warnings(graph_plan, summary)] == ["few-samples"]


def pixels(kind, rng):
    """Random pixels of an image: bytes, bytes minus 128, or bytes after a resize."""
    integers = rng.integers(0, 256, (1, 8, 8, 8)).astype(np.float32)
    resized = 0.5 * (integers + integers[..., ::-1])
    resized.flat[0] = 254.5
    return {"bytes": integers, "signed": integers - 128, "resized": resized, "normalized": integers / 255}[kind]


@pytest.mark.parametrize(
    ("kind", "scale", "expected"),
    [
        ("bytes", 1.0, "integers from 0 to 255"),
        ("signed", 1.0, "integers from -128 to 127"),
        ("resized", 1.0, "numbers from "),
        ("normalized", 1.0, None),
        ("bytes", 0.01, None),
        ("signed", 0.01, None),
        ("resized", 0.01, None),
    ],
)
def test_pixels_that_were_not_normalized(tmp_path, kind, scale, expected):
    """The weights of the last three models are small enough for raw pixels."""
    rng = np.random.default_rng(0)
    report = quantized(tmp_path, chain(scale=scale), [{"x": pixels(kind, rng)} for _ in range(32)])
    assert ("unscaled-data" in codes(report)) == (expected is not None)
    if expected:
        assert f"input x holds {expected}" in text_of(report, "unscaled-data")


@pytest.mark.parametrize("kind", ["bytes", "signed", "resized"])
def test_a_normalization_after_the_first_layer_hides_the_size_of_its_weights(tmp_path, kind):
    m = Maker()
    ones, zeros = m.constant(np.ones(32, np.float32)), m.constant(np.zeros(32, np.float32))
    t = m.add("InstanceNormalization", [m.conv("x", 8, 32, name="first"), ones, zeros])
    model = m.model([("x", ["n", 8, 8, 8])], [m.conv(m.add("Relu", [t]), 32, 32, name="last")])
    rng = np.random.default_rng(0)
    report = quantized(tmp_path, model, [{"x": pixels(kind, rng)} for _ in range(32)])
    assert "unscaled-data" not in codes(report)


@pytest.mark.parametrize(("kind", "expected"), [("bytes", True), ("signed", False), ("resized", False)])
def test_numbers_that_a_matmul_reads_need_not_be_pixels(tmp_path, kind, expected):
    m = Maker()
    t = m.add("Relu", [m.matmul("x", 8, 64, name="first")])
    model = m.model([("x", ["n", 8, 8, 8])], [m.matmul(t, 64, 64, name="last")])
    rng = np.random.default_rng(0)
    report = quantized(tmp_path, model, [{"x": pixels(kind, rng)} for _ in range(32)])
    assert ("unscaled-data" in codes(report)) == expected


@pytest.mark.parametrize("kind", ["bytes", "signed", "resized"])
def test_a_model_that_normalizes_pixels_itself_is_no_warning(tmp_path, kind):
    m = Maker()
    t = m.add("Sub", [m.add("Mul", ["x", m.constant(np.float32(1 / 128))]), m.constant(np.float32(1))])
    model = m.model([("x", ["n", 8, 8, 8])], [m.conv(t, 8, 64, name="first")])
    rng = np.random.default_rng(0)
    data = [{"x": pixels(kind, rng)} for _ in range(32)]
    assert "unscaled-data" not in codes(quantized(tmp_path, model, data))


def mostly_float():
    """Five large layers that ONNX Runtime cannot quantize, and a small one that it can."""
    m = Maker()
    t = "x"
    for i in range(5):
        t = m.add("ConvTranspose", [t, m.constant(weights(8, 8, 3, 3, seed=i))], name=f"up{i}", pads=[1] * 4)
    return m.model([("x", [1, 8, 8, 8])], [m.conv(m.add("Relu", [t]), 8, 8, name="last")])


def test_layers_that_do_not_run_on_integer_kernels(tmp_path):
    report = quantized(tmp_path, mostly_float(), images(32, batch=1))
    text = text_of(report, "float-layers")
    assert text.startswith(
        "only 1 of 6 layers run on integer kernels; others hold 83% of the weights: up0: ONNX Runtime has"
    )
    assert text.endswith(
        "; 2 more: ONNX Runtime has no integer kernel for ConvTranspose, so only its weight is quantized"
    )
    skipped = quantized(tmp_path, chain(), images(32, batch=1), skip="second")
    assert "float-layers" not in codes(skipped), "the user chose it"


def test_the_largest_layers_are_named(tmp_path):
    m = Maker()
    t = "x"
    for i, side in enumerate((1, 5, 3, 9, 7)):
        weight = m.constant(weights(8, 8, side, side, seed=i))
        t = m.add("ConvTranspose", [t, weight], name=f"up{i}", pads=[side // 2] * 4)
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(m.add("Relu", [t]), 8, 8, name="last")])
    text = text_of(quantized(tmp_path, model, images(32, batch=1)), "float-layers")
    assert re.findall(r"up\d", text) == ["up3", "up4", "up1"]
    assert sum(map(int, re.findall(r"(\d+) more: ", text))) == 2


@pytest.mark.parametrize(("channels", "expected"), [(71, True), (73, False)])
def test_the_limit_of_float_layers(tmp_path, channels, expected):
    """The first layer has 576 weights, and 10.1 % or 9.9 % of all weights and of all multiplications."""
    m = Maker()
    t = m.add("ConvTranspose", ["x", m.constant(weights(8, 8, 3, 3))], name="up", pads=[1] * 4)
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(m.add("Relu", [t]), 8, channels, name="last")])
    report = quantized(tmp_path, model, images(32, batch=1))
    assert report.multiplications == {"up": 64 * 576, "last": 64 * 72 * channels}
    assert ("float-layers" in codes(report)) == expected


@pytest.mark.parametrize("pooled", [False, True])
def test_a_float_layer_with_many_multiplications_and_few_bytes(tmp_path, pooled):
    m = Maker()
    t = m.add("AveragePool", ["x"], kernel_shape=[16, 16], strides=[16, 16]) if pooled else "x"
    stem = m.add("ConvTranspose", [t, m.constant(weights(3, 16, 5, 5))], name="stem", pads=[2] * 4)
    t = m.add("Relu", [stem])
    t = m.add("Flatten", [m.add("GlobalAveragePool", [t])])
    t = m.add("Relu", [m.matmul(t, 16, 512, name="wide")])
    model = m.model([("x", [1, 3, 32, 32])], [m.matmul(t, 512, 512, name="last")])
    report = quantized(tmp_path, model, images(32, channels=3, side=32, batch=1))
    sizes = {line.name: line.nbytes_before for line in report.plan.layers}
    assert sizes["stem"] < 0.01 * sum(sizes.values())
    assert [layer.name for layer in report.layers if not layer.runs_on_integer_kernel] == ["stem"]
    if pooled:
        assert "float-layers" not in codes(report), "it has 2 % of the multiplications"
    else:
        assert text_of(report, "float-layers").startswith(
            "only 2 of 3 layers run on integer kernels; others do 82% of the multiplications: stem: ONNX Runtime"
        )


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_that_an_integer_kernel_would_slow_down_is_no_reason_to_warn(tmp_path, transposed):
    """The stem has most of the multiplications; a layer that lacks a kernel still counts, and is named alone."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 3, 16, 5, name="stem")])
    if transposed:
        t = m.add("ConvTranspose", [t, m.constant(weights(16, 16, 3, 3))], name="up", pads=[1] * 4)
    t = m.add("Flatten", [m.add("GlobalAveragePool", [t])])
    t = m.add("Relu", [m.matmul(t, 16, 512, name="wide")])
    model = m.model([("x", [1, 3, 32, 32])], [m.matmul(t, 512, 512, name="last")])
    report = quantized(tmp_path, model, images(32, channels=3, side=32, batch=1))
    assert report.layers[0].reason == "only 3 input channels: an integer kernel would be slower than float"
    if transposed:
        assert "multiplications: up: ONNX Runtime" in text_of(report, "float-layers")
        assert "stem" not in text_of(report, "float-layers")
    else:
        assert "float-layers" not in codes(report)


def test_weight_only_recipes_count_quantized_layers(tmp_path):
    m = Maker()
    t = m.add("GlobalAveragePool", [m.conv("x", 8, 16, 3, name="odd")])
    model = m.model([("x", [1, 8, 6, 6])], [m.matmul(m.add("Flatten", [t]), 16, 256, name="even")])
    report = quantized(tmp_path, model, None, recipe="w4a16-g8")
    assert text_of(report, "float-layers").startswith(
        "only 1 of 2 layers are quantized; others hold 22% of the weights: odd: "
    )
    evaluation = qe.quantize_and_evaluate(model, tmp_path / "e.onnx", recipe="w4a16-g8", checks=FAST)
    assert ("quantized", "1 of 2 layers") in evaluation.facts()
    assert "float-layers" not in codes(quantized(tmp_path, model, None, recipe="w8a16"))


def test_weights_of_3_bits_that_are_stored_in_4(tmp_path):
    recipe = dt.Recipe([dt.Rule(weight="int3/axis0", input="uint8/tensor/affine")])
    report = quantized(tmp_path, chain(), images(32, batch=1), recipe=recipe)
    text = text_of(report, "padded-weights")
    assert "weights of 3 layers are stored in a larger type; the first layer is first: " in text
    assert "ONNX files store its weight in 4 bits, not 3: no smaller than 4-bit weights" in text


def test_weights_of_4_bits_are_stored_in_4(tmp_path):
    report = quantized(tmp_path, chain(), images(32, batch=1), recipe="w4a8")
    assert "padded-weights" not in codes(report)
    notes = {line.name: line.note for line in plan(qo.prepare(conv_chain(), low_bits=True), "w4a8").layers}
    assert set(notes.values()) == {""}


def test_embeddings_of_4_bits_are_stored_in_8(tmp_path):
    m = Maker()
    rows = m.add("Gather", [m.constant(np.eye(16, dtype=np.float32)), "x"], name="words")
    model = m.model([("x", ["n", 4], TensorProto.INT64)], [m.matmul(rows, 16, 16, name="fc")])
    rules = [dt.Rule(weight="int4/axis0"), dt.Rule(types="Embedding", weight="int4/axis0")]
    text = text_of(quantized(tmp_path, model, None, recipe=dt.Recipe(rules)), "padded-weights")
    assert "the first layer is words: ONNX files store its weight in 8 bits, not 4" in text


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        (Timing(1.0, 1.5, 50, 1, 0.02), True),
        (Timing(1.0, 1.04, 50, 1, 0.0), False),
        (Timing(1.0, 1.2, 50, 1, 0.3), False),
        (Timing(1.0, 0.5, 50, 1, 0.02), False),
    ],
    ids=["slower", "equal", "within the spread", "faster"],
)
def test_a_slower_model(tmp_path, monkeypatch, timing, expected):
    monkeypatch.setattr(evaluation_module, "time_models", lambda *_args, **_options: timing)
    checks = FAST._replace(time=True)
    evaluation = qe.quantize_and_evaluate(chain(), tmp_path / "q.onnx", images(32, batch=1), checks=checks)
    assert codes(evaluation) == (["slower"] if expected else [])
    facts = dict(qr.build_from_evaluation(evaluation).facts)
    assert ("Warning: slower" in facts) == expected
    if expected:
        assert "1.00 ms -> 1.50 ms (1.5x slower, 1 thread, 50 runs, ±2 %)" in facts["Warning: slower"]
        assert facts["Warning: slower"].endswith("quantizing does not make this model faster on this CPU")


def test_a_slower_weight_only_model_gets_another_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_module, "time_models", lambda *_args, **_options: Timing(1.0, 1.5, 50, 1))
    checks = FAST._replace(time=True)
    evaluation = qe.quantize_and_evaluate(chain(), tmp_path / "q.onnx", recipe="w8a16", checks=checks)
    assert text_of(evaluation, "slower").endswith("not faster: for speed, try --recipe w8a8")


def test_the_page_lists_every_code():
    page = (Path(__file__).parents[2] / "docs/howto/cli.md").read_text(encoding="utf-8")
    section = page.partition("**Warnings.**")[2].partition("**JSON.**")[0]
    listed = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
    assert listed == warning_codes()
    sources = [*map(inspect.getsource, (quality_warnings, evaluation_module, speed_advice, program_file))]
    written = set(re.findall(r"QuantizeWarning\(\s*\"([a-z-]+)\"", "".join(sources)))
    assert written == set(listed)


def test_warnings_print_as_text():
    assert str(QuantizeWarning("slower", "a text")) == "a text"
