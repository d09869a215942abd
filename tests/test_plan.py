"""Plans: one per combination of arguments; can_implement agrees with run; equal bits from every thread."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import detent as dt

SHAPE = (6, 10)
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
G = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
SPEC = dt.QuantSpec("int4", "axis0", rounding=dt.rounding.stochastic(3))
P = dt.QuantParams.from_data(SPEC, X)
CODES = dt.quantize(X, P).codes

INPUTS = {
    "quantize": (X,),
    "dequantize": (CODES,),
    "fake_quantize": (X,),
    "quantize_backward": (G, X),
    "dequantize_backward": (G,),
    "fake_quantize_backward": (G, X),
    "fake_quantize_learned_backward": (G, X),
}
FUNCTIONS = {
    "quantize": lambda: dt.quantize(X, P).codes,
    "dequantize": lambda: dt.dequantize(CODES, P),
    "fake_quantize": lambda: dt.fake_quantize(X, P),
    "quantize_backward": lambda: dt.quantize_backward(G, X, P),
    "dequantize_backward": lambda: dt.dequantize_backward(G, P),
    "fake_quantize_backward": lambda: dt.fake_quantize_backward(G, X, P),
    "fake_quantize_learned_backward": lambda: dt.fake_quantize_learned_backward(G, X, P),
}


def select(operation="quantize", **changes):
    return dt.Plan.select(operation, **({"shape": SHAPE, "dtype": "float32", "spec": SPEC} | changes))


def same(a, b):
    if isinstance(a, tuple):
        return all(same(*pair) for pair in zip(a, b, strict=True))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("operation", INPUTS)
def test_run_is_the_public_function(operation):
    assert same(select(operation).run(*INPUTS[operation], P), FUNCTIONS[operation]())


def test_the_same_arguments_give_the_same_plan():
    assert select() is select()
    assert select(spec="int8", dtype=np.float32) is select(spec=dt.QuantSpec("int8"), dtype="float32")
    assert select(shape=list(SHAPE)) is select(shape=SHAPE)
    assert select("fake_quantize_backward") is select("fake_quantize_backward", ste=dt.ste.Clipped())
    assert select(nan="raise") is select()


@pytest.mark.parametrize(
    "changes", [{"shape": (6, 11)}, {"dtype": "float64"}, {"spec": "int8/axis0"}, {"nan": "qmin"}], ids=str
)
def test_other_arguments_give_another_plan(changes):
    assert select(**changes) != select()


def test_plans_are_values():
    plan = select()
    assert hash(plan) == hash(select())
    with pytest.raises(AttributeError):
        plan.shape = (1,)


def test_what_a_plan_says_of_itself():
    plan = select(spec="int8/group2", dtype="bfloat16")
    assert plan.sku == f"quantize/bfloat16/int8/group2/symmetric/onnx/{plan.kernel.backend}"
    assert plan.workspace_size == 0
    assert plan.precision_guarantee == dt.PrecisionGuarantee("float32", "float64", deterministic=True, bit_stable=True)
    assert select(dtype="float64").precision_guarantee.math == "float64"
    assert not select("fake_quantize_backward", ste="tanh").precision_guarantee.bit_stable


READ_ONLY = np.empty(SHAPE, np.int8)
READ_ONLY.setflags(write=False)
OPERANDS = {
    "no out": (True, (X, P)),
    "out is None": (True, (X, P, None)),
    "codes": (True, (X, P, np.empty(SHAPE, np.int8))),
    "packed": (True, (X, P, np.empty(30, np.uint8))),
    "strided": (True, (X.T.copy().T, P, np.empty((10, 6), np.int8).T)),
    "nothing": (False, ()),
    "too many": (False, (X, P, None, None)),
    "shape": (False, (X[:5], P)),
    "dtype": (False, (X.astype(np.float64), P)),
    "a list": (False, (X.tolist(), P)),
    "other params": (False, (X, dt.QuantParams("int4/axis0", np.ones(6)))),
    "params' shape": (False, (X, dt.QuantParams(SPEC, np.ones(5)))),
    "no params": (False, (X, None)),
    "out's dtype": (False, (X, P, np.empty(SHAPE, np.int16))),
    "out's shape": (False, (X, P, np.empty((6, 9), np.int8))),
    "packed size": (False, (X, P, np.empty(31, np.uint8))),
    "read-only": (False, (X, P, READ_ONLY)),
    "overlap": (False, (X, P, X.view(np.int8)[:, :10])),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_can_implement(name):
    expected, operands = OPERANDS[name]
    assert select().can_implement(*operands) is expected


@pytest.mark.parametrize("operation", INPUTS)
def test_can_implement_every_operation(operation):
    plan = select(operation)
    assert plan.can_implement(*INPUTS[operation], P)
    assert not plan.can_implement(*INPUTS[operation][:-1], P)


def test_run_fills_packed_and_plain_outputs():
    plan = select()
    codes, packed = np.empty(SHAPE, np.int8), np.empty(30, np.uint8)
    assert plan.run(X, P, out=codes) is codes
    assert plan.run(X, P, out=packed) is packed
    assert np.array_equal(codes, CODES)
    assert np.array_equal(packed, dt.packing.pack(CODES, 4))


def test_run_looks_at_nan_where_the_policy_says_so():
    bad = X.copy()
    bad[2, 3] = np.nan
    with pytest.raises(dt.NaNError):
        select().run(bad, P)
    assert select(nan="zero_point").run(bad, P)[2, 3] == 0


@pytest.mark.parametrize("operation", INPUTS)
def test_eight_threads_give_the_same_bits(operation):
    plan, expected = select(operation), FUNCTIONS[operation]()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: plan.run(*INPUTS[operation], P), range(64)))
    assert all(same(result, expected) for result in results)


def test_eight_threads_select_equal_plans():
    shapes = [(3, n) for n in range(1, 40)]
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda shape: select(shape=shape, spec="int8"), shapes * 8))
    assert len(set(plans)) == len(shapes)


def test_the_number_of_threads_changes_nothing():
    before = dt.get_num_threads()
    expected = select("fake_quantize").run(X, P)
    try:
        for count in (1, 3):
            dt.set_num_threads(count)
            assert same(select("fake_quantize").run(X, P), expected)
    finally:
        dt.set_num_threads(before)
