"""After an error nothing has changed: inputs, outputs, quantizers, observers, files."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import detent as dt
from detent.observers import EMAMinMax, MinMax

NAN = float("nan")


def batch(seed=0):
    return np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)


def trained(mode, spec="uint8/axis0"):
    fq = dt.FakeQuantize(spec, mode=mode)
    fq.calibrate(batch())
    fq(batch(1))
    fq.backward(batch(2))
    return fq


@dataclass
class World:
    """Everything that a failing call could change."""

    x: np.ndarray = field(default_factory=batch)
    g: np.ndarray = field(default_factory=lambda: batch(3))
    y: np.ndarray = field(default_factory=lambda: np.full((2, 3), 7.0, np.float32))
    codes: np.ndarray = field(default_factory=lambda: np.full((2, 3), 7, np.uint8))
    params: dt.QuantParams = field(default_factory=lambda: dt.QuantParams.from_data("uint8/axis0", batch()))
    ema: dt.FakeQuantize = field(default_factory=lambda: trained("ema"))
    fixed: dt.FakeQuantize = field(default_factory=lambda: trained("fixed"))
    learned: dt.FakeQuantize = field(default_factory=lambda: trained("learned"))
    minmax: MinMax = field(default_factory=lambda: MinMax("axis0").observe(batch()))
    average: EMAMinMax = field(default_factory=lambda: EMAMinMax(granularity="axis0").observe(batch()))

    @property
    def bad(self):
        """A batch of integers where floats are expected."""
        return np.ones((2, 3), int)

    def snapshot(self):
        """All objects as comparable values, including the gradients of each quantizer's last forward pass."""
        quantizers = {name: getattr(self, name) for name in ("ema", "fixed", "learned")}
        return {
            "arrays": [a.tobytes() for a in (self.x, self.g, self.y, self.codes)],
            "params": self.params.to_json(),
            "states": {name: _plain(fq.state_dict()) for name, fq in quantizers.items()},
            "flags": {name: (fq.training, fq.enabled) for name, fq in quantizers.items()},
            "gradients": {name: _gradients(fq) for name, fq in quantizers.items()},
            "observers": [self.minmax.to_bytes(), self.average.to_bytes()],
        }


def _plain(state):
    return {k: (v.dtype, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for k, v in state.items()}


def _gradients(fq):
    return fq.backward(batch(4)).tobytes()


INFINITE = np.full((2, 3), np.inf, np.float32)
MISTAKES = {
    "quantize: NaN": lambda w: dt.quantize(w.x * NAN, w.params),
    "quantize: integers": lambda w: dt.quantize(w.bad, w.params, out=w.codes),
    "quantize: shape": lambda w: dt.quantize(w.x.T, w.params, out=w.codes),
    "quantize: out": lambda w: dt.quantize(w.x, w.params, out=w.codes.T),
    "quantize: policy": lambda w: dt.quantize(w.x, w.params, out=w.codes, nan="zero"),
    "quantize: step": lambda w: dt.quantize(w.x, w.params, out=w.codes, step=-1),
    "fake_quantize: out": lambda w: dt.fake_quantize(w.x, w.params, out=w.x),
    "fake_quantize: step": lambda w: dt.fake_quantize(w.x, w.params, out=w.y, step=2**32),
    "dequantize: codes": lambda w: dt.dequantize(w.codes.astype(int) + 300, w.params, out=w.y),
    "backward: shape": lambda w: dt.fake_quantize_backward(w.g[:1], w.x, w.params, out=w.y),
    "backward: estimator": lambda w: dt.fake_quantize_backward(w.g, w.x, w.params, ste="clip", out=w.y),
    "backward: callable": lambda w: dt.fake_quantize_backward(
        w.g, w.x, w.params, ste=lambda g, x, p: g.astype("f8"), out=w.y
    ),
    "ema: integers": lambda w: w.ema(w.bad),
    "ema: shape": lambda w: w.ema(w.x.T),
    "ema: beyond float32": lambda w: w.ema(np.full((2, 3), 1e300)),
    "ema: calibrate integers": lambda w: w.ema.calibrate(w.bad),
    "ema: calibrate NaN": lambda w: w.ema.calibrate(w.x * NAN),
    "ema: calibrate shape": lambda w: w.ema.calibrate(np.float32(1.0)),
    "ema: update": lambda w: w.ema.update_params([-1.0, 1.0]),
    "ema: backward shape": lambda w: w.ema.backward(w.g[:1]),
    "ema: state": lambda w: w.ema.load_state_dict(w.ema.state_dict() | {"observer.count": -1}),
    "ema: state of another mode": lambda w: w.ema.load_state_dict(w.fixed.state_dict()),
    "fixed: shape": lambda w: w.fixed(w.x.T),
    "fixed: calibrate NaN": lambda w: w.fixed.calibrate(w.x * NAN),
    "fixed: calibrate nothing": lambda w: w.fixed.calibrate(w.x[:, :0]),
    "fixed: update scale": lambda w: w.fixed.update_params([0.0, 1.0], 3),
    "fixed: update zero point": lambda w: w.fixed.update_params([1.0, 1.0], 256),
    "fixed: state": lambda w: w.fixed.load_state_dict(w.fixed.state_dict() | {"scale": np.zeros(2, np.float32)}),
    "learned: integers": lambda w: w.learned(w.bad),
    "learned: backward shape": lambda w: w.learned.backward(w.g[:1]),
    "learned: update scale": lambda w: w.learned.update_params([NAN, 1.0], 2.5),
    "learned: update zero point": lambda w: w.learned.update_params([1.0, 1.0], NAN),
    "learned: update shape": lambda w: w.learned.update_params([1.0, 1.0], [1.5, 2.5, 3.5]),
    "learned: state": lambda w: w.learned.load_state_dict(w.learned.state_dict() | {"step": -1}),
    "minmax: integers": lambda w: w.minmax.observe(w.bad),
    "minmax: shape": lambda w: w.minmax.observe(w.x.T),
    "minmax: merge": lambda w: w.minmax.merge(w.average),
    "minmax: merge shape": lambda w: w.minmax.merge(MinMax("axis0").observe(w.x.T)),
    "minmax: state": lambda w: w.minmax.load_state_dict(w.minmax.state_dict() | {"count": -1}),
    "average: shape": lambda w: w.average.observe(w.x.T),
    "average: merge": lambda w: w.average.merge(EMAMinMax(0.5, "axis0").observe(w.x)),
    "average: state": lambda w: w.average.load_state_dict(w.average.state_dict() | {"batches": -1}),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_changes(name):
    world = World()
    before = world.snapshot()
    with pytest.raises(dt.DetentError):
        MISTAKES[name](world)
    after = world.snapshot()
    changed = [part for part in before if before[part] != after[part]]
    assert not changed


@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned"])
def test_a_first_batch_that_fails_leaves_the_quantizer_new(mode):
    fq = dt.FakeQuantize("int8/axis0", mode=mode)
    before = _plain(fq.state_dict())
    with pytest.raises(dt.DetentError):
        fq(INFINITE)
    assert _plain(fq.state_dict()) == before
    assert not fq.is_initialized
    assert fq(batch()).shape == (2, 3)


def test_a_failed_step_of_stochastic_rounding_is_not_counted():
    fq = dt.FakeQuantize(dt.QuantSpec("int8", rounding=dt.rounding.stochastic(1)), mode="fixed")
    fq.update_params(0.1)
    fq(batch())
    with pytest.raises(dt.DetentError):
        fq(np.ones(3, int))
    assert fq.step == 1


def test_a_file_that_cannot_be_read_stays_as_it_is(tmp_path):
    path = tmp_path / "q"
    path.write_bytes(b"junk")
    with pytest.raises(dt.FileFormatError):
        dt.QuantizedTensor.load(path)
    assert path.read_bytes() == b"junk"
