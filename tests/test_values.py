"""Specs, params and tensors that are copied, pickled, shared or reused compare, hash and compute as before."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import detent as dt

X = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
SPECS = ["int8", "uint4/group8", "float8_e4m3fn/axis0", "float8_e5m2", "nf4/token", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
@pytest.mark.parametrize("spec", SPECS)
def test_copies_are_equal_hash_alike_and_stay_read_only(spec, again):
    params = dt.QuantParams.from_data(spec, X)
    q = dt.quantize(X, params)
    for value in (params.spec.format, params.spec, params, q):
        other = again(value)
        assert other == value
        assert hash(other) == hash(value)
    assert not again(params).scale.flags.writeable
    assert not again(q).codes.flags.writeable
    assert np.array_equal(dt.fake_quantize(X, again(params)), dt.fake_quantize(X, params))


def test_a_nan_error_survives_pickling():
    with pytest.raises(dt.NaNError) as caught:
        dt.quantize(np.array([1.0, np.nan]), dt.QuantParams.int8_symmetric())
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.count, again.first_index, str(again)) == (1, (1,), str(caught.value))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_tensor_in_a_reused_buffer_follows_the_buffer(dtype):
    params, ones = dt.QuantParams.int8_symmetric(), np.ones(4, np.float32)
    buffer = np.empty(4, dtype)  # uint8 means packed codes
    q = dt.quantize(ones, params, out=buffer)
    assert q.codes.tolist() == q.packed.tolist() == [1] * 4
    dt.quantize(2 * ones, params, out=buffer)
    assert q.codes.tolist() == q.packed.tolist() == [2] * 4
    with pytest.raises(dt.DtypeError, match="no hash"):
        hash(q)


def test_scales_beyond_float32_live_as_long_as_the_data_are_float64(tmp_path):
    x = np.array([1e-300, 2e-300])
    q = dt.quantize(x, dt.QuantParams.from_data("int8", x))
    q.save(tmp_path / "q")
    assert dt.QuantizedTensor.load(tmp_path / "q") == q
    assert dt.quantize(x, q.params, out=np.empty(2, np.uint8)).codes.tolist() == q.codes.tolist()
    assert np.array_equal(dt.dequantize(q.codes, q.params, dtype="float64"), q.dequantize())


@pytest.mark.parametrize("spec", ["mxfp4", "mxfp8", "nvfp4"])
def test_block_formats_of_float64_data_survive_a_file(spec, tmp_path):
    x = X.astype(np.float64)
    q = dt.quantize(x, dt.QuantParams.from_data(spec, x))
    q.save(tmp_path / "q")
    assert dt.QuantizedTensor.load(tmp_path / "q") == q


def test_a_changed_preset_needs_a_name_of_its_own():
    import dataclasses

    with pytest.raises(dt.SpecError, match="differs from the preset"):
        dataclasses.replace(dt.Convention.onnx, division="reciprocal")
    mine = dataclasses.replace(dt.Convention.onnx, name="mine", division="reciprocal")
    assert dt.QuantSpec.from_json(dt.QuantSpec("int8", convention=mine).to_json()).convention == mine


def test_global_error_settings_change_nothing():
    expected = dt.fake_quantize(X * 1e-30, dt.QuantParams.from_data("uint8/axis0", X * 1e-30))
    with np.errstate(all="raise"):
        actual = dt.fake_quantize(X * 1e-30, dt.QuantParams.from_data("uint8/axis0", X * 1e-30))
        dt.metrics.sqnr_db(X * 1e-30, actual)
    assert np.array_equal(actual, expected)


def test_forward_with_calibration_counts_the_first_batch_once():
    one, two = dt.FakeQuantize("int8", mode=dt.EMA(0.9)), dt.FakeQuantize("int8", mode=dt.EMA(0.9))
    one.forward_with_calibration(X)
    two.forward(X)
    assert one.state_dict()["observer.batches"] == 1
    assert one.params == two.params


def test_backward_uses_the_forwards_parameters_after_an_update():
    fq = dt.FakeQuantize.from_bits(8, scale=1.0)
    x, g = np.full(1, 100, np.float32), np.ones(1, np.float32)
    fq(x)
    fq.update_params(0.1)
    assert fq.backward(g).tolist() == fq.backward(g, x).tolist() == [1.0]


def test_a_disabled_forward_is_not_mistaken_for_an_older_one():
    fq = dt.FakeQuantize.from_bits(8)
    fq(X)
    fq.enabled = False
    fq(X)
    fq.enabled = True
    with pytest.raises(dt.NotCalibratedError, match="called before forward"):
        fq.backward(np.ones_like(X))


@pytest.mark.parametrize("mode", [dt.PerBatch(), dt.EMA(0.9), dt.Learned()])
def test_empty_batches_pass_and_change_nothing(mode):
    fq = dt.FakeQuantize("int8", mode=mode)
    empty = np.empty((0, 4), np.float32)
    assert fq(empty).shape == fq.backward(empty).shape == (0, 4)
    assert not fq.is_initialized


def test_numpy_integers_are_integers():
    assert dt.PerAxis(np.int64(1)) == dt.PerAxis(1)
    assert dt.QuantSpec("int8", qmin=np.int32(-128)).qmin == -128
    assert dt.EMA(np.float32(0.5)) == dt.EMA(0.5)
    assert dt.FakeQuantize.from_bits(np.uint8(8)).bits == 8


def test_more_than_32_axes():
    x = X.reshape((1,) * 30 + (4, 1, 1, 32))
    assert np.array_equal(
        dt.QuantParams.from_data("int8/axis30", x).scale, dt.QuantParams.from_data("int8/axis0", X).scale
    )


def test_a_state_survives_an_npz_file(tmp_path):
    fq = dt.FakeQuantize("uint8/axis0", mode=dt.EMA(0.9))
    fq(X)
    np.savez(tmp_path / "state.npz", **fq.state_dict())
    with np.load(tmp_path / "state.npz") as stored:
        again = dt.FakeQuantize("uint8/axis0", mode=dt.EMA(0.9)).load_state_dict(dict(stored))
    assert again.params == fq.params


def test_eight_threads_give_the_same_bits():
    params = dt.QuantParams.from_data(dt.QuantSpec("int8", rounding="stochastic(7)"), X)
    expected = dt.fake_quantize(X, params, step=3).tobytes()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: dt.fake_quantize(X, params, step=3).tobytes(), range(64)))
    assert set(results) == {expected}


def test_code_usage_never_exceeds_one():
    import ml_dtypes

    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    q = dt.QuantizedTensor(codes, dt.QuantParams("float8_e4m3fn", 1.0))
    assert dt.metrics.code_usage(q) == 1.0


def test_a_forward_that_fails_leaves_the_state():
    fq = dt.FakeQuantize("int8")
    fq(np.array([1e-38]))
    before = fq.state_dict()
    with pytest.raises(dt.ParamsError, match="float32"):
        fq(np.array([2e-38], np.float32))
    after = fq.state_dict()
    assert {name: str(value) for name, value in after.items()} == {name: str(value) for name, value in before.items()}


def test_ratios_at_the_ends_of_float64():
    assert dt.metrics.cosine([1e-200], [1e-200]) == dt.metrics.cosine([1e200], [1e200]) == 1.0
    assert round(dt.metrics.sqnr_db([1e200, 0.0], [1e200, 1e190]), 6) == 200.0
    assert round(dt.metrics.sqnr_db([1e-200, 0.0], [1e-200, 1e-210]), 6) == 200.0


def test_a_tensor_is_no_plain_array():
    q = dt.quantize(X, dt.QuantParams.int8_symmetric())
    with pytest.raises(dt.DtypeError, match="dequantize"):
        np.asarray(q)
    with pytest.raises(TypeError):
        list(q)


def test_a_convention_has_no_more_fields_than_it_shows():
    import dataclasses

    assert "onnx" not in {field.name for field in dataclasses.fields(dt.Convention)}
    assert "onnx" not in dt.Convention.__dataclass_fields__
