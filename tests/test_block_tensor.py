"""BlockTensor, and operators with a block format: interface, slices, files, bad input."""

import copy
import pickle

import numpy as np
import pytest

import detent as dt


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(3, 4, 512)).astype(np.float32)


def test_a_name_and_a_value_give_the_same_tensor(x):
    q = dt.quantize(x, "q4_k")
    assert q == dt.quantize(x, dt.gguf.q4_k)
    assert q.spec is q.format is dt.gguf.q4_k
    assert (q.shape, q.size, q.nbytes, q.packed.shape) == ((3, 4, 512), 6144, 3456, (3456,))
    assert len(q) == 3
    assert q != dt.quantize(x, "q4_0")
    assert hash(q) == hash(dt.quantize(x, "q4_k"))


def test_fake_quantize_equals_the_round_trip(x):
    for name in dt.gguf.BLOCK_FORMATS:
        q = dt.quantize(x, name)
        assert dt.fake_quantize(x, name).tobytes() == q.dequantize().tobytes() == dt.dequantize(q).tobytes()
        assert q.codes.shape == x.shape


def test_slices_are_slices_of_the_data(x):
    q = dt.quantize(x, "q6_k")
    for index in (slice(1, 3), (slice(None), slice(3, None, -2)), (..., slice(256, 512)), (slice(0, 0),)):
        part = q[index]
        assert part.dequantize().tobytes() == q.dequantize()[index].tobytes()
        assert part.shape == q.dequantize()[index].shape
    assert q[1:2] == dt.quantize(x[1:2], "q6_k")


def test_a_slice_may_not_cut_a_block(x):
    with pytest.raises(dt.ShapeError, match="cuts blocks of 256"):
        dt.quantize(x, "q6_k")[..., 128:384]
    with pytest.raises(dt.ShapeError, match="cuts blocks of 256"):
        dt.quantize(x, "q6_k")[..., ::2]


def test_out_receives_bytes_and_values(x):
    q = dt.quantize(x, "q5_k")
    packed, values = np.empty(q.nbytes, np.uint8), np.empty_like(x)
    assert dt.quantize(x, "q5_k", out=packed).packed.tobytes() == packed.tobytes() == q.packed.tobytes()
    assert dt.fake_quantize(x, "q5_k", out=values) is values
    assert values.tobytes() == q.dequantize(out=np.empty_like(x)).tobytes()
    with pytest.raises(dt.DtypeError, match="no hash"):
        hash(dt.quantize(x, "q5_k", out=packed))
    for bad in (np.empty(7, np.uint8), np.empty(q.nbytes, np.int8), np.empty(2 * q.nbytes, np.uint8)[::2]):
        with pytest.raises(dt.OutError):
            dt.quantize(x, "q5_k", out=bad)
    with pytest.raises(dt.OutError, match="shares memory"):
        dt.fake_quantize(x, "q5_k", out=x)


def test_strided_and_empty_data(x):
    assert dt.quantize(x[::-1, ::2], "q4_0") == dt.quantize(x[::-1, ::2].copy(), "q4_0")
    empty = dt.quantize(x[:0], "q4_k")
    assert (empty.nbytes, empty.dequantize().shape) == (0, (0, 4, 512))
    assert dt.quantize(np.empty((3, 0), np.float32), "q4_0").dequantize().shape == (3, 0)
    values = np.empty((512, 4), np.float32).T
    dt.fake_quantize(x[0], "q4_k", out=values)
    assert np.array_equal(values, dt.fake_quantize(x[0], "q4_k"))


def test_copies_and_pickles_are_equal(x):
    q = dt.quantize(x, "iq4_xs")
    assert copy.deepcopy(q) == pickle.loads(pickle.dumps(q)) == q
    assert pickle.loads(pickle.dumps(dt.gguf.q4_k)) is dt.gguf.q4_k
    assert copy.deepcopy(dt.gguf.q4_k) is dt.gguf.q4_k


def test_a_file_contains_the_bytes(x, tmp_path):
    q = dt.quantize(x.astype(np.float16), "q3_k")
    q.save(tmp_path / "q.safetensors")
    assert dt.BlockTensor.load(tmp_path / "q.safetensors") == q
    assert q.packed.tobytes() in (tmp_path / "q.safetensors").read_bytes()
    with pytest.raises(dt.FileFormatError):
        dt.QuantizedTensor.load(tmp_path / "q.safetensors")
    dt.quantize(x, "int8").save(tmp_path / "other.safetensors")
    with pytest.raises(dt.FileFormatError):
        dt.BlockTensor.load(tmp_path / "other.safetensors")


def test_bytes_of_a_wrong_number_are_rejected():
    with pytest.raises(dt.ShapeError, match="expected 144 bytes"):
        dt.BlockTensor(np.zeros(143, np.uint8), "q4_k", (256,))
    with pytest.raises(dt.ShapeError, match="144 bytes"):
        dt.BlockTensor(np.zeros(144, np.int16), "q4_k", (256,))
    with pytest.raises(dt.SpecError, match="did you mean 'q4_k'"):
        dt.BlockTensor(np.zeros(144, np.uint8), "Q4_K", (256,))


def test_the_error_of_a_wrong_shape_names_the_block_size():
    with pytest.raises(dt.ShapeError, match=r"shape \(2, 640\) for q4_k.*multiple of 256.*use q5_0"):
        dt.quantize(np.zeros((2, 640), np.float32), "q4_k")
    with pytest.raises(dt.ShapeError, match=r"shape \(2, 30\) for q4_0.*multiple of 32"):
        dt.fake_quantize(np.zeros((2, 30), np.float32), "q4_0")
    with pytest.raises(dt.ShapeError, match=r"shape \(\)"):
        dt.quantize(np.float32(1.0), "q4_0")


def test_nan_and_infinities_are_rejected_by_index(x):
    bad = x.copy()
    bad[1, 2, 300] = np.nan
    with pytest.raises(dt.NaNError, match=r"first at \(1, 2, 300\)"):
        dt.quantize(bad, "q4_k")
    bad[1, 2, 300] = -np.inf
    with pytest.raises(dt.RangeError, match=r"-inf at \(1, 2, 300\)"):
        dt.quantize(bad, "q4_k")
    with pytest.raises(dt.RangeError, match=r"-inf at \(1, 2, 300\)"):
        dt.fake_quantize(bad, "q4_k", nan="raise")
    with pytest.raises(dt.RangeError, match="1e\\+40 at"):
        dt.quantize(np.full((1, 32), 1e40), "q8_0")
    with pytest.raises(dt.SpecError, match="no code for NaN"):
        dt.quantize(x, "q4_k", nan="qmin")


def test_fake_quantize_makes_the_whole_block_nan(x):
    bad = x.copy()
    bad[1, 2, 300] = np.inf
    y = dt.fake_quantize(bad, "q4_k")
    assert np.isnan(y[1, 2, 256:]).all()
    rest = ~np.isnan(y)
    assert int((~rest).sum()) == 256
    assert np.array_equal(y[rest], dt.fake_quantize(x, "q4_k")[rest])


@pytest.mark.parametrize(("factor", "text"), [(1e-9, "become 0"), (1e9, "become infinite")])
@pytest.mark.parametrize("name", [name for name, form in dt.gguf.BLOCK_FORMATS.items() if form.scale_offsets])
def test_scales_outside_float16_are_reported(x, name, factor, text):
    bad = x.copy()
    bad[2, 1, 256:] *= factor
    with pytest.raises(dt.ParamsError, match=rf"{text}; first in the block at \(2, 1, 256\)"):
        dt.quantize(bad, name)
    kept = dt.quantize(bad, name, scales="keep")
    assert kept[:2] == dt.quantize(x[:2], name)


@pytest.mark.parametrize("name", list(dt.gguf.BLOCK_FORMATS))
def test_blocks_of_zeros_and_of_constants_are_no_error(name):
    zeros = np.zeros((2, 512), np.float32)
    assert not dt.quantize(zeros, name).dequantize().any()
    constant = np.full((2, 512), -0.5, np.float32)
    assert np.allclose(dt.quantize(constant, name).dequantize(), constant, rtol=0.05)


def test_importance_is_checked(x):
    for bad, text in (
        (np.ones(4), "one weight per column"),
        (np.ones((4, 512)), "one weight per column"),
        (np.full(512, np.nan), "nan at column 0"),
        (-np.ones(512), "at least 0"),
    ):
        with pytest.raises(dt.DetentError, match=text):
            dt.quantize(x, "q4_k", importance=bad)
    with pytest.raises(dt.SpecError, match="only block formats"):
        dt.quantize(x, "int8", importance=np.ones(512))
    with pytest.raises(dt.SpecError, match="only block formats"):
        dt.fake_quantize(x, "int8", importance=np.ones(512))
    with pytest.raises(dt.SpecError, match="'raise' or 'keep'"):
        dt.quantize(x, "q4_k", scales="no")


def test_the_gradient_passes_straight_through(x):
    g = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    for ste in (None, dt.ste.Identity(), "identity"):
        assert dt.fake_quantize_backward(g, x, "q4_k", ste=ste).tobytes() == g.tobytes()
    out = np.empty_like(g)
    assert dt.fake_quantize_backward(g, x, dt.gguf.q2_k, out=out) is out
    assert out.tobytes() == g.tobytes()
    with pytest.raises(dt.SpecError, match="expected Identity"):
        dt.fake_quantize_backward(g, x, "q4_k", ste=dt.ste.Clipped())
    with pytest.raises(dt.ShapeError, match="expected those of x"):
        dt.fake_quantize_backward(g[:1], x, "q4_k")


def test_what_needs_params_says_so(x):
    for call in (
        lambda: dt.QuantParams.from_data("q4_k", x),
        lambda: dt.QuantSpec.parse("q4_k"),
        lambda: dt.Plan.select("quantize", shape=(256,), dtype="float32", spec="q4_k"),
        lambda: dt.fake_quantize_dynamic(x, "q4_k"),
        lambda: dt.fake_quantize_masked(x, "q4_k"),
    ):
        with pytest.raises(dt.SpecError, match="derives its scales itself"):
            call()


def test_a_block_tensor_is_no_array(x):
    q = dt.quantize(x, "q8_0")
    with pytest.raises(dt.DtypeError, match="not an array"):
        np.asarray(q)
    with pytest.raises(TypeError):
        iter(q)
    assert "q8_0" in q._repr_html_()
    assert "8.5" in q._repr_html_()
