"""Schedule: every phase in any training loop, and resumed runs equal to uninterrupted ones."""

import copy

import pytest

import detent as dt

torch = pytest.importorskip("torch")

import detent.torch as qt  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402

nn = torch.nn


def small_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3, bias=False)
    )


def batch(seed):
    return torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(seed)) * (1 + seed)


def train_step(model, optimizer, seed, schedule=None):
    optimizer.zero_grad()
    loss = model(batch(seed)).square().mean()
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    return loss.detach()


def ranges(model):
    return {name: (each.lo.clone(), each.hi.clone()) for name, each in quantizers_of(model).items() if "input" in name}


def same(first, second):
    return all(torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True))


# Phases


def test_delay_computes_in_float_and_updates_ranges():
    model, plain = qt.prepare(small_cnn(), "w8a8"), small_cnn()
    schedule = qt.Schedule(model, delay=2)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (model, plain)]
    for seed in range(2):
        losses = [train_step(each, optimizer, seed) for each, optimizer in zip((model, plain), optimizers, strict=True)]
        assert torch.equal(*losses)  # the float model's bits
        schedule.step()
    first = model[0].input_quantizer
    low, high = batch(0).min(), batch(0).max()
    assert first.is_initialized
    assert torch.allclose(first.lo, 0.99 * low + 0.01 * batch(1).min())
    assert torch.allclose(first.hi, 0.99 * high + 0.01 * batch(1).max())
    assert not any(each.delayed for each in quantizers_of(model).values())
    assert not torch.equal(model(batch(2)), plain(batch(2)))  # now quantized


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16-g32", "fp8", dt.Recipe.preset("w4a4", mode="learned")])
def test_delay_leaves_every_layer_float(recipe):
    def make():
        torch.manual_seed(1)
        return nn.ModuleDict({"mix": nn.MultiheadAttention(32, 2), "rnn": nn.GRU(32, 32), "out": nn.Linear(32, 32)})

    def run(model):
        x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(2))
        return model["out"](model["rnn"](model["mix"](x, x, x)[0])[0])

    model = qt.prepare(make(), recipe)
    schedule = qt.Schedule(model, delay=1)
    assert torch.equal(run(model), run(make()))
    assert [each for each in quantizers_of(model).values() if each.mode == dt.Learned() and each.is_initialized] == []
    schedule.step()
    assert not torch.equal(run(model), run(make()))


def test_scales_of_weights_are_set_again_after_a_delay():
    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Linear(32, 8)), "w4a16-g32")
    schedule = qt.Schedule(model, delay=1)
    with torch.no_grad():
        model[0].weight.mul_(3.0)  # float training
    before = model[0].weight_quantizer.scale.clone()
    schedule.step()
    torch.testing.assert_close(model[0].weight_quantizer.scale, 3.0 * before)


def test_delay_in_evaluation_updates_nothing():
    model = qt.prepare(small_cnn(), "w8a8").eval()
    qt.Schedule(model, delay=1)
    model(batch(0))
    assert not model[0].input_quantizer.is_initialized


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")  # it may: a pure function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_delay_updates_ranges_in_a_compiled_model():
    model = qt.prepare(small_cnn(), "w8a8")
    schedule = qt.Schedule(model, delay=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch(0)), small_cnn()(batch(0)))
    assert model[0].input_quantizer.hi == batch(0).max()
    schedule.step()
    assert not torch.equal(compiled(batch(0)), small_cnn()(batch(0)))


def test_calibrating_inside_a_delay_keeps_the_delay():
    model = qt.prepare(small_cnn(), "w8a8")
    qt.Schedule(model, delay=1)
    with qt.calibrating(model):
        model(batch(0))
    assert model[0].input_quantizer.is_initialized
    assert torch.equal(model(batch(0)), small_cnn()(batch(0)))


def test_a_quantizer_disabled_by_the_user_stays_disabled():
    model = qt.prepare(small_cnn(), "w8a8")
    model[0].input_quantizer.enabled = False
    schedule = qt.Schedule(model, delay=1)
    schedule.step()
    assert not model[0].input_quantizer.enabled


def test_every_phase_in_turn():
    model = qt.prepare(small_cnn(), "w8a8")
    schedule = qt.Schedule(model, delay=1, observe_until=3, freeze_norms=4, freeze_scales=6)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    moved = []
    for seed in range(7):
        before, mean, weight = ranges(model), model[1].running_mean.clone(), model[0].weight.detach().clone()
        delayed, observing = model[0].input_quantizer.delayed, model[0].input_quantizer.observing
        train_step(model, optimizer, seed, schedule)
        norm = not torch.equal(mean, model[1].running_mean)
        moved.append((delayed, observing, not same(before, ranges(model)), norm))
        assert not torch.equal(weight, model[0].weight)  # the model itself goes on
    assert [step[0] for step in moved] == [True] + [False] * 6
    assert [step[1] for step in moved] == [True] * 3 + [False] * 4
    assert [step[2] for step in moved] == [True] * 3 + [False] * 4
    assert [step[3] for step in moved] == [True] * 4 + [False] * 3
    assert schedule.steps == 7


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1)])
def test_freeze_scales_stops_learned_scales_with_any_optimizer(make, set_to_none):
    model = qt.prepare(small_cnn(), dt.Recipe.preset("w4a4", mode="learned"))
    schedule = qt.Schedule(model, freeze_scales=2)
    optimizer = make(model.parameters())
    seen = []
    for seed in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(seed)).square().mean().backward()
        optimizer.step()
        schedule.step()
        seen.append([each.scale_shift.detach().clone() for each in quantizers_of(model).values()])
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert all(torch.equal(a, b) for later in seen[2:] for a, b in zip(seen[1], later, strict=True))


def test_observe_until_affects_only_ema_ranges():
    model = qt.prepare(small_cnn(), dt.Recipe.preset("w4a4", mode="learned"))
    qt.Schedule(model, observe_until=0)
    model(batch(0))  # learned scales still start from their first batch
    assert model[0].input_quantizer.is_initialized


def test_arguments_not_given_change_nothing():
    model = qt.prepare(small_cnn(), "w8a8")
    model[1].frozen = True
    model[0].input_quantizer.observing = False
    schedule = qt.Schedule(model, delay=1)
    schedule.step()
    assert model[1].frozen
    assert not model[0].input_quantizer.observing


def test_steps_between_events_change_nothing():
    model = qt.prepare(small_cnn(), "w8a8")
    with qt.calibrating(model):
        model(batch(0))
    schedule = qt.Schedule(model, freeze_scales=100)
    qt.freeze(model)
    schedule.step()
    assert not model[0].input_quantizer.observing


def test_synchronized_quantizers_merge_in_step():
    model = qt.prepare(small_cnn(), "w8a8", sync=True)
    schedule = qt.Schedule(model, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train_step(model, optimizer, 0)  # nothing to start from is needed while the model is float
    quantizer = model[0].input_quantizer
    assert not quantizer.is_initialized
    schedule.step()
    assert quantizer.hi == batch(0).max()
    train_step(model, optimizer, 1)
    assert quantizer.hi == batch(0).max()
    schedule.step()
    assert torch.allclose(quantizer.hi, 0.99 * batch(0).max() + 0.01 * batch(1).max())


def test_a_wrapped_model_is_found():
    wrapped = nn.Sequential(qt.prepare(small_cnn(), "w8a8"))
    qt.Schedule(wrapped, delay=1)
    assert wrapped[0][0].input_quantizer.delayed


# Resuming


@pytest.mark.parametrize("recipe", ["w8a8", dt.Recipe.preset("w4a4", mode="learned")])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_run(recipe, stop, tmp_path):
    def start():
        model = qt.prepare(small_cnn(), recipe)
        schedule = qt.Schedule(model, delay=2, observe_until=3, freeze_norms=4, freeze_scales=5)
        return model, torch.optim.Adam(model.parameters(), 1e-2), schedule

    parts = start()
    for seed in range(stop):
        train_step(parts[0], parts[1], seed, parts[2])
    torch.save([each.state_dict() for each in parts], tmp_path / "run.pt")
    other = start()
    for each, state in zip(other, torch.load(tmp_path / "run.pt", weights_only=True), strict=True):
        each.load_state_dict(state)
    for seed in range(stop, 7):
        losses = [train_step(model, optimizer, seed, schedule) for model, optimizer, schedule in (parts, other)]
        assert torch.equal(*losses)
    first, second = (copy.deepcopy(model.state_dict()) for model, _, _ in (parts, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_loading_turns_switches_on_and_off():
    model = qt.prepare(small_cnn(), dt.Recipe.preset("w4a4", mode="learned"))
    schedule = qt.Schedule(model, delay=2, freeze_norms=3, freeze_scales=4)
    quantizer = model[0].input_quantizer
    schedule.load_state_dict({"steps": 4})
    assert (quantizer.delayed, model[1].frozen, quantizer.scale_shift.requires_grad) == (False, True, False)
    schedule.load_state_dict({"steps": 1})
    assert (quantizer.delayed, model[1].frozen, quantizer.scale_shift.requires_grad) == (True, False, True)


def test_a_state_with_different_arguments_is_rejected():
    model = qt.prepare(small_cnn(), "w8a8")
    state = qt.Schedule(model, delay=5, freeze_norms=7).state_dict()
    schedule = qt.Schedule(model, delay=3)
    with pytest.raises(dt.StateError, match=r"delay=5 \(here 3\), freeze_norms=7 \(here None\).*{'steps': 0}"):
        schedule.load_state_dict(state)


@pytest.mark.parametrize("state", [None, {}, {"steps": -1}, {"steps": 1.5}, {"steps": 1, "warmup": 2}])
def test_invalid_states_are_rejected(state):
    schedule = qt.Schedule(qt.prepare(small_cnn(), "w8a8"))
    with pytest.raises(dt.StateError):
        schedule.load_state_dict(state)
    assert schedule.steps == 0


# Text and errors


def test_text():
    schedule = qt.Schedule(qt.prepare(small_cnn(), "w8a8"), delay=2, observe_until=2, freeze_norms=10)
    assert repr(schedule) == "Schedule(delay=2, observe_until=2, freeze_norms=10) at step 0"
    schedule.load_state_dict({"steps": 5})
    assert str(schedule).splitlines() == [
        "  step 0   float, EMA ranges are updated",
        "> step 2   quantized; EMA ranges frozen",
        "  step 10  batch norm statistics frozen",
    ]
    assert repr(qt.Schedule(schedule.model)) == "Schedule() at step 0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"delay": -1}, "delay must be an integer of at least 0, got -1"),
        ({"delay": 2.5}, "delay must be an integer of at least 0, got 2.5"),
        ({"delay": True}, "delay must be an integer"),
        ({"freeze_norms": "10"}, "freeze_norms must be an integer of at least 0, got '10'"),
        ({"delay": 5, "observe_until": 3}, "observe_until=3 and delay=5, expected observe_until >= delay"),
        ({"delay": 5, "freeze_scales": 4}, "freeze_scales=4 and delay=5"),
        ({"observe_until": 9, "freeze_scales": 4}, "freeze_scales=4 and observe_until=9"),
    ],
)
def test_invalid_arguments(arguments, words):
    model = qt.prepare(small_cnn(), "w8a8")
    with pytest.raises(dt.SpecError, match=words):
        qt.Schedule(model, **arguments)
    assert not any(each.delayed for each in quantizers_of(model).values())


def test_an_unprepared_model_is_rejected():
    with pytest.raises(dt.StateError, match="not prepared"):
        qt.Schedule(small_cnn())
    with pytest.raises(dt.DtypeError, match="got list"):
        qt.Schedule([small_cnn()])
