"""Learned scales that no optimizer contains: one warning at the first step, and no false alarms."""

from __future__ import annotations

import warnings

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import untrained_scales  # noqa: E402

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def learned(float_model: nn.Module) -> nn.Module:
    prepared = qt.prepare(float_model, dt.Recipe.preset("w8a8", mode="learned"))
    with qt.calibrating(prepared):
        prepared(X)
    return prepared


def shifts(prepared: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in prepared.named_parameters() if n.endswith("_shift")]


def others(prepared: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in prepared.named_parameters() if not n.endswith("_shift")]


def backward(prepared: nn.Module) -> None:
    prepared(X).square().sum().backward()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_made_before_prepare(make):
    net = model()
    optimizer = make(net.parameters(), lr=1e-3)
    learned(net)
    backward(net)
    with pytest.warns(
        UserWarning,
        match=r"trains 6 learned .* \(first: '0\.weight_quantizer\.scale_shift'\)\. Construct the optimizer",
    ):
        optimizer.step()
    optimizer.zero_grad()
    backward(net)
    optimizer.step()  # warns only once: a second warning would be an error


def test_the_advice_helps():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    learned(net)
    optimizer.add_param_group({"params": [p for n, p in net.named_parameters() if n.endswith("_shift")]})
    before = [p.clone() for p in shifts(net)]
    backward(net)
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, shifts(net), strict=True))


def test_some_of_them():
    net = learned(model())
    optimizer = torch.optim.SGD([*others(net), *shifts(net)[:4]], lr=1e-3)
    backward(net)
    with pytest.warns(UserWarning, match="trains 2 learned scales"):
        optimizer.step()


def step(optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    backward(net)
    optimizer.step()


def all_in_one(net: nn.Module) -> None:
    step(torch.optim.SGD(net.parameters(), lr=1e-3), net)


def warmup(net: nn.Module) -> None:
    step(torch.optim.SGD(net.parameters(), lr=0.0), net)


def scales_do_not_move_yet(net: nn.Module) -> None:
    step(torch.optim.SGD([{"params": others(net), "lr": 0.1}, {"params": shifts(net), "lr": 0.0}]), net)


def another_optimizer_that_waits(net: nn.Module) -> None:
    waiting = torch.optim.Adam(shifts(net), lr=1e-3)
    step(torch.optim.SGD(others(net), lr=0.1), net)
    waiting.step()


def accumulation(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    backward(net)
    backward(net)
    optimizer.step()


def skipped_by_a_scaler(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(others(net), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(X).square().sum()).backward()
    net[0].weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()


def frozen_scales(net: nn.Module) -> None:
    for p in shifts(net):
        p.requires_grad_(False)
    step(torch.optim.SGD(others(net), lr=0.1), net)


def frozen(net: nn.Module) -> None:
    qt.freeze(net)
    step(torch.optim.SGD(others(net), lr=0.1), net)


def only_the_head(net: nn.Module) -> None:
    step(torch.optim.SGD([*net[2].parameters()], lr=0.1), net)


def another_model(net: nn.Module) -> None:
    other = model()
    backward(net)
    step(torch.optim.SGD(other.parameters(), lr=0.1), other)


def no_gradients_yet(net: nn.Module) -> None:
    qt.Schedule(net, delay=5)
    step(torch.optim.SGD(others(net), lr=0.1), net)


def scales_alone(net: nn.Module) -> None:
    step(torch.optim.SGD(shifts(net), lr=0.1), net)


QUIET = [
    all_in_one,
    warmup,
    scales_do_not_move_yet,
    another_optimizer_that_waits,
    accumulation,
    skipped_by_a_scaler,
    frozen_scales,
    frozen,
    only_the_head,
    another_model,
    no_gradients_yet,
    scales_alone,
]


@pytest.mark.parametrize("run", QUIET)
def test_no_false_alarm(run):
    net = learned(model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(net)


def test_steps_are_watched_only_as_long_as_needed():
    from torch.optim import optimizer as module

    untrained_scales._undecided.clear()
    all_in_one(learned(model()))
    assert not untrained_scales._hooks
    count = len(module._global_optimizer_post_hooks)
    qt.prepare(model(), "w8a8")
    assert len(module._global_optimizer_post_hooks) == count
    net = learned(model())
    assert len(module._global_optimizer_post_hooks) == count + 1
    all_in_one(net)
    assert len(module._global_optimizer_post_hooks) == count
