"""Unusual uses of prepared models that must work, or fail with a clear error."""

import copy
import threading

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def calibrated(model, recipe="w8a8", x=X):
    qt.prepare(model, recipe)
    with qt.calibrating(model):
        model(x)
    return model


def test_a_model_prepared_in_evaluation_mode_stays_in_it():
    model = mlp().eval()
    qt.prepare(model, "w8a8")
    assert not any(each.training for each in model.modules())
    with pytest.raises(dt.NotCalibratedError, match=r"0\.input_quantizer"):
        model(X)
    with qt.calibrating(model):
        model(X)
    before = model[0].input_quantizer.scale.clone()
    model(100 * X)
    assert torch.equal(model[0].input_quantizer.scale, before)


def test_threads_that_share_a_model_all_use_quantized_weights():
    torch.manual_seed(0)
    model = qt.prepare(nn.LSTM(8, 8), dt.Recipe([dt.Rule(weight="int2/axis0")])).eval()
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        expected, wrong = model(x)[0], []

        def work():
            with torch.no_grad():
                wrong.extend(not torch.equal(model(x)[0], expected) for _ in range(40))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == [False] * 160
    assert not model._forwards


def conv_bn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def test_a_norm_replaced_after_prepare():
    model = calibrated(conv_bn(), x=torch.randn(2, 1, 6, 6))
    model[1] = nn.BatchNorm2d(4)
    for use in (qt.freeze, qt.quantized_state):
        with pytest.raises(dt.StateError, match="folded into 0 was replaced"):
            use(model)


def test_a_norm_along_another_axis_is_never_folded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    x = 3 * torch.randn(32, 4, 8) + 1
    for _ in range(20):
        model(x)
    expected = copy.deepcopy(model).eval()(x)
    qt.freeze(calibrated(model, x=x)).eval()
    assert dt.metrics.sqnr_db(expected.detach().numpy(), model(x).detach().numpy()) > 30


class OtherInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) if self.training else self.norm(y) + y.mean()


def test_a_fold_must_occur_in_training_and_in_evaluation():
    assert all(not layer.norm for layer in qt.plan(OtherInEvaluation(), "w8a8").layers)


class StoresItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.seen = nn.Linear(8, 4), []
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        return self.fc(x + torch.rand(1))


def test_a_plan_changes_nothing():
    model, state = StoresItsInput(), torch.get_rng_state()
    qt.plan(model, "w8a8")
    assert model.calls == 0
    assert model.seen == []
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


class Blocks(nn.Module):
    """An MLP that checkpoints its blocks; ``reentrant=None`` disables checkpointing."""

    def __init__(self):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList([mlp(), mlp()]), None
        self.between = nn.Linear(4, 8)

    def forward(self, x):
        first, second = self.blocks
        if self.reentrant is None:
            return second(self.between(first(x)))
        x = checkpoint(first, x, use_reentrant=self.reentrant)
        return checkpoint(second, self.between(x), use_reentrant=self.reentrant)


def assert_same_training(plain, saving, reentrant):
    """Check that state and gradients are equal after three steps."""
    saving.reentrant = reentrant
    for model in (plain, saving):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in (3 * X, X + 0.25, -2 * X):
            optimizer.zero_grad()
            model(x.clone().requires_grad_()).square().sum().backward()
            optimizer.step()
    for key, state in plain.state_dict().items():
        assert torch.equal(saving.state_dict()[key], state), key
    for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned", "fixed"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_does_not_count_twice(reentrant, mode, native, monkeypatch):
    if not native:
        monkeypatch.setattr("detent.torch.native_step.run", lambda *_: None)
        for module in ("quantizer", "quantized_layer"):
            monkeypatch.setattr(f"detent.torch.{module}.is_plain", lambda x: False)
    recipe = dt.Recipe.preset("w4a4", mode=mode)
    assert_same_training(*(calibrated(Blocks(), recipe) for _ in range(2)), reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_does_not_count_twice_in_a_delay(reentrant):
    plain, saving = (calibrated(Blocks()) for _ in range(2))
    for model in (plain, saving):
        qt.Schedule(model, delay=9)
    assert_same_training(plain, saving, reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_rounds_as_the_first_one(reentrant):
    rule = dt.Rule(weight=dt.QuantSpec("int4", rounding="stochastic(1)"), input="uint8")
    plain, saving = (calibrated(mlp(), dt.Recipe([rule])) for _ in range(2))
    for _ in range(2):
        plain(X).square().sum().backward()
        checkpoint(saving, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert saving[0].weight_quantizer.step == plain[0].weight_quantizer.step == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_last_batch_is_not_a_recomputed_one(reentrant):
    recipe = dt.Recipe([dt.Rule(input="uint8", mode="per_batch")])
    plain, saving = (qt.prepare(Blocks(), recipe) for _ in range(2))
    saving.reentrant = reentrant
    for model in (plain, saving):
        sum(model(x.clone().requires_grad_()).sum() for x in (X, 3 * X)).backward()
    for key, state in plain.state_dict().items():
        assert torch.equal(saving.state_dict()[key], state), key


def test_a_recomputed_forward_is_not_watched():
    model, calls = calibrated(mlp()), []
    for quantizer in quantizers_of(model).values():
        quantizer.watcher = lambda quantizer, *_: calls.append(quantizer.name)
    checkpoint(model, X, use_reentrant=False).sum().backward()
    assert sorted(calls) == sorted(quantizers_of(model))


def test_freezing_is_final():
    model = qt.freeze(calibrated(conv_bn(), x=torch.randn(2, 1, 6, 6)))
    with pytest.raises(dt.StateError, match="a frozen model cannot be calibrated"), qt.calibrating(model):
        pass
    with pytest.warns(UserWarning, match="no longer train"):
        model.train()(torch.randn(2, 1, 6, 6))


def test_a_class_registered_twice():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return x @ self.a.T + x @ self.b.T

    qt.register_layer(Two, ("a",))
    model = qt.unprepare(qt.prepare(nn.Sequential(Two()), "w4a16-g32") and qt.prepare(nn.Sequential(Two()), "w8a16"))
    qt.register_layer(Two, ("a", "b"))
    assert set(qt.quantized_state(qt.prepare(model, "w8a16"))) == {"0.a", "0.b"}
    with pytest.raises(dt.SpecError, match="expected a tuple of names"):
        qt.register_layer(Two, "ab")


def test_tied_weights_have_one_mode():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    rules = [dt.Rule(weight="int4/axis0"), dt.Rule("1", mode="learned")]
    with pytest.raises(dt.SpecError, match="are the same parameter"):
        qt.plan(model, dt.Recipe(rules))


@pytest.mark.parametrize("spec", ["int8/token", "nvfp4"])
def test_a_failing_prepare_does_not_change_the_model(spec):
    model = mlp()
    rule = dt.Rule(weight="int4/axis0", input=dt.nvfp4 if spec == "nvfp4" else spec, mode="learned")
    with pytest.raises(dt.SpecError, match=r"cannot construct 0\.input_quantizer"):
        qt.prepare(model, dt.Recipe([rule]))
    assert type(model[0]) is nn.Linear
    calibrated(model)


def test_per_batch_parameters_are_not_in_the_state():
    model = qt.prepare(mlp(), dt.Recipe([dt.Rule(input="int8/token", mode="per_batch")]))
    model(X)
    other = qt.prepare(mlp(), dt.Recipe([dt.Rule(input="int8/token", mode="per_batch")]))
    other(X[:3])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))


@pytest.mark.parametrize("spec", [dt.mxfp4, dt.mxfp8, dt.nvfp4, dt.QuantSpec.parse("uint4/group32/affine")], ids=str)
def test_packed_bytes_are_those_of_the_tensor(spec):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    planned = qt.plan(model, dt.Recipe([dt.Rule(weight=spec)])).nbytes_after
    weight = model[0].weight.detach().numpy()
    assert planned == dt.quantize(weight, dt.QuantParams.from_data(spec, weight)).nbytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_is_rejected_with_an_alternative():
    model = calibrated(mlp()).eval()
    with pytest.raises(dt.UnsupportedError, match=r"torch\.export"):
        torch.jit.trace(model, X)


def test_nan_is_reported_with_the_layer():
    model = calibrated(mlp())
    bad = X.clone()
    bad[2, 3] = np.nan
    with pytest.raises(dt.NaNError, match=r"0\.input_quantizer: x contains 1 NaN in .*, first at \(2, 3\)"):
        model(bad)
