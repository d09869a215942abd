"""The search for ``max_drop``: against exhaustive search, and in ``qo.quantize``."""

from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from onnx import numpy_helper, parser

import detent as dt
import detent.onnx as qo
from detent.errors import NotCalibratedError, RangeError, ShapeError, SpecError
from detent.model_metric import MetricResult
from detent.onnx.metric_search import MAX_DROP_REASON, MetricSearch, search_float_layers
from detent.onnx.quality_warnings import drop_warnings
from detent.onnx_model import make_session


class AdditiveTrials:
    """Layers with given bytes and drops; drops add up, except that they are rounded as an accuracy is."""

    def __init__(self, nbytes, drops, step=1e-6):
        self._nbytes, self._drops, self._step = nbytes, drops, step
        self.measured = []

    def result(self, layers):
        self.measured.append(layers)
        drop = sum(each for name, each in self._drops.items() if name not in layers)
        return MetricResult("top1", 1 - self._step * np.floor(drop / self._step), 1.0)

    def nbytes(self, layers):
        return sum(each * (4 if name in layers else 1) for name, each in self._nbytes.items())

    def noise(self, layers):
        return sum(each for name, each in self._drops.items() if name not in layers)

    def is_quantized(self, layers):
        return len(layers) < len(self._nbytes)

    def prepare(self, candidates):
        pass


def exhaustive(trials, names, max_drop):
    subsets = chain.from_iterable(combinations(names, count) for count in range(len(names)))
    fitting = [each for each in map(frozenset, subsets) if trials.result(each).largest_drop <= max_drop + 1e-9]
    return min(map(trials.nbytes, fitting))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("step", [1e-6, 0.01])
def test_few_bytes_more_than_an_exhaustive_search(seed, step):
    rng = np.random.default_rng(seed)
    names = list("abcdefg")
    nbytes = {name: int(10 ** rng.uniform(2, 5)) for name in names}
    trials = AdditiveTrials(nbytes, {name: float(10 ** rng.uniform(-4, -1.5)) for name in names}, step)
    search = search_float_layers(names, (), trials, 0.01)
    assert search.is_met
    assert search.nbytes_after <= 1.1 * exhaustive(trials, names, 0.01)
    assert search.nbytes_after == trials.nbytes(frozenset(search.layers))


def test_a_result_within_the_limit_stays():
    trials = AdditiveTrials({"a": 10, "b": 20}, {"a": 0.01, "b": 0.02})
    search = search_float_layers(["a", "b"], ["a"], trials, 0.02)
    assert (search.layers, search.steps, search.is_met) == (("a",), (), True)


def test_layers_that_are_no_longer_needed_are_quantized_again():
    trials = AdditiveTrials({"a": 10, "b": 1000, "c": 10}, {"a": 0.01, "b": 0.05, "c": 0.0})
    search = search_float_layers(["a", "b", "c"], ["a"], trials, 0.02)
    assert [(each.layer, each.in_float) for each in search.steps] == [("b", True), ("a", False)]
    assert search.layers == ("b",)
    assert str(search.steps[1]) == "max_drop: quantized a again: metric 0.9900, drop 0.0100, weights 4.02 kB"


def test_one_layer_stays_quantized():
    search = search_float_layers(["a", "b"], [], AdditiveTrials({"a": 10, "b": 20}, {"a": 0.1, "b": 0.1}), 0.02)
    assert (len(search.layers), search.is_met) == (1, False)


def test_a_failed_search_keeps_few_layers_in_float():
    """One layer causes the drop that can be avoided; the large ones hardly help, and one must stay quantized."""
    nbytes = {"a": 10, "b": 10_000, "c": 10_000, "d": 100_000}
    trials = AdditiveTrials(nbytes, {"a": 0.2, "b": 0.001, "c": 0.001, "d": 0.1})
    search = search_float_layers(list(nbytes), [], trials, 0.02)
    assert (search.layers, search.is_met) == (("a",), False) or search.layers == ("a", "d")
    assert {"b", "c"}.isdisjoint(search.layers)
    assert search.after.drop < search.before.drop
    assert [each.layer for each in search.steps] == list(search.layers)


def test_a_failed_search_without_a_better_set_changes_nothing():
    trials = AdditiveTrials({"a": 10, "b": 20}, {"a": 0.1, "b": 0.1})
    trials.result = lambda _layers: MetricResult("top1", 0.5, 1.0)
    search = search_float_layers(["a", "b"], [], trials, 0.02)
    assert (search.layers, search.steps, search.is_met) == ((), (), False)


def test_noise_guides_where_the_metric_is_flat():
    trials = AdditiveTrials({"a": 10, "b": 10, "c": 10}, {"a": 0.2, "b": 0.3, "c": 0.4}, step=1.0)
    trials.result = lambda layers: MetricResult("top1", 1.0 if len(layers) > 1 else 0.5, 1.0)
    search = search_float_layers(["a", "b", "c"], [], trials, 0.01)
    assert [each.layer for each in search.steps] == ["c", "b"]


# In qo.quantize


WIDTHS = (16, 24, 24, 24, 10)


def network(seed=0):
    """A network whose second layer has outliers, so that few bits destroy it; its labels are its own classes."""
    rng = np.random.default_rng(seed)
    pairs = list(pairwise(WIDTHS))
    nodes = [f"[fc{i}] h{i} = MatMul({'x' if i == 0 else f'r{i - 1}'}, w{i}) r{i} = Relu(h{i})" for i in range(3)]
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N, 16] x) => (float[N, 10] y)
        {{ {" ".join(nodes)} [fc3] y = MatMul(r2, w3) }}"""
    model = parser.parse_model(text)
    for i, shape in enumerate(pairs):
        weight = (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
        if i == 1:
            weight[:2] *= 20
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{i}"))
    return model


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(count, 16)).astype(np.float32) for name, count in (("calib", 64), ("search", 256))}


@pytest.fixture(scope="module")
def result(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("search") / "net.onnx"
    return qo.quantize(
        network(), path, [data["calib"]], "w4a8", eval_data=[*data["search"].reshape(16, 16, 16)], max_drop="4%"
    )


def test_the_limit_is_met_and_the_path_is_reported(result):
    search = result.search
    assert search.max_drop == 0.04
    assert search.before.name == "top-1 agreement"
    assert search.before.drop > 0.04
    assert search.is_met
    assert 0 < len(search.layers) < 4
    reasons = {layer.name: layer.reason for layer in result.layers if layer.reason}
    assert reasons == dict.fromkeys(search.layers, MAX_DROP_REASON)
    assert [step for step in result.steps if step.startswith("max_drop: kept")]
    document = result.to_dict()["max_drop_search"]
    assert document["steps"][0]["in_float"]
    assert document["after"]["drop"] == search.after.drop


def test_the_file_is_what_the_search_measured(result, data):
    """ONNX Runtime computes the metric of the file from its own kernels, and verify replays the decisions."""
    from detent.evaluate import measure_accuracy

    accuracy = measure_accuracy(network(), result.output, [data["search"]])
    assert accuracy.agreement == pytest.approx(result.search.after.value)
    assert dt.verify(network(), result.output, [data["calib"]]).ok
    assert '"max_drop":0.04' in result.decisions.options


def test_bytes_are_within_ten_percent_of_an_exhaustive_search(result, data, tmp_path):
    names = [layer.name for layer in result.layers]
    best = min(
        report.plan.nbytes_after
        for count in range(4)
        for chosen in combinations(names, count)
        if (report := forced(chosen, data, tmp_path)).search.is_met
    )
    assert result.plan.nbytes_after <= 1.1 * best


def forced(chosen, data, directory):
    """Quantize with chosen layers in float; a limit of 100 % of the metric measures without a search."""
    report = qo.quantize(
        network(),
        directory / "forced.onnx",
        [data["calib"]],
        "w4a8",
        skip=chosen,
        keep_float="none",
        eval_data=[*data["search"].reshape(16, 16, 16)],
        max_drop=10.0,
    )
    object.__setattr__(report.search, "max_drop", 0.04)
    return report


def test_a_limit_that_is_met_anyway_changes_nothing(data, tmp_path):
    plain = qo.quantize(network(), tmp_path / "a.onnx", [data["calib"]])
    limited = qo.quantize(network(), tmp_path / "b.onnx", [data["calib"]], max_drop=0.5)
    assert limited.search.steps == ()
    assert qo.rewrite(network(), plain.decisions).graph == qo.rewrite(network(), limited.decisions).graph


def test_a_limit_that_cannot_be_met_is_a_warning(data, tmp_path):
    session = make_session(network())
    expected = session.run(None, {"x": data["calib"]})[0]

    def closeness(outputs):
        return -float(np.abs(outputs["y"] - expected).max())

    report = qo.quantize(network(), tmp_path / "a.onnx", [data["calib"]], metric=closeness, max_drop=0)
    assert not report.search.is_met
    kept = [layer.reason for layer in report.layers].count(MAX_DROP_REASON)
    assert 0 < kept < len(report.layers), "the layers that help, not all of them"
    text = next(each.text for each in report.warnings if each.code == "max-drop")
    assert text.startswith("no set of layers in float meets max_drop 0 on 64 search samples: closeness is -0.")
    assert report.output.is_file()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric": "top2"}, SpecError, "there is no metric 'top2'"),
        ({"labels": [1]}, ShapeError, "got 1 labels for 64 samples"),
        ({"max_drop": "x"}, SpecError, "max_drop must be a number such as 0.005"),
        ({"max_drop": -1}, SpecError, "must not be negative"),
        ({"max_drop": 0.1, "metric": "top2"}, SpecError, "there is no metric 'top2': did you mean 'top1'"),
        ({"max_drop": 0.1, "metric": "nowhere:f"}, SpecError, "cannot be imported: ModuleNotFoundError"),
        ({"max_drop": 0.1, "metric": "math:tau"}, SpecError, "'tau' in module 'math' is not a function"),
        ({"max_drop": 0.1, "metric": lambda y: 1 / 0}, SpecError, "raised ZeroDivisionError"),
        ({"max_drop": 0.1, "metric": lambda y: float("nan")}, SpecError, "returned nan, expected a finite number"),
        ({"max_drop": 0.1, "metric": lambda y: "good"}, SpecError, "returned 'good'"),
        ({"max_drop": 0.1, "labels": [1, 2]}, ShapeError, "got 2 labels for 64 samples"),
        ({"max_drop": 0.1, "labels": np.full(64, 10)}, RangeError, "classes are from 0 to 9"),
        ({"max_drop": 0.1, "labels": np.full(64, 0.5)}, dt.DtypeError, "top1 needs integer labels, got float64"),
        ({"max_drop": 0.1, "labels": np.zeros((64, 3), int)}, ShapeError, r"expected \(64,\)"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_bad_input_writes_nothing(options, error, message, data, tmp_path):
    with pytest.raises(error, match=message):
        qo.quantize(network(), tmp_path / "a.onnx", [data["calib"]], **options)
    assert not list(tmp_path.iterdir())


def test_weight_only_recipes_need_data(data, tmp_path):
    with pytest.raises(NotCalibratedError, match="max_drop needs calibration data"):
        qo.quantize(network(), tmp_path / "a.onnx", recipe="w4a16", max_drop=0.1, eval_data=[data["search"]])
    with pytest.raises(NotCalibratedError, match="a metric needs eval_data= or data="):
        qo.quantize(network(), tmp_path / "a.onnx", recipe="w4a16", metric="top1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_a_metric_without_a_limit_is_measured(recipe, data, tmp_path):
    calibration = [data["calib"]] if recipe == "w8a8" else None
    report = qo.quantize(network(), tmp_path / "a.onnx", calibration, recipe, metric="top1", eval_data=[data["search"]])
    assert report.search is None
    assert report.metric.name == "top1 agreement with float"
    assert (report.metric.float_value, report.metric.samples) == (1.0, 256)
    assert f"top1 agreement with float: {report.metric}" in str(report)
    assert report.to_dict()["metric"]["value"] == report.metric.value


def test_one_shot_data_cannot_be_measured(data, tmp_path):
    with pytest.raises(SpecError, match="a metric needs data that can be read twice"):
        qo.quantize(network(), tmp_path / "a.onnx", iter([data["calib"]]), metric="top1")


@pytest.mark.parametrize(
    ("name", "max_drop", "warns"),
    [("top1", 0.004, True), ("top1", 0.005, False), ("top1", 0, False), ("f", 0.004, False)],
)
def test_a_limit_below_one_sample_is_a_warning(name, max_drop, warns):
    result = MetricResult(name, 1.0, 1.0, 0.0, 200, 10)
    search = MetricSearch(max_drop, result, result, (), (), 10, 10, 1)
    texts = [each.text for each in drop_warnings(search)]
    expected = ["max_drop 0.004 is less than one of 200 search samples (0.0050), so one changed class exceeds it"]
    assert [text.partition(":")[0] for text in texts] == (expected if warns else [])
