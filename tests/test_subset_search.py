"""Search of the changes that lower the noise together."""

import pytest

from detent.subset_search import MAX_MEASUREMENTS, search_subset


def additive(effects, calls):
    def measure(changes, limit):
        calls.append(set(changes))
        return 100.0 + sum(effects[name] for name in changes)

    return measure


def test_harmful_changes_are_dropped():
    calls = []
    effects = {"a": -20.0, "b": 5.0, "c": -10.0, "d": 30.0}
    chosen, noise = search_subset(list(effects), additive(effects, calls), 100.0)
    assert chosen == {"a", "c"}
    assert noise == 70.0


def test_nothing_is_chosen_if_every_change_raises_the_noise():
    chosen, noise = search_subset(["a", "b"], additive({"a": 1.0, "b": 2.0}, []), 100.0)
    assert chosen == set()
    assert noise == 100.0


def test_changes_that_help_only_together_are_kept():
    chosen, _ = search_subset(["a", "b"], lambda changes, _: 10.0 if len(changes) == 2 else 200.0, 100.0)
    assert chosen == {"a", "b"}


@pytest.mark.parametrize("count", [1, 2, 100])
def test_the_number_of_measurements_is_limited(count):
    calls = []
    names = [str(i) for i in range(count)]
    search_subset(names, additive(dict.fromkeys(names, -0.001), calls), 100.0)
    assert len(calls) <= MAX_MEASUREMENTS + 1


def test_noise_that_is_not_a_number_keeps_nothing():
    chosen, noise = search_subset(["a"], lambda *_: float("nan"), 100.0)
    assert chosen == set()
    assert noise == 100.0
