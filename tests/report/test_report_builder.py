"""Reports of files: every metric is compared with an independent computation, and unknown values are None."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from report_models import (
    example_mix,
    example_sensitivity,
    example_verification,
    feeds,
    float_model,
    full_report,
    quantized,
    sites_model,
)

import detent as dt
import detent.onnx as qo
import detent.report as qr
from detent import metrics
from detent.errors import DtypeError, FileFormatError, ShapeError, UnsupportedError
from detent.onnx_model import Provenance, array_of, load, make_session, save
from detent.onnx_model.qdq_reader import open_quantized
from detent.report.tensor_stats import Distribution, QuantizerStats, code_histogram


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A model whose weights are only rounded, its file and the report of quantize."""
    folder = tmp_path_factory.mktemp("building")
    options = {"equalize": False, "smooth": False, "bias_correction": False, "keep_float": "none"}
    return quantized(folder, prefer="accuracy", **options)


def by_name(page):
    return {layer.name: layer for layer in page.layers}


# Histograms


@pytest.mark.parametrize("seed", range(4))
def test_histogram_counts_what_is_in_its_bins(seed):
    rng = np.random.default_rng(seed)
    parts = [(rng.normal(size=300) * 10.0**power).astype(np.float32) for power in rng.integers(-3, 4, size=5)]
    seen = Distribution()
    for part in parts:
        seen.add(part)
    values = np.concatenate(parts).astype(np.float64)
    histogram = seen.histogram()
    edges = histogram.low + histogram.width * np.arange(len(histogram.counts) + 1)
    expected = [int(np.count_nonzero((values >= a) & (values < b))) for a, b in pairwise(edges)]
    assert list(histogram.counts) == expected
    assert sum(histogram.counts) == values.size == seen.count
    assert (seen.minimum, seen.maximum) == (values.min(), values.max())


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0, 5.0], [1e30, -1e30], [1e-40, 2e-40], [3.4e38, -3.4e38], [1e6, 1e6 + 0.5]],
    ids=["zero", "constant", "huge", "subnormal", "largest", "narrow"],
)
def test_histogram_of_nasty_values(values):
    seen = Distribution()
    seen.add(np.float32(values))
    seen.add(np.float32([]))
    seen.add(np.float32([np.nan, np.inf]))
    histogram = seen.histogram()
    assert sum(histogram.counts) == len(values)
    assert seen.not_finite == 2
    assert histogram.low <= float(min(np.float32(values))) <= float(max(np.float32(values))) <= histogram.high


def test_histogram_of_nothing():
    seen = Distribution()
    seen.add(np.float32([np.nan]))
    assert seen.histogram() is None
    assert code_histogram(np.array([]), 0) is None


def test_codes_share_bins():
    histogram = code_histogram(np.arange(255), -127)
    assert len(histogram.counts) == 64
    assert sum(histogram.counts) == 254 * 255 // 2
    assert (histogram.low, histogram.width, histogram.of) == (-127.5, 4.0, "codes")


# Activations


def test_activation_figures_are_those_of_the_metrics():
    data = [np.random.default_rng(i).normal(scale=30, size=500).astype(np.float32) for i in range(3)]
    page = qr.build(sites_model(), data)
    tensor = page.others[0]
    params = dt.QuantParams("uint8/tensor/affine", 0.5, 3)
    whole = np.concatenate(data)
    q = dt.quantize(whole, params)
    assert tensor.clip_fraction == pytest.approx(metrics.clip_fraction(whole, params), rel=1e-5)
    assert tensor.sqnr_db == pytest.approx(metrics.sqnr_db(whole, q.dequantize()), rel=1e-5)
    assert tensor.codes_used / tensor.codes_available == pytest.approx(metrics.code_usage(q))
    assert (tensor.clip_low, tensor.clip_high) == (-1.5, 126.0)
    assert tensor.minimum == pytest.approx(whole.min(), rel=1e-5)
    assert tensor.elements == whole.size == sum(tensor.histogram.counts)
    assert page.batches == 3


def test_without_data_only_the_range_is_known():
    tensor = qr.build(sites_model()).others[0]
    assert (tensor.clip_low, tensor.clip_high, tensor.codes_available) == (-1.5, 126.0, 256)
    assert tensor.sqnr_db is tensor.clip_fraction is tensor.codes_used is tensor.histogram is tensor.minimum is None


def test_a_clip_of_the_models_own_clips_nothing():
    data = [np.float32([-50, 1, 2, 50])]
    tensor = qr.build(sites_model(bound=(0.0, 6.0)), data).others[0]
    assert tensor.name == "x_clipped"
    assert tensor.clip_fraction == 0


def test_a_clip_of_the_quantizer_is_part_of_it():
    model = sites_model(bound=(-1.5, 6.0))
    Provenance(activations={"Q": "x"}).write(model)
    tensor = qr.build(model, [np.float32([-50, 1, 2, 50])]).others[0]
    assert tensor.name == "x"
    assert tensor.clip_fraction == 0.5
    assert (tensor.clip_low, tensor.clip_high, tensor.codes_available) == (-1.5, 6.0, 16)


def test_non_finite_values_are_noted():
    artifact = open_quantized(sites_model())
    watched = QuantizerStats(artifact, artifact.quantize_nodes[0])
    watched.reading().take({"x": np.float32([1, 2, np.inf]), "q": np.uint8([5, 7, 255])})
    tensor = watched.result()
    assert tensor.note == "NaN or infinite values: 1"
    assert sum(tensor.histogram.counts) == 2
    assert tensor.codes_used == 3
    assert not np.isfinite(tensor.sqnr_db)


def test_at_most_eight_batches_are_read():
    read = []

    def batches():
        for i in range(20):
            read.append(i)
            yield np.float32([i])

    page = qr.build(sites_model(), batches())
    assert page.batches == 8
    assert len(read) <= 9


# Weights


def test_weight_figures_are_those_of_the_metrics(example):
    model, path, result = example
    page = qr.build(path, feeds(), source=model, result=result)
    file = load(path)
    about = Provenance.read(file)
    codes_of = {layer: codes for codes, layer in about.weights.items()}
    tensors = {tensor.name: array_of(tensor) for tensor in file.graph.initializer}
    floats = {node.name: node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    weights = {tensor.name: array_of(tensor) for tensor in model.graph.initializer}
    quantized_model = qo.load_quantized(path)
    assert len(page.layers) == 3
    for layer in page.layers:
        codes = codes_of[layer.name]
        decoded = quantized_model.weights[codes].dequantize()
        assert layer.weight.sqnr_db == pytest.approx(metrics.sqnr_db(weights[floats[layer.name]], decoded), rel=1e-5)
        assert layer.weight.codes_used == np.unique(tensors[codes]).size
        assert layer.weight.codes_available == 255
        shift = 128 if tensors[codes].dtype == np.uint8 else 0
        ends = int(tensors[codes].min()) - shift, int(tensors[codes].max()) - shift
        assert (layer.weight.code_low, layer.weight.code_high) == ends
        assert layer.weight.spec.startswith("int8/axis")
        assert sum(layer.weight.histogram.counts) == decoded.size
        assert layer.nbytes_float == 4 * decoded.size
        assert decoded.size < layer.nbytes < 2 * layer.nbytes_float


def test_weights_with_different_codes_are_changed(example, tmp_path):
    model, path, _ = example
    same, other = qr.build(path), quantized(tmp_path, "w4a8", model, keep_float="none")[1]
    both = qr.compare(same, qr.build(other))
    [narrow] = [each for each in both.layers if each.b.weight.codes_text == "codes -7..7"]  # two of three keep 8 bits
    assert narrow.a.weight.codes_text == "codes -127..127"
    assert narrow.is_changed
    assert narrow.a.weight.digest != narrow.b.weight.digest
    assert not any(each.is_changed for each in qr.compare(same, qr.build(path)).layers)
    assert len({layer.weight.digest for layer in same.layers}) == len(same.layers)


def test_the_source_gives_the_same_statistics(example):
    model, path, result = example
    with_result, alone = (qr.build(path, feeds(), source=model, result=each) for each in (result, None))
    for layer in with_result.layers:
        other = by_name(alone)[layer.name]
        assert other.weight.sqnr_db == layer.weight.sqnr_db
        assert other.output_sqnr_db == layer.output_sqnr_db
        assert other.kernel == layer.kernel
        assert other.status == layer.status


def test_other_weights_are_not_compared(example):
    _, path, _ = example
    page = qr.build(path, feeds(), source=float_model(seed=1))
    assert {layer.weight.sqnr_db for layer in page.layers} == {None}
    assert [layer.name for layer in page.layers if layer.output_sqnr_db is not None] == ["fc2"]  # the output itself


@pytest.mark.parametrize("factor", [1.25, 0.8, -1.0])
def test_scaled_weights_are_not_compared(example, factor):
    model, path, _ = example
    scaled = type(model)()
    scaled.CopyFrom(model)
    weight = scaled.graph.initializer[0]
    weight.raw_data = (array_of(weight) * np.float32(factor)).tobytes()
    layers = by_name(qr.build(path, source=scaled))
    assert layers["fc0"].weight.sqnr_db is None
    assert layers["fc1"].weight.sqnr_db is not None


def test_smoothed_weights_are_compared_with_the_smoothed_float_weights(tmp_path):
    model, path, result = quantized(tmp_path, effort="fast")  # SmoothQuant is not compared at the outputs
    assert any("smoothed" in step for step in result.steps)
    with_result, alone = (by_name(qr.build(path, feeds(), source=model, result=each)) for each in (result, None))
    smoothed = [name for name, layer in with_result.items() if "smoothed" in layer.weight.name]
    assert smoothed
    for name in smoothed:
        assert 20 < with_result[name].weight.sqnr_db < 60
        assert alone[name].weight.sqnr_db is None


# Layers


def test_result_sqnr_is_that_of_both_models(example):
    model, path, _ = example
    page = qr.build(path, feeds(), source=model)
    file, float_file = load(path), load(model)
    for each in (file, float_file):
        each.graph.output.add().name = "t0"
    sums = np.zeros(2)
    for feed in feeds():
        a, b = (make_session(each, optimize=False).run(["t0"], feed)[0] for each in (float_file, file))
        sums += (a.astype(np.float64) ** 2).sum(), ((a - b).astype(np.float64) ** 2).sum()
    assert by_name(page)["fc0"].output_sqnr_db == pytest.approx(10 * np.log10(sums[0] / sums[1]), rel=1e-4)
    assert page.output_sqnr_db["y"] == by_name(page)["fc2"].output_sqnr_db
    assert 0.9 <= page.agreement <= 1


def test_layers_come_by_noise_share(example):
    model, path, _ = example
    page = qr.build(path, feeds(), source=model)
    assert page.noise_share_basis == "output"
    shares = [layer.noise_share for layer in page.layers]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    sqnr = [layer.output_sqnr_db for layer in page.layers]
    assert sqnr == sorted(sqnr)


def test_noise_share_has_the_best_available_basis(example):
    model, path, result = example
    given = {"source": model, "result": result}
    bases = [
        qr.build(path, feeds(), **given, sensitivity=example_sensitivity()).noise_share_basis,
        qr.build(path, feeds(), **given).noise_share_basis,
        qr.build(path, **given).noise_share_basis,
        qr.build(path, feeds()).noise_share_basis,
        qr.build(path).noise_share_basis,
    ]
    assert bases == ["sensitivity", "output", "weight", "input", "none"]


def test_sensitivity_ranks_by_the_option_of_the_layer(example):
    _, path, result = example
    sensitivity = example_sensitivity()
    loud = replace(
        sensitivity.layers[0], noise={**sensitivity.layers[0].noise, "int4/axis0": 99.0}
    )  # which no layer has
    sensitivity = replace(sensitivity, layers=(loud, *sensitivity.layers[1:]))
    page = qr.build(path, result=result, sensitivity=sensitivity, mix=example_mix())
    assert [layer.name for layer in page.layers] == ["fc2", "fc1", "fc0"]
    assert [layer.noise_share for layer in page.layers] == pytest.approx([4 / 7, 2 / 7, 1 / 7], rel=1e-5)
    assert page.mix.measured_sqnr_db == 20.25
    assert page.mix.options["fc0"] == "int8/axis0"


def test_real_sensitivity_fits(example):
    import detent.sensitivity as qs

    model, path, result = example
    sensitivity = qs.measure(model, feeds(), widths=(4, 8), samples=16)
    smallest = sensitivity.curve()[0][0]
    mix = sensitivity.choose(smallest + 200)
    page = qr.build(path, result=result, sensitivity=sensitivity, mix=mix)
    assert page.noise_share_basis == "sensitivity"
    assert len(page.sensitivity.layers) == 3
    assert page.sensitivity == sensitivity
    assert page.mix == mix
    assert qr.Report.from_json(page.to_json()) == page
    assert "Predicted" in page.to_html()


def test_float_layers_say_why_and_come_last(tmp_path):
    model, path, result = quantized(tmp_path, skip=["fc1"])
    for given in ({"result": result}, {}):
        page = qr.build(path, feeds(), source=model, **given)
        last = page.layers[-1]
        assert (last.name, last.status, last.weight, last.noise_share) == ("fc1", "float", None, None)
        assert last.reason
        assert page.counts[:2] == (3, 2)
        assert last.nbytes == last.nbytes_float == 16 * 16 * 4


def test_integer_kernels_are_counted(example):
    _, path, result = example
    page = qr.build(path)
    assert page.counts[2] == sum(layer.runs_on_integer_kernel for layer in result.layers)
    assert {layer.kernel for layer in page.layers} == {layer.kernel for layer in result.layers}


@pytest.mark.parametrize("recipe", ["w4a8", "w8a16", "w4a4"])
def test_other_recipes(tmp_path, recipe):
    model, path, result = quantized(tmp_path, recipe)
    page = qr.build(path, feeds(), source=model, result=result)
    assert page.counts[1] == 3
    assert page.reproduction.recipe.startswith(recipe)
    assert qr.Report.from_json(page.to_json()) == page
    levels = {layer.weight.codes_available for layer in page.layers}
    assert levels <= {15, 16, 129, 255, 256}
    if recipe.endswith("a16"):
        assert all(layer.input is None for layer in page.layers)
    if recipe == "w4a4":
        assert {layer.input.codes_available for layer in page.layers} == {16, 256}


def test_groups(tmp_path):
    model = float_model(widths=(128, 128, 5))
    result = qo.quantize(model, tmp_path / "a.onnx", recipe="w4a16-g32", progress=False)
    data = feeds(width=128)
    page = qr.build(tmp_path / "a.onnx", data, source=model, result=result)
    assert [layer.status for layer in page.layers] == ["quantized", "quantized"]
    for layer in page.layers:
        assert layer.weight.scales == layer.weight.elements // 32
        assert 10 < layer.weight.sqnr_db < 30
        assert layer.weight.codes_available in {15, 16}


# Files of other tools


def test_a_foreign_file(example, tmp_path):
    model, path, _ = example
    foreign = load(path)
    del foreign.metadata_props[:]
    save(foreign, tmp_path / "foreign.onnx")
    page = qr.build(tmp_path / "foreign.onnx", feeds(), source=model)
    own = qr.build(path, feeds(), source=model)
    assert page.reproduction.written_by == page.reproduction.recipe_toml == ""
    assert page.reproduction.origin == "other"
    for layer in own.layers:
        other = by_name(page)[layer.name]
        assert other.status == layer.status
        assert other.weight.sqnr_db == layer.weight.sqnr_db
        assert other.input.clip_fraction == layer.input.clip_fraction
    assert "another tool" in page.to_html()
    assert "--skip" not in page.to_html()
    assert "--skip" in own.to_html()


def test_names_of_modules_name_layers(example):
    _, path, _ = example
    file = load(path)
    about = Provenance.read(file)
    names = {codes: f"body.{layer}.weight" for codes, layer in about.weights.items()}
    activations = dict.fromkeys(about.activations, "body.input_quantizer")
    Provenance(names, activations, about.target, about.recipe, about.made_by).write(file)  # as an export writes it
    page = qr.build(file, feeds())
    assert {layer.name for layer in page.layers} == {"body.fc0", "body.fc1", "body.fc2"}
    assert page.reproduction.origin == "torch"
    assert {layer.status for layer in page.layers} == {layer.status for layer in qr.build(path).layers}
    assert "--skip" not in page.to_html()


def test_layers_with_dynamic_quantization(tmp_path):
    model, path, result = quantized(tmp_path, "w8a8-dynamic")
    page = qr.build(path, feeds(), source=model, result=result)
    layers = [layer for layer in page.layers if layer.type == "MatMulInteger"]
    assert (
        {layer.name for layer in layers} == {layer.name for layer in result.layers if "dynamic" in layer.input} != set()
    )
    assert {layer.status for layer in layers} == {"integer"}
    assert all("quantized dynamically" in layer.note for layer in layers)
    assert all(layer.output_sqnr_db > 15 for layer in layers)
    assert qr.Report.from_json(page.to_json()) == page


@pytest.mark.slow
def test_a_file_of_torch(tmp_path):
    import torch
    from torch import nn

    import detent.torch as qt

    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(6, 8))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(8, 3))
    prepared = qt.prepare(model, "w4a8")
    x = torch.randn(16, 6)
    with qt.calibrating(prepared):
        prepared(x)
    prepared.eval()
    qt.export_onnx(prepared, x[:2], tmp_path / "net.onnx")
    page = qr.build(tmp_path / "net.onnx", [x.numpy()], verification=example_verification())
    assert {layer.name for layer in page.layers} == {"body", "head"}
    assert page.reproduction.origin == "torch"
    assert page.reproduction.recipe == "w4a8"
    assert all(layer.input.clip_fraction is not None for layer in page.layers)
    assert page.agreement == 0.96875
    assert page.output_sqnr_against == "the source model of dt.verify"
    assert "--skip" not in page.to_html()


def test_nodes_of_one_name_get_unique_names(example):
    _, path, _ = example
    file = load(path)
    del file.metadata_props[:]
    for node in file.graph.node:
        node.name = "same" if node.op_type == "MatMul" else node.name
    page = qr.build(file)
    assert {layer.name for layer in page.layers} == {"same", "same#2", "same#3"}
    assert len({layer.weight.shape for layer in page.layers}) == 3


def test_a_file_that_no_runtime_takes(example):
    _, path, _ = example
    file = load(path)
    file.opset_import.add(domain="elsewhere", version=1)
    file.graph.node.add(op_type="Odd", domain="elsewhere", input=["y"], output=["z"], name="odd")
    file.graph.output[0].name = "z"
    page = qr.build(file)
    assert any("kernels of layers are unknown" in note for note in page.notes)
    assert {layer.status for layer in page.layers} == {"quantized"}
    assert all(layer.weight.codes_used for layer in page.layers)
    with pytest.raises(UnsupportedError) as caught:
        qr.build(file, feeds())
    assert str(caught.value).count("ONNX Runtime failed") == 1


def test_errors_of_the_data_are_the_users_own(example):
    def broken():
        yield feeds()[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match=r"^the disk is gone$"):
        qr.build(example[1], broken())


# Sizes, reproduction, verification, errors


def test_sizes_add_up(example):
    _, path, result = example
    page = qr.build(path, result=result)
    assert sum(part.nbytes for part in page.sizes) == page.nbytes_after == path.stat().st_size
    codes = next(part.nbytes for part in page.sizes if part.name == "codes of weights")
    assert codes == 12 * 16 + 16 * 16 + 16 * 5
    assert page.nbytes_before == result.nbytes_before


def test_reproduction(example):
    import hashlib

    _, path, _ = example
    reproduction = qr.build(path, command="detent quantize a.onnx").reproduction
    assert reproduction.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert dt.Recipe.from_toml(reproduction.recipe_toml) == dt.Recipe.preset("w8a8")
    assert {"detent", "numpy", "onnx", "onnxruntime"} <= set(reproduction.versions)
    assert reproduction.command == "detent quantize a.onnx"
    assert len(reproduction.data) == 64


def test_verification_is_shown(example):
    _, path, _ = example
    page = qr.build(path, verification=example_verification(differing=7))
    assert not page.verification.ok
    assert page.verification.differing_codes == 7
    assert "fc0_q[0, 3] is 18, expected 17" in str(page.verification.first_difference)
    text = page.to_html()
    assert "Failed" in text
    assert "not ok: fc0_Q: another code" in text


def test_a_source_with_other_ends_is_a_note(example):
    _, path, _ = example
    other = float_model()
    other.graph.input[0].name = other.graph.node[0].input[0] = "z"
    page = qr.build(path, feeds(), source=other)
    assert any("its inputs differ from the file's inputs" in note for note in page.notes)
    assert page.output_sqnr_db == {}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: qr.build(float_model()), UnsupportedError, "no QuantizeLinear"),
        (lambda path: qr.build(path.with_name("none.onnx")), FileFormatError, "no such file"),
        (lambda path: qr.build(path, [np.zeros((1, 3), np.float32)]), ShapeError, "expects (any, 12)"),
        (lambda path: qr.build(path, [np.zeros((1, 12), np.float16)]), DtypeError, "float16"),
        (lambda path: qr.build(path, verification="ok"), DtypeError, "expected the result of dt.verify"),
        (lambda path: qr.build(path, tables=[("a", ["b"], [])]), DtypeError, "in tables, expected qr.Table"),
    ],
    ids=["float", "missing", "shape", "dtype", "verification", "tables"],
)
def test_bad_input_is_rejected(example, make, error, words):
    with pytest.raises(error) as caught:
        make(example[1])
    assert words in str(caught.value)


def test_the_file_and_the_source_stay_as_they_are(example):
    model, path, result = example
    before = model.SerializeToString(), path.read_bytes(), result.plan.model.SerializeToString()
    qr.build(path, feeds(), source=model, result=result)
    assert before == (model.SerializeToString(), path.read_bytes(), result.plan.model.SerializeToString())


def test_a_full_report_is_the_same_every_time(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (full_report(tmp_path / name) for name in "ab")
    assert first.layers == second.layers
    assert replace(first, steps=()).to_json() == replace(second, steps=()).to_json()
