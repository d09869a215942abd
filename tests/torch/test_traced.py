"""The contract in torch operations: the bits of the NumPy core, eager and compiled.

Data are tie-adjacent, `x = (k + 1/2) s` and both neighbors, with infinities, NaN, subnormals and the largest numbers
among them, in sizes that leave a compiler's vector loop a tail. Compiled functions run many specs in one graph, because
each graph costs seconds; what takes longer is marked slow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt
from detent.observers import EMAMinMax
from detent.observers.minmax import mix_ranges, mix_seen_ranges
from detent.params import QuantParams

torch = pytest.importorskip("torch")

from detent.torch import traced, traced_namespace  # noqa: E402

# Not ours: inductor loads its own scripted parts.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

SCALES = (0.0123, 0.3, 0.017)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("float16", "bfloat16", "float32", "float64")
FORMATS = ("int2", "int4", "int8", "uint8", "int16", "float8_e4m3fn", "float4_e2m1fn", "nf4")
CONVENTIONS = ("onnx", "torch", "compressed_tensors", "oxicuda", "baracuda_token")
GRANULARITIES = ("tensor", "axis0", "axis-1", "token", "group5", "group2@0", "block2x4")
ROUNDINGS = ("half_even", "half_away", "floor", "stochastic(81985529216486895)")
SHAPE = (3, 5, 23)
ESTIMATORS = {
    "identity": dt.ste.Identity(),
    "clipped": dt.ste.Clipped(),
    "clipped_value": dt.ste.Clipped(on="value"),
    "clipped_exclusive": dt.ste.Clipped(bounds="exclusive"),
    "clipped_value_exclusive": dt.ste.Clipped(on="value", bounds="exclusive"),
    "hard_tanh": dt.ste.HardTanh(),
}


def tensor(a: NDArray) -> torch.Tensor:
    a = np.array(a, order="C")
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == BFLOAT16 else torch.from_numpy(a)


def array(t: torch.Tensor) -> NDArray:
    t = t.detach().contiguous()
    return t.view(torch.int16).numpy().view(BFLOAT16) if t.dtype == torch.bfloat16 else t.numpy()


def assert_same(theirs: torch.Tensor, ours: NDArray, what: object = "") -> None:
    """Check that dtype, shape and bits are equal; NaNs may differ in their bits."""
    got = array(theirs)
    assert (got.dtype, got.shape) == (ours.dtype, ours.shape), what
    nan = np.isnan(ours.astype(np.float64))
    assert np.array_equal(nan, np.isnan(got.astype(np.float64))), what
    bits = f"u{ours.dtype.itemsize}"
    bad = (np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(ours).view(bits)) & ~nan
    assert not bad.any(), f"{what}: {int(bad.sum())} of {bad.size} differ, {got[bad][:4]} for {ours[bad][:4]}"


@dataclass(frozen=True)
class Case:
    """One spec with data for it, as NumPy arrays."""

    spec: dt.QuantSpec
    x: NDArray
    g: NDArray
    scale: NDArray
    zero_point: NDArray

    @property
    def params(self) -> QuantParams:
        return QuantParams(self.spec, scale=self.scale, zero_point=self.zero_point)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """g, x, scale, zero point."""
        return tuple(tensor(a) for a in (self.g, self.x, self.scale, self.zero_point))

    def __str__(self) -> str:
        return f"{self.spec} {self.x.dtype}"


def make_case(
    fmt: str,
    granularity: str = "tensor",
    convention: str = "onnx",
    dtype: str = "float32",
    rounding: str | None = None,
    shape: tuple[int, ...] = SHAPE,
) -> Case:
    form = dt.formats.FORMATS[fmt]
    integer = form.kind == "integer"
    spec = dt.QuantSpec(
        fmt, granularity, symmetric=not integer, convention=convention, rounding=rounding if integer else None
    )
    rng = np.random.default_rng(zlib.crc32(f"{spec} {dtype}".encode()))
    tiling = spec.granularity.tiling(shape)
    stored = np.float64 if dtype == "float64" else np.float32
    scale = np.asarray(rng.choice(SCALES, size=tiling.scale_shape)).astype(stored)
    zero = np.zeros(tiling.scale_shape, np.int32)
    if integer:
        zero = np.asarray(rng.integers(spec.qmin, spec.qmax, size=tiling.scale_shape, endpoint=True), np.int32)
    x = _near_ties(rng, form, _spread(scale, tiling), _spread(zero, tiling), dtype)
    g = rng.normal(size=shape).astype(dtype)
    g.reshape(-1)[:3] = [np.inf, -0.0, 0.0]
    return Case(spec, x, g, scale, zero)


def _spread(values: NDArray, tiling: dt.granularity.Tiling) -> NDArray:
    values = values.reshape(tiling.grid)
    for axis, (size, block) in enumerate(zip(tiling.shape, tiling.block, strict=True)):
        values = np.repeat(values, block, axis=axis).take(range(size), axis=axis)
    return values


def _near_ties(rng: np.random.Generator, form: dt.Format, scale: NDArray, zero: NDArray, dtype: str) -> NDArray:
    """Numbers at and next to the ties of all codes, some out of range, with special values in front."""
    if form.kind == "integer":
        reach = min(form.qmax - form.qmin, 300)
        ties = rng.integers(-reach, reach, size=scale.shape) + 0.5 - (zero if form.bits < 16 else 0)
    else:
        levels = np.array(form.finite_levels)
        ties = rng.choice([*((levels[1:] + levels[:-1]) / 2), 2 * form.qmax], size=scale.shape)
        ties *= rng.choice([-1, 1], size=scale.shape)
    with np.errstate(all="ignore"):
        x = (ties * scale.astype(np.float64)).astype(dtype)
        towards = rng.choice([-np.inf, 0.0, np.inf], size=scale.shape).astype(dtype)
        x = np.where(towards == 0, x, np.nextafter(x, towards))
    info = ml_dtypes.finfo(dtype)
    special = [np.inf, np.nan, 0.0, info.smallest_subnormal, info.tiny, info.max, 1e-3]
    special = np.array([sign * float(v) for v in special for sign in (1, -1)]).astype(dtype)
    x.reshape(-1)[: special.size] = special[: x.size]
    x.reshape(-1)[-2:] = special[4:6]  # zeros in the tail, and what rounds to -0
    x.reshape(-1)[-3] = special[-1]
    return x


def compiled(function: Callable[..., object], **options: object) -> Callable[..., object]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def run_all(call: Callable[..., object], cases: list[Case]) -> list[object]:
    """One graph for all the cases."""
    specs = [case.spec for case in cases]

    def everything(tensors: list[tuple[torch.Tensor, ...]]) -> list[object]:
        return [call(spec, *parts) for spec, parts in zip(specs, tensors, strict=True)]

    return compiled(everything)([case.tensors for case in cases])


def forward(spec: dt.QuantSpec, _: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return traced.fake_quantize(x, s, z, spec, 7)


def check_compiled_forward(cases: list[Case]) -> None:
    for case, y in zip(cases, run_all(forward, cases), strict=True):
        assert_same(y, dt.fake_quantize(case.x, case.params, step=7), case)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_fake_quantize(fmt: str, dtype: str, convention: str) -> None:
    for granularity in GRANULARITIES:
        case = make_case(fmt, granularity, convention, dtype)
        assert_same(forward(case.spec, *case.tensors), dt.fake_quantize(case.x, case.params), case)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounding(dtype: str, rounding: str) -> None:
    for convention in CONVENTIONS:
        case = make_case("uint8", "group5", convention, dtype, rounding)
        expected = dt.fake_quantize(case.x, case.params, step=7)
        assert_same(forward(case.spec, *case.tensors), expected, case)
        _, x, s, z = case.tensors
        assert_same(traced.fake_quantize(x, s, z, case.spec, torch.tensor(7)), expected, case)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)], ids=str)
def test_shapes_without_much_in_them(shape: tuple[int, ...]) -> None:
    spec, x = dt.QuantSpec("int8"), np.full(shape, 0.07, np.float32)
    params = QuantParams(spec, scale=0.1)
    y = traced.fake_quantize(tensor(x), torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), spec)
    assert_same(y, dt.fake_quantize(x, params))


def test_views_of_other_memory_orders() -> None:
    case = make_case("int4", "axis-1", dtype="bfloat16")
    _, x, s, z = case.tensors
    expected = dt.fake_quantize(case.x, case.params)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert_same(traced.fake_quantize(turned, s, z, case.spec), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["int4", "uint8", "float8_e4m3fn", "nf4"])
def test_backward(fmt: str, dtype: str, estimator: str) -> None:
    for convention in CONVENTIONS:
        for granularity in GRANULARITIES:
            case = make_case(fmt, granularity, convention, dtype)
            expected = dt.fake_quantize_backward(case.g, case.x, case.params, ste=ESTIMATORS[estimator])
            got = traced.fake_quantize_backward(*case.tensors, case.spec, ESTIMATORS[estimator])
            assert_same(got, expected, case)


@pytest.mark.parametrize("unit", ["range", "step"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_to_4_ulp(dtype: str, unit: str) -> None:
    case = make_case("int4", "axis0", dtype=dtype)
    assert_close(traced.fake_quantize_backward(*case.tensors, case.spec, dt.ste.Tanh(unit)), case, unit)


def assert_close(got: torch.Tensor, case: Case, unit: str) -> None:
    """Within 4 units in the last place of the gradient that came in: 1 - tanh^2 takes its error from near 1."""
    expected = dt.fake_quantize_backward(case.g, case.x, case.params, ste=dt.ste.Tanh(unit)).astype(np.float64)
    finite = np.isfinite(case.g.astype(np.float64))
    allowed = 4 * float(ml_dtypes.finfo(case.g.dtype).eps) * np.abs(case.g.astype(np.float64))
    error = np.abs(array(got).astype(np.float64) - expected)
    assert (error[finite] <= allowed[finite]).all()
    assert np.array_equal(np.isnan(expected), np.isnan(array(got).astype(np.float64)))


def finite(case: Case) -> Case:
    """Replace infinities, whose sums would be NaN."""
    keep = [np.where(np.isinf(a.astype(np.float64)), a.dtype.type(1), a) for a in (case.x, case.g)]
    return replace(case, x=keep[0], g=keep[1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["int4", "uint8", "float8_e4m3fn", "nf4"])
def test_learned_backward(fmt: str, dtype: str, granularity: str) -> None:
    for convention, grad_scale in (("onnx", None), ("torch", 0.3), ("oxicuda", None)):
        check_learned(finite(make_case(fmt, granularity, convention, dtype)), grad_scale)


def test_learned_backward_of_many_blocks() -> None:
    for size in (1023, 1024, 1025, 4096, 5 * 1024 + 3):
        check_learned(finite(make_case("int8", shape=(size,))), None)


def check_learned(case: Case, grad_scale: float | None) -> None:
    options = {"ste": dt.ste.Clipped(), "grad_scale": grad_scale}
    expected = dt.fake_quantize_learned_backward(case.g, case.x, case.params, **options)
    got = traced.fake_quantize_learned_backward(*case.tensors, case.spec, **options)
    for ours, theirs in zip(expected, got, strict=True):
        assert_same(theirs, ours, case)


def core_minmax(x: NDArray, spec: dt.QuantSpec) -> tuple[NDArray, NDArray]:
    lo, hi, _ = dt.kernels.minmax(x, spec.granularity.tiling(x.shape))
    return lo, hi


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_minmax(dtype: str, granularity: str) -> None:
    case = make_case("int8", granularity, dtype=dtype)
    case.x[-1] = np.nan
    for data in (case.x, np.full_like(case.x, -0.0), np.full_like(case.x, -np.inf)):
        for ours, theirs in zip(core_minmax(data, case.spec), traced.minmax(tensor(data), case.spec), strict=True):
            assert_same(theirs, ours)


def ranges(dtype: str) -> tuple[NDArray, NDArray]:
    """Ranges of all sizes and signs, of width zero, and with a zero point near a tie."""
    rng = np.random.default_rng(5)
    ends = np.sort(rng.normal(size=(2, 300)) * 10.0 ** rng.integers(-30, 30, size=300), axis=0)
    ties = np.stack([-(np.arange(100) + 0.5) / 255, 1 - (np.arange(100) + 0.5) / 255])
    special = np.array([[0.0, 0, -1, 2, -3e38, -1e-45, 5e-324], [0.0, 3, -1, 2, 3e38, 1e-45, 5e-324]])
    lo, hi = np.concatenate([ends, ties, special], axis=1).astype(dtype)
    return lo, hi


def derivable() -> list[dt.QuantSpec]:
    specs = []
    for convention in dt.convention.PRESETS:
        for fmt, symmetric in (("int8", True), ("int8", False), ("uint8", True), ("uint8", False), ("int2", False)):
            specs.append(dt.QuantSpec(fmt, "axis0", symmetric=symmetric, convention=convention))
        specs += [dt.QuantSpec(fmt, "axis0", convention=convention) for fmt in ("int16", "float8_e4m3fn", "nf4")]
    return specs


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", derivable(), ids=str)
def test_derive(spec: dt.QuantSpec, dtype: str) -> None:
    lo, hi = ranges(dtype)
    expected = QuantParams.from_range(spec, lo, hi, dtype=dtype)
    with dt.use_kernels("reference"):
        plain = QuantParams.from_range(spec, lo, hi, dtype=dtype)
    scale, zero_point = traced.derive(spec, tensor(lo), tensor(hi))
    for ours in (expected, plain):
        assert_same(scale, ours.scale)
        assert_same(zero_point, ours.zero_point)


def test_derive_of_one_range() -> None:
    scale, zero_point = traced.derive(dt.QuantSpec("uint8"), torch.tensor(-1.0), torch.tensor(4.0))
    params = QuantParams.from_range(dt.QuantSpec("uint8"), -1.0, 4.0)
    assert_same(scale, params.scale)
    assert_same(zero_point, params.zero_point)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_derive_rejects_scales_of_other_formats(name: str) -> None:
    with pytest.raises(dt.errors.UnsupportedError, match="not supported in torch operations"):
        traced.derive(dt.QuantSpec.parse(name), torch.zeros(1), torch.ones(1))


def averages(decay: float) -> tuple[NDArray, NDArray, NDArray]:
    """Old bounds, new ones, and the observer's average of them."""
    old, new = np.random.default_rng(3).normal(size=(2, 1001)).astype(np.float32)
    ema = EMAMinMax(decay, "axis0").observe(old[:, None]).observe(new[:, None])
    return old, new, ema.range().hi


def mix(old: torch.Tensor, new: torch.Tensor, decay: float) -> torch.Tensor:
    """The upper bounds of the average of ranges that end at the old and new bounds."""
    ranges = ((bound.min(), bound) for bound in (old, new))
    return mix_seen_ranges(traced_namespace, *ranges, decay, torch.ones_like(old, dtype=torch.bool))[1]


@pytest.mark.parametrize("decay", [0.99, 0.9, 0.0, 1 / 3])
def test_mixed_ranges(decay: float) -> None:
    old, new, expected = averages(decay)
    assert_same(mix(tensor(old), tensor(new), decay), expected)


def test_mixed_ranges_of_sets_that_one_side_has_not_seen() -> None:
    old = np.array([[1.0, np.inf, 1.0, np.inf], [2.0, -np.inf, 2.0, -np.inf]], np.float32)
    new = np.array([[3.0, 3.0, np.inf, np.inf], [4.0, 4.0, -np.inf, -np.inf]], np.float32)
    mixed = mix_seen_ranges(traced_namespace, tensor(old), tensor(new), 0.75, tensor(old[0] <= old[1]))
    for ours, theirs in zip(mixed, mix_ranges(tuple(old), tuple(new), 0.75), strict=True):
        assert_same(ours, theirs)


def test_nothing_records_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    s = torch.tensor(0.1, requires_grad=True)
    y = traced.fake_quantize(x, s, torch.tensor(0, dtype=torch.int32), dt.QuantSpec("int8"))
    assert not y.requires_grad


def test_compiled_conventions() -> None:
    cases = [make_case("uint8", "tensor", name, shape=(1031,)) for name in CONVENTIONS]
    check_compiled_forward(cases)


def test_compiled_granularities() -> None:
    check_compiled_forward([make_case("int4", granularity) for granularity in GRANULARITIES])


def test_compiled_backward() -> None:
    cases = [make_case("uint8", "axis0", dtype=dtype) for dtype in ("float32", "bfloat16")]
    stes = list(ESTIMATORS.values())

    def everything(spec: dt.QuantSpec, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [traced.fake_quantize_backward(*tensors, spec, ste) for ste in stes]

    for case, gradients in zip(cases, run_all(everything, cases), strict=True):
        for ste, gradient in zip(stes, gradients, strict=True):
            assert_same(gradient, dt.fake_quantize_backward(case.g, case.x, case.params, ste=ste), (case, ste))


def test_compiled_ranges() -> None:
    lo, hi = ranges("float32")
    specs = [dt.QuantSpec(fmt, "axis0", convention=name) for fmt in ("int8", "uint8") for name in CONVENTIONS]
    x = make_case("int8", "token").x
    token = dt.QuantSpec("int8", "token")
    old, new, average = averages(0.99)

    def everything(lo: torch.Tensor, hi: torch.Tensor, x: torch.Tensor, *bounds: torch.Tensor) -> tuple:
        return [traced.derive(spec, lo, hi) for spec in specs], traced.minmax(x, token), mix(*bounds, 0.99)

    derived, ends, mixed = compiled(everything)(*map(tensor, (lo, hi, x, old, new)))
    for spec, (scale, zero_point) in zip(specs, derived, strict=True):
        params = QuantParams.from_range(spec, lo, hi)
        assert_same(scale, params.scale, spec)
        assert_same(zero_point, params.zero_point, spec)
    for ours, theirs in zip(core_minmax(x, token), ends, strict=True):
        assert_same(theirs, ours)
    assert_same(mixed, average)


def test_a_minimum_of_negative_zeros_is_positive_when_compiled() -> None:
    x = np.full((3, 7), -0.0, np.float32)
    spec = dt.QuantSpec("int8", "token")
    for ours, theirs in zip(core_minmax(x, spec), compiled(lambda x: traced.minmax(x, spec))(tensor(x)), strict=True):
        assert_same(theirs, ours)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_round_between_fused_neighbors(dtype: str) -> None:
    """Each neighbor rounds once (0.5 x is exact), so only casts of the operator can be lost."""
    case = make_case("int8", dtype=dtype, shape=(4099,))
    _, x, s, z = case.tensors
    rng = np.random.default_rng(1)
    b, c = (tensor(rng.normal(size=x.shape).astype(x.numpy().dtype if dtype == "float16" else BFLOAT16)) for _ in "bc")

    def between(operator: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, b, c: operator(x * 0.5 + b) * c

    f = between(lambda h: traced.fake_quantize(h, s, z, case.spec))
    expected = f(x, b, c)
    assert_same(compiled(f)(x, b, c), array(expected))
    g = between(lambda h: traced.fake_quantize_backward(h, x, s, z, case.spec, dt.ste.Identity()))
    assert_same(compiled(g)(x, b, c), array(g(x, b, c)))


def test_fused_neighbors_lose_plain_casts() -> None:
    """If inductor kept plain casts, the test above would check nothing."""
    case = make_case("int8", dtype="bfloat16", shape=(4099,))
    _, x, s, _ = case.tensors

    def naive(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.round((x * 0.5 + b).float() / s).to(x.dtype)

    b = torch.linspace(-1, 1, 4099, dtype=torch.bfloat16)
    assert not torch.equal(compiled(naive)(x, b).nan_to_num(), naive(x, b).nan_to_num())


def test_a_different_batch_size_uses_the_same_graph() -> None:
    spec = dt.QuantSpec("uint8", "group5", rounding="half_away")
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    torch._dynamo.reset()
    f = torch.compile(lambda x, s, z: traced.fake_quantize(x, s, z, spec), fullgraph=True, backend=count)
    for batch in (3, 8, 5):
        case = make_case("uint8", "group5", rounding="half_away", shape=(batch, 23))
        _, x, s, z = case.tensors
        for part in (x, s, z):
            torch._dynamo.mark_dynamic(part, 0)
        assert_same(f(x, s, z), dt.fake_quantize(case.x, case.params))
    assert len(graphs) == 1


def test_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return traced.fake_quantize(x, s, z, dt.QuantSpec("int8", symmetric=False))

    case = make_case("int8")
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(Module(), case.tensors[1:], dynamic_shapes=({0: batch}, None, None))
    for size in (1, 3):
        x = case.x[:size]
        got = program.module()(tensor(x), *case.tensors[2:])
        assert_same(got, dt.fake_quantize(x, case.params))


def test_constants_are_divided_by() -> None:
    """A compiler must not replace division by a constant scale by its reciprocal."""
    case = make_case("int8", shape=(1031,))

    def f(x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((), float(case.scale), dtype=torch.float32)
        zero_point = torch.full((), int(case.zero_point), dtype=torch.int32)
        return traced.fake_quantize(x, scale, zero_point, case.spec)

    assert_same(compiled(f)(case.tensors[1]), dt.fake_quantize(case.x, case.params))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_compiled_formats(fmt: str, dtype: str) -> None:
    cases = [make_case(fmt, granularity, name, dtype) for granularity in ("axis0", "group5") for name in CONVENTIONS]
    check_compiled_forward(cases if dt.formats.FORMATS[fmt].kind == "integer" else cases[::5])


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_roundings(dtype: str, rounding: str) -> None:
    conventions = CONVENTIONS[2:3] if "stochastic" in rounding else CONVENTIONS  # ten rounds of Philox compile slowly
    check_compiled_forward([make_case("uint8", "axis0", name, dtype, rounding) for name in conventions])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_gradients(dtype: str) -> None:
    cases = [make_case(fmt, "group5", dtype=dtype) for fmt in ("int4", "nf4")]
    for case in cases:
        for ste in ESTIMATORS.values():
            f = compiled(lambda *tensors, spec=case.spec, ste=ste: traced.fake_quantize_backward(*tensors, spec, ste))
            assert_same(f(*case.tensors), dt.fake_quantize_backward(case.g, case.x, case.params, ste=ste), (case, ste))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_tanh_to_4_ulp(dtype: str) -> None:
    case = make_case("int4", "axis0", dtype=dtype)
    for unit in ("range", "step"):
        f = compiled(lambda *tensors, unit=unit: traced.fake_quantize_backward(*tensors, case.spec, dt.ste.Tanh(unit)))
        assert_close(f(*case.tensors), case, unit)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "axis-1", "group5"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_compiled_learned_backward(dtype: str, granularity: str) -> None:
    case = finite(make_case("uint8", granularity, dtype=dtype, shape=(13, 5, 37)))
    expected = dt.fake_quantize_learned_backward(case.g, case.x, case.params, ste="clipped")
    f = compiled(lambda *tensors: traced.fake_quantize_learned_backward(*tensors, case.spec, dt.ste.Clipped()))
    for ours, theirs in zip(expected, f(*case.tensors), strict=True):
        assert_same(theirs, ours, case)
