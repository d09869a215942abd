"""The cache of quantized weights: never stale after any change, and used if nothing changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_bits import assert_same  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import eager, native_step  # noqa: E402
from detent.torch.preparation import plan_of  # noqa: E402

RECIPES = {
    "w8a8": dt.Recipe.preset("w8a8"),
    "w8a16": dt.Recipe.preset("w8a16"),
    "learned": dt.Recipe.preset("w8a8", mode="learned"),
}


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "linear": nn.Sequential(nn.Linear(6, 5)),
        "conv": nn.Sequential(nn.Conv1d(6, 5, 1)),
        "conv_bn": nn.Sequential(nn.Conv1d(6, 5, 1), nn.BatchNorm1d(5)),
        "bilinear": nn.Sequential(_Twice(nn.Bilinear(6, 6, 5))),
        "recurrent": nn.Sequential(_First(nn.GRU(6, 5))),
    }


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def data(name: str) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 6, 3) if "conv" in name else torch.randn(4, 6)


def layer_of(model: nn.Module) -> nn.Module:
    return getattr(model[0], "inner", model[0])


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(p for n, p in layer_of(model).named_parameters() if n.startswith("weight") and "quantizer" not in n)


def weight_name(model: nn.Module) -> str:
    return next(n for n, _ in layer_of(model).named_parameters() if n.startswith("weight") and "quantizer" not in n)


def fresh(model: nn.Module, name: str) -> nn.Module:
    """A model with the same state and an empty cache."""
    copy = qt.prepare(models()[name], plan_of(model).recipe)
    copy.load_state_dict(model.state_dict())
    return copy.train(model.training)


def other_values(p: torch.Tensor) -> torch.Tensor:
    return torch.flip(p.detach(), [0]).mul(1.7).contiguous()


def swap(model: nn.Module) -> None:
    setattr(layer_of(model), weight_name(model), nn.Parameter(other_values(weight_of(model))))


def point_elsewhere(model: nn.Module) -> None:
    weight_of(model).data = other_values(weight_of(model))


def write_data(model: nn.Module) -> None:
    weight_of(model).data.copy_(other_values(weight_of(model)))


def write_one(model: nn.Module) -> None:
    """Write a single element without a new version number."""
    weight_of(model).data.view(-1)[-1] = 3.0


def write_numpy(model: nn.Module) -> None:
    weight_of(model).detach().numpy()[...] = other_values(weight_of(model)).numpy()


def exchange(model: nn.Module) -> None:
    """Exchange two elements, which does not change the sum of the weights."""
    flat = weight_of(model).data.view(-1)
    flat[:5] = flat[:5].roll(1)


def load(model: nn.Module) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    key = next(k for k in state if k.endswith(weight_name(model)))
    state[key] = other_values(state[key])
    model.load_state_dict(state)


def load_assigned(model: nn.Module) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    key = next(k for k in state if k.endswith(weight_name(model)))
    state[key] = other_values(state[key])
    model.load_state_dict(state, assign=True)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        weight_of(model).copy_(other_values(weight_of(model)))


def in_inference(model: nn.Module) -> None:
    with torch.inference_mode():
        weight_of(model).copy_(other_values(weight_of(model)))


def step(make: Callable[[object], torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        optimizer = make([p for n, p in model.named_parameters() if "quantizer" not in n])
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.3) * torch.linspace(1, 2, p.numel()).reshape(p.shape)
        optimizer.step()
        for p in model.parameters():
            p.grad = None

    return change


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "in_place": in_place,
    "in_inference": in_inference,
    "data": write_data,
    "one": write_one,
    "numpy": write_numpy,
    "exchange": exchange,
    "new_data": point_elsewhere,
    "swap": swap,
    "load": load,
    "load_assigned": load_assigned,
    "sgd": step(lambda p: torch.optim.SGD(p, 0.5)),
    "sgd_foreach": step(lambda p: torch.optim.SGD(p, 0.5, foreach=True)),
    "sgd_fused": step(lambda p: torch.optim.SGD(p, 0.5, fused=True)),
    "adam_foreach": step(lambda p: torch.optim.Adam(p, 0.5, foreach=True)),
    "adam_fused": step(lambda p: torch.optim.Adam(p, 0.5, fused=True)),
    "adamw": step(lambda p: torch.optim.AdamW(p, 0.5, foreach=False)),
}


def prepared(name: str, recipe: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = models()[name], data(name)
    qt.prepare(model, RECIPES[recipe])
    model(x)
    return model.eval(), x


@pytest.mark.filterwarnings("ignore:no optimizer trains")  # the scales stay constant
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("linear", "w8a8"), ("linear", "learned"), ("conv", "w8a16"), ("conv_bn", "w8a8"), ("recurrent", "w8a8")],
)
def test_every_change_is_detected(name: str, recipe: str, change: str) -> None:
    model, x = prepared(name, recipe)
    with torch.no_grad():
        before = model(x)
        model(x)
        for _ in range(2):  # the second time what was freed may be in use again
            CHANGES[change](model)
            assert_same(model(x), fresh(model, name)(x), change)
    assert not torch.equal(before, model(x))


@pytest.mark.parametrize("change", ["in_place", "data", "new_data", "swap", "adam_fused"])
@pytest.mark.parametrize("recipe", ["w8a8", "learned"])
def test_every_change_is_detected_after_freezing(recipe: str, change: str) -> None:
    """A folded weight is computed each time, and may have the address of the previous one."""
    model, x = prepared("conv_bn", recipe)
    qt.freeze(model)
    with torch.no_grad():
        for _ in range(6):
            before = model(x)
            CHANGES[change](model)
            expected = fresh(model, "conv_bn")
            qt.freeze(expected)
            got = model(x)
            assert_same(got, expected(x), change)
            assert not torch.equal(before, got)


@pytest.mark.parametrize("change", ["in_place", "data", "swap", "sgd_fused"])
@pytest.mark.parametrize("name", ["linear", "conv_bn"])
def test_gradients_use_changed_weights(name: str, change: str) -> None:
    model, x = prepared(name, "w8a8")
    model.train()
    for _ in range(3):
        twin = fresh(model, name)
        for each in (model, twin):
            each.zero_grad()
            each(x).square().sum().backward()
        assert_same(weight_of(model).grad, weight_of(twin).grad)
        CHANGES[change](model)


def flat(weight: torch.Tensor) -> torch.Tensor:
    """The memory of a weight; writes to it do not change the version number."""
    return weight.data.as_strided((weight.numel(),), (1,))


def exchange_two(weight: torch.Tensor) -> None:
    flat(weight)[:65:64] = flat(weight)[:65:64].flip(0)


def flip_bits(weight: torch.Tensor, count: int) -> None:
    """Flip bits of single weights, including the sign."""
    bits, rng = flat(weight).view(torch.int32), torch.Generator().manual_seed(count)
    for _ in range(count):
        at, bit = (int(torch.randint(high, (), generator=rng)) for high in (bits.numel(), 9))
        bits[at] ^= -(2**31) if bit == 8 else 1 << (15 + bit)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "all signs": lambda w: w.data.neg_(),
    "the signs of two rows": lambda w: w.data[2:4].neg_(),
    "two signs in one lane": lambda w: flat(w)[:65:64].neg_(),
    "two exchanged": exchange_two,
    "one bit": lambda w: flip_bits(w, 1),
    "two bits": lambda w: flip_bits(w, 2),
    "many bits": lambda w: flip_bits(w, 101),
}


def wide(kind: str) -> nn.Module:
    torch.manual_seed(2)
    layers = {"linear": nn.Linear(64, 128), "conv": nn.Conv1d(8, 128, 3), "conv_last": nn.Conv2d(8, 128, 2)}
    if kind == "conv_last":
        return nn.Sequential(layers[kind]).to(memory_format=torch.channels_last)
    return nn.Sequential(layers[kind.removesuffix("_bn")], *[nn.BatchNorm1d(128)] * kind.endswith("_bn"))


WIDE = {"linear": (4, 64), "linear_bn": (4, 64), "conv": (4, 8, 5), "conv_bn": (4, 8, 5), "conv_last": (4, 8, 5, 5)}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("kind", "recipe"), [*((kind, "w8a8") for kind in WIDE), ("linear", "learned")])
def test_every_bit_and_every_position_counts(kind: str, recipe: str, write: str) -> None:
    """For weights that are compared by checksum, and written without a new version number."""
    model, x = qt.prepare(wide(kind), RECIPES[recipe]), torch.randn(WIDE[kind])
    model(x)
    model.eval()
    with torch.no_grad():
        model(x)
        before = model(x)
        WRITES[write](model[0].weight)
        other = qt.prepare(wide(kind), RECIPES[recipe])
        other.load_state_dict(model.state_dict())
        assert_same(model(x), other.eval()(x))
        assert "bit" in write or not torch.equal(model(x), before)


@pytest.mark.parametrize("name", ["weight", "running_var"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("frozen", [True, False])
def test_every_bit_of_a_folded_norm_counts(write: str, name: str, frozen: bool) -> None:
    model, x = qt.prepare(wide("conv_bn"), "w8a8"), torch.randn(WIDE["conv_bn"])
    model(x)
    model.eval()
    twin = qt.prepare(wide("conv_bn"), "w8a8")
    twin.load_state_dict(model.state_dict())
    if frozen:
        qt.freeze(model)
    with torch.no_grad():
        model(x)
        for each in (model, twin):
            part = getattr(each[1], name)
            WRITES[write](part)
            part.data.copy_(torch.nan_to_num(part.data, 1.0, 1.0, 1.0).clamp(-1e3, 1e3))
            if name == "running_var":
                part.data.abs_()
        assert_same(model(x), (qt.freeze(twin) if frozen else twin).eval()(x))


def test_changed_statistics_are_detected() -> None:
    """Statistics of a batch norm whose gain is part of the quantized weight."""
    model, x = prepared("conv_bn", "w8a8")
    norm = model[1]
    changes = {
        "in place": lambda: norm.running_var.mul_(3.0),
        "gamma's data": lambda: norm.weight.data.mul_(-0.3),
        "data": lambda: norm.running_var.data.mul_(0.1),
        "another": lambda: setattr(norm, "running_var", torch.rand(5) + 0.5),
        "a forward in training": lambda: norm.train()(torch.randn(9, 5, 3)),
    }
    for name, change in changes.items():
        with torch.no_grad():
            model(x)
            change()
            model.eval()
            assert_same(model(x), fresh(model, "conv_bn")(x), name)


def test_changed_learned_scales_are_detected() -> None:
    model, x = prepared("linear", "learned")
    quantizer = model[0].weight_quantizer
    changes = {
        "in place": lambda: quantizer.scale_shift.add_(0.5),
        "params": lambda: quantizer.set_params(dt.QuantParams(quantizer.spec, quantizer.params.scale * 1.3)),
        "data": lambda: quantizer.scale_shift.data.add_(0.5),
    }
    for name, change in changes.items():
        with torch.no_grad():
            before = model(x)
            change()
            after = model(x)
            assert not torch.equal(after, before), name
            assert_same(after, fresh(model, "linear")(x))


def test_disabling_the_quantizer_is_detected() -> None:
    model, x = prepared("linear", "w8a16")
    on = model(x)
    model[0].weight_quantizer.enabled = False
    off = model(x)
    assert_same(off, nn.functional.linear(x, model[0].weight, model[0].bias))
    model[0].weight_quantizer.enabled = True
    assert_same(model(x), on)


def test_inference_mode() -> None:
    for name in models():
        model, x = prepared(name, "w8a8")
        expected = model(x)
        with torch.inference_mode():
            assert_same(model(x).clone(), expected)
            in_place(model)
            got = model(x).clone()
        assert_same(got, fresh(model, name)(x))
        qt.freeze(model)
        with torch.no_grad():
            expected = model(x)
        with torch.inference_mode():
            assert_same(model(x).clone(), expected)


class Counter:
    """Counts how often weights are quantized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
        self.count = 0
        for name in ("fake_quantize", "fake_quantize_dynamic", "fake_quantize_masked"):
            real = getattr(eager, name)

            def counted(x: torch.Tensor, *args: object, _real: Callable = real, **kwargs: object) -> object:
                self.count += tuple(x.shape) == shape
                return _real(x, *args, **kwargs)

            monkeypatch.setattr(eager, name, counted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["linear", "conv", "conv_bn"])
def test_evaluation_and_accumulation_use_the_cache(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_step, "run", lambda *_: None)  # native steps leave repeated weights to the cache
    model, x = prepared(name, recipe)
    if name != "conv_bn":
        model.train()  # where statistics move, so does the factor
    for _ in range(2):  # a weight that comes twice is kept
        model(x)
    counter = Counter(monkeypatch, tuple(weight_of(model).shape))
    for _ in range(4):
        model(x).sum().backward()
    assert counter.count == 0
    in_place(model)
    model(x)
    assert counter.count > 0


def test_the_cache_is_not_part_of_the_state() -> None:
    model, x = prepared("linear", "w8a8")
    model(x)
    assert all("cache" not in key for key in model.state_dict())
    assert set(dict(model.named_modules())) == {"", "0", "0.weight_quantizer", "0.input_quantizer"}
