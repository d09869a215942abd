"""Memory layout never changes a bit: every operation on strided, reversed, read-only and unaligned arrays."""

import numpy as np
import pytest

import detent as dt

from .cases import DTYPES, edge_data, make_params, same_bits


def _reversed(a):
    back = (slice(None, None, -1),) * a.ndim
    return a[back].copy()[back]


def _stepped(a):
    return np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a[...]


def _read_only(a):
    copy = a.copy()
    copy.setflags(write=False)
    return copy


def _unaligned(a):
    return np.frombuffer(b"\0" + a.tobytes(), a.dtype, offset=1, count=a.size).reshape(a.shape)


LAYOUTS = {
    "fortran": lambda a: np.array(a, order="F"),
    "transposed": lambda a: a.T.copy().T,
    "reversed": _reversed,
    "stepped": _stepped,
    "read_only": _read_only,
    "unaligned": _unaligned,
    "swapped": lambda a: a.astype(a.dtype.newbyteorder(">")),
}
SHAPES = [
    (dt.PerTensor(), (4, 6)),
    (dt.PerTensor(), ()),
    (dt.PerTensor(), (0, 3)),
    (dt.PerAxis(1), (4, 6)),
    (dt.PerAxis(0), (3, 0)),
    (dt.PerToken(), (2, 3, 4)),
    (dt.PerGroup(4), (3, 6)),
    (dt.PerGroup(2), (0, 5)),
    (dt.PerBlock(2, 4), (3, 6)),
]
OPERATIONS = {
    "quantize": lambda g, x, p: [dt.quantize(x, p).codes],
    "dequantize": lambda g, x, p: [dt.dequantize(dt.quantize(x, p).codes[...], p)],
    "fake_quantize": lambda g, x, p: [dt.fake_quantize(x, p)],
    "quantize_backward": lambda g, x, p: [dt.quantize_backward(g, x, p)],
    "dequantize_backward": lambda g, x, p: [dt.dequantize_backward(g, p)],
    "fake_quantize_backward": lambda g, x, p: [dt.fake_quantize_backward(g, x, p, ste="clipped")],
    "hard_tanh": lambda g, x, p: [dt.fake_quantize_backward(g, x, p, ste="hard_tanh")],
    "fake_quantize_learned_backward": dt.fake_quantize_learned_backward,
}


def _data(granularity, shape, dtype, format_="uint4"):
    rng = np.random.default_rng(5)
    rounding = dt.rounding.stochastic(1) if "int" in format_ else None
    spec = dt.QuantSpec(format_, granularity, rounding=rounding)
    params = make_params(rng, spec, shape)
    return rng.normal(size=shape).astype(dtype).reshape(shape), edge_data(rng, params, shape, dtype), params


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_input(layout, operation):
    run = OPERATIONS[operation]
    for granularity, shape in SHAPES:
        for dtype in ("float32", "float16"):
            g, x, params = _data(granularity, shape, dtype)
            expected = run(g, x, params)
            got = run(LAYOUTS[layout](g), LAYOUTS[layout](x), params)
            for a, b in zip(got, expected, strict=True):
                assert same_bits(a, b), (granularity, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["fortran", "reversed", "stepped", "unaligned"])
def test_layout_of_every_dtype_and_format(layout, dtype):
    for format_ in ("int16", "float8_e5m2", "nf4"):
        _, x, params = _data(dt.PerAxis(0), (3, 5), dtype, format_)
        strided = LAYOUTS[layout](x)
        assert same_bits(dt.quantize(strided, params).packed, dt.quantize(x, params).packed)
        assert same_bits(dt.fake_quantize(strided, params), dt.fake_quantize(x, params))


def test_layout_of_the_codes():
    _, x, params = _data(dt.PerAxis(0), (3, 5), "float32")
    codes = dt.quantize(x, params).codes
    for layout in LAYOUTS.values():
        assert same_bits(dt.dequantize(layout(codes), params), dt.dequantize(codes, params))


def test_a_broadcast_input_is_read_like_its_copy():
    x = np.broadcast_to(np.array([0.3, -0.7, 9.0], np.float32), (4, 3))
    params = dt.QuantParams.from_data("int4/axis0", x)
    assert same_bits(dt.fake_quantize(x, params), dt.fake_quantize(x.copy(), params))


@pytest.mark.parametrize("layout", ["fortran", "transposed", "reversed", "stepped"])
def test_layout_of_out(layout):
    g, x, params = _data(dt.PerGroup(4), (3, 6), "float32")
    outs = {
        "y": (np.zeros_like(x), lambda out: dt.fake_quantize(x, params, out=out)),
        "codes": (np.zeros(x.shape, np.uint8), lambda out: dt.quantize(x, params, out=out).codes),
        "gx": (np.zeros_like(x), lambda out: dt.fake_quantize_backward(g, x, params, out=out)),
        "gq": (np.zeros_like(x), lambda out: dt.dequantize_backward(g, params, out=out)),
        "value": (np.zeros_like(x), lambda out: dt.quantize(x, params).dequantize(out=out)),
    }
    for name, (plain, run) in outs.items():
        strided = LAYOUTS[layout](plain)
        assert same_bits(run(strided), run(plain)), name
        assert same_bits(strided, plain), name


@pytest.mark.parametrize("layout", ["fortran", "reversed", "stepped", "read_only", "unaligned"])
def test_layout_of_observed_data(layout):
    for granularity, shape in SHAPES:
        if 0 in shape:
            continue
        x = np.random.default_rng(9).normal(size=shape).astype(np.float32).reshape(shape)
        strided = LAYOUTS[layout](x)
        assert dt.observers.MinMax(granularity).observe(strided).to_bytes() == (
            dt.observers.MinMax(granularity).observe(x).to_bytes()
        )
        spec = dt.QuantSpec("uint8", granularity)
        assert dt.QuantParams.from_data(spec, strided) == dt.QuantParams.from_data(spec, x)
        assert dt.metrics.mae(strided, x * 0.9) == dt.metrics.mae(x, x * 0.9)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_empty_data_give_empty_results_of_the_right_type(shape):
    x, params = np.zeros(shape, np.float16), dt.QuantParams.int4_symmetric()
    q = dt.quantize(x, params)
    assert (q.shape, q.packed.size, q.codes.dtype) == (shape, 0, np.int8)
    for y in (q.dequantize(), dt.fake_quantize(x, params), dt.fake_quantize_backward(x, x, params)):
        assert (y.shape, y.dtype) == (shape, np.float16)
    gx, gs, gz = dt.fake_quantize_learned_backward(x, x, params)
    assert (gx.shape, gs.tolist(), gz.tolist()) == (shape, 0.0, 0.0)


def test_0_d_data_give_0_d_arrays():
    x, params = np.array(0.7, np.float32), dt.QuantParams.int4_symmetric()
    results = [
        dt.quantize(x, params).codes,
        dt.quantize(x, params).dequantize(),
        dt.fake_quantize(x, params),
        dt.fake_quantize_backward(x, x, params),
        *dt.fake_quantize_learned_backward(x, x, params),
    ]
    assert [type(r) for r in results] == [np.ndarray] * 7
    assert [r.shape for r in results] == [()] * 7
