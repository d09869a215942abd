"""The choice within a budget is exact: it equals the choice of an exhaustive search."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detent.sensitivity.knapsack import best_choice, hull_choices, smallest_total

OPTIONS = st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1, width=32)), min_size=1, max_size=5)
LAYERS = st.lists(OPTIONS, min_size=1, max_size=5)
GRAINY = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)
WIDE = st.floats(-12, 0).map(lambda power: 10.0**power)
DECADES = st.lists(
    st.lists(st.tuples(st.integers(1, 1 << 40), WIDE | st.just(0.0)), min_size=1, max_size=5), min_size=1, max_size=5
)


def totals(layers, places):
    chosen = [options[place] for options, place in zip(layers, places, strict=True)]
    return sum(nbytes for nbytes, _ in chosen), sum(noise for _, noise in chosen)


def everything(layers):
    return [totals(layers, places) for places in itertools.product(*(range(len(each)) for each in layers))]


def least(layers, budget):
    return min((noise for nbytes, noise in everything(layers) if nbytes <= budget), default=None)


@pytest.mark.parametrize("kind", ["any", "ties"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_choice_is_the_best_of_all(kind, data):
    layers = data.draw(LAYERS if kind == "any" else GRAINY)
    budget = data.draw(st.integers(0, 160 if kind == "any" else 32))
    choice, expected = best_choice(layers, budget), least(layers, budget)
    if expected is None:
        assert choice is None
        assert smallest_total(layers) > budget
        return
    nbytes, noise = totals(layers, choice)
    assert nbytes <= budget
    assert noise == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("keep_float", [False, True], ids=["quantized", "float too"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_noise_of_many_decades_is_added_up_without_loss(keep_float, data):
    layers = data.draw(DECADES)
    if keep_float:
        layers = [[*options, (1 << 41, 0.0)] for options in layers]
    smallest, largest = smallest_total(layers), sum(max(nbytes for nbytes, _ in options) for options in layers)
    budget = data.draw(st.integers(smallest, largest) | st.sampled_from([smallest, largest]))
    nbytes, noise = totals(layers, best_choice(layers, budget))
    assert nbytes <= budget
    assert noise == pytest.approx(least(layers, budget), rel=1e-12, abs=0)


def ordinary(rng, keep_float):
    """Return realistic layers at 2 to 16 bits: 6 dB per bit, and very different noise."""
    layers = []
    for _ in range(rng.integers(8, 26)):
        count, loudness = int(rng.integers(100, 10**6)), 10 ** rng.uniform(-6, 1)
        options = [
            (count * bits // 8 + 64, float(loudness * 4.0**-bits * rng.uniform(0.8, 1.2))) for bits in range(2, 17)
        ]
        layers.append([*options, (4 * count, 0.0)] if keep_float else options)
    return layers


@pytest.mark.parametrize("keep_float", [False, True], ids=["quantized", "float too"])
@pytest.mark.parametrize("seed", range(12))
def test_ordinary_layers_have_a_choice_at_every_budget(seed, keep_float):
    layers = ordinary(np.random.default_rng(seed), keep_float)
    smallest, largest = smallest_total(layers), sum(options[-1][0] for options in layers)
    points = list(hull_choices(layers))
    before = np.inf
    for share in (0.0, 0.3, 0.6, 0.9, 0.99, 1.0):
        budget = int(smallest + share * (largest - smallest))
        nbytes, noise = totals(layers, best_choice(layers, budget))
        assert nbytes <= budget
        assert noise <= min(point for size, point in points if size <= budget) * (1 + 1e-12)
        assert noise <= before
        before = noise
    assert before == sum(options[-1][1] for options in layers)


def test_the_best_choice_where_one_layer_has_almost_all_noise():
    """If the bound were a difference of large sums, its rounding error would exceed the noise of small layers."""
    layers = [[(1, 1.0), (1 << 40, 1e-15)], [(1, 3e-13), ((1 << 20), 1e-13), (1 << 21, 2e-14)], [(1, 1e-14), (9, 0.0)]]
    for budget in ((1 << 40) + 2, (1 << 40) + (1 << 20) + 1, (1 << 40) + (1 << 21) + 8, (1 << 40) + (1 << 21) + 9):
        assert totals(layers, best_choice(layers, budget))[1] == least(layers, budget)


@pytest.mark.parametrize("budget", [2**62, 2**63, 2**64, 10**30], ids=["62", "63", "64", "10**30"])
def test_budgets_of_any_size_are_taken(budget):
    assert best_choice([[(4, 0.5), (8, 0.1)], [(4, 0.3), (8, 0.2)]], budget) == [1, 1]


@settings(max_examples=80, deadline=None)
@given(layers=LAYERS)
def test_the_curve_holds_best_choices_and_grows(layers):
    points = list(hull_choices(layers))
    assert points[0][0] == smallest_total(layers)
    assert points[-1][1] == pytest.approx(min(noise for _, noise in everything(layers)), abs=1e-12)
    for (fewer, more_noise), (more, less_noise) in itertools.pairwise(points):
        assert fewer < more
        assert more_noise > less_noise or more_noise == pytest.approx(less_noise)
    for nbytes, noise in points:
        assert noise == pytest.approx(least(layers, nbytes), rel=1e-9, abs=1e-12)


def test_greedy_would_be_wrong():
    """A greedy choice fails: the step with the most gain per byte leaves no room for the best one."""
    layers = [[(1, 1.0), (2, 0.8)], [(1, 1.0), (11, 0.0)]]
    assert best_choice(layers, 12) == [0, 1]


def test_of_equal_noise_the_smaller_is_taken():
    assert best_choice([[(9, 0.5), (4, 0.5), (7, 0.5)]], 100) == [1]


def test_many_layers_take_little_time():
    """A hundred layers with a dozen candidates of odd sizes are solved exactly."""
    rng = np.random.default_rng(0)
    layers = []
    for _ in range(100):
        count, factor = int(rng.integers(100, 200_000)), float(rng.lognormal(-6, 2))
        layers.append([(count * bits // 8 + 37, factor * 4.0**-bits) for bits in range(2, 14)])
    budget = sum(options[3][0] for options in layers)
    places = best_choice(layers, budget)
    nbytes, noise = totals(layers, places)
    assert nbytes <= budget
    below = max((point for point in hull_choices(layers) if point[0] <= budget), key=lambda point: point[0])
    above = min((point for point in hull_choices(layers) if point[0] > budget), key=lambda point: point[0])
    share = (budget - below[0]) / (above[0] - below[0])
    relaxed = below[1] + share * (above[1] - below[1])  # no real choice is better
    assert relaxed <= noise * (1 + 1e-9)
    assert noise <= below[1] * (1 + 1e-9)
