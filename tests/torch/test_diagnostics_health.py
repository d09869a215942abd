"""Health: metrics computed by hand, and warnings exactly when a limit is exceeded."""

import copy
import json

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

import detent.torch as qt  # noqa: E402
from detent.torch import diagnostics  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402

nn = torch.nn
INPUT, WEIGHT = "0.input_quantizer", "0.weight_quantizer"
LEARNED = dt.Recipe.preset("w8a8", mode="learned")


def one_linear(recipe="w8a8", size=4, scale=None):
    """A prepared linear layer whose input quantizer has the given scale and zero point 0."""
    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Linear(size, 2, bias=False)), recipe)
    if scale is not None:
        quantizer = model[0].input_quantizer
        quantizer.set_params(dt.QuantParams(quantizer.spec, scale, 0))
    return model


def with_weight(values, recipe=LEARNED, scale=1.0):
    """A prepared linear layer with these weights and a learned scale that starts as given."""
    model = one_linear(recipe, size=len(values[0]), scale=1.0)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(values))
    quantizer = model[0].weight_quantizer
    shape = quantizer.spec.granularity.tiling(tuple(model[0].weight.shape)).scale_shape
    quantizer.set_params(dt.QuantParams(quantizer.spec, np.full(shape, scale, np.float32)))
    return model


# Metrics


def test_clip_fraction_and_usage_of_batches():
    model = one_linear(scale=1.0)
    x = torch.tensor([[0.0, 1.0, 2.0, 300.0], [0.0, 1.0, -9.0, 255.4]])
    row = qt.health(model, [x, x])[INPUT]
    assert (row.source, row.elements) == ("batches", 16)
    assert row.clip_fraction == row.saturated == 2 / 8
    assert row.code_usage == 4 / 256  # 0, 1, 2 and 255
    assert row.oscillation is None


def test_exported_weights_are_measured_in_full():
    model = with_weight([[1.0, 500.0, -2.0, 3.0], [0.0, 1.0, -300.0, 900.0]])
    row = qt.health(model)[WEIGHT]
    assert (row.source, row.elements, row.clip_fraction) == ("weight", 8, 3 / 8)
    assert row.code_usage == 6 / 255  # -127, -2, 0, 1, 3 and 127


def test_folded_weights_include_the_gain():
    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)), LEARNED)
    with qt.calibrating(model):
        model(torch.randn(4, 1, 2, 2))
    assert qt.health(model)[WEIGHT].clip_fraction == 0
    model[1].running_var.fill_(0.01)  # the shipped weights are ten times larger now, and so are their scales
    assert qt.health(model)[WEIGHT].clip_fraction == 0
    one_scale = dt.Recipe([dt.Rule(weight="int8/tensor", mode="learned")])
    qt.prepare(qt.unprepare(model), one_scale)
    with qt.calibrating(model):
        model(torch.randn(4, 1, 2, 2))
    model[1].running_var.fill_(1e-6)
    assert qt.health(model)[WEIGHT].clip_fraction >= 0.5


@pytest.mark.parametrize(
    ("ste", "stopped"),
    [("identity", 0.0), ("clipped", 0.25), ("hard_tanh", 0.5), (lambda g, x, params: g, None)],
)
def test_saturated_gradients_are_those_that_the_ste_stops(ste, stopped):
    model = one_linear(dt.Recipe.preset("w8a8", ste=ste), scale=1.0)
    row = qt.health(model, [torch.tensor([[1.0, 128.0, 100.0, 300.0]])])[INPUT]
    assert row.clip_fraction == 0.25
    # hard tanh lets |v| reach 0 at the ends: 1.0 is 0.8 % from one
    assert row.saturated == stopped


def test_drift_of_a_learned_scale_needs_no_watch():
    model = with_weight([[1.0, 2.0], [3.0, 4.0]])
    assert qt.health(model)[WEIGHT].drift == 1.0
    with torch.no_grad():
        model[0].weight_quantizer.scale_shift[1] = 7.0
        model[0].weight_quantizer.scale_shift[0] = -0.5
    report = qt.health(model)
    assert report[WEIGHT].drift == 8.0  # of both, the one that has moved most
    assert any("8x its first value" in text for text in report.warnings)


def test_drift_of_an_ema_range_refers_to_the_start_of_the_watch():
    model = one_linear(dt.Recipe.preset("w8a8", mode="ema(0.0)"), scale=1.0)
    assert qt.health(model)[INPUT].drift is None
    qt.watch(model)
    model(torch.tensor([[0.0, 0.0, 0.0, 51.0]]))
    assert qt.health(model)[INPUT].drift == pytest.approx(0.2)
    assert not any("what it was" in text for text in qt.health(one_linear(scale=1.0)).warnings)


# Oscillation


@pytest.mark.filterwarnings("ignore:no optimizer trains")  # the scales stay constant
def test_a_toy_optimizer_makes_weights_oscillate():
    """The minimum lies between two codes: the straight-through gradient makes the weight oscillate (Nagel et al.)."""
    model = with_weight([[0.3, 0.2], [5.0, 5.0]])
    target = torch.tensor([[0.5, 0.4], [5.0, 5.0]])
    optimizer = torch.optim.SGD([model[0].weight], 0.2)
    qt.watch(model)
    assert qt.health(model)[WEIGHT].oscillation is None
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.eye(2)).T - target).square().sum().backward()
        optimizer.step()
    report = qt.health(model)
    assert report[WEIGHT].oscillation == 0.5  # the first row; the second has arrived
    assert any("50 % of its weights oscillate" in text and "learning rate" in text for text in report.warnings)


def test_a_weight_that_walks_one_way_does_not_oscillate():
    turning, params = diagnostics.Oscillation(), dt.QuantParams.int8_symmetric()
    for step in range(30):
        turning.update(np.array([step, -step, 0.0], np.float32), params)
    assert (turning.steps, turning.rate) == (29, 0.0)


def test_old_reversals_are_forgotten():
    turning, params = diagnostics.Oscillation(), dt.QuantParams.int8_symmetric()
    rates = []
    for step in range(80):
        turning.update(np.array([1.0 if step == 1 else 0.0, step], np.float32), params)
        rates.append(turning.rate)
    # f = 0.01 * 0.99^n falls below 0.005 after 69 steps
    assert rates[:2] == [None, 0.0]
    assert rates[2:71] == [0.5] * 69
    assert rates[71:] == [0.0] * 9


def test_unchanged_weights_do_not_count_as_a_step():
    turning, params = diagnostics.Oscillation(), dt.QuantParams.int8_symmetric()
    for value in (0.0, 1.0, 1.0, 1.0, 0.0):
        turning.update(np.array([value], np.float32), params)
    assert turning.steps == 2


@pytest.mark.parametrize("form", ["int8", "uint4", "float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_directions_follow_values_in_every_format(form):
    turning, spec = diagnostics.Oscillation(), dt.QuantSpec(form)
    scale = 1.0 if spec.format.is_integer else 4.0 / spec.format.qmax
    for value in (-4.0, 4.0, 1.0):  # up, down: as bits, a small float would go down, up
        turning.update(np.array([value, 0.0], np.float32), dt.QuantParams(spec, scale))
    assert turning.rate == 0.5


# Sampling


@pytest.mark.parametrize(
    "spec", ["int8", "int8/axis0", "int8/axis-2", "int4/token", "int4/group32", "uint4/group7@0", "nvfp4", "mxfp4"]
)
@pytest.mark.parametrize("shape", [(96, 5, 64), (8, 64, 32), (3, 4, 32)])
def test_a_sample_has_the_codes_of_the_full_tensor(spec, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    params = dt.QuantParams.from_data(spec, x.numpy())
    data, own = diagnostics.sample(x, params)
    step = diagnostics._distance(x.numel())
    assert data.size <= diagnostics.MAX_SAMPLE
    assert data.size > diagnostics.MAX_SAMPLE / 2 or step == 1
    whole = dt.quantize(x.numpy(), params).codes.reshape(-1)[::step]
    assert np.array_equal(dt.quantize(data, own).codes.view(np.uint8), whole.view(np.uint8))


@pytest.mark.parametrize("shape", [(128, 64, 16, 16), (32, 1024), (7, 4096), (4096,), (1,), (4097,)])
def test_a_sample_covers_every_index_of_every_axis(shape):
    size = int(np.prod(shape))
    places = np.unravel_index(np.arange(0, size, diagnostics._distance(size)), shape)
    for place, length in zip(places, shape, strict=True):
        assert len(np.unique(place)) >= min(length, 2048)


def test_watched_activations_have_the_metrics_of_their_latest_samples():
    model = one_linear("w8a8", size=8192, scale=1.0)
    model[0].input_quantizer.observing = False
    with qt.watch(model, every=3):
        for call in range(7):  # the calls 0, 3 and 6 are samples
            x = torch.zeros(1, 8192)
            x[:, : 8192 // 2] = 300.0 if call % 3 == 0 else 1.0
            model(x)
        row = qt.health(model)[INPUT]
        assert row.source == "watch"
        assert row.clip_fraction == pytest.approx(0.5, abs=1e-3)
        assert row.elements == 3 * len(range(0, 8192, diagnostics._distance(8192)))
    assert qt.health(model)[INPUT].source == ""


def test_only_training_is_watched():
    model = one_linear(scale=1.0)
    with qt.watch(model, every=1):
        model.eval()(torch.ones(1, 4))
        assert qt.health(model)[INPUT].source == ""
        model.train()(torch.ones(1, 4))
        assert qt.health(model)[INPUT].elements == 4


def test_watching_changes_no_bit_and_survives_a_copy():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    models = [one_linear(), one_linear()]
    qt.watch(models[0], every=1)
    models[0] = copy.deepcopy(models[0])
    for _ in range(3):
        for model in models:
            model(x).square().sum().backward()
    assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)
    assert qt.health(models[0])[INPUT].source == "watch"


def test_tensors_that_native_kernels_cannot_read_are_watched_too():
    class Odd(torch.Tensor):
        pass

    model = one_linear(scale=1.0)
    model[0].input_quantizer.observing = False
    qt.watch(model, every=1)
    model(torch.tensor([[0.0, 1.0, 2.0, 300.0]]).as_subclass(Odd))
    assert qt.health(model)[INPUT].clip_fraction == 0.25


def test_stopping_a_watch_leaves_a_newer_one():
    model = one_linear()
    old, new = qt.watch(model), qt.watch(model)
    old.stop()
    assert model[0].input_quantizer.watcher is not None
    new.stop()
    assert model[0].input_quantizer.watcher is None


# Warnings


@pytest.mark.parametrize(("outside", "warned"), [(1, False), (20, False), (21, True), (120, True)])
def test_clipping_draws_a_warning_beyond_its_limit(outside, warned):
    assert diagnostics.CLIP_LIMITS[6] == 0.02
    model = one_linear(scale=1.0)
    x = torch.arange(1000.0) % 256
    x[:outside] = 999.0
    texts = qt.health(model, [x.reshape(250, 4)]).warnings
    shown = f"{INPUT} clips {outside / 10:.1f} % of its input: calibrate with more data, or with observer='minmax'"
    assert (shown in texts) == warned


def test_unused_codes_draw_a_warning_with_enough_data():
    model = one_linear(scale=1.0)
    x = (torch.arange(4096.0) % 100).reshape(-1, 4)
    assert any(
        "leaves 61 % of its codes unused, because a few outliers" in text for text in qt.health(model, [x]).warnings
    )
    assert qt.health(model, [x[:1000]]).warnings == ()  # too few to tell


def test_unused_negative_codes_have_their_own_advice():
    recipe = dt.Recipe([dt.Rule(input=dt.QuantSpec("int8"))])
    model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), recipe)
    quantizer = model[0].input_quantizer
    quantizer.set_params(dt.QuantParams(quantizer.spec, 1.0))
    report = qt.health(model, [(torch.arange(4096.0) % 100).reshape(-1, 4)])
    assert any("one sign: use an unsigned or asymmetric spec" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("value", "scale", "cause"), [(0.0, 1.0, "is constant"), (0.3, 9.0, "is constant"), (9.0, 0.01, "too narrow")]
)
def test_a_dead_quantizer_draws_a_warning(value, scale, cause):
    report = qt.health(one_linear(scale=scale), [torch.full((2, 4), value)])
    (text,) = report.warnings
    assert text.startswith(f"{INPUT} is dead: all 8 codes of its input are equal")
    assert cause in text


def test_stopped_gradients_draw_a_warning_where_clipping_does_not():
    model = one_linear(dt.Recipe.preset("w8a8", ste="tanh"), scale=1.0)
    x = torch.arange(256.0).reshape(-1, 4)
    assert not any("stops the gradient" in text for text in qt.health(model, [x]).warnings)
    model = one_linear(dt.Recipe.preset("w8a8", ste=dt.ste.Tanh("step")), scale=1.0)
    assert any("stops the gradients of 98.8 %" in text for text in qt.health(model, [x]).warnings)


def test_missing_metrics_have_a_note():
    model = one_linear()
    assert qt.health(model)[INPUT].note == "not calibrated"
    assert any("calibrate" in text for text in qt.health(model).warnings)
    model[0].input_quantizer.enabled = False
    assert qt.health(model)[INPUT].note == "disabled"
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    report = qt.health(model)
    assert report[WEIGHT].note == "not finite"
    assert report.warnings == (
        f"{WEIGHT}: the weight contains NaN or infinity: go back to a checkpoint, and lower the learning rate",
    )


def test_a_delayed_quantizer_has_a_note():
    model = one_linear(scale=1.0)
    qt.Schedule(model, delay=1)
    assert qt.health(model, [torch.ones(1, 4)])[INPUT].note == "delayed"


# The report


def test_report_reads_well_and_is_json():
    model = one_linear(scale=1.0)
    report = qt.health(model, [torch.tensor([[0.0, 1.0, 2.0, 300.0]])])
    lines = str(report).splitlines()
    assert lines[0].split() == ["quantizer", "data", "clip", "codes", "drift", "oscillation", "saturated"]
    assert lines[2].split() == [INPUT, "batches", "25.00", "%", "2", "%", "-", "-", "25.00", "%"]
    assert lines[3] == f"! {report.warnings[0]}"
    data = json.loads(report.to_json())
    assert [each["name"] for each in data["quantizers"]] == [WEIGHT, INPUT]
    assert data["quantizers"][1]["clip_fraction"] == 0.25
    assert data["quantizers"][1]["warnings"] == list(report.warnings)
    with pytest.raises(dt.SpecError, match=r"did you mean '0\.input_quantizer'"):
        report["0.inputs_quantizer"]


def test_tied_weights_and_dynamic_activations():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    recipe = dt.Recipe([dt.Rule(weight="int8", input="int8/token", mode="per_batch")])
    qt.prepare(model, recipe)
    batches = [torch.randn(3, 4), torch.randn(2, 5, 4)]
    report = qt.health(model, batches)
    assert [each.name for each in report.quantizers].count(WEIGHT) == 1
    assert len(report.quantizers) == len(quantizers_of(model)) == 3
    assert report[INPUT].elements == 12 + 40
    assert report[INPUT].clip_fraction == 0


@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_health_does_not_change_the_model(mode):
    model = one_linear(dt.Recipe.preset("w8a8", mode=mode))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model(x)
    qt.watch(model)
    before, watcher = copy.deepcopy(model.state_dict()), model[0].input_quantizer.watcher
    qt.health(model, [x * 9])
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.training
    assert model[0].input_quantizer.training
    assert model[0].input_quantizer.watcher is watcher


def test_a_failing_batch_does_not_change_the_model():
    model = one_linear(scale=1.0)
    with pytest.raises(RuntimeError):
        qt.health(model, [torch.ones(1, 5)])
    assert model.training
    assert model[0].input_quantizer.watcher is None


@pytest.mark.parametrize("make", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"input": x}])
def test_batches_of_every_kind(make):
    model = one_linear(scale=1.0)
    assert qt.health(model, (make(torch.ones(2, 4)) for _ in range(3)))[INPUT].elements == 24


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        (torch.ones(2, 4), dt.DtypeError, "got Tensor for batches.*put a single batch in a list"),
        ({"input": torch.ones(2, 4)}, dt.DtypeError, "got dict"),
        (7, dt.DtypeError, "got int"),
        ([7], dt.DtypeError, "got int for a batch, expected a tensor, a tuple"),
        ([], dt.SpecError, "no batch"),
    ],
)
def test_invalid_batches_are_rejected(batches, error, words):
    with pytest.raises(error, match=words):
        qt.health(one_linear(scale=1.0), batches)


def test_an_unprepared_model_is_rejected():
    for function in (qt.health, qt.watch):
        with pytest.raises(dt.StateError, match="not prepared"):
            function(nn.Linear(2, 2))
        with pytest.raises(dt.DtypeError, match="got int"):
            function(3)
    with pytest.raises(dt.SpecError, match="every must be an integer of at least 1, got 0"):
        qt.watch(one_linear(), every=0)
