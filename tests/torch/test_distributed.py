"""Several processes: scales equal those of one process, bit for bit on all ranks, and errors reach all ranks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import detent as dt

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import distributed  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qat_distributed.py"
STEPS, HALF = 4, 8
STATE = ("scale", "zero_point", "lo", "hi")
RECIPES = {
    "ema": dt.Recipe.preset("w8a8"),
    "learned": dt.Recipe.preset("w8a8", mode="learned"),
    "integer": dt.Recipe([dt.Rule(weight="int8/axis0", input="uint8/tensor/affine", arithmetic="integer")]),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What the processes run. Without a group, rank 0 of 1 does the same alone.


def place():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def cnn():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(64, 4))


MODELS = {"mlp": (mlp, (8,)), "cnn": (cnn, (2, 6, 6))}


def batches(shape, count=STEPS, seed=1):
    """Batches of all processes together; each process uses its half of every batch."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2 * HALF, *shape, generator=generator) * (i + 1) for i in range(count)]


def part(batch):
    rank, size = place()
    return batch[rank * len(batch) // size : (rank + 1) * len(batch) // size]


def state_of(model):
    """The state of every quantizer, as bits."""
    for quantizer in quantizers_of(model).values():
        quantizer.refresh()
    return {
        f"{name}.{key}".removeprefix("module."): getattr(quantizer, key).clone()
        for name, quantizer in quantizers_of(model).items()
        for key in STATE
        if hasattr(quantizer, key)
    }


def bits(state):
    return {key: value.numpy().tobytes() for key, value in state.items()}


def calibrate(observer, takes):
    """The state after calibration with the batches in ``takes`` for this rank; None means all batches."""
    model, shape = qt.prepare(mlp(), "w8a8"), (8,)
    data = batches(shape, 6)
    with qt.calibrating(model, observer):
        for i in range(len(data)) if takes is None else takes[place()[0]]:
            model(data[i])
    return state_of(model)


def calibrate_wrapped(takes):
    model = DistributedDataParallel(qt.prepare(mlp(), "w8a8"))
    with qt.calibrating(model):
        for i in takes[place()[0]]:
            model(batches((8,), 6)[i])
    assert model.require_forward_param_sync
    return state_of(model)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x, branch):
        return self.each[branch](x)


def calibrate_branches(both):
    model = qt.prepare(Branches(), "w8a8")
    with qt.calibrating(model):
        for branch in (0, 1) if both else (place()[0],):
            model(batches((8,))[branch], branch)
    return state_of(model)


def calibrate_unequal():
    with qt.calibrating(qt.prepare(mlp(), "w8a8" if place()[0] == 0 else "w4a8")) as model:
        model(batches((8,))[0])


def calibrate_observers():
    model = qt.prepare(mlp(), "w8a8")
    with qt.calibrating(model, "minmax" if place()[0] == 0 else "mse"):
        model(batches((8,))[0])


def calibrate_failing(failure):
    model = qt.prepare(mlp(), "w8a8")
    with qt.calibrating(model):
        data = batches((8,))[0]
        if place()[0] == 1 and failure == "nan":
            data[0, 0] = torch.nan
        model(data)
        if place()[0] == 1 and failure == "raise":
            raise KeyError("missing file")


def refill(names):
    """Two outputs, before and after the memory of parameters is refilled in place, as sharding trainers do."""
    model, x = qt.prepare(mlp(), RECIPES["learned"]).eval(), batches((8,))[0]
    with qt.calibrating(model):
        model(x)
    with torch.no_grad():
        before = model(x)
        for name, parameter in model.named_parameters():
            with torch.autograd._unsafe_preserve_version_counter(parameter):
                if name.endswith(names):
                    parameter.add_(0.25)
        return before, model(x)


def sync_unequal():
    qt.sync(qt.prepare(mlp(), "w8a8" if place()[0] == 0 else "w8a16"))


def prepare_sharded():
    qt.prepare(shard(mlp()), "w8a8")


def half_precision():
    """The learned scales, and their values in the forward pass of a sharded model with half-precision weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = qt.prepare(mlp(), RECIPES["learned"])
    with qt.calibrating(model):
        model(batches((8,))[0])
    quantizer = model[0].input_quantizer
    with torch.no_grad():
        quantizer.scale_shift.fill_(2.0**-10)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    seen = []
    model[0].register_forward_pre_hook(
        lambda *_: seen.append((quantizer.scale_shift.dtype, quantizer.learned_values()[0]))
    )
    model(part(batches((8,))[0])).sum().backward()
    return seen[0][0], seen[0][1].detach(), quantizer.initial_scale


def sync_alone():
    qt.sync(qt.prepare(mlp(), "w8a8", sync=False))


def forward_alone():
    model = qt.prepare(mlp(), "w8a8", sync=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batches((8,))[0])
    return [str(each.message) for each in caught]


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (place()[1],))
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(model, trainer):
    if trainer == "ddp":
        return DistributedDataParallel(model)
    return shard(model) if trainer == "fsdp" else model


def prepared_model(kind, recipe, trainer, *, calibrated=True):
    build, shape = MODELS[kind]
    model = build() if recipe is None else qt.prepare(build(), RECIPES[recipe], sync=True)
    if recipe is not None and calibrated:
        with qt.calibrating(model):
            model(part(batches(shape, seed=2)[0]))
    model = wrapped(model, trainer)
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def train(model, optimizer, data, *, quantized=True):
    """The states after each step."""
    states = []
    for batch in data:
        x = part(batch)
        loss = (model(x) - x.flatten(1)[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if quantized:
            qt.sync(model)
            states.append(state_of(model))
    return states


def train_steps(kind, recipe, trainer):
    model, optimizer = prepared_model(kind, recipe, trainer)
    return train(model, optimizer, batches(MODELS[kind][1]))


def float_weights(trainer):
    model, optimizer = prepared_model("mlp", None, trainer)
    train(model, optimizer, batches((8,)), quantized=False)
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]


def count_collectives():
    model, optimizer = prepared_model("mlp", "ema", "none")
    train(model, optimizer, batches((8,), 1))
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(args[0].shape) or real(*args, **kwargs)
    gathers, gather = [], dist.all_gather
    dist.all_gather = lambda *args, **kwargs: gathers.append(args) or gather(*args, **kwargs)
    try:
        qt.sync(model)
    finally:
        dist.all_reduce, dist.all_gather = real, gather
    return [tuple(shape) for shape in calls], len(gathers)


def step_with_data_on(rank):
    """A step in which only one rank has data: (before, after)."""
    model, _ = prepared_model("mlp", "ema", "none")
    before = state_of(model)
    if place()[0] == rank:
        model(3 * batches((8,))[3])
    qt.sync(model)
    return before, state_of(model)


def resume(recipe, trainer, folder):
    """The states of steps 2 and 3, without stopping and after a checkpoint in between."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    data = batches((8,))
    model, optimizer = prepared_model("mlp", recipe, trainer)
    train(model, optimizer, data[:2])
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    straight = train(model, optimizer, data[2:])

    model, optimizer = prepared_model("mlp", recipe, trainer, calibrated=False)
    state, optimizer_state = get_state_dict(model, optimizer)
    saved = {"model": state, "optimizer": optimizer_state}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return straight, train(model, optimizer, data[2:])


def finish(trainer):
    model, optimizer = prepared_model("cnn", "learned", trainer)
    train(model, optimizer, batches((2, 6, 6), 2))
    qt.freeze(model.eval())
    shipped = {name: weight.codes.tobytes() for name, weight in qt.quantized_state(model).items()}
    return shipped, model(batches((2, 6, 6))[0]).detach()


# Calibration


@pytest.mark.parametrize("observer", ["minmax", "mse", "percentile(0.1, 99.9)", "entropy"])
def test_calibration_has_the_bits_of_one_process(ranks, observer):
    alone = bits(calibrate(observer, None))
    assert [bits(state) for state in ranks.run(calibrate, observer, [(0, 2, 4), (1, 3, 5)])] == [alone, alone]


@pytest.mark.parametrize("takes", [[range(6), ()], [(), range(6)]], ids=["only-rank-0", "only-rank-1"])
def test_a_rank_without_data_has_the_same_bits(ranks, takes):
    alone = bits(calibrate(None, None))
    assert [bits(state) for state in ranks.run(calibrate, None, takes)] == [alone, alone]


def test_processes_in_ddp_may_have_unequal_numbers_of_batches(ranks):
    alone = bits(calibrate(None, None))
    assert [bits(state) for state in ranks.run(calibrate_wrapped, [(4, 5), (0, 1, 2, 3)])] == [alone, alone]
    assert [bits(state) for state in ranks.run(calibrate_wrapped, [range(6), ()])] == [alone, alone]


def test_quantizers_with_data_on_one_rank_only(ranks):
    alone = bits(calibrate_branches(True))
    assert [bits(state) for state in ranks.run(calibrate_branches, False)] == [alone, alone]


def test_unequal_recipes_raise_on_all_ranks(ranks):
    for succeeded, error in ranks.outcomes(calibrate_unequal):
        assert not succeeded
        assert error[0] == "StateError"
        assert "the model on rank 0 is prepared differently from the model on rank 1:" in error[1]
        assert "- rank 0: 2.weight_quantizer: int8/axis0" in error[1]
        assert "+ rank 1: 2.weight_quantizer: int4/axis0" in error[1]


def test_unequal_observers_raise_on_all_ranks(ranks):
    for succeeded, error in ranks.outcomes(calibrate_observers):
        assert not succeeded
        assert error[0] == "StateError"
        assert "MinMax" in error[1]
        assert "MSE" in error[1]


@pytest.mark.parametrize(("failure", "error_name"), [("nan", "NaNError"), ("raise", "KeyError")])
def test_a_failing_rank_stops_the_others(ranks, failure, error_name):
    (_, first), (_, second) = ranks.outcomes(calibrate_failing, failure)
    assert first[:2] == (
        "StateError",
        "calibration failed on rank 1, so this process also stops: see the error message of the failed rank",
    )
    assert second[0] == error_name


# Training


def same_on_all(states):
    """The states of rank 0, after checking that all ranks have their bits."""
    first, *others = states
    for other in others:
        assert [bits(state) for state in other] == [bits(state) for state in first]
    return first


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_training_follows_one_process(ranks, recipe, trainer):
    alone = train_steps("mlp", recipe, "none")
    states = same_on_all(ranks.run(train_steps, "mlp", recipe, trainer))
    assert bits(states[0]) != bits(states[-1])
    expected = float_weights("none")
    for theirs in ranks.run(float_weights, trainer):
        for ours, weight in zip(expected, theirs, strict=True):
            torch.testing.assert_close(weight, ours, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(alone, states, strict=True):
        for key, value in ours.items():
            if key.endswith("zero_point"):
                assert (theirs[key] - value).abs().max() <= 1, key
            else:
                torch.testing.assert_close(theirs[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_folded_layers_have_the_same_scales_on_all_ranks(ranks, recipe, trainer):
    same_on_all(ranks.run(train_steps, "cnn", recipe, trainer))


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_exported_weights_are_the_same_on_all_ranks(ranks, trainer):
    (first, y), (second, z) = ranks.run(finish, trainer)
    assert first == second
    assert len(first) == 2
    assert torch.equal(y, z)


@pytest.mark.parametrize("names", ["weight", "weight_quantizer.scale_shift"])
def test_weights_refilled_without_a_new_version_are_quantized_again(ranks, names):
    for before, after in ranks.run(refill, names):
        assert not torch.equal(before, after)


def test_sync_is_one_collective(ranks):
    assert ranks.run(count_collectives) == [([(6,)], 0)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_with_data_on_one_rank_updates_all_ranks(ranks, rank):
    pairs = ranks.run(step_with_data_on, rank)
    same_on_all([list(pair) for pair in pairs])
    before, after = pairs[0]
    assert not torch.equal(before["0.input_quantizer.hi"], after["0.input_quantizer.hi"])


def test_sync_rejects_unequal_recipes(ranks):
    for succeeded, error in ranks.outcomes(sync_unequal):
        assert not succeeded
        assert error[0] == "StateError"
        assert "- rank 0: 0.input_quantizer" in error[1]


def test_prepare_rejects_a_sharded_model(ranks):
    for succeeded, error in ranks.outcomes(prepare_sharded):
        assert not succeeded
        assert error[0] == "SpecError"
        assert "call qt.prepare before fully_shard" in error[1]


def test_learned_scales_keep_their_precision_with_half_precision_weights(ranks):
    for dtype, scale, initial in ranks.run(half_precision):
        assert dtype == torch.bfloat16
        assert torch.equal(scale, initial * (1 + 2.0**-10))


def test_sync_rejects_ranges_that_each_process_updates(ranks):
    for succeeded, error in ranks.outcomes(sync_alone):
        assert not succeeded
        assert error[0] == "StateError"
        assert "each process updates the EMA ranges of 3 quantizers separately (first: 0.input_quantizer)" in error[1]


def test_separate_ema_ranges_draw_a_warning(ranks):
    for messages in ranks.run(forward_alone):
        assert len(messages) == 3
        assert "each process updates its EMA ranges separately" in messages[0]


# Checkpoints


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_resuming_from_a_distributed_checkpoint_changes_no_bit(ranks, recipe, trainer, tmp_path):
    for straight, resumed in ranks.run(resume, recipe, trainer, str(tmp_path / "checkpoint")):
        assert [bits(state) for state in resumed] == [bits(state) for state in straight]


@pytest.mark.parametrize("recipe", RECIPES)
def test_resuming_from_a_file_changes_no_bit(recipe, tmp_path):
    data = batches((8,))
    model, optimizer = prepared_model("mlp", recipe, "none")
    train(model, optimizer, data[:2])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    straight = train(model, optimizer, data[2:])
    model, optimizer = prepared_model("mlp", recipe, "none", calibrated=False)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert [bits(state) for state in train(model, optimizer, data[2:])] == [bits(state) for state in straight]


# One process


def synced(data, *, decay=0.9):
    quantizer = qt.FakeQuantize("uint8", mode=dt.EMA(decay))
    quantizer(torch.tensor([-1.0, 1.0]))
    quantizer.sync = True
    for x in data:
        quantizer(x)
    return quantizer


def test_forward_uses_the_state_of_the_last_sync():
    quantizer = synced([torch.tensor([-3.0, 5.0]), torch.tensor([-4.0, 2.0])])
    assert (quantizer.lo.item(), quantizer.hi.item()) == (-1.0, 1.0)
    assert quantizer.pending.tolist() == [4.0, 5.0]


def test_pending_ranges_are_the_same_traced():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    eager, traced = synced([x]), synced([])
    traced.traced_values_for(x)
    assert torch.equal(eager.pending, traced.pending)


def test_values_that_are_not_finite_do_not_count():
    assert synced([torch.tensor([torch.inf, 5.0])]).pending.tolist() == [-5.0, 5.0]


def test_sync_merges_the_range_of_the_whole_step():
    model = qt.prepare(mlp(), "w8a8", sync=True)
    data = batches((8,), 3)
    with qt.calibrating(model):
        model(data[0])
    first = model[0].input_quantizer
    lo, hi = first.lo.clone(), first.hi.clone()
    for x in data[1:]:
        model(x)
    qt.sync(model)
    kept, new = torch.tensor(0.99), torch.tensor(1.0 - 0.99)
    seen = torch.cat(data[1:])
    assert torch.equal(first.lo, kept * lo + new * seen.min())
    assert torch.equal(first.hi, kept * hi + new * seen.max())
    after = bits(state_of(model))
    qt.sync(model)
    assert bits(state_of(model)) == after


def test_missing_calls_of_sync_draw_a_warning():
    quantizer = synced([torch.ones(2)] * 98)
    with pytest.warns(UserWarning, match=r"qt\.sync\(model\) was not called for 100 training forward passes"):
        quantizer(torch.ones(2))


def test_training_before_calibration_is_rejected():
    model = qt.prepare(mlp(), "w8a8", sync=True)
    with pytest.raises(dt.NotCalibratedError, match="calibrate the model first"):
        model(batches((8,))[0])


def test_sync_takes_prepared_models_only():
    with pytest.raises(dt.StateError, match="not prepared"):
        qt.sync(mlp())


def test_a_model_without_ema_ranges_needs_no_sync():
    qt.sync(qt.prepare(mlp(), "w8a16", sync=True))


def test_bytes_of_a_rank_are_checked():
    with pytest.raises(dt.StateError, match="in a different order"):
        distributed._check_same([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}])


# The example


def test_example_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(EXAMPLE)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as agent:
        try:
            out, err = agent.communicate(timeout=60)
        finally:
            agent.terminate()  # ends the processes it has started, if they hang
    assert agent.returncode == 0, err
    assert "2 processes" in out
    assert "same scales on all processes: True" in out
