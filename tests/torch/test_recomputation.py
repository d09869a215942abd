"""Activation checkpointing: gradients and state are those of a plain step."""

from __future__ import annotations

import gc
import itertools

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_bits import WEIGHT_AND_INPUT_BY_ROUNDING  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import recomputation  # noqa: E402

torch.manual_seed(1)
BATCHES = [torch.randn(3, 4, 5) * scale for scale in (1, 2, 0.5, 3)]


class Blocks(nn.Module):
    """A model that checkpoints its blocks; ``reentrant=None`` disables checkpointing."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def with_norm() -> Blocks:
    first = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU())
    return Blocks(first, nn.Sequential(nn.Conv1d(6, 4, 1), nn.ReLU(), nn.Conv1d(4, 4, 1)))


class First(nn.Module):
    """The first output of a layer that returns several."""

    def __init__(self, layer: nn.Module, count: int = 1) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x, *[x.sin() for _ in range(self.count - 1)])
        return result[0] if isinstance(result, tuple) else result


def prepared(model: nn.Module, mode: str, rounding: str = "half_even") -> nn.Module:
    weight, data = WEIGHT_AND_INPUT_BY_ROUNDING[rounding]
    qt.prepare(model, dt.Recipe([dt.Rule(weight=weight, input=data, mode=mode)]))
    with qt.calibrating(model):
        model(BATCHES[0])
    return model.train()


def one_by_one(model: nn.Module, *batches: torch.Tensor) -> None:
    for x in batches:
        model(x.clone().requires_grad_()).square().sum().backward()


def at_once(model: nn.Module, *batches: torch.Tensor) -> None:
    sum(model(x.clone().requires_grad_()).square().sum() for x in batches).backward()


def first_in_first_out(model: nn.Module, *batches: torch.Tensor) -> None:
    for loss in [model(x.clone().requires_grad_()).square().sum() for x in batches]:
        loss.backward()


def one_is_dropped(model: nn.Module, *batches: torch.Tensor) -> None:
    losses = [model(x.clone().requires_grad_()).square().sum() for x in batches]
    losses[0].backward()


ORDERS = [one_by_one, at_once, first_in_first_out, one_is_dropped]


def train(model: nn.Module, order, reentrant: bool | None) -> nn.Module:
    model.reentrant = reentrant
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for i in range(2):
        optimizer.zero_grad()
        order(model, BATCHES[i], BATCHES[i + 1])
        optimizer.step()
    return model


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name


@pytest.mark.parametrize(("order", "native"), [*((order, True) for order in ORDERS), (at_once, False)])
@pytest.mark.parametrize("rounding", WEIGHT_AND_INPUT_BY_ROUNDING)
@pytest.mark.parametrize("mode", ["ema", "per_batch", "learned", "fixed"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_step_is_a_plain_step(reentrant, mode, rounding, order, native, monkeypatch):
    """Including the statistics of batch norms, and the gain of a folded batch norm."""
    if not native:
        monkeypatch.setattr("detent.torch.native_step.run", lambda *_: None)
        for module in ("quantizer", "quantized_layer"):
            monkeypatch.setattr(f"detent.torch.{module}.is_plain", lambda x: False)
    models = []
    for setting in (None, reentrant):
        torch.manual_seed(0)
        models.append(train(prepared(with_norm(), mode, rounding), order, setting))
    assert_equal(models[1], models[0])


OTHERS = {
    "attention": lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), 3),
    "lstm": lambda: First(nn.LSTM(6, 6, 2)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose1d(5, 5, 3, padding=1), nn.BatchNorm1d(5)),
    "bilinear": lambda: First(nn.Bilinear(6, 6, 6), 2),
    "quantizer": lambda: nn.Sequential(nn.ReLU(), qt.Quantizer(), nn.Linear(6, 6)),
    "nested": lambda: Blocks(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))),
}


@pytest.mark.parametrize("rounding", WEIGHT_AND_INPUT_BY_ROUNDING)
@pytest.mark.parametrize("mode", ["ema", "learned"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_of_layer(kind, reentrant, mode, rounding, monkeypatch):
    """Several forward passes before one backward; some layers give different bits without gradients."""
    monkeypatch.setattr(f"{__name__}.BATCHES", [torch.randn(3, 5, 6).double() * scale for scale in (1, 2, 0.5)])
    models = []
    for setting in (None, reentrant):
        torch.manual_seed(0)
        model = prepared(Blocks(OTHERS[kind](), nn.Linear(6, 6)).double(), mode, rounding)
        if kind == "nested":
            model.blocks[0].reentrant = setting
        models.append(train(model, at_once, setting))
    plain, ours = (dict(each.state_dict()) for each in models)
    for key, value in plain.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("rounding", WEIGHT_AND_INPUT_BY_ROUNDING)
def test_a_retained_graph_is_repeated_alike(rounding):
    models = []
    for setting in (None, False):
        torch.manual_seed(0)
        model = prepared(with_norm(), "ema", rounding)
        model.reentrant = setting
        losses = [model(x.clone().requires_grad_()).square().sum() for x in BATCHES[:3]]
        for i in (2, 0, 1, 0):
            losses[i].backward(retain_graph=True)
        models.append(model)
    assert_equal(models[1], models[0])


def test_a_quantizer_alone():
    first, second = (qt.FakeQuantize("uint8", dt.EMA(0.5)) for _ in range(2))
    grads = []
    for quantizer, reentrant in ((first, None), (second, False)):
        xs = [x.clone().requires_grad_() for x in BATCHES]

        def run(x, quantizer=quantizer):
            return quantizer(2 * x).square()

        ys = [run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant) for x in xs]
        sum(y.sum() for y in ys).backward()
        grads.append([x.grad for x in xs])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))
    assert torch.equal(first.lo, second.lo)


def test_the_number_of_records_is_limited():
    model = prepared(with_norm(), "ema")
    model.reentrant = True
    conv = model.blocks[0][0]
    for _ in range(3 * recomputation.MAX_REPLAYED):
        one_by_one(model, BATCHES[0])
    assert 0 < len(recomputation._journals[conv]) <= recomputation.MAX_REPLAYED
    before = len(recomputation._journals)
    del model, conv
    gc.collect()
    assert len(recomputation._journals) < before


def test_plain_steps_record_nothing():
    model = prepared(with_norm(), "ema", "stochastic")
    one_by_one(model, *BATCHES)
    model.eval()(BATCHES[0])
    assert not any(layer in recomputation._journals for layer in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_checksums_on_other_devices_distinguish_permuted_inputs(dtype, monkeypatch):
    x = torch.arange(24, dtype=dtype).reshape(4, 6)
    keys = {recomputation._checksum(each) for each in (x, x.flip(0), x.flip(1), x[[1, 0, 2, 3]], x.roll(1))}
    assert len(keys) == 5
    assert recomputation._checksum(x.clone()) in keys
    monkeypatch.setattr(recomputation, "CHECKSUM_CHUNK", 6)
    rows = {recomputation._checksum(x[list(order)]) for order in itertools.permutations(range(4))}
    assert len(rows) == 24
    assert recomputation._checksum(x[:0]) == 0
