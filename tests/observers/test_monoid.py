"""MinMax and histograms: any order, partition and tree of merges gives the same bytes. EMAMinMax is exempt."""

from functools import reduce
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import detent as dt
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Percentile

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
BATCHES = st.lists(hnp.arrays(np.float32, (2, 3), elements=FLOATS), min_size=1, max_size=4)
HALVES = hnp.arrays(np.float16, (2, 3), elements=st.floats(width=16, allow_nan=True, allow_infinity=True))
WEIGHTS = hnp.arrays(np.float64, (2, 3), elements=st.floats(0, 1000))
WEIGHTED = st.lists(st.tuples(hnp.arrays(np.float32, (2, 3), elements=FLOATS), WEIGHTS), min_size=1, max_size=3)

HISTOGRAMS = {
    "Percentile": lambda granularity, precision=5: Percentile(1, 99, granularity, precision),
    "MSE": lambda granularity, precision=5: MSE(2.4, granularity, precision),
    "Entropy": Entropy,
}
KINDS = {"MinMax": lambda granularity, precision=5: MinMax(granularity), **HISTOGRAMS}
every_histogram = pytest.mark.parametrize("kind", HISTOGRAMS)
every_kind = pytest.mark.parametrize("kind", KINDS)
PRECISIONS = {"tensor": 5, "axis0": 1, "axis1": 5, "token": 3, "group2": 5, "block2x2": 2}
SOME = {
    ("MinMax", "axis1"),
    ("Percentile", "tensor"),
    ("Percentile", "block2x2"),
    ("MSE", "axis0"),
    ("MSE", "group2"),
    ("Entropy", "token"),
}


def cases(granularities):
    """All pairs of observer and granularity; most are slow."""
    cases = product(KINDS, granularities)
    return [pytest.param(*case, marks=() if case in SOME else pytest.mark.slow) for case in cases]


every_case = pytest.mark.parametrize(("kind", "granularity"), cases(PRECISIONS))


def observed(make, *batches):
    """Return a new observer that has observed the batches; a batch may be a pair with weights."""
    observer = make()
    for batch in batches:
        observer.observe(*batch) if isinstance(batch, tuple) else observer.observe(batch)
    return observer


def merged(observers):
    return reduce(lambda a, b: a.merge(b), observers)


@every_case
@given(batches=BATCHES, random=st.randoms(use_true_random=False))
def test_the_order_of_batches_changes_nothing(kind, granularity, batches, random):
    def make():
        return KINDS[kind](granularity, PRECISIONS[granularity])

    whole, shuffled = observed(make, *batches).to_bytes(), random.sample(batches, len(batches))
    assert observed(make, *shuffled).to_bytes() == whole
    assert merged([observed(make, x) for x in shuffled]).to_bytes() == whole


@pytest.mark.parametrize(("kind", "granularity"), cases(("tensor", "axis0", "axis1", "token")))
@given(batches=BATCHES, cut=st.integers(0, 4))
def test_the_partition_into_batches_changes_nothing(kind, granularity, batches, cut):
    def make():
        return KINDS[kind](granularity)

    axis = 0 if granularity == "axis1" else 1
    joined = np.concatenate(batches, axis=axis)
    whole = observed(make, joined).to_bytes()
    assert observed(make, *batches).to_bytes() == whole
    assert observed(make, *np.split(joined, [joined.shape[axis] * cut // 4], axis=axis)).to_bytes() == whole


@every_case
@given(a=BATCHES, b=BATCHES, c=BATCHES)
def test_merge_is_commutative_and_associative(kind, granularity, a, b, c):
    def fresh():
        return [observed(lambda: KINDS[kind](granularity, PRECISIONS[granularity]), *batches) for batches in (a, b, c)]

    x, y, z = fresh()
    left = x.merge(y).merge(z).to_bytes()
    x, y, z = fresh()
    assert x.merge(y.merge(z)).to_bytes() == left
    x, y, z = fresh()
    assert z.merge(y).merge(x).to_bytes() == left


@every_case
@given(batches=BATCHES)
def test_merge_with_nothing_changes_nothing(kind, granularity, batches):
    def make():
        return KINDS[kind](granularity, PRECISIONS[granularity])

    whole = observed(make, *batches).to_bytes()
    assert observed(make, *batches).merge(make()).to_bytes() == whole
    assert make().merge(observed(make, *batches)).to_bytes() == whole
    assert make().merge(make()).to_bytes() == make().to_bytes()


@every_kind
@given(a=BATCHES, b=BATCHES)
def test_merge_does_not_change_the_other(kind, a, b):
    first, second = (observed(lambda: KINDS[kind]("axis0"), *batches) for batches in (a, b))
    before = second.to_bytes()
    first.merge(second).observe(np.full((2, 3), 9.0, np.float32))
    assert second.to_bytes() == before


@every_kind
@given(batches=BATCHES)
def test_observers_may_travel_as_bytes_before_they_merge(kind, batches):
    def make():
        return KINDS[kind]("axis0")

    parts = [type(make()).from_bytes(observed(make, x).to_bytes()) for x in batches]
    assert merged(parts).to_bytes() == observed(make, *batches).to_bytes()


@every_kind
@given(batches=BATCHES)
def test_a_batch_without_elements_changes_nothing(kind, batches):
    def make():
        return KINDS[kind]("axis0")

    nothing, whole = np.empty((2, 0), np.float32), observed(make, *batches).to_bytes()
    assert observed(make, *batches, nothing).to_bytes() == whole
    assert observed(make, nothing, *batches).to_bytes() == whole


@pytest.mark.parametrize("kind", ["MinMax", *HISTOGRAMS])
def test_merge_with_one_that_has_seen_a_batch_without_elements(kind):
    def make():
        return KINDS[kind]("tensor")

    whole = observed(make, [1.0, 2.0]).to_bytes()
    assert observed(make, np.empty(0)).merge(observed(make, [1.0, 2.0])).to_bytes() == whole
    assert observed(make, [1.0, 2.0]).merge(observed(make, np.empty(0))).to_bytes() == whole


@every_kind
def test_an_observer_may_merge_with_itself(kind):
    x = np.random.default_rng(0).normal(size=(2, 3))
    one = observed(lambda: KINDS[kind]("axis0"), x)
    assert one.merge(one).to_bytes() == observed(lambda: KINDS[kind]("axis0"), x, x).to_bytes()


@pytest.mark.parametrize("kind", ["MinMax", "Percentile"])
@given(x=HALVES)
def test_the_dtype_of_the_data_changes_no_count(kind, x):
    observers = [observed(lambda: KINDS[kind]("axis0"), x.astype(dtype)) for dtype in ("float16", "float32", "float64")]
    assert observers[0].to_bytes() == observers[1].to_bytes()
    narrow, wide = observers[0].state_dict(), observers[2].state_dict()
    assert (narrow.pop("double"), wide.pop("double")) == (0, 1)
    np.testing.assert_equal(wide, narrow)


@every_kind
def test_float16_pieces_and_one_float32_array(kind):
    x = np.random.default_rng(0).normal(size=(3, 400)).astype(np.float16)
    pieces = observed(lambda: KINDS[kind]("axis0"), *np.split(x, 8, axis=1))
    assert pieces.to_bytes() == observed(lambda: KINDS[kind]("axis0"), x.astype(np.float32)).to_bytes()


@every_kind
def test_bfloat16_and_float32_give_the_same_bytes(kind):
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = x.astype(np.float32)
        narrow = observed(lambda: KINDS[kind]("tensor"), x)
    assert narrow.to_bytes() == observed(lambda: KINDS[kind]("tensor"), wide).to_bytes()


@pytest.mark.parametrize("granularity", ["tensor", "axis0", "axis1", "group128"])
@every_kind
def test_kernels_and_threads_change_nothing(kind, granularity):
    x = np.random.default_rng(0).standard_cauchy(size=(20, 2000)).astype(np.float32)
    states, threads = set(), dt.get_num_threads()
    try:
        for count in (1, 2, 3):
            dt.set_num_threads(count)
            states.add(observed(lambda: KINDS[kind](granularity), x).to_bytes())
    finally:
        dt.set_num_threads(threads)
    with dt.use_kernels("reference"):
        states.add(observed(lambda: KINDS[kind](granularity), x).to_bytes())
    assert len(states) == 1


@pytest.mark.parametrize(("kind", "granularity"), [("Percentile", "tensor"), ("MSE", "axis0"), ("Entropy", "group2")])
@given(batches=WEIGHTED, random=st.randoms(use_true_random=False))
def test_weighted_observers_merge_exactly(kind, granularity, batches, random):
    def make():
        return HISTOGRAMS[kind](granularity)

    whole, shuffled = observed(make, *batches).to_bytes(), random.sample(batches, len(batches))
    assert observed(make, *shuffled).to_bytes() == whole
    assert merged([observed(make, batch) for batch in shuffled]).to_bytes() == whole


@pytest.mark.parametrize(
    "kind", ["Percentile", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("MSE", "Entropy"))]
)
@given(plain=BATCHES, weighted=WEIGHTED)
def test_no_weight_is_weight_1(kind, plain, weighted):
    def make():
        return HISTOGRAMS[kind]("axis0")

    whole = observed(make, *((x, 1.0) for x in plain), *weighted).to_bytes()
    assert observed(make, *plain, *weighted).to_bytes() == whole
    assert observed(make, *weighted, *plain).to_bytes() == whole
    assert observed(make, *plain).merge(observed(make, *weighted)).to_bytes() == whole
    assert observed(make, *weighted).merge(observed(make, *plain)).to_bytes() == whole


@every_histogram
def test_weights_broadcast(kind):
    x, weight = np.random.default_rng(0).normal(size=(2, 3)), np.array([[1.0], [0.5]])
    whole = observed(lambda: HISTOGRAMS[kind]("axis0"), (x, np.tile(weight, (1, 3)))).to_bytes()
    assert observed(lambda: HISTOGRAMS[kind]("axis0"), (x, weight)).to_bytes() == whole


@every_histogram
def test_elements_that_weigh_nothing_in_any_partition(kind):
    def make():
        return HISTOGRAMS[kind]("tensor")

    x, weight = np.array([1.0, 5.0]), np.array([1.0, 0.0])
    parts = [(x[:1], weight[:1]), (x[1:], weight[1:])]
    assert observed(make, *parts).to_bytes() == observed(make, (x, weight)).to_bytes()


def test_an_average_depends_on_the_order_and_its_docstring_mentions_it():
    a, b = np.array([1.0], np.float32), np.array([2.0], np.float32)
    assert observed(EMAMinMax, a, b).to_bytes() != observed(EMAMinMax, b, a).to_bytes()
    assert "neither commutative nor associative" in EMAMinMax.merge.__doc__
