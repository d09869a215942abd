"""Re-estimation of batch norm statistics."""

import pytest
import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 8, 8, generator=generator) * (i + 1) for i in range(count)]


def test_statistics_are_averages_over_batches_with_the_final_weights() -> None:
    model = qt.prepare(network(), "w4a4")
    with torch.no_grad(), qt.calibrating(model):
        model(batches()[0])
    inputs: list[Tensor] = []
    hook = model[1].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    before = model[1].running_var.clone()
    assert qt.reestimate_norms(model, batches()) is model
    hook.remove()
    flat = [each.detach().transpose(0, 1).flatten(1).double() for each in inputs]
    assert torch.equal(model[1].running_mean, torch.stack([each.mean(1) for each in flat]).mean(0).float())
    assert torch.equal(model[1].running_var, torch.stack([each.var(1) for each in flat]).mean(0).float())
    assert not torch.equal(model[1].running_var, before)


def test_nothing_else_changes() -> None:
    model = qt.prepare(network(), "w8a8", arithmetic="auto").train()
    with torch.no_grad(), qt.calibrating(model):
        model(batches()[0])
    model[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    qt.reestimate_norms(model, batches())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    statistics = {f"{i}.{name}" for i in (1, 5) for name in ("running_mean", "running_var")}
    counters = {f"{i}.num_batches_tracked" for i in (1, 5)}
    assert statistics <= changed <= statistics | counters
    assert (model.training, model[1].training, model[5].training) == (True, False, True)
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.1)


def test_it_repairs_statistics_that_belong_to_other_weights() -> None:
    model = qt.prepare(network(), "w4a8")
    with torch.no_grad(), qt.calibrating(model):
        model(batches(1)[0])
    with torch.no_grad():
        model[1].running_mean.fill_(3.0)
    qt.reestimate_norms(model, batches(1))
    model.eval()
    with torch.no_grad():
        y = model(batches(1)[0])
    assert float(y.mean().abs()) < 0.2
    assert float((y.std() - 1).abs()) < 0.2


def test_norms_that_a_schedule_froze_keep_their_statistics() -> None:
    model = qt.prepare(network(), "w8a8")
    qt.Schedule(model, freeze_norms=0)
    before = model[1].running_mean.clone()
    with torch.no_grad(), qt.calibrating(model):
        model(batches()[0])
    qt.reestimate_norms(model, batches())
    assert torch.equal(model[1].running_mean, before)


def test_a_frozen_model_is_rejected() -> None:
    model = qt.prepare(network(), "w8a8")
    with torch.no_grad(), qt.calibrating(model):
        model(batches()[0])
    qt.freeze(model)
    with pytest.raises(dt.DetentError, match=r"before qt\.freeze"):
        qt.reestimate_norms(model, batches())


def test_missing_and_tiny_batches_are_rejected_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(dt.DetentError, match="got no batch"):
        qt.reestimate_norms(model, [])
    with pytest.raises(dt.DetentError, match="use larger batches"):
        qt.reestimate_norms(model, [torch.ones(1, 2)])
    assert torch.equal(model[1].running_mean, torch.zeros(2))
    assert (model.training, model[1].momentum) == (True, 0.1)
