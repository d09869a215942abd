"""qt.fake_quantize: the bits of the core for every layout, gradients, memory saved for backward, and transforms.

Data are next to ties and results are compared bit by bit. Gradients are also compared with float64 formulas.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

torch = pytest.importorskip("torch")

from torch_bits import array, assert_same, make_case, tensor  # noqa: E402

import detent.torch as qt  # noqa: E402

# Not ours: inductor loads its own scripted parts, and how dynamo looks at autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]

DTYPES = ("float16", "bfloat16", "float32", "float64")
FORMATS = ("int2", "int4", "int8", "uint8", "int16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")
GRANULARITIES = ("tensor", "axis0", "axis1", "axis-1", "token", "group5", "group2@0", "block2x4")
SHAPE = (3, 5, 23)
STES = {
    "none": None,
    "identity": dt.ste.Identity(),
    "clipped": dt.ste.Clipped(),
    "value": dt.ste.Clipped(on="value"),
    "exclusive": dt.ste.Clipped(bounds="exclusive"),
    "value_exclusive": dt.ste.Clipped(on="value", bounds="exclusive"),
    "hard_tanh": dt.ste.HardTanh(),
}


def specs_of(fmt: str, granularity: str) -> list[dt.QuantSpec]:
    """One spec per convention; every second one is affine."""
    integer = dt.formats.FORMATS[fmt].kind == "integer"
    names = list(dt.convention.PRESETS)
    return [
        dt.QuantSpec(fmt, granularity, symmetric=False if integer and i % 2 else None, convention=name)
        for i, name in enumerate(names)
    ]


# Forward


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_forward_equals_the_core(fmt: str, dtype: str, granularity: str) -> None:
    for spec in specs_of(fmt, granularity):
        case = make_case(spec, SHAPE, dtype)
        x = tensor(case.x)
        assert_same(qt.fake_quantize(x, case.params), dt.fake_quantize(case.x, case.params), spec)
        assert_same(x, case.x, "x was changed")


@pytest.mark.parametrize("spec", ["mxfp4", "mxfp8", "nvfp4"])
def test_block_formats(spec: str) -> None:
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    params = dt.QuantParams.from_data(spec, x)
    assert_same(qt.fake_quantize(tensor(x), params), dt.fake_quantize(x, params))


@pytest.mark.parametrize("rounding", ["half_even", "half_away", "floor", "stochastic(81985529216486895)"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_roundings_and_steps(dtype: str, rounding: str) -> None:
    case = make_case(dt.QuantSpec("uint8", "axis1", rounding=rounding), SHAPE, dtype)
    for step in (0, 7, 2**32 - 1):
        x = tensor(case.x).requires_grad_()
        y = qt.fake_quantize(x, case.params, step=step)
        assert_same(y, dt.fake_quantize(case.x, case.params, step=step))
        y.backward(tensor(case.g))
        assert_same(x.grad, dt.fake_quantize_backward(case.g, case.x, case.params, step=step))


LAYOUTS = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "sliced": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "offset": lambda x: torch.cat([torch.zeros(1, dtype=x.dtype), x.reshape(-1)])[1:].reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rounding", ["half_even", "stochastic(3)"])
@pytest.mark.parametrize("granularity", ["tensor", "axis0", "axis1", "axis-1", "token", "group3", "group2@1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_layouts(dtype: str, granularity: str, rounding: str, layout: str) -> None:
    case = make_case(dt.QuantSpec("uint4", granularity, rounding=rounding), (2, 3, 4, 5), dtype)
    x = LAYOUTS[layout](tensor(case.x)).detach().requires_grad_()
    expected = dt.fake_quantize(case.x, case.params, step=2)
    gradient = dt.fake_quantize_backward(case.g, case.x, case.params, step=2)
    for g_layout in (*LAYOUTS, None):
        g = tensor(case.g) if g_layout is None else LAYOUTS[g_layout](tensor(case.g))
        y = qt.fake_quantize(x, case.params, step=2)
        assert_same(y, expected, layout)
        (gx,) = torch.autograd.grad(y, x, g)
        assert_same(gx, gradient, (layout, g_layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_learned_gradients_do_not_depend_on_the_layout(layout: str) -> None:
    spec = dt.QuantSpec("uint4", "axis1")
    case = make_case(spec, (2, 3, 40, 50), nasty=False)
    scale = tensor(case.params.scale).requires_grad_()
    zero = tensor(case.params.zero_point.astype(np.float32)).requires_grad_()
    x = LAYOUTS[layout](tensor(case.x)).detach().requires_grad_()
    y = qt.fake_quantize(x, case.params, scale=scale, zero_point=zero)
    y.backward(LAYOUTS["channels_last"](tensor(case.g)))
    for got, expected in zip(
        (x.grad, scale.grad, zero.grad),
        dt.fake_quantize_learned_backward(case.g, case.x, case.params),
        strict=True,
    ):
        assert_same(got, expected)


def test_dense_layouts_are_kept() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = qt.fake_quantize(x, dt.QuantParams(dt.QuantSpec("int8", "axis1"), np.full(3, 0.1, np.float32)))
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_expanded() -> None:
    case = make_case(dt.QuantSpec("int4"), (1, 7))
    x = tensor(case.x).requires_grad_()
    y = qt.fake_quantize(x.expand(5, 7), case.params)
    whole = np.broadcast_to(case.x, (5, 7))
    assert_same(y, dt.fake_quantize(whole, case.params))
    y.sum().backward()  # an expanded gradient, too
    expected = dt.fake_quantize_backward(np.ones((5, 7), np.float32), whole, case.params).sum(0, keepdims=True)
    assert_same(x.grad, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 1, 1)], ids=str)
def test_small_shapes(shape: tuple[int, ...], dtype: str) -> None:
    case = make_case(dt.QuantSpec("int8"), shape, dtype)
    for ste in STES.values():
        x = tensor(case.x).requires_grad_()
        y = qt.fake_quantize(x, case.params, ste=ste)
        assert_same(y, dt.fake_quantize(case.x, case.params))
        y.backward(tensor(case.g))
        assert_same(x.grad, dt.fake_quantize_backward(case.g, case.x, case.params, ste=ste))


def test_a_tensor_with_a_negative_bit() -> None:
    x = torch.complex(torch.zeros(3), torch.tensor([0.3, 0.9, 9.0])).conj().imag
    assert x.is_neg()
    y = qt.fake_quantize(x, dt.QuantParams("int8", 0.5))
    assert y.tolist() == [-0.5, -1.0, -9.0]


def test_a_parameter_without_gradients_records_no_graph() -> None:
    x = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert not qt.fake_quantize(x, dt.QuantParams("int8", 0.5)).requires_grad
    assert not qt.fake_quantize(torch.ones(3), dt.QuantParams("int8", 0.5)).requires_grad


# Gradients


@pytest.mark.parametrize("ste", STES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["int4", "uint8", "float8_e4m3fn", "nf4"])
def test_gradients_equal_the_core(fmt: str, dtype: str, ste: str) -> None:
    for granularity in GRANULARITIES:
        for spec in specs_of(fmt, granularity)[::3]:
            case = make_case(spec, SHAPE, dtype)
            x = tensor(case.x).requires_grad_()
            qt.fake_quantize(x, case.params, ste=STES[ste]).backward(tensor(case.g))
            assert_same(x.grad, dt.fake_quantize_backward(case.g, case.x, case.params, ste=STES[ste]), spec)


@pytest.mark.parametrize("unit", ["range", "step"])
def test_tanh_to_4_ulp(unit: str) -> None:
    case = make_case(dt.QuantSpec("int4", "axis0"), SHAPE, "float64", nasty=False)
    x = tensor(case.x).requires_grad_()
    qt.fake_quantize(x, case.params, ste=dt.ste.Tanh(unit)).backward(tensor(case.g))
    expected = dt.fake_quantize_backward(case.g, case.x, case.params, ste=dt.ste.Tanh(unit))
    assert np.abs(array(x.grad) - expected).max() <= 4 * np.finfo(np.float64).eps * np.abs(case.g).max()


def by_formula(ste: dt.ste.Estimator, x: NDArray, s: NDArray, z: NDArray, low: int, high: int) -> NDArray:
    """The factor of g for each straight-through estimator, from the table of the contract; x is not at a bound."""
    u = np.round(x / s) + z
    middle, half = ((low + high) / 2 - z) * s, (high - low) / 2 * s
    v = (x - middle) / half
    match ste:
        case dt.ste.Identity():
            return np.ones_like(x)
        case dt.ste.Clipped(on="code", bounds="inclusive"):
            return (low <= u) & (u <= high)
        case dt.ste.Clipped(on="code", bounds="exclusive"):
            return (low < u) & (u < high)
        case dt.ste.Clipped(on="value", bounds="inclusive"):
            return ((low - z) * s <= x) & (x <= (high - z) * s)
        case dt.ste.Clipped(on="value", bounds="exclusive"):
            return ((low - z) * s < x) & (x < (high - z) * s)
        case dt.ste.HardTanh():
            return np.maximum(0, 1 - np.abs(v))
        case dt.ste.Tanh(unit="range"):
            return 1 - np.tanh(v) ** 2
        case dt.ste.Tanh(unit="step"):
            return 1 - np.tanh(x / s) ** 2
    raise AssertionError(ste)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    "ste", [*[s for s in STES.values() if s is not None], dt.ste.Tanh(), dt.ste.Tanh("step")], ids=str
)
def test_gradients_by_formula(ste: dt.ste.Estimator, granularity: str) -> None:
    spec = dt.QuantSpec("uint4", granularity)
    case = make_case(spec, SHAPE, "float64", nasty=False)
    x = tensor(case.x).requires_grad_()
    qt.fake_quantize(x, case.params, ste=ste).backward(tensor(case.g))
    ones = np.ones(SHAPE)
    s = dt.dequantize_backward(ones, case.params)  # g * s: the scale of each element
    codes = dt.quantize(np.zeros(SHAPE), case.params).codes  # of 0: the zero point of each element
    expected = case.g * by_formula(ste, case.x, s, codes.astype(float), spec.qmin, spec.qmax)
    np.testing.assert_allclose(array(x.grad), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", ["int4", "uint8"])
def test_scale_and_zero_point_against_finite_differences(fmt: str, granularity: str) -> None:
    """The frozen surrogate ``s (clip(x/s + e + z) - z)``, away from its kinks."""
    spec = dt.QuantSpec(fmt, granularity, symmetric=False)
    case = make_case(spec, SHAPE, "float64", nasty=False)
    rng = np.random.default_rng(1)
    ones = np.ones(SHAPE)
    s, z = dt.dequantize_backward(ones, case.params), dt.quantize(0 * ones, case.params).codes.astype(float)
    reach = spec.qmax - spec.qmin
    k = rng.integers(-reach, reach, SHAPE)
    k = np.where(np.isin(k + z, (spec.qmin, spec.qmax)), k + 2, k)  # codes at the ends are kinks
    data = (k + rng.uniform(-0.4, 0.4, SHAPE)) * s
    e = np.round(data / s) - data / s
    x = tensor(data).requires_grad_()
    scale = tensor(case.params.scale).requires_grad_()
    zero = tensor(case.params.zero_point.astype(float)).requires_grad_()
    qt.fake_quantize(x, case.params, scale=scale, zero_point=zero).backward(tensor(case.g))

    def surrogate(ds: float = 0.0, dz: float = 0.0, dx: float = 0.0) -> NDArray:
        t = (data + dx) / (s + ds) + e + (z + dz)
        return (s + ds) * (np.clip(t, spec.qmin, spec.qmax) - (z + dz)) * case.g

    def per_set(terms: NDArray) -> NDArray:
        tiling = spec.granularity.tiling(SHAPE)
        owners = np.arange(tiling.sets).reshape(tiling.scale_shape)
        owner = dt.dequantize_backward(ones, dt.QuantParams(spec, owners + 1.0)).astype(int) - 1
        sums = np.bincount(owner.ravel(), terms.ravel(), tiling.sets)
        count = np.bincount(owner.ravel(), minlength=tiling.sets)
        return (sums / np.sqrt(count * max(abs(spec.qmax), 1))).reshape(tiling.scale_shape)

    h = 1e-6
    ds = per_set((surrogate(ds=h * 0.01) - surrogate(ds=-h * 0.01)) / (2 * h * 0.01))
    dz = per_set((surrogate(dz=h) - surrogate(dz=-h)) / (2 * h))
    dx = (surrogate(dx=h * 0.01) - surrogate(dx=-h * 0.01)) / (2 * h * 0.01)
    np.testing.assert_allclose(array(scale.grad), ds, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(array(zero.grad), dz, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(array(x.grad), dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ste", STES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_learned_gradients_equal_the_core(dtype: str, granularity: str, ste: str) -> None:
    for spec in specs_of("uint4", granularity)[1::3]:
        case = make_case(spec, SHAPE, dtype, nasty=False)
        x, scale = tensor(case.x).requires_grad_(), tensor(case.params.scale).requires_grad_()
        zero = tensor(case.params.zero_point.astype(np.float32)).requires_grad_()
        y = qt.fake_quantize(x, case.params, scale=scale, zero_point=zero, ste=STES[ste])
        assert_same(y, dt.fake_quantize(case.x, case.params))
        y.backward(tensor(case.g))
        gx, gs, gz = dt.fake_quantize_learned_backward(case.g, case.x, case.params, ste=STES[ste])
        assert_same(x.grad, gx, spec)
        assert_same(scale.grad, gs, spec)
        assert_same(zero.grad, gz.astype(np.float32), spec)


def test_tensors_replace_the_values_of_the_params() -> None:
    x = torch.tensor([-0.4, 0.3, 7.0])
    params = dt.QuantParams("uint4", 1.0, 3)
    got = qt.fake_quantize(x, params, scale=torch.tensor(0.5), zero_point=torch.tensor(1.5))
    assert_same(got, dt.fake_quantize(x.numpy(), dt.QuantParams("uint4", 0.5, 2)))
    got = qt.fake_quantize(x, params, zero_point=torch.tensor([99.0]))
    assert_same(got, dt.fake_quantize(x.numpy(), dt.QuantParams("uint4", 1.0, 15)))


def test_a_learned_scale_of_a_frozen_input() -> None:
    scale = torch.tensor([0.5], requires_grad=True)
    qt.fake_quantize(torch.tensor([0.7]), dt.QuantParams("int8", 1.0), scale=scale).sum().backward()
    assert scale.grad.shape == (1,)
    with torch.no_grad():
        assert not qt.fake_quantize(torch.ones(2), dt.QuantParams("int8", 1.0), scale=scale).requires_grad


def test_a_callable_ste_gets_tensors() -> None:
    seen = []

    def double(g: torch.Tensor, x: torch.Tensor, params: dt.QuantParams) -> torch.Tensor:
        seen.append((type(g), type(x), params.spec))
        return 2 * g

    params = dt.QuantParams("int8", 0.5)
    x = torch.tensor([0.3, 900.0], requires_grad=True)
    qt.fake_quantize(x, params, ste=double).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert seen == [(torch.Tensor, torch.Tensor, params.spec)]
    with pytest.raises(dt.DetentError, match="callable STE returned"):
        qt.fake_quantize(x, params, ste=lambda g, *_: g.double()).sum().backward()
    scale = torch.tensor(0.5, requires_grad=True)
    qt.fake_quantize(x, params, scale=scale, ste=double).sum().backward()
    _, expected, _ = dt.fake_quantize_learned_backward(np.ones(2, np.float32), array(x), params)
    assert_same(scale.grad, expected)


def test_gradients_have_gradients() -> None:
    x = torch.tensor([0.3, 900.0], requires_grad=True)
    y = qt.fake_quantize(x, dt.QuantParams("int8", 0.5)) * x
    (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    gx.sum().backward()
    assert x.grad.tolist() == [2.0, 0.0]
    scale = torch.tensor(0.5, requires_grad=True)
    y = qt.fake_quantize(x, dt.QuantParams("int8", 0.5), scale=scale) * x
    with pytest.raises(dt.UnsupportedError, match="learned scales have no second"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_backward_uses_the_forwards_parameters() -> None:
    """The tensors may change between forward and backward."""
    x, scale = torch.tensor([0.3, 900.0], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    params = dt.QuantParams("int8", 1.0)
    y = qt.fake_quantize(x, params, scale=scale)
    with torch.no_grad():
        scale.mul_(1000)
    y.sum().backward()
    _, expected, _ = dt.fake_quantize_learned_backward(
        np.ones(2, np.float32), array(x), dt.QuantParams("int8", np.float32(0.5))
    )
    assert_same(scale.grad, expected)


# What is kept for backward


def saved_bytes(f: object, *args: torch.Tensor) -> int:
    seen = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f(*args).sum()
    return sum(seen)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(4096,), (3, 5, 23), (2, 8, 16, 16)], ids=str)
def test_one_bit_per_element_is_saved(shape: tuple[int, ...], dtype: str) -> None:
    x = torch.randn(shape).to(getattr(torch, dtype)).requires_grad_()
    params = dt.QuantParams("int8", 0.02)
    for ste in ("clipped", "value", "exclusive", "none"):
        kept = saved_bytes(lambda x, ste=ste: qt.fake_quantize(x, params, ste=STES[ste]), x)
        assert kept <= -(-x.numel() // 8) + 8, ste
    assert saved_bytes(lambda x: qt.fake_quantize(x, params, ste="identity"), x) == 0


def test_channels_last_saves_one_bit_too() -> None:
    x = torch.randn(2, 8, 16, 16).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert saved_bytes(lambda x: qt.fake_quantize(x, dt.QuantParams("int8", 0.02)), x) == x.numel() // 8


# A spec in place of params: the range of x


BY_RANGE = ("int8", "uint4/axis0", "int4/group5", "uint8/token/affine", "mxfp8", "nvfp4")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("text", BY_RANGE)
def test_a_spec_takes_the_range_of_the_data(text: str, dtype: str) -> None:
    spec = dt.QuantSpec.parse(text)
    case = make_case(dt.QuantSpec("int8"), (4, 5, 32), dtype, nasty=False)
    params = dt.QuantParams.from_data(spec, case.x)
    x = tensor(case.x).requires_grad_()
    y = qt.fake_quantize(x, text)
    assert_same(y, dt.fake_quantize(case.x, params))
    y.backward(tensor(case.g))
    assert_same(x.grad, dt.fake_quantize_backward(case.g, case.x, params))
    assert_same(qt.fake_quantize(x, spec), dt.fake_quantize(case.x, params))


def test_a_format_is_a_spec_and_a_given_scale_replaces_that_of_the_range() -> None:
    x = torch.tensor([0.3, -127.0])
    assert_same(qt.fake_quantize(x, dt.int8), np.array([0, -127], np.float32))
    scale = torch.tensor(0.5, requires_grad=True)
    y = qt.fake_quantize(x, "int8", scale=scale)
    assert_same(y, np.array([0.5, -63.5], np.float32))
    y.sum().backward()
    assert scale.grad != 0


@pytest.mark.parametrize("spec", ["uint8/axis0", dt.QuantSpec("int4", "tensor")])
def test_a_spec_in_transforms_and_compiled_graphs(spec: dt.QuantSpec | str) -> None:
    case = make_case(dt.QuantSpec("int8"), (5, 23), nasty=False)
    expected = dt.fake_quantize(case.x, dt.QuantParams.from_data(spec, case.x))
    batch = torch.stack([tensor(case.x)] * 2)
    assert_same(torch.func.vmap(lambda x: qt.fake_quantize(x, spec))(batch), np.stack([expected] * 2))
    torch._dynamo.reset()
    parsed = dt.spec.get_spec(spec)
    f = torch.compile(lambda x: qt.fake_quantize(x, parsed), fullgraph=True, backend="aot_eager")
    assert_same(f(tensor(case.x)), expected)
    learned = torch.func.vmap(lambda x, s: qt.fake_quantize(x, "int8", scale=s), in_dims=(0, None))
    assert_same(
        learned(batch, torch.tensor(0.5)), np.stack([dt.fake_quantize(case.x, dt.QuantParams("int8", 0.5))] * 2)
    )


# Transformations


def portable(case: object) -> tuple[torch.Tensor, NDArray]:
    return tensor(case.x), dt.fake_quantize(case.x, case.params)


@pytest.mark.parametrize("granularity", ["tensor", "axis0", "axis-1", "token", "group5"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_vmap(dtype: str, granularity: str) -> None:
    for fmt in ("uint8", "int4", "float8_e4m3fn"):
        case = make_case(dt.QuantSpec(fmt, granularity), (5, 23), dtype)
        batch = np.stack([case.x, case.x[::-1], case.x * case.x.dtype.type(0.5)])
        expected = np.stack([dt.fake_quantize(x, case.params) for x in batch])
        got = torch.func.vmap(lambda x, p=case.params: qt.fake_quantize(x, p))(tensor(batch))
        assert_same(got, expected)
        inner = torch.func.vmap(lambda x, p=case.params: qt.fake_quantize(x, p), in_dims=2, out_dims=2)
        assert_same(inner(tensor(np.moveaxis(batch, 0, 2))), np.moveaxis(expected, 0, 2))


@pytest.mark.parametrize("ste", ["none", "identity", "value", "hard_tanh"])
def test_func_grad_and_vmap_of_it(ste: str) -> None:
    case = make_case(dt.QuantSpec("uint4", "axis0"), (5, 23), "float64", nasty=False)
    weight = tensor(case.g)
    f = torch.func.grad(lambda x: (qt.fake_quantize(x, case.params, ste=STES[ste]) * weight).sum())
    expected = dt.fake_quantize_backward(case.g, case.x, case.params, ste=STES[ste])
    assert_same(f(tensor(case.x)), expected)
    twice = torch.func.vmap(f)(tensor(np.stack([case.x, case.x])))
    assert_same(twice, np.stack([expected, expected]))


def test_func_grad_of_learned_parameters() -> None:
    case = make_case(dt.QuantSpec("uint4", "axis0"), (5, 23), "float64", nasty=False)
    weight = tensor(case.g)

    def loss(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return (qt.fake_quantize(x, case.params, scale=scale, zero_point=zero) * weight).sum()

    operands = (tensor(case.x), tensor(case.params.scale), tensor(case.params.zero_point.astype(float)))
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*operands)
    for ours, theirs in zip(dt.fake_quantize_learned_backward(case.g, case.x, case.params), got, strict=True):
        assert_same(theirs, ours)


def check_compiled(backend: str, dtype: str, granularity: str) -> None:
    case = make_case(dt.QuantSpec("uint8", granularity), SHAPE, dtype)
    torch._dynamo.reset()
    f = torch.compile(lambda x: qt.fake_quantize(x, case.params), fullgraph=True, backend=backend)
    x = tensor(case.x).requires_grad_()
    y = f(x)
    assert_same(y, dt.fake_quantize(case.x, case.params))
    y.backward(tensor(case.g))
    assert_same(x.grad, dt.fake_quantize_backward(case.g, case.x, case.params))


@pytest.mark.parametrize("granularity", ["tensor", "axis0"])
def test_compiled_graph(granularity: str) -> None:
    check_compiled("aot_eager", "float32", granularity)


def test_compiled_learned_graph() -> None:
    case = make_case(dt.QuantSpec("uint4", "axis0"), SHAPE, nasty=False)
    torch._dynamo.reset()
    f = torch.compile(
        lambda x, s, z: qt.fake_quantize(x, case.params, scale=s, zero_point=z), fullgraph=True, backend="aot_eager"
    )
    operands = [
        tensor(a).requires_grad_() for a in (case.x, case.params.scale, case.params.zero_point.astype(np.float32))
    ]
    f(*operands).backward(tensor(case.g))
    for ours, theirs in zip(dt.fake_quantize_learned_backward(case.g, case.x, case.params), operands, strict=True):
        assert_same(theirs.grad, ours)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "axis1", "token", "group5"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_by_inductor(dtype: str, granularity: str) -> None:
    check_compiled("inductor", dtype, granularity)


def test_exported() -> None:
    case = make_case(dt.QuantSpec("uint8", "axis1"), SHAPE)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return qt.fake_quantize(x, case.params)

    program = torch.export.export(Module(), (tensor(case.x),))
    assert_same(program.module()(tensor(case.x)), dt.fake_quantize(case.x, case.params))


def test_meta_tensors_have_shapes() -> None:
    x = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    y = qt.fake_quantize(x, dt.QuantParams("int8", 0.5))
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")


def test_it_is_registered_with_torch() -> None:
    assert callable(torch.ops.detent.fake_quantize)


# Bad input

P = dt.QuantParams("int8", 0.5)
PER_ROW = dt.QuantParams(dt.QuantSpec("int8", "axis0"), np.ones(3, np.float32))
BAD = {
    "integers": lambda: qt.fake_quantize(torch.arange(3), P),
    "complex": lambda: qt.fake_quantize(torch.zeros(3, dtype=torch.complex64), P),
    "booleans": lambda: qt.fake_quantize(torch.zeros(3, dtype=torch.bool), P),
    "float8": lambda: qt.fake_quantize(torch.zeros(3).to(torch.float8_e4m3fn), P),
    "an array": lambda: qt.fake_quantize(np.zeros(3), P),
    "a list": lambda: qt.fake_quantize([1.0], P),
    "sparse": lambda: qt.fake_quantize(torch.eye(3).to_sparse(), P),
    "no params": lambda: qt.fake_quantize(torch.zeros(3), None),
    "a wrong number of rows": lambda: qt.fake_quantize(torch.zeros(4, 2), PER_ROW),
    "no rows": lambda: qt.fake_quantize(torch.zeros(()), PER_ROW),
    "a wrong number of rows on meta": lambda: qt.fake_quantize(torch.zeros(4, 2, device="meta"), PER_ROW),
    "a scale of a wrong shape": lambda: qt.fake_quantize(torch.zeros(3, 2), PER_ROW, scale=torch.ones(4)),
    "a scale of a wrong shape on meta": lambda: qt.fake_quantize(
        torch.zeros(3, 2, device="meta"), PER_ROW, scale=torch.ones(4, device="meta")
    ),
    "a negative scale": lambda: qt.fake_quantize(torch.zeros(3), P, scale=torch.tensor(-1.0)),
    "a zero scale": lambda: qt.fake_quantize(torch.zeros(3), P, scale=torch.tensor(0.0)),
    "a NaN scale": lambda: qt.fake_quantize(torch.zeros(3), P, scale=torch.tensor(float("nan"))),
    "an infinite zero point": lambda: qt.fake_quantize(
        torch.zeros(3), dt.QuantParams("uint8", 1.0), zero_point=torch.tensor(float("inf"))
    ),
    "a number as scale": lambda: qt.fake_quantize(torch.zeros(3), P, scale=0.5),
    "a negative step": lambda: qt.fake_quantize(torch.zeros(3), P, step=-1),
    "a huge step": lambda: qt.fake_quantize(torch.zeros(3), P, step=2**32),
    "NaN, whose range a spec needs": lambda: qt.fake_quantize(torch.tensor([1.0, float("nan")]), "int8"),
    "no data, whose range a spec needs": lambda: qt.fake_quantize(torch.zeros(0), "int8"),
    "an unknown spec": lambda: qt.fake_quantize(torch.zeros(3), "int99"),
    "an unknown estimator": lambda: qt.fake_quantize(torch.zeros(3), P, ste="clip"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    with pytest.raises(dt.DetentError):
        BAD[name]()


def test_a_callable_ste_cannot_be_vectorized() -> None:
    with pytest.raises(dt.DetentError, match="callable"):
        torch.func.vmap(lambda x: qt.fake_quantize(x, P, ste=lambda g, *_: g))(torch.zeros(2, 3))
