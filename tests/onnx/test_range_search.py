"""Ranges have a margin or are clipped if that lowers the noise at the outputs, on data of other folds."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from onnx_graphs import Maker, images, weights

import detent as dt
import detent.onnx as qo
from detent.onnx.calibration import choose_params
from detent.onnx.float_fallback import NoiseByLayer
from detent.onnx.pass_errors import listening
from detent.onnx.pipeline import output_sqnr
from detent.onnx.range_search import MIN_RUNS, SampleBounds, search_ranges


def peaks(pooled):
    """A layer with rare large outputs, which a global maximum or a global mean passes on."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, 1, weight=weights(16, 8, 1, 1), name="first")])
    t = m.add("Relu", [m.conv(t, 16, 16, 1, name="second")])
    t = m.add(f"Global{pooled}Pool", [t])
    return m.model([("x", [1, 8, 16, 16])], [m.conv(t, 16, 16, 1, name="last")])


def rare(count):
    feeds = images(count, side=16, batch=1, scale=0.05)
    for i, feed in enumerate(feeds):
        feed["x"][0, :, i % 16, 3] = np.random.default_rng(i).normal(size=8) * 4
    return feeds


@pytest.mark.parametrize("pooled", ["Max", "Average"])
def test_the_default_is_close_to_the_better_range(pooled):
    model, feeds = peaks(pooled), rare(12)
    sqnr = {}
    for observer in (None, "minmax", "mse"):
        decisions = qo.decide(model, feeds[:8], observer=observer, keep_float="none", progress=False)
        file = qo.rewrite(model, decisions)
        assert dt.verify(model, file, feeds[:1]).ok
        sqnr[observer] = min(output_sqnr(model, file, feeds[8:]).values())
    assert sqnr[None] > max(sqnr["minmax"], sqnr["mse"]) - 1


def test_a_maximum_keeps_the_min_max_range():
    model, feeds = peaks("Max"), rare(8)
    decisions = qo.decide(model, feeds, keep_float="none", progress=False)
    assert not any(each.clipped for tensor, each in decisions.ranges.items() if tensor != "x")


def test_a_margin_does_not_make_a_range_negative():
    bounds = SampleBounds({"x": (0.25, 4.0)}, {"x": (np.float64([0.25, 0.5, 1, 2]), np.float64([1, 2, 4, 2]))})
    assert bounds.range("x", 3.0)[0] == 0.25
    assert bounds.range("x", 3.0)[1] > 4


class Searched:
    """A search in which the noise is a function of the parameters of one sample."""

    def __init__(self, noise_of, count=16):
        self.plan = qo.plan(qo.prepare(peaks("Average")))
        self.seen = qo.calibrate(self.plan, rare(count))
        self.placements = self.plan.placements(self.seen.ranges)
        self.bounds = SampleBounds.measure(self.plan, self.seen, self.seen.samples)
        self.noise = Mock(spec=NoiseByLayer, samples=count, count=count)
        self.fixed = set()
        self.preferred = None
        self.noise.noises_by_sample.side_effect = lambda params: map(noise_of, params)

    def run(self):
        full, clipped = (choose_params(self.placements, self.seen, groups) for groups in ((), None))
        self.changed = {group for group in full if full[group] != clipped[group]}
        groups = frozenset(full)
        return search_ranges(self.noise, self.placements, self.seen, groups, self.bounds, 0, self.fixed, self.preferred)


def width(params):
    return float(sum(each.scale for each in params.values()))


def test_noise_that_is_not_a_number_allows_no_clipping_and_no_margin():
    search = Searched(lambda params: np.nan)
    ranges = search.run()
    assert search.changed
    assert (ranges.clipped, ranges.margin) == (frozenset(), 0.0)
    assert ranges.params == choose_params(search.placements, search.seen, ())


@pytest.mark.parametrize("value", [0.0, np.inf])
def test_noise_that_cannot_be_measured_allows_no_clipping(value):
    assert Searched(lambda params: value).run().clipped == frozenset()


def test_fixed_groups_keep_their_ranges():
    search = Searched(lambda params: width(params) ** -8)
    search.fixed = {search.placements[0].group}
    ranges = search.run()
    clipped = choose_params(search.placements, search.seen, None)
    assert ranges.clipped == frozenset(search.fixed), "clipped as given, although wide ranges have less noise"
    assert all(ranges.params[group] == clipped[group] for group in search.fixed)


def with_less_noise_of_clipped_ranges(noise):
    """A search in which clipping all tensors leaves 0.7 of the noise."""
    search = Searched(width)
    full = width(choose_params(search.placements, search.seen, ()))

    def measure(params):  # the same parameters for all samples are final ranges, others those of folds
        is_final = all(each is params[0] for each in params)
        total = 0.4 * noise if is_final and width(params[0]) < 0.999 * full else noise
        return [total / len(params)] * len(params)

    search.noise.noises_by_sample.side_effect = measure
    return search


def test_with_many_calibration_samples_clipping_must_halve_the_noise():
    search = with_less_noise_of_clipped_ranges(10.0)
    assert search.run().clipped == search.changed, "the noise is 0.7 of that without clipping"
    search.bounds.has_many = True
    assert not search.run().clipped


def test_above_30_db_clipping_must_halve_the_noise():
    limit = 1e-3 * 16
    assert with_less_noise_of_clipped_ranges(1.01 * limit).run().clipped
    assert not with_less_noise_of_clipped_ranges(0.99 * limit).run().clipped


@pytest.mark.parametrize(("remaining", "is_searched"), [(0.5, True), (0.65, False)])
def test_where_clipping_must_halve_the_noise_a_few_samples_can_end_the_search(remaining, is_searched):
    search, counts = Searched(width), []
    search.bounds.has_many = True
    clipped = width(choose_params(search.placements, search.seen, None))

    def measure(params):  # less noise only if all tensors are clipped
        counts.append(len(params))
        return [remaining if width(each) <= 1.001 * clipped else 1.0 for each in params]

    search.noise.noises_by_sample.side_effect = measure
    search.run()
    after_few = counts[counts.index(8) :]
    assert (16 in after_few) == is_searched


def test_clipping_that_has_not_lowered_the_noise_after_a_few_runs_is_given_up():
    search, measured = Searched(width), []
    full = width(choose_params(search.placements, search.seen, ()))

    def measure(params):  # clipping everything removes half of the noise, clipping less removes nothing
        measured.append(0)
        for each in params:
            measured[-1] += 1
            yield 0.5 if width(each) == clipped else 1.0

    clipped = width(choose_params(search.placements, search.seen, None))
    search.noise.noises_by_sample.side_effect = measure
    assert search.run().clipped == search.changed
    assert full > clipped
    assert measured.count(MIN_RUNS) >= 2, "each half of the clipped groups"


def test_less_noise_of_narrow_ranges_clips_all_tensors():
    search = Searched(lambda params: 1e9 * width(params) ** 8)
    ranges = search.run()
    assert ranges.clipped == search.changed
    assert ranges.margin == 0


def test_less_noise_of_wide_ranges_gives_the_largest_margin_and_no_clipping():
    search = Searched(lambda params: width(params) ** -8)
    ranges = search.run()
    assert (ranges.clipped, ranges.margin) == (frozenset(), 3.0)
    full = choose_params(search.placements, search.seen, ())
    assert all(ranges.params[group].scale >= full[group].scale for group in full)
    assert width(ranges.params) > width(full)


def test_a_small_gain_gives_no_margin():
    assert Searched(lambda params: 1 + 1e-3 / width(params)).run().margin == 0


def test_new_groups_get_the_margin():
    search = Searched(lambda params: width(params) ** -8)
    ranges = search.run()
    first = search.placements[0].group
    fewer = ranges._replace(params={group: each for group, each in ranges.params.items() if group != first})
    assert fewer.with_new(search.placements, search.seen).params == ranges.params


def test_ranges_of_a_fold_exclude_samples_of_other_folds_only():
    hi = np.arange(16, dtype=np.float64)  # the largest value, 15, is in fold 3
    bounds = SampleBounds({"x": (0.0, 15.0)}, {"x": (np.zeros(16), hi)})
    assert [bounds.range("x", 0.0, fold)[1] for fold in range(4)] == [12, 13, 14, 15]
    assert bounds.range("x", 2.0, 0) == (0.0, pytest.approx(12 + 2 * hi.std()))
    more = SampleBounds({"x": (0.0, 99.0)}, {"x": (np.zeros(16), hi)})  # 99 is in none of the samples
    assert more.range("x", 0.0, 0)[1] == 99


def test_rounding_does_not_make_a_bound_one_of_other_data():
    hi = np.arange(16, dtype=np.float64)
    bounds = SampleBounds({"x": (0.0, 15.0 * (1 + 1e-6))}, {"x": (np.zeros(16), hi)})
    assert bounds.range("x", 0.0, 0)[1] == 12


@pytest.mark.parametrize(("excess", "margin"), [(1.04, 0.0), (1.06, 0.5)])
def test_no_margin_needs_more_evidence_than_a_small_one(excess, margin):
    search = Searched(width)
    full = width(choose_params(search.placements, search.seen, ()))

    def measure(params):  # the noise of all margins is equal, except without a margin
        return [excess if width(each) < 1.0001 * full else 1.0 for each in params]

    search.noise.noises_by_sample.side_effect = measure
    search.bounds.range = Mock(wraps=search.bounds.range)
    search.bounds.range.side_effect = lambda tensor, margin, fold=None: (
        search.seen.range(tensor)[0] - margin,
        search.seen.range(tensor)[1] + margin,
    )
    assert search.run().margin == margin


def test_with_many_calibration_samples_ranges_end_at_the_bounds_of_all_data():
    hi = np.arange(32, dtype=np.float64)
    bounds = SampleBounds({"x": (0.0, 33.0)}, {"x": (np.zeros(32), hi)}, has_many=True)
    assert bounds.range("x", 0.0) == (0.0, 31.0)
    assert bounds.range("x", 0.1) == (0.0, 31.0 + 0.1 * hi.std())
    assert bounds.range("x", 1.0) == bounds.range("x", bounds.min_max) == (0.0, 33.0)
    # Samples of fold 3 use the ranges of "fold 0": here all folds except 3, whose largest value is 31.
    assert [bounds.range("x", 0.0, fold)[1] for fold in range(4)] == [30, 31, 31, 31]


def test_with_many_calibration_samples_a_few_of_them_do_not_decide():
    few = {"x": (np.zeros(16), np.arange(16, dtype=np.float64))}
    assert not SampleBounds({"x": (0.0, 33.0)}, few, has_many=True).has_enough
    assert SampleBounds({"x": (0.0, 33.0)}, few).has_enough


def test_with_many_calibration_samples_rare_values_do_not_widen_ranges_if_that_adds_noise():
    search = Searched(lambda params: width(params) ** 8, count=32)  # the wider the ranges, the more noise
    search.bounds.has_many, search.bounds.min_max = True, np.inf
    ranges = search.run()
    assert ranges.margin == 0
    assert ranges.steps == ["ranges of 32 samples: less noise than with all data"]
    search.noise.noises_by_sample.side_effect = lambda params: [1.0] * len(params)
    assert search.run().margin == np.inf, "equal noise: the range of all data is chosen"
    assert not search.run().steps


def test_the_observer_of_a_rule_decides():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, 3, name="first")])
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(t, 16, 8, 1, name="last")])
    feeds = heavy(16, 0)
    scales = {}
    for name in ("minmax", "percentile(5, 95)"):
        rules = dt.Recipe.preset("w8a8", observer=name)
        by_rule = qo.decide(model, feeds, rules, keep_float="none", bias_correction=False, progress=False)
        by_option = qo.decide(model, feeds, observer=name, keep_float="none", bias_correction=False, progress=False)
        scales[name] = {group: each.scale for group, each in by_rule.ranges.items()}
        read = ["x", *(group for group in by_rule.ranges if group != "x")][:2]
        assert all(scales[name][group] == by_option.ranges[group].scale for group in read)
    assert scales["minmax"]["x"] > scales["percentile(5, 95)"]["x"]


def heavy(count, seed):
    """Images of very different contrast: the largest of a few samples says little about the next."""
    rng = np.random.default_rng(seed)
    return [{"x": (feed["x"] * rng.lognormal(0, 0.7)).astype(np.float32)} for feed in images(count, side=8, batch=1)]


def test_samples_of_different_contrast_get_a_margin_which_lowers_the_noise_on_other_data():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, 3, name="first")])
    t = m.add("Relu", [m.conv(t, 16, 16, 3, name="second")])
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(t, 16, 8, 1, name="last")])
    feeds, others = heavy(16, 0), heavy(200, 1)
    sqnr = {}
    for observer in (None, "minmax"):
        decisions = qo.decide(model, feeds, observer=observer, keep_float="none", progress=False)
        sqnr[observer] = min(output_sqnr(model, qo.rewrite(model, decisions), others).values())
    assert sqnr[None] > sqnr["minmax"] + 1


def test_a_report_names_the_margin(tmp_path):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, 3, name="first")])
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(t, 16, 8, 1, name="last")])
    report = qo.quantize(model, tmp_path / "q.onnx", data=heavy(16, 0), progress=False)
    assert any("standard deviations" in step for step in report.steps)


def test_a_preferred_margin_is_kept_unless_another_one_halves_the_noise():
    search = Searched(lambda params: width(params) ** -0.5)
    search.preferred = 0.5
    assert search.run().margin == 0.5, "a margin of 3 has less noise, but more than half of it"
    search = Searched(lambda params: width(params) ** -8)
    search.preferred = 0.5
    assert search.run().margin == 3.0


def test_skipping_layers_keeps_the_margin_of_all_layers(monkeypatch):
    model, feeds, preferred = peaks("Average"), rare(16), []

    def record(*arguments):
        ranges = search_ranges(*arguments)
        preferred.append((arguments[-1], ranges.margin))
        return ranges

    monkeypatch.setattr("detent.onnx.quantizer_choice.search_ranges", record)
    qo.decide(model, feeds, keep_float="none", progress=False)
    qo.decide(model, feeds, keep_float="none", skip="second", progress=False)
    (none, full), (also_none, again), (given, _) = preferred
    assert none is also_none is None
    assert given == again == full
    qo.decide(model, feeds, keep_float="none", skip="second", observer="minmax", progress=False)
    qo.decide(model, iter(feeds), keep_float="none", skip="second", progress=False)
    assert [each for each, _ in preferred[3:]] == [None], "an iterator can be read only once"


@pytest.mark.parametrize(
    ("recipe", "options", "is_searched"),
    [
        ("w8a8", {}, True),
        ("w8a16", {}, False),  # 16 bits need no search
        ("w8a8", {"effort": "fast"}, False),
        ("w8a8", {"memory_budget": 1 << 20}, True),
    ],
)
def test_all_layers_are_calibrated_only_if_ranges_are_searched(recipe, options, is_searched):
    passes = []
    with listening(lambda name, seconds: passes.append(name)):
        qo.decide(peaks("Average"), rare(16), recipe, skip="second", progress=False, **options)
    assert ("calibration of all layers" in passes) == is_searched


def test_workers_do_not_change_ranges_of_data_that_can_be_read_once(tmp_path):
    options = {"skip": "second", "keep_float": "none", "progress": False}
    here = qo.decide(peaks("Average"), iter(rare(16)), **options)
    with ThreadPoolExecutor(1) as executor:
        there = qo.decide(peaks("Average"), iter(rare(16)), executor=executor, work_directory=tmp_path, **options)
    assert here.to_json() == there.to_json()
