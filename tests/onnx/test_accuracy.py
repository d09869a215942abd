"""Accuracy passes, each on a model that needs it."""

from unittest.mock import Mock

import numpy as np
import pytest
from onnx_graphs import Maker, conv_chain, images, operators, rows, weights

import detent as dt
import detent.onnx as qo
from detent.onnx import accuracy_passes, calibration, equalization, quantizer_choice, range_search, smoothquant
from detent.onnx.bias_correction import corrected_biases
from detent.onnx.decisions import Equalized, QuantizerPlacement, Smoothed
from detent.onnx.fast_kernels import multiplications
from detent.onnx.float_fallback import NoiseByLayer, choose_float
from detent.onnx.graph_plan import LayerPlan
from detent.onnx.layer_error import IsolatedLayers, ReferenceOutputs
from detent.onnx.pipeline import output_sqnr
from detent.onnx_model import make_session


def choose_params(plan, seen, clipped=None):
    return calibration.choose_params(plan.placements(seen.ranges), seen, clipped)


def choose_clipped(plan, seen):
    return calibration.choose_clipped(plan, seen, plan.placements(seen.ranges), IsolatedLayers(plan, seen.samples))


def smooth(plan, feeds):
    """Return the smoothed model and the chosen factors."""
    chosen = smoothquant.choose(plan, feeds)
    return smoothquant.apply(qo.load(plan.model), chosen), list(chosen)


def equalize(plan, feeds):
    """Return the equalized model and the chosen factors."""
    chosen = equalization.choose(plan, feeds)
    return equalization.apply(qo.load(plan.model), chosen), list(chosen)


def outlying(width=32, folded=True):
    """A matmul after a normalization, whose input has outliers in some channels."""
    m = Maker()
    gain = np.ones(width, np.float32)
    gain[[3, 17]] = 60
    norm = m.add("LayerNormalization", ["x", m.constant(gain), m.constant(np.zeros(width, np.float32))], axis=-1)
    y = m.matmul(norm, width, 16, name="fc")
    outputs = [y] if folded else [y, norm]
    return m.model([("x", [1, "n", width])], outputs)


@pytest.mark.parametrize("folded", [True, False])
def test_smoothing_moves_outliers_into_the_weight(folded):
    model, feeds = outlying(folded=folded), rows(width=32, length=64)
    plan = qo.plan(qo.prepare(model))
    smoothed, done = smooth(plan, feeds)
    assert [each.folded for each in done] == [folded]
    assert done[0].gain_db > 6
    kinds = [node.op_type for node in smoothed.graph.node]
    assert kinds == (["LayerNormalization", "MatMul"] if folded else ["LayerNormalization", "Mul", "MatMul"])
    expected, got = (make_session(each).run(None, feeds[0]) for each in (model, smoothed))
    for old, new in zip(expected, got, strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(old).max())


def test_few_rows_are_not_smoothed():
    """The largest of eight numbers is chance: its factors do not generalize."""
    m = Maker()
    model = m.model([("x", ["N", 288])], [m.matmul("x", 288, 4, name="head")])
    few = [{"x": np.random.default_rng(i).normal(size=(1, 288)).astype(np.float32)} for i in range(8)]
    _, done = smooth(qo.plan(qo.prepare(model)), few)
    assert done == []


def test_a_channel_of_few_values_is_not_equalized():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, size=1, name="squeeze")])
    model = m.model([("x", ["N", 8, 1, 1])], [m.conv(t, 64, 8, size=1, name="excite")])
    plan = qo.plan(qo.prepare(model))
    _, few = equalize(plan, images(side=1))
    assert few == []


def test_smoothing_in_the_whole_job(tmp_path):
    model, feeds = outlying(), rows(width=32, length=64)
    plain, smoothed = (
        qo.quantize(model, tmp_path / "q.onnx", feeds, smooth=on, keep_float="none", progress=False)
        for on in (False, True)
    )
    assert smoothed.output_sqnr_db > plain.output_sqnr_db + 5
    assert smoothed.steps[0].startswith("smoothed")


def test_inputs_without_outliers_are_not_smoothed():
    m = Maker()
    model = m.model([("x", [1, "n", 16])], [m.matmul("x", 16, 16, name="fc")])
    even = [{"x": np.random.default_rng(0).uniform(-1, 1, (1, 400, 16)).astype(np.float32)}]
    _, done = smooth(qo.plan(qo.prepare(model)), even)
    assert not done


@pytest.mark.parametrize("zero", ["data", "weight"])
def test_tensors_without_error_are_not_smoothed(zero):
    m = Maker()
    weight = np.zeros((32, 16), np.float32) if zero == "weight" else None
    model = m.model([("x", [1, "n", 32])], [m.matmul("x", 32, 16, name="fc", weight=weight)])
    feeds = [{"x": feed["x"] * (zero == "weight")} for feed in rows(width=32, length=64)]
    assert smoothquant.choose(qo.plan(qo.prepare(model)), feeds) == ()


@pytest.mark.parametrize("zero", ["data", "weight"])
def test_tensors_without_error_are_not_equalized(zero):
    m = Maker()
    uneven = weights(16, 8, 1, 1) * np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv("x", 8, 16, 1, weight=uneven, bias=False, name="before")])
    weight = np.zeros((4, 16, 3, 3), np.float32) if zero == "weight" else None
    model = m.model([("x", [2, 8, 16, 16])], [m.conv(t, 16, 4, weight=weight, name="behind")])
    assert equalization.choose(qo.plan(qo.prepare(model)), images(side=16, scale=zero == "weight")) == ()


def test_bias_correction_removes_the_mean_error():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    t = m.add("Relu", [m.conv(t, 16, 16, name="second")])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="last")])
    feeds = images(6)
    plan = qo.plan(qo.prepare(model, low_bits=True), dt.Recipe.preset("w4a8"))
    seen = qo.calibrate(plan, feeds)
    params = choose_params(plan, seen)
    biases = corrected_biases(plan, params, IsolatedLayers(plan, seen.samples), len(seen.samples))
    assert set(biases) == {"first", "second", "last"}
    arrays = {name: each.bias for name, each in biases.items()}
    before, after = (
        output_sqnr(model, qo.insert(plan, seen, params=params, biases=each), feeds) for each in ({}, arrays)
    )
    assert next(iter(after.values())) > next(iter(before.values()))
    means = []
    for each in ({}, arrays):
        session = make_session(qo.insert(plan, seen, params=params, biases=each))
        off = [session.run(None, feed)[0] - make_session(model).run(None, feed)[0] for feed in feeds]
        means.append(np.abs(np.mean(off, axis=(0, 1, 3, 4))).mean())
    assert means[1] < 0.7 * means[0]


def hurting():
    """One small layer with channels of very different size that all matter."""
    m = Maker()
    spread = weights(16, 1, 3, 3) * np.logspace(-3, 1, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv("x", 16, 16, group=16, weight=spread, bias=False, name="spread")])
    mixed = weights(16, 16, 1, 1) / np.logspace(-3, 1, 16, dtype=np.float32).reshape(1, -1, 1, 1)
    t = m.conv(t, 16, 16, 1, weight=mixed, name="mix")
    for i, channels in enumerate((16, 64, 64)):
        t = m.conv(m.add("Relu", [t]), channels, 64, name=f"wide{i}")
    return m.model([("x", [2, 16, 8, 8])], [t])


def test_float_fallback_keeps_the_noisiest_layers_in_float(tmp_path):
    model, feeds = hurting(), images(4, channels=16)
    plan = qo.plan(qo.prepare(model))
    seen = qo.calibrate(plan, feeds)
    noise = NoiseByLayer(plan, choose_params(plan, seen), seen.samples[:1])
    shares = choose_float(noise, plan, multiplications(plan, feeds[0]), lambda names: plan.without(names, "noisy"))
    assert next(iter(shares)) in {"spread", "mix"}
    assert sum(shares.values()) <= 1
    assert shares[next(iter(shares))] >= 0.25
    others = {"progress": False, "bias_correction": False, "equalize": False}
    kept = qo.quantize(model, tmp_path / "a.onnx", feeds, **others)
    all_in = qo.quantize(model, tmp_path / "b.onnx", feeds, keep_float="none", **others)
    assert kept.output_sqnr_db > all_in.output_sqnr_db + 3
    assert any("noise" in step for step in kept.steps)
    assert sum(bool(layer.reason) for layer in kept.layers) <= 5


def test_float_fallback_searches_again_after_each_layer():
    noise = Mock(spec=NoiseByLayer, count=1)
    alone = {"a": 8.0, "b": 1.0, "c": 0.4, "d": 0.1}  # b and c stand out only after a is in float
    noise.noise_without.side_effect = lambda names=(), *_: sum(alone.values()) - sum(alone[name] for name in names)
    noise.noise_of.side_effect = lambda changed, _limit: noise.noise_without(changed.names)
    noise.noise.side_effect = lambda names: sum(alone[name] for name in names)
    noise.worst.side_effect = lambda share, kept: [
        name for name in alone if alone[name] >= share * noise.noise_without(kept)
    ]
    rows = [LayerPlan(name, "Conv", nbytes_before=1) for name in alone]
    plan = Mock(layers=[*rows, LayerPlan("large", "Conv")], nbytes_before=1000)

    def replan(names):
        return Mock(names=names, quantized=set(alone) - set(names))

    work = {**dict.fromkeys(alone, 1.0), "large": 1000.0}
    shares = choose_float(noise, plan, work, replan)
    assert list(shares) == ["a", "b", "c"], "one layer remains quantized"
    assert sum(shares.values()) == pytest.approx(9.4 / 9.5)
    noise.count = 1000  # 1.5, the noise without a, is 28 dB below 1000 outputs; 0.5, without a and b, 33 dB
    assert list(choose_float(noise, plan, work, replan)) == ["a", "b"], "then the noise is negligible"
    noise.count = 1
    plan.nbytes_before = 25  # a tenth of it holds two layers
    assert list(choose_float(noise, plan, work, replan)) == ["a", "b"]
    # The bytes of layers that were kept in float before count.
    assert list(choose_float(noise, plan, work, replan, ["d"])) == ["a"]
    assert not choose_float(noise, plan, work, replan, ["c", "d"])


def test_ranges_are_searched_again_without_the_layers_of_float_fallback(monkeypatch):
    searched = []

    def search_ranges(noise, placements, *arguments):
        searched.append({each.tensor for each in placements})
        return range_search.search_ranges(noise, placements, *arguments)

    monkeypatch.setattr(quantizer_choice, "search_ranges", search_ranges)
    model, feeds, options = hurting(), images(8, channels=16), {"equalize": False, "bias_correction": False}
    decisions = qo.decide(model, feeds, progress=False, **options)
    kept = [layer.name for layer in decisions.layers if "float fallback" in layer.reason]
    assert kept
    assert len(searched) == 2, "before and after the fallback"
    assert set(decisions.ranges) <= searched[1] <= searched[0]
    for name, value in (("MAX_REPEATED_NOISE", 0.0), ("NEGLIGIBLE_NOISE", 1.0)):  # much noise is left, or little
        searched.clear()
        with monkeypatch.context() as patch:
            patch.setattr(quantizer_choice, name, value)
            qo.decide(model, feeds, progress=False, **options)
        assert len(searched) == 1


@pytest.mark.parametrize(
    ("work", "nbytes", "expected"), [(1.0, 1, ["a"]), (1.0, 40, ["a"]), (100.0, 1, []), (1.0, 90, [])]
)
def test_an_expensive_layer_is_kept_in_float_only_if_that_halves_the_noise(work, nbytes, expected):
    noise = Mock(spec=NoiseByLayer, count=1)
    noise.noise_without.return_value = 1.0
    noise.noise.return_value, noise.noise_of.return_value = 0.5, 0.6
    noise.worst.return_value = ["a"]
    plan = Mock(layers=[LayerPlan("a", "Conv", nbytes_before=nbytes), LayerPlan("b", "Conv")], nbytes_before=1000)
    shares = choose_float(noise, plan, {"a": work, "b": 1000.0}, lambda names: Mock(quantized={"b"}))
    assert list(shares) == expected
    noise.noise_of.return_value = 0.4
    assert list(choose_float(noise, plan, {"a": work, "b": 1000.0}, lambda names: Mock(quantized={"b"}))) == ["a"]


def test_float_fallback_joins_no_tensor_that_was_not_observed():
    """After fallback, ``c`` is a last layer, and the Concat could read codes; the range of the Resize is unknown."""
    m = Maker()
    fine = m.add("Relu", [m.conv("x", 8, 64, name="fine")])
    middle = m.add("Relu", [m.conv(fine, 64, 64, name="middle", strides=[2, 2])])
    weight, noisy = weights(64, 64, 3, 3, seed=3), weights(64, 64, 1, 1, seed=4)
    weight[0], noisy[:, 0] = 0, 300
    c = m.conv(middle, 64, 64, name="c", weight=weight, bias=False)
    k = m.conv(c, 64, 64, 1, name="k", weight=noisy)
    resized = m.add("Resize", [c, "", m.constant(np.float32([1, 1, 2, 2]))], mode="linear")
    y = m.conv(m.add("Concat", [fine, resized], axis=1), 128, 64, name="y")
    model = m.model([("x", [1, 8, 16, 16])], [y, c, m.add("Sigmoid", [k])])
    feeds = images(16, side=16, batch=1)
    decisions = qo.decide(model, feeds, progress=False)
    assert [layer.name for layer in decisions.layers if "float fallback" in layer.reason] == ["k"]
    assert resized not in {placement.tensor for placement in decisions.placements}
    assert dt.verify(model, qo.rewrite(model, decisions), feeds[:1]).ok


def test_a_gemm_before_an_activation_keeps_its_integer_kernel():
    m = Maker()
    t = m.add(
        "Relu", [m.add("Gemm", ["x", m.constant(weights(256, 256)), m.constant(weights(256, 1).ravel())], name="a")]
    )
    y = m.add("Gemm", [t, m.constant(weights(256, 64))], name="b")
    model = m.model([("x", ["n", 256])], [y])
    feeds = [{"x": np.random.default_rng(i).normal(size=(8, 256)).astype(np.float32)} for i in range(4)]
    for options, kernels in (({}, 2), ({"skip": "b"}, 1)):
        file = qo.rewrite(model, qo.decide(model, feeds, progress=False, **options))
        assert operators(file)["QGemm"] == kernels
        assert not operators(file)["FusedGemm"]
        assert dt.verify(model, file, feeds[:1]).ok


@pytest.mark.parametrize("name", ["equalization", "smoothquant"])
def test_a_pass_that_raises_the_noise_at_the_outputs_changes_nothing(name, monkeypatch, caplog):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    t = m.add("GlobalAveragePool", [m.add("Relu", [m.conv(t, 16, 16, name="second")])])
    t = m.add("Reshape", [t, m.constant(np.array([-1, 16]))])
    model, feeds = m.model([("x", [2, 8, 8, 8])], [m.matmul(t, 16, 16, name="head")]), images(6)
    factors = np.logspace(-3, 0, 16).astype(np.float32)
    relu = qo.prepare(model).graph.node[1].output[0]
    harmful = {
        "equalization": Equalized(relu, "first", ("second",), factors, 1.0, 3.0),
        "smoothquant": Smoothed(t, ("head",), factors, False, 0.5, 3.0),
    }
    monkeypatch.setattr(getattr(accuracy_passes, name), "choose", lambda *_, **__: (harmful[name],))
    with caplog.at_level("INFO"):
        decisions = qo.decide(model, feeds, progress=False)
    used = [*decisions.equalized, *decisions.smoothed]
    assert not [each for each in used if np.array_equal(each.factors, factors)]
    assert "was not applied, because it would change the noise at the outputs by +" in caplog.text
    fast = qo.decide(model, feeds, progress=False, effort="fast")  # compares nothing at the outputs
    assert any(np.array_equal(each.factors, factors) for each in (*fast.equalized, *fast.smoothed))


def test_a_blank_sample_does_not_outweigh_others():
    x = np.ones(100, np.float32)
    references = ReferenceOutputs(["y"], [[x], [x * 1e-4]])
    noises = [references.noise(i, [sample + 1e-3]) for i, sample in enumerate((x, x * 1e-4))]
    assert noises[0][0] == pytest.approx(noises[1][0], rel=1e-3)


def test_switches_turn_on_one_layer_at_a_time():
    model, feeds = conv_chain(), images()
    plan = qo.plan(qo.prepare(model))
    seen = qo.calibrate(plan, feeds)
    switches = NoiseByLayer(plan, choose_params(plan, seen), feeds[:1])
    assert switches.noise([]) == 0
    single = {name: switches.noise([name]) for name in ("first", "second", "last")}
    assert all(noise > 0 for noise in single.values())
    total = switches.noise(single)
    assert 0.3 * total < sum(single.values()) < 3 * total, "noise about adds up"


def test_layers_below_8_bits_are_compared_as_the_file_computes_them():
    model, feeds = conv_chain(), images()
    plan = qo.plan(qo.prepare(model), "w6a6")
    seen = qo.calibrate(plan, feeds, observer="percentile(5, 95)")  # much of the data saturates
    noise = NoiseByLayer(plan, choose_params(plan, seen), feeds[:1]).noise_without()
    quantized, floats = make_session(qo.insert(plan, seen)), make_session(plan.model)
    (old,), (new,) = (session.run(None, feeds[0]) for session in (floats, quantized))
    assert noise == pytest.approx(np.square(new - old).sum() / np.square(old).sum(), rel=0.02)


def test_noise_is_that_of_the_file_if_only_one_node_reads_the_codes():
    m = Maker()
    branch = m.matmul("x", 32, 32, name="fc", weight=0.01 * weights(32, 32))
    model, feeds = m.model([("x", [1, "n", 32])], [m.add("Add", ["x", branch])]), rows(width=32, length=64)
    plan = qo.plan(qo.prepare(model))
    seen = qo.calibrate(plan, feeds)
    noise = NoiseByLayer(plan, choose_params(plan, seen), feeds[:1]).noise_without()
    (old,), (new,) = (make_session(each).run(None, feeds[0]) for each in (plan.model, qo.insert(plan, seen)))
    assert noise == pytest.approx(np.square(new - old).sum() / np.square(old).sum(), rel=0.02)
    assert noise < 1e-7, "the Add reads x in float"


def residual_blocks(count):
    """Residual blocks after a convolution that is kept in float."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 3, 16)])
    for _ in range(count):
        t = m.add("Add", [t, m.conv(t, 16, 16, weight=0.1 * weights(16, 16, 3, 3))])
    return m.model([("x", [2, 3, 8, 8])], [m.conv(t, 16, 4)])


@pytest.mark.parametrize(
    ("blocks", "prefer", "additions"),
    [(1, "balanced", 0), (4, "balanced", 4), (4, "speed", 0), (1, "accuracy", 1)],
)
def test_additions_behind_a_float_layer_are_quantized_if_they_add_little_noise(blocks, prefer, additions, tmp_path):
    feeds, path = images(8, channels=3), tmp_path / "q.onnx"
    options = {"progress": False, "equalize": False, "bias_correction": False, "prefer": prefer}
    report = qo.quantize(residual_blocks(blocks), path, feeds, **options)
    assert any("kept Add and Concat nodes" in step for step in report.steps) == ((blocks, prefer) == (4, "balanced"))
    counts = operators(qo.load(path))
    assert (counts["Add"], counts["QLinearAdd"]) == (additions, blocks - additions)
    assert dt.verify(residual_blocks(blocks), path).ok


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 0.7, 1.1])
def test_scales_of_multiples_are_rounded_once(factor):
    spec = dt.QuantSpec("uint8", symmetric=False)
    placement = QuantizerPlacement("y", spec, "y")
    for high in np.linspace(1, 2, 50, dtype=np.float32):
        seen = {"x": dt.observers.MinMax().observe(np.float32([0, high]))}
        data = qo.Calibration(seen, (), 1, "", {"y": ("x", factor)})
        got = calibration.activation_params(placement, data, clipped=False)
        own = dt.QuantParams.from_range(spec, np.float32(0), high, dtype="float32")
        assert got.scale == np.float32(np.float64(own.scale) * factor)


def test_outliers_are_clipped_only_where_layers_gain():
    m = Maker()
    weight = weights(16, 8)
    weight[0] *= 30  # the weight of the outliers
    model = m.model([("x", [1, "n", 16])], [m.matmul("x", 16, 8, weight=weight, name="fc")])
    feeds = rows(length=400)
    for feed in feeds:
        feed["x"][0, 0, 0] = 40.0
    plan = qo.plan(qo.prepare(model))
    seen = qo.calibrate(plan, feeds)
    kept, clipped = (choose_params(plan, seen, each)["x"] for each in ((), None))
    assert clipped.scale < kept.scale, "the observer alone would clip"
    assert choose_clipped(plan, seen) == set()


def test_tensors_that_reach_an_output_are_not_clipped():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    scores = m.add("Sigmoid", [t])
    y = m.conv(t, 16, 4, name="second")
    model = m.model([("x", [2, 8, 8, 8])], [y, scores])
    plan = qo.plan(qo.prepare(model))
    seen = qo.calibrate(plan, images())
    assert t not in choose_clipped(plan, seen)


def test_channels_before_a_depthwise_convolution_are_equalized(tmp_path):
    m = Maker()
    uneven = weights(16, 8, 1, 1) * np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv("x", 8, 16, 1, weight=uneven, bias=False, name="before")])
    even = weights(16, 1, 3, 3) / np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv(t, 16, 16, group=16, weight=even, name="depthwise")])
    model, feeds = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="behind")]), images()
    equalized, done = equalize(qo.plan(qo.prepare(model)), feeds)
    assert (done[0].maker, *done[0].readers) == ("before", "depthwise")
    assert done[0].strength == 1
    for feed in feeds:
        expected, got = (make_session(each).run(None, feed)[0] for each in (model, equalized))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    plain, better = (
        qo.quantize(model, tmp_path / "q.onnx", feeds, equalize=on, keep_float="none", progress=False)
        for on in (False, True)
    )
    assert better.output_sqnr_db > plain.output_sqnr_db + 6


def test_grouped_readers_get_the_factors_of_their_own_inputs():
    m = Maker()
    uneven = weights(16, 8, 1, 1) * np.logspace(-2, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.conv("x", 8, 16, 1, weight=uneven, name="before")
    model, feeds = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 6, group=2, name="grouped")]), images()
    equalized, done = equalize(qo.plan(qo.prepare(model)), feeds)
    assert done
    expected, got = (make_session(each).run(None, feeds[0])[0] for each in (model, equalized))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_gelu_stays_one_operator():
    m = Maker()
    t = m.conv("x", 8, 16)
    root, one, half = (m.constant(np.float32([value])) for value in (2**0.5, 1, 0.5))
    bent = m.add("Add", [m.add("Erf", [m.add("Div", [t, root])]), one])
    t = m.add("Mul", [m.add("Mul", [t, bent]), half])
    model, feeds = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4)]), images()
    plan = qo.plan(qo.prepare(model))
    quantized = qo.insert(plan, qo.calibrate(plan, feeds))
    assert operators(quantized)["Gelu"] == 1
    assert operators(quantized)["Erf"] == 0


def test_equalization_accepts_samples_whose_channels_are_all_zero():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, bias=False)])
    model, feeds = m.model([("x", ["n", 8, 32, 32])], [m.conv(t, 16, 8, bias=False)]), images(2, side=32)
    feeds[1] = {"x": np.zeros_like(feeds[1]["x"])}
    equalization.choose(qo.plan(qo.prepare(model)), feeds)  # raises nothing


def selecting():
    """A model that drops images without a positive pixel."""
    m = Maker()
    is_kept = m.add("Greater", [m.add("ReduceMax", ["x"], axes=[1, 2, 3], keepdims=0), m.constant(np.float32(0))])
    uneven = weights(16, 8, 1, 1) * np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv(m.add("Compress", ["x", is_kept], axis=0), 8, 16, 1, weight=uneven)])
    t = m.add("Relu", [m.conv(t, 16, 16, group=16)])
    return m.model([("x", ["n", 8, 16, 16])], [m.conv(t, 16, 8)])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("full", [(0,), (1,), (2,), (0, 3, 6, 9)])
def test_layers_may_get_no_images_in_some_samples(full):
    feeds = images(12, batch=1, side=16)
    feeds = [feed if i in full else {"x": -np.abs(feed["x"])} for i, feed in enumerate(feeds)]
    decisions = qo.decide(selecting(), feeds, progress=False)
    assert all(np.isfinite(layer.bias).all() for layer in decisions.layers if layer.bias is not None)


def test_layers_may_have_the_names_of_tensors():
    noises = []
    for is_same in (False, True):
        m, t = Maker(), "x"
        for _ in range(3):
            t = m.conv(t, 8, 8)
        model = m.model([("x", ["n", 8, 8, 8])], [t])
        for node in model.graph.node:
            node.name = node.output[0] if is_same else node.name
        plan = qo.plan(qo.prepare(model))
        seen = qo.calibrate(plan, images())
        noise = NoiseByLayer(plan, choose_params(plan, seen), seen.samples)
        noises.append([(noise.noise([name]), noise.noise_without([name])) for name in noise.layers])
    assert noises[0] == noises[1]


def test_float_fallback_clips_no_tensor_that_was_not_quantized_before(monkeypatch):
    m = Maker()
    t = m.add("MaxPool", [m.add("Relu", [m.conv("x", 8, 16, name="first")])], kernel_shape=[2, 2])
    model = m.model([("x", ["n", 8, 8, 8])], [m.add("GlobalAveragePool", [m.conv(t, 16, 16, name="second")])])
    monkeypatch.setattr(quantizer_choice, "choose_float", lambda *_: {"first": 0.5})
    for observer, is_clipped in ((None, False), ("mse", True)):
        decisions = qo.decide(model, images(), observer=observer, prefer="accuracy", progress=False)
        assert [layer.name for layer in decisions.layers if layer.reason] == ["first"]
        assert decisions.ranges[t].clipped is is_clipped


@pytest.mark.parametrize(
    ("count", "ratios", "is_kept"),
    [
        (8, [0.9], True),
        (7, [0.9], False),  # too few samples to compare them one by one
        (8, [0.97], False),  # less than 5 %
        (16, [0.3, 1.6], False),  # lower in the mean, but not on every other sample
        (16, [0.6, 0.9], True),
    ],
)
def test_small_gains_above_30_db_must_be_the_same_on_many_samples(count, ratios, is_kept):
    before = [1e-4] * count
    after = [noise * ratios[i % len(ratios)] for i, noise in enumerate(before)]
    assert accuracy_passes._is_better(before, after) == is_kept


def test_samples_without_noise_do_not_hide_a_loss():
    assert not accuracy_passes._is_better([0.0, *[1e-4] * 8], [1e-6, *[0.9e-4] * 8])
