"""Native steps: the same bits as the general path, and no use of stale settings."""

import copy
import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt
from detent.kernels import current_kernels, native, use_kernels
from detent.torch import native_step

pytestmark = pytest.mark.skipif(
    native.WHY_NOT is not None or current_kernels() == "reference", reason="native steps need the native kernels"
)


class Network(nn.Module):
    """Convolutions with and without batch norm and bias, depthwise, grouped, dilated and 1x1, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise, self.norm2 = nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16, affine=False)
        self.grouped = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4)
        self.tokens = nn.Linear(16, 16, bias=False)
        self.linear = nn.Linear(16, 12)
        self.last = nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(torch.relu(self.norm(self.first(x))))
        x = self.grouped(torch.relu(self.norm2(self.pointwise(x))))
        x = nn.functional.gelu(self.tokens(x.flatten(2).transpose(1, 2).contiguous())).mean(1)
        return self.last(torch.relu(self.linear(x)))


def recipe(mode: dt.ScaleMode, weight: str = "int8/axis0", x: str = "uint8/tensor/affine", **rest: object) -> dt.Recipe:
    return dt.Recipe([dt.Rule("*", weight=weight, input=x, mode=mode, **rest)])  # type: ignore[arg-type]


RECIPES: dict[str, Callable[[], dt.Recipe]] = {
    "ema": lambda: recipe(dt.EMA(0.9)),
    "per batch": lambda: recipe(dt.PerBatch()),
    "learned": lambda: recipe(dt.Learned()),
    "learned, 2 bits": lambda: dt.Recipe.preset("w2a2"),
    "identity": lambda: recipe(dt.EMA(0.9), ste="identity"),
    "one scale for the weight": lambda: recipe(dt.EMA(0.9), weight="int8"),
    "signed input": lambda: recipe(dt.EMA(0.9), x="int8"),
    "mask by value": lambda: recipe(dt.EMA(0.9), ste=dt.ste.Clipped(on="value", bounds="exclusive")),
}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *, native: bool) -> Iterator[list[bool]]:
    """Count the layers' passes, with True for those of native steps; or use the general path only."""
    used: list[bool] = []
    original = native_step.run

    def run(layer: nn.Module, x: Tensor) -> Tensor | None:
        y = original(layer, x) if native else None
        used.append(y is not None)
        return y

    with monkeypatch.context() as patch:
        patch.setattr(native_step, "run", run)
        yield used


def trained(make: Callable[[], dt.Recipe], *, channels_last: bool = False, steps: int = 4, **options: object) -> list:
    """Train a network; return everything that a step computes."""
    torch.manual_seed(0)
    model = Network().train()
    x = torch.randn(6, 3, 8, 8)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    qt.prepare(model, make(), **options)  # type: ignore[arg-type]
    with torch.no_grad(), qt.calibrating(model):
        model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    results: list[object] = []
    for step in range(steps):
        optimizer.zero_grad()
        data = (x * (1 + 0.3 * step)).requires_grad_(step == 1)
        y = model(data)
        nn.functional.cross_entropy(y, torch.arange(6) % 5).backward()
        results += [y.detach().clone(), data.grad, *(each.grad for each in model.parameters())]
        results += [each.clone() for each in model.state_dict().values()]
        optimizer.step()
    quantizers = [each for each in model.modules() if isinstance(each, qt.FakeQuantize)]
    return [*results, *(each.params.to_json() for each in quantizers)]


def assert_same(a: list, b: list) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("arithmetic", ["float", "auto"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_the_general_path(
    name: str, channels_last: bool, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps) as used:
            results.append(trained(RECIPES[name], channels_last=channels_last, arithmetic=arithmetic))
            general = name == "mask by value" or (name == "signed input" and arithmetic == "auto")
            supported = steps and not general
            assert sum(used) == (len(used) if supported else 0)
    assert_same(*results)


@pytest.mark.parametrize("memory", ["float", "codes", "auto"])
def test_bits_do_not_depend_on_what_backward_keeps(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps):
            results.append(trained(RECIPES["ema"], arithmetic="integer", memory=memory))
    assert_same(*results)


def small(mode: dt.ScaleMode | None = None, **options: object) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    x = torch.randn(5, 8)
    qt.prepare(model, recipe(mode or dt.EMA(0.9)), **options)  # type: ignore[arg-type]
    with torch.no_grad(), qt.calibrating(model):
        model(x)
    return model, x


def step(model: nn.Module, x: Tensor) -> Tensor:
    """Run a step that changes the weights; return the output."""
    y: Tensor = model(x)
    y.square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
    return y.detach()


SETTINGS: dict[str, Callable[[qt.FakeQuantize], None]] = {
    "disabled": lambda each: setattr(each, "enabled", False),
    "frozen range": lambda each: setattr(each, "observing", False),
    "other estimator": lambda each: setattr(each, "ste", dt.ste.Identity()),
    "hard tanh": lambda each: setattr(each, "ste", dt.ste.HardTanh()),
    "delayed": lambda each: setattr(each, "delayed", True),
    "evaluation": lambda each: each.eval() and None,
    "watched": lambda each: setattr(each, "watcher", lambda *_: None),
    "other scale": lambda each: each.scale.mul_(2) and None,
    "other range": lambda each: each.lo.sub_(1) and None,
    "new buffer": lambda each: setattr(each, "hi", each.hi * 2),
    "after a ReLU": lambda each: setattr(each, "after_relu", True),
}


@pytest.mark.parametrize("arithmetic", ["float", "auto"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_has_effect_in_the_next_step(
    name: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps):
            model, x = small(arithmetic=arithmetic)
            outputs: list[object] = [step(model, x), step(model, x)]
            SETTINGS[name](model[0].input_quantizer)
            outputs += [step(model, x), step(model, x), *(each.clone() for each in model.state_dict().values())]
            results.append(outputs)
    assert_same(*results)


def test_each_shape_and_memory_order_has_its_own_step() -> None:
    model, x = small()
    for size in (5, 3, 5, 3):
        step(model, x[:size])
    step(model, torch.randn(8, 5).t())
    assert [key[0] for key in model[0]._steps] == [(5, 8), (3, 8), (5, 8)]
    for size in range(1, 2 * native_step.MAX_STEPS):
        step(model, torch.randn(size, 8))
    assert len(model[0]._steps) <= native_step.MAX_STEPS


def test_a_copy_has_no_steps_and_trains_to_the_same_bits() -> None:
    model, x = small(arithmetic="auto")
    step(model, x)
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert all(other[0]._steps is None for other in others)
    expected = [step(model, x) for _ in range(2)]
    for other in others:
        assert_same([step(other, x) for _ in range(2)], expected)


def test_a_loaded_state_and_moved_memory_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps):
            model, x = small(arithmetic="auto")
            saved = copy.deepcopy(model.state_dict())
            step(model, 3 * x)
            model.load_state_dict(saved)
            outputs = [step(model, x)]
            model.load_state_dict(saved, assign=True)
            outputs.append(step(model, x))
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            gc.collect()
            outputs.append(step(model, 2 * x))
            model.double().float()
            outputs += [step(model, x), step(model, x)]
            results.append(outputs)
    assert_same(*results)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("observing", [True, False])
def test_numbers_without_a_code_take_the_general_path(
    value: float, observing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps):
            model, x = small(arithmetic="auto")
            step(model, x)
            for layer in (model[0], model[2]):
                layer.input_quantizer.observing = observing
            bad = x.clone()
            bad[1, 2] = value
            try:
                outcome: object = torch.nan_to_num(model(bad).detach(), 77.0)
            except dt.NaNError as error:
                outcome = str(error)
            results.append([outcome, *(each.clone() for each in model.state_dict().values())])
    assert_same(*results)


def test_two_forward_passes_before_one_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps):
            model, x = small()
            step(model, x)
            total = model(x).sum() + model(4 * x).square().sum() + model(x[:2]).sum()
            total.backward()
            results.append([total.detach(), *(each.grad for each in model.parameters())])
    assert_same(*results)


def test_second_derivatives_equal_those_of_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for steps in (True, False):
        with counted(monkeypatch, native=steps):
            torch.manual_seed(0)
            model = Network().train()
            x = torch.randn(4, 3, 8, 8)
            qt.prepare(model, RECIPES["ema"]())
            with torch.no_grad(), qt.calibrating(model):
                model(x)
            x.requires_grad_()
            (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            first.square().sum().backward()
            results.append([first.detach(), x.grad, *(each.grad for each in model.parameters())])
    assert_same(*results)


def test_second_derivatives_of_learned_scales_are_rejected() -> None:
    model, x = small(dt.Learned())
    x.requires_grad_()
    with pytest.raises(dt.DetentError, match="no second"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_frozen_parameters_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[bool, list[object]] = {True: [], False: []}
    for steps, frozen in itertools.product((True, False), ("weight", "scale_shift", "bias")):
        with counted(monkeypatch, native=steps):
            model, x = small(dt.Learned(), arithmetic="auto")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.endswith(frozen))
            model(x.requires_grad_()).sum().backward()
            results[steps] += [x.grad, *(each.grad for each in model.parameters())]
            assert all((each.grad is None) == name.endswith(frozen) for name, each in model.named_parameters())
    assert_same(results[True], results[False])


def test_an_unchanged_weight_is_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small()
    step(model, x)
    with counted(monkeypatch, native=True) as used:
        for _ in range(3):  # gradient accumulation
            model(x).sum().backward()
    assert used == [True, True, False, False, False, False]


def test_reference_kernels_hooks_and_autocast_take_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small()
    step(model, x)
    with counted(monkeypatch, native=True) as used:
        with use_kernels("reference"):
            step(model, x)
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            step(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            step(model, x)
        with torch.no_grad():
            model(x)
    assert not any(used)
    assert len(used) == 6


@pytest.mark.parametrize("count", [1, 2])
def test_bits_do_not_depend_on_the_number_of_threads(count: int) -> None:
    before, own = torch.get_num_threads(), dt.get_num_threads()
    results = []
    try:
        for threads in (1, count):
            torch.set_num_threads(threads)
            dt.set_num_threads(threads)
            model, x = small(arithmetic="integer")
            results.append([step(model, x), step(model, x), *(each.clone() for each in model.state_dict().values())])
    finally:
        torch.set_num_threads(before)
        dt.set_num_threads(own)
    assert_same(*results)
