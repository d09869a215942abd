"""Round trips lose nothing: JSON, arrays, files, bytes, state and slices."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt

from .cases import (
    DTYPES,
    INTEGERS,
    OTHERS,
    PRESETS,
    TILINGS,
    all_specs,
    cases,
    edge_data,
    make_params,
    same_bits,
    specs,
)

ROUNDINGS = (None, "half_away", "floor", "stochastic(18446744073709551615)")
GRANULARITIES = tuple({granularity for granularity, _ in TILINGS})
ALL_SPECS = [spec for name in ("onnx", "oxicuda") for spec in all_specs(name, dt.PerGroup(4))]


def saved(q):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "q.safetensors")
        q.save(path)
        return dt.QuantizedTensor.load(path)


@given(specs(roundings=ROUNDINGS, granularities=GRANULARITIES))
def test_spec_through_json(spec):
    again = dt.QuantSpec.from_json(spec.to_json())
    assert again == spec
    assert (hash(again), again.to_json()) == (hash(spec), spec.to_json())


@given(specs(granularities=GRANULARITIES).filter(lambda spec: spec == spec.replace(qmin=None, qmax=None)))
def test_spec_through_its_short_string(spec):
    assert dt.QuantSpec.parse(str(spec)) == spec


@given(specs(roundings=ROUNDINGS, granularities=GRANULARITIES))
def test_spec_prints_as_the_call_that_makes_it(spec):
    names = {name: getattr(dt, name) for name in ("PerTensor", "PerAxis", "PerToken", "PerGroup", "PerBlock")}
    assert eval(repr(spec), {"dt": dt, **names}) == spec


@given(cases(roundings=ROUNDINGS))
def test_params_through_json_and_arrays(case):
    again = dt.QuantParams.from_json(case.params.to_json())
    assert again == case.params
    assert hash(again) == hash(case.params)
    assert dt.QuantParams.from_arrays(case.spec, case.params.to_arrays()) == case.params


@pytest.mark.parametrize("spec", ALL_SPECS, ids=str)
def test_params_of_every_format_through_json_and_arrays(spec):
    x = np.random.default_rng(0).normal(size=(3, 10))
    for data in (x, x.astype(np.float32)):
        params = dt.QuantParams.from_data(spec, data)
        assert dt.QuantParams.from_json(params.to_json()) == params
        assert dt.QuantParams.from_arrays(spec, params.to_arrays()) == params


def test_json_is_strict_json():
    text = dt.QuantParams.from_data("uint8", np.array([-1.0, 0.1])).to_json()
    assert json.dumps(json.loads(text), allow_nan=False) == text


@given(cases(roundings=ROUNDINGS))
def test_tensor_through_a_file(case):
    q = dt.quantize(case.x, case.params)
    again = saved(q)
    assert again == q
    assert hash(again) == hash(q)
    assert same_bits(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 3)])
@pytest.mark.parametrize("name", [*INTEGERS[1:], *OTHERS])
def test_tensor_of_every_format_through_a_file(name, shape):
    rng = np.random.default_rng(1)
    spec = dt.QuantSpec(name) if name != "int1" else dt.QuantSpec(name, symmetric=False)
    params = make_params(rng, spec, shape)
    q = dt.quantize(edge_data(rng, params, shape, "float16"), params)
    assert saved(q) == q
    assert dt.QuantizedTensor.from_packed(q.packed, params, shape, "float16") == q
    assert dt.QuantizedTensor.from_codes(q.codes, params, "float16") == q


@pytest.mark.parametrize("spec", [dt.mxfp4, dt.mxfp8, dt.mxfp8_e5m2, dt.nvfp4], ids=str)
def test_tensor_of_a_block_format_through_a_file(spec):
    x = np.random.default_rng(1).normal(size=(3, 70)).astype(np.float32)
    q = dt.quantize(x, dt.QuantParams.from_data(spec, x))
    again = saved(q)
    assert again == q
    assert again.params.block_scale is None or same_bits(again.params.block_scale, q.params.block_scale)


MODES = [dt.PerBatch(), dt.EMA(0.9), dt.Fixed(), dt.Learned()]


SPECS = ["uint8", "int4/axis0", "float8_e4m3fn/group4", "nf4/token", "mxfp4", "nvfp4"]
LEARNABLE = [(spec, mode) for spec in SPECS for mode in MODES if spec[:2] not in {"mx", "nv"} or mode != dt.Learned()]


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4"])
def test_a_scale_of_few_bits_cannot_be_learned(spec):
    with pytest.raises(dt.SpecError, match="mode Learned needs scale_format"):
        dt.FakeQuantize(spec, mode=dt.Learned())


@pytest.mark.parametrize(("spec", "mode"), LEARNABLE, ids=str)
def test_quantizer_through_its_state(spec, mode):
    x = np.random.default_rng(2).normal(size=(4, 32)).astype(np.float32)
    fq = dt.FakeQuantize(spec, mode=mode)
    fq.calibrate(x)
    fq(x)
    other = dt.FakeQuantize(spec, mode=mode).load_state_dict(fq.state_dict())
    assert other.params == fq.params
    assert _plain(other.state_dict()) == _plain(fq.state_dict())
    assert same_bits(other(x * 2), fq(x * 2))


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_uninitialized_quantizer_through_its_state(mode):
    other = dt.FakeQuantize("int8", mode=mode)
    other.calibrate(np.ones(3, np.float32))
    other.load_state_dict(dt.FakeQuantize("int8", mode=mode).state_dict())
    assert not other.is_initialized


def _plain(state):
    """Arrays as their dtype, shape and bytes, so that states compare with ==."""
    return {
        name: (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in state.items()
    }


@given(st.sampled_from([dt.observers.MinMax, dt.observers.EMAMinMax]), st.integers(0, 4), st.sampled_from(DTYPES))
def test_observer_through_bytes(make, batches, dtype):
    rng = np.random.default_rng(batches)
    observer = make(granularity=dt.PerAxis(0))
    for _ in range(batches):
        x = rng.normal(size=(3, 4)).astype(dtype)
        x[0, 0] = np.nan
        observer.observe(x)
    again = make.from_bytes(observer.to_bytes())
    assert again.to_bytes() == observer.to_bytes()
    assert (again.count, again.nonfinite) == (11 * batches, batches)
    if batches:
        assert again.params("uint8/axis0") == observer.params("uint8/axis0")


# Slices


@st.composite
def slices_of(draw, granularity, shape):
    """Slices that do not cut groups: any slice along ungrouped axes, multiples of the group size along grouped ones."""
    tiling = granularity.tiling(shape)
    grouped = isinstance(granularity, dt.PerGroup | dt.PerBlock)
    parts = []
    for size, block in zip(shape, tiling.block, strict=True):
        if not grouped or block == 1:
            parts.append(draw(st.slices(size)))
            continue
        count = -(-size // block)
        start = draw(st.integers(0, count))
        stop = draw(st.integers(start, count))
        end = draw(st.sampled_from([min(stop * block, size), None] if stop == count else [stop * block]))
        parts.append(slice(start * block, end))
    return tuple(parts)


@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
@given(data=st.data())
def test_a_slice_dequantizes_to_the_slice_of_the_values(granularity, shape, data):
    rng = np.random.default_rng(7)
    spec = data.draw(st.sampled_from([s for s in ALL_SPECS if s.format.bits in {3, 4, 8}]))
    params = make_params(rng, spec.replace(granularity=granularity), shape)
    q = dt.quantize(edge_data(rng, params, shape, "float32"), params)
    part = data.draw(slices_of(granularity, shape))
    cut = q[part]
    assert cut.shape == q.codes[part].shape
    assert same_bits(cut.codes, np.ascontiguousarray(q.codes[part]))
    assert same_bits(cut.dequantize(), np.ascontiguousarray(q.dequantize()[part]))
    assert cut.params.scale.shape == granularity.tiling(cut.shape).scale_shape
    assert dt.QuantizedTensor.from_codes(cut.codes, cut.params) == cut


def test_presets_are_all_tried():
    assert set(PRESETS) == set(dt.convention.PRESETS)
