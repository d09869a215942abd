"""rlx: the documented behavior of ScaleMode, the four straight-through estimators, the channel axis and learned scales.

Documented: ``ScaleMode`` PerBatch (default), EMA with a decay, Fixed, all serializable and hashable; ``SteKind``
Identity (default), ClippedIdentity, Tanh, HardTanh; 2, 4 and 8 bits; one scale per index of any axis; LSQ gradients.
"""

import math
from functools import partial

import numpy as np
import pytest

import detent as dt

from .tables import number, same_bits

INT4 = "int4/tensor/symmetric/rlx"
fixed = partial(dt.FakeQuantize.from_bits, convention="rlx")
CLIPPED = dt.ste.Clipped(on="value")


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# ---- scale modes ----


def test_per_batch_takes_each_batch_by_itself() -> None:
    fq = dt.FakeQuantize(INT4, mode=dt.PerBatch())
    fq(array(-7.0, 3.5))
    fq(array(14.0, 1.0))
    assert fq.scale == 2.0


def test_per_batch_values() -> None:
    # s = 7 / 7; 3.5 -> 4, away from zero
    assert same_bits(dt.FakeQuantize(INT4, mode=dt.PerBatch())(array(-7.0, 3.5)), array(-7.0, 4.0))


def test_per_batch_takes_each_batch_in_evaluation_too() -> None:
    fq = dt.FakeQuantize(INT4, mode=dt.PerBatch())
    fq.eval()
    fq(array(14.0))
    assert fq.scale == 2.0


def test_ema_uses_the_updated_state_in_the_same_call() -> None:
    # hi: 7, then 0.5 * 7 + 0.5 * 21 = 14, s = 2: 21 -> 7 steps, 1 -> 1 step (0.5, away from zero)
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    fq(array(7.0, 0.0))
    assert same_bits(fq(array(21.0, 1.0)), array(14.0, 2.0))


def test_ema_rests_in_evaluation() -> None:
    # rlx updates on every forward
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    fq(array(7.0))
    fq.eval()
    fq(array(700.0))
    assert fq.scale == 1.0


def test_ema_resumes_in_training() -> None:
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    fq(array(0.0, 7.0))
    fq.eval()
    fq.train()
    fq(array(0.0, 21.0))
    assert fq.scale == 2.0


def test_ema_without_data_refuses_to_evaluate() -> None:
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    fq.eval()
    with pytest.raises(dt.NotCalibratedError):
        fq(array(1.0))


def test_a_first_batch_of_zeros_is_a_batch() -> None:
    # an explicit flag instead of a sentinel value: hi = 0.5 * 0 + 0.5 * 7
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    fq(array(0.0, 0.0))
    fq(array(0.0, 7.0))
    assert fq.scale == 0.5


def test_fixed_never_follows_the_data() -> None:
    fq = fixed(4, True, 0.5)
    fq(array(700.0))
    assert fq.scale == 0.5


MODES = [dt.PerBatch(), dt.EMA(decay=0.9), dt.EMA(decay=0.99), dt.Fixed(), dt.Learned()]


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_modes_survive_json(mode: dt.ScaleMode) -> None:
    assert dt.ScaleMode.from_json(mode.to_json()) == mode


def test_modes_hash_by_value() -> None:
    assert len({*MODES, dt.EMA(decay=0.9)}) == len(MODES)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(dt.SpecError):
        dt.EMA(decay=decay)


def test_state_survives_saving() -> None:
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    fq(array(0.0, 7.0))
    other = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5))
    other.load_state_dict(fq.state_dict())
    other(array(0.0, 21.0))
    assert other.scale == 2.0


# ---- estimators ----


def test_identity_is_the_default() -> None:
    fq = dt.FakeQuantize(INT4, mode=dt.PerBatch())
    fq(array(7.0, 1.0))
    assert same_bits(fq.backward(array(2.0, 3.0)), array(2.0, 3.0))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("ste", "factors"),
    [
        (dt.ste.Identity(), (1.0, 1.0, 1.0, 1.0)),
        (CLIPPED, (1.0, 1.0, 1.0, 0.0)),
        (dt.ste.HardTanh(), (1.0, 0.5, 0.0, 0.0)),
        (dt.ste.Tanh(unit="range"), tuple(1 - math.tanh(v) ** 2 for v in (0.0, 0.5, 1.0, 1.5))),
    ],
    ids=repr,
)
def test_estimator_across_the_range(bits: int, ste: dt.ste.Estimator, factors: tuple[float, ...]) -> None:
    # the middle, halfway, the bound, and half a range beyond it; qmax * s = 1 at every bit width would need
    # rounded scales, so s = 2 and the points scale with qmax
    end = 2.0 * (2 ** (bits - 1) - 1)
    fq = fixed(bits, True, 2.0, ste=ste)
    gx = fq.backward(np.ones(4, np.float32), array(0.0, end / 2, end, end * 1.5))
    assert gx == pytest.approx(np.array(factors), abs=4 * 2.0**-24, rel=0)


def test_backward_uses_the_scale_of_the_forward() -> None:
    # hi: 7, then 0.5 * 7 + 0.5 * 35 = 21, s = 3, so 35 is outside [-21, 21].
    # rlx recomputes s = 35 / 7 from the batch, and nothing is ever outside.
    fq = dt.FakeQuantize(INT4, mode=dt.EMA(decay=0.5), ste=CLIPPED)
    fq(array(0.0, 7.0))
    fq(array(1.0, 35.0))
    assert same_bits(fq.backward(array(1.0, 1.0)), array(1.0, 0.0))


# ---- bits ----


@pytest.mark.parametrize(("bits", "qmax"), [(2, 1), (3, 3), (4, 7), (5, 15), (8, 127), (16, 32767)])
def test_the_range_is_narrow(bits: int, qmax: int) -> None:
    # rlx supports 2, 4 and 8 bits and panics otherwise
    assert dt.FakeQuantize(f"int{bits}/tensor/symmetric/rlx").quant_range() == (-qmax, qmax)


# ---- axis ----


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_one_scale_per_index_of_any_axis(axis: int) -> None:
    # channel c holds 7 * (c + 1) once and zeros elsewhere
    x = np.zeros((3, 3, 3, 3), np.float32)
    np.moveaxis(x, axis, 0)[[0, 1, 2], 2, 0, 1] = [7.0, -14.0, 21.0]
    fq = dt.FakeQuantize(f"int4/axis{axis}/symmetric/rlx", mode=dt.PerBatch())
    fq(x)
    assert fq.scale.tolist() == [1.0, 2.0, 3.0]


def test_channels_round_with_their_own_scale() -> None:
    # columns have the scales 1 and 2: 2.5 -> 3, and 2.5 / 2 = 1.25 -> 1 -> 2
    x = np.array([[7.0, 14.0], [2.5, 2.5]], dtype=np.float32)
    y = dt.FakeQuantize("int4/axis1/symmetric/rlx", mode=dt.PerBatch())(x)
    assert same_bits(y, np.array([[7.0, 14.0], [3.0, 2.0]], dtype=np.float32))


def test_ema_of_channels() -> None:
    fq = dt.FakeQuantize("int4/axis0/symmetric/rlx", mode=dt.EMA(decay=0.5))
    fq(np.array([[0.0, 7.0], [0.0, 14.0]], dtype=np.float32))
    fq(np.array([[0.0, 21.0], [0.0, 0.0]], dtype=np.float32))
    assert fq.scale.tolist() == [2.0, 1.0]


# ---- learned scales ----

X = array(0.625, 4.0, -0.75)  # v = 1.25 -> 1, 8 -> clipped at 7, -1.5 -> -2: gradients of the scale -0.25, 7, -0.5


def test_learned_gradients_add_up() -> None:
    params = dt.QuantParams(dt.QuantSpec.parse(INT4), scale=0.5)
    _, gs, _ = dt.fake_quantize_learned_backward(np.ones_like(X), X, params, grad_scale=1.0)
    assert gs == 6.25


def test_learned_gradients_are_weighted_by_g() -> None:
    params = dt.QuantParams(dt.QuantSpec.parse(INT4), scale=0.5)
    _, gs, _ = dt.fake_quantize_learned_backward(array(4.0, 1.0, 2.0), X, params, grad_scale=1.0)
    assert gs == -1.0 + 7.0 - 1.0


def test_learned_gradients_are_scaled_by_default() -> None:
    # 1 / sqrt(N * qmax) as in the paper; rlx omits it
    params = dt.QuantParams(dt.QuantSpec.parse(INT4), scale=0.5)
    _, gs, _ = dt.fake_quantize_learned_backward(np.ones_like(X), X, params)
    assert gs == pytest.approx(6.25 / math.sqrt(3 * 7), rel=2**-22)


def test_learned_gradients_of_channels() -> None:
    params = dt.QuantParams("int4/axis1/symmetric/rlx", scale=array(0.5, 1.0))
    x = np.array([[0.625, 0.25], [4.0, 100.0]], dtype=np.float32)
    _, gs, _ = dt.fake_quantize_learned_backward(np.ones_like(x), x, params, grad_scale=1.0)
    assert gs.tolist() == [6.75, 6.75]  # -0.25 + 7, -0.25 + 7


def test_learned_forward_floors_nothing() -> None:
    # rlx floors the scale at 1e-12; detent keeps every normal number
    s = number("1e-20")
    params = dt.QuantParams(dt.QuantSpec.parse(INT4), scale=s)
    assert same_bits(dt.fake_quantize(array(number("3*s", s)), params), array(number("3*s", s)))
