"""Oscillation: damping and freezing of weights that jump between two codes."""

import pytest
import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt


def prepared(bits: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4))
    recipe = dt.Recipe([dt.Rule("*", weight=f"int{bits}/axis0", mode=dt.Fixed())])
    qt.prepare(model, recipe)
    quantizer = model[0].weight_quantizer
    quantizer.set_params(dt.QuantParams(quantizer.spec, torch.full((4,), 0.5).numpy()))
    with torch.no_grad():
        model[0].weight.fill_(0.1)
    return model


def jump(model: nn.Sequential, schedule: qt.Schedule, value: float) -> None:
    """Move one weight, as an optimizer would, and count the step."""
    with torch.no_grad():
        model[0].weight[0, 0] = value
    schedule.step()


def test_a_weight_that_jumps_back_and_forth_is_frozen_at_its_usual_code() -> None:
    model = prepared()
    schedule = qt.Schedule(model, oscillation=qt.Oscillation(threshold=0.02))
    for turn in range(6):
        jump(model, schedule, 0.3 if turn % 2 else 0.1)  # codes 1 and 0, one of them in three turns more often
    assert schedule.frozen_weights == {"0.weight": pytest.approx(1 / 24)}
    frozen = float(model[0].weight.detach()[0, 0])
    assert frozen in (0.0, 0.5)
    jump(model, schedule, 0.9)  # the optimizer moves it, and the schedule moves it back
    assert float(model[0].weight.detach()[0, 0]) == frozen
    assert torch.equal(model[0].weight[1:], torch.full((3, 6), 0.1)), "other weights do not change"


def test_a_weight_that_moves_in_one_direction_is_not_frozen() -> None:
    model = prepared(4)
    schedule = qt.Schedule(model, oscillation=qt.Oscillation(threshold=0.005))
    for turn in range(6):
        jump(model, schedule, 0.1 + 0.5 * turn)
    assert schedule.frozen_weights == {}


def test_a_frozen_weight_follows_its_scale() -> None:
    model = prepared()
    schedule = qt.Schedule(model, oscillation=qt.Oscillation(threshold=0.0, momentum=1.0))
    for value in (0.1, 0.4, 0.1):
        jump(model, schedule, value)
    jump(model, schedule, 0.4)
    assert schedule.frozen_weights
    code = float(model[0].weight.detach()[0, 0]) / 0.5
    quantizer = model[0].weight_quantizer
    quantizer.set_params(dt.QuantParams(quantizer.spec, torch.full((4,), 0.25).numpy()))
    schedule.step()
    assert float(model[0].weight.detach()[0, 0]) == code * 0.25


def test_damping_pulls_weights_to_their_quantized_values_but_not_clipped_ones() -> None:
    model = prepared()
    with torch.no_grad():
        model[0].weight[0, 1] = 7.0
    schedule = qt.Schedule(model, oscillation=qt.Oscillation(damping=0.25, threshold=None))
    schedule.step()  # the first step only takes in the codes
    assert float(model[0].weight.detach()[1, 1]) == pytest.approx(0.1)
    schedule.step()
    assert float(model[0].weight.detach()[1, 1]) == pytest.approx(0.075)
    assert float(model[0].weight.detach()[0, 1]) == 7.0


def test_weights_are_tracked_from_the_start_step_only() -> None:
    model = prepared()
    schedule = qt.Schedule(model, oscillation=qt.Oscillation(damping=1.0, start=3))
    for _ in range(3):
        schedule.step()
    assert float(model[0].weight.detach()[0, 0]) == pytest.approx(0.1)
    schedule.step()
    assert float(model[0].weight.detach()[0, 0]) == 0.0


def train(model: nn.Module, schedule: qt.Schedule, data: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
        schedule.step()


def test_a_checkpoint_continues_to_the_same_bits() -> None:
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    settings = qt.Oscillation(damping=0.01, threshold=0.02, momentum=0.1)
    model = prepared()
    schedule = qt.Schedule(model, oscillation=settings)
    train(model, schedule, data, 4)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = schedule.state_dict()
    other = prepared()
    continued = qt.Schedule(other, oscillation=settings)
    other.load_state_dict(saved)
    continued.load_state_dict(state)
    train(model, schedule, data, 6)
    train(other, continued, data, 6)
    assert torch.equal(model[0].weight, other[0].weight)
    assert continued.frozen_weights == schedule.frozen_weights


def test_a_folded_batch_norm_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3))
    model[1].running_var.fill_(4.0)
    qt.prepare(model, dt.Recipe([dt.Rule("*", weight="int4/axis0", mode=dt.PerBatch())]))
    schedule = qt.Schedule(model.train(), oscillation=qt.Oscillation(damping=1.0))
    schedule.step()
    schedule.step()
    weight = model[0].weight.detach()
    scaled = weight * model[0].fold.factor(weight)
    scale = torch.from_numpy(model[0].weight_quantizer.params_for(scaled).scale.copy()).reshape(-1, 1, 1, 1)
    codes = scaled / scale
    assert torch.allclose(codes, codes.round(), atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"damping": -1}, {"threshold": 2.0}, {"momentum": True}, {"start": -1}, {"damping": "much"}]
)
def test_bad_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(dt.DetentError, match=next(iter(settings))):
        qt.Oscillation(**settings)  # type: ignore[arg-type]


def test_bad_arguments_and_states_are_rejected() -> None:
    model = prepared()
    with pytest.raises(dt.DetentError, match=r"expected a qt\.Oscillation"):
        qt.Schedule(model, oscillation=0.02)  # type: ignore[arg-type]
    schedule = qt.Schedule(model, oscillation=qt.Oscillation())
    with pytest.raises(dt.DetentError, match=r"oscillation state of 0\.weight"):
        schedule.load_state_dict({"steps": 1, "oscillation": {"0.weight": {"codes": torch.ones(1)}}})
    assert "oscillation=Oscillation(" in repr(schedule)
