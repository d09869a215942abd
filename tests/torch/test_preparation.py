"""qt.plan, qt.prepare, qt.unprepare: the table, the promise that nothing else changes, and every type of layer by hand.

What a layer computes is compared with its float operation on operands that detent's NumPy functions have quantized, and
its gradients with autograd through that composition.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch_bits import array, assert_same, bits  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402

# Not ours: what torch says of its own layers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]

WEIGHT, INPUT = "int8/axis0", "uint8/tensor/affine"
Both = [dt.Rule(weight=WEIGHT, input=INPUT)]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


class Gate(nn.Module):
    """A user-defined layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.sigmoid(x @ self.matrix)
        return out if y is None else out * y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))


# Plans


def reason(model: nn.Module, recipe: dt.Recipe | str, name: str) -> str:
    model_plan = qt.plan(model, recipe)
    layer = next(each for each in model_plan.layers if each.name == name)
    assert layer.reason in str(model_plan)
    assert not layer.is_quantized
    assert layer.nbytes_before == layer.nbytes_after
    return layer.reason


def test_unknown_types_are_listed() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 3))

    model = nn.Sequential(nn.Linear(3, 3), Unknown())
    assert "register_layer" in reason(model, "w8a8", "1")
    qt.prepare(model, "w8a8")
    assert type(model[1]) is Unknown


def test_excluded_and_unmatched_layers_are_listed() -> None:
    recipe = dt.Recipe([dt.Rule("0", weight=WEIGHT), dt.Rule("0", skip=True)])
    assert reason(small(), recipe, "0") == "excluded"
    assert "no rule" in reason(small(), recipe, "2")


def test_groups_that_do_not_divide_are_listed() -> None:
    recipe = dt.Recipe([dt.Rule(weight="int4/group4")])
    assert re.search(r"group size 4 .* 6", reason(small(), recipe, "0"))
    assert [layer.name for layer in qt.plan(small(), recipe).quantized] == ["2"]


def test_a_rule_without_a_spec_for_the_layer() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    assert reason(model, dt.Recipe([dt.Rule(input=INPUT)]), "0")


def test_weights_cannot_be_per_token() -> None:
    assert "token" in reason(small(), dt.Recipe([dt.Rule(weight="int8/token")]), "0")


def test_tied_weights_in_the_plan() -> None:
    model_plan = qt.plan(Tied(), "w8a16")
    first, _, last = model_plan.layers
    assert last.tied == {"weight": "embedding.weight"}
    assert "weight is shared with embedding.weight" in str(model_plan)
    assert (last.nbytes_before, last.nbytes_after) == (0, 0)
    assert first.nbytes_before == 9 * 6 * 4


@pytest.mark.parametrize(
    "rules",
    [
        [dt.Rule(weight=WEIGHT), dt.Rule("head", skip=True)],
        [dt.Rule(weight=WEIGHT), dt.Rule("head", weight="int4/axis0")],
        [dt.Rule("head", weight=WEIGHT)],
    ],
    ids=["skipped", "other", "unmatched"],
)
def test_tied_weights_with_two_specs_are_rejected(rules: list[dt.Rule]) -> None:
    model = Tied()
    with pytest.raises(dt.SpecError, match=r"head\.weight and embedding\.weight are the same parameter"):
        qt.prepare(model, dt.Recipe(rules))
    assert type(model.embedding) is nn.Embedding


def test_tied_weights_are_quantized_once() -> None:
    model = qt.prepare(Tied(), "w8a16")
    assert model.head.weight_quantizer is model.embedding.weight_quantizer
    assert model.head.weight is model.embedding.weight
    x = torch.arange(9)
    table = array(model.embedding.weight)
    quantized = dt.fake_quantize(table, dt.QuantParams.from_data(WEIGHT, table))
    assert_same(model.embedding(x), quantized)
    assert_same(model.head(torch.eye(6)), np.ascontiguousarray(quantized.T))
    state = qt.quantized_state(model)
    assert np.array_equal(state["head.weight"].codes, state["embedding.weight"].codes)
    twin = qt.prepare(Tied(), "w8a16")
    twin.load_state_dict(model.state_dict())
    assert_same(twin(x), model(x))


def test_an_empty_recipe() -> None:
    model, x = small(), torch.randn(3, 6)
    expected = model(x)
    model_plan = qt.plan(model, dt.Recipe([]))
    assert model_plan.quantized == ()
    assert "0 of 2 layers" in str(model_plan)
    qt.prepare(model, dt.Recipe([]))
    assert_same(model(x), expected)
    with qt.calibrating(model):
        model(x)
    assert qt.quantized_state(model) == {}
    with pytest.raises(dt.SpecError, match="already prepared"):
        qt.prepare(model, "w8a8")
    qt.unprepare(model)


def test_an_empty_model() -> None:
    assert qt.plan(nn.ReLU(), dt.Recipe([])).layers == ()
    with pytest.raises(dt.SpecError, match="matches none of 0 layers"):
        qt.plan(nn.ReLU(), "w8a8")


def test_unmatched_rules_name_the_closest() -> None:
    with pytest.raises(dt.SpecError, match="did you mean 'body'"):
        qt.prepare(Tied(), dt.Recipe([dt.Rule("bodi", weight=WEIGHT)]))
    with pytest.raises(dt.SpecError, match="Lineer"):
        qt.prepare(small(), dt.Recipe([dt.Rule(types="Lineer", weight=WEIGHT)]))


def test_unused_layers() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model, x = Unused(), torch.randn(3, 4)
    assert len(qt.plan(model, "w8a8").quantized) == 2
    qt.prepare(model, "w8a8")
    with pytest.warns(UserWarning, match="unused.input_quantizer"), qt.calibrating(model):
        model(x)
    model(x).sum().backward()
    model.eval()(x)
    assert set(qt.quantized_state(model)) == {"used.weight", "unused.weight"}


def test_lazy_layers_are_rejected() -> None:
    with pytest.raises(dt.DetentError):
        qt.prepare(nn.Sequential(nn.LazyLinear(4)), "w8a8")


@pytest.mark.parametrize("bad", [None, 5, [], torch.zeros(3)], ids=str)
def test_invalid_models_and_recipes(bad: object) -> None:
    with pytest.raises((dt.DetentError, dt.errors.FileFormatError)):
        qt.plan(bad, "w8a8")
    with pytest.raises(dt.DetentError):
        qt.prepare(bad, "w8a8")
    with pytest.raises(dt.DetentError):
        qt.plan(small(), bad)


# Prepare and back


def zoo() -> dict[str, Callable[[], nn.Module]]:
    return {
        "mlp": small,
        "tied": Tied,
        "conv_bn": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
        "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.EmbeddingBag(4, 3)),
        "root": lambda: nn.Linear(4, 4),
        "placed": lambda: nn.Sequential(qt.Quantizer(), nn.Bilinear(3, 3, 2)),
    }


def snapshot(model: nn.Module) -> object:
    def inside(value: object) -> object:
        if isinstance(value, dict):
            return {k: id(v) for k, v in value.items()}
        return [type(v) for v in value] if isinstance(value, list) else id(value)

    return [
        (name, type(m), {k: inside(v) if k != "training" else v for k, v in vars(m).items()})
        for name, m in model.named_modules()
    ]


@pytest.mark.parametrize("name", zoo())
def test_unprepare_restores_everything(name: str) -> None:
    model = zoo()[name]()
    before, state = snapshot(model), {k: bits(v) for k, v in model.state_dict().items()}
    order = list(model.state_dict())
    qt.plan(model, "w8a8")
    assert snapshot(model) == before
    qt.prepare(model, "w8a8")
    assert [id(p) for p in model.parameters()] != [] or name == "placed"
    qt.unprepare(model)
    assert snapshot(model) == before
    assert list(model.state_dict()) == order
    assert {k: bits(v) for k, v in model.state_dict().items()} == state
    qt.unprepare(qt.prepare(model, dt.Recipe.preset("w8a8", mode="learned")))
    assert snapshot(model) == before


def test_unprepare_after_use_restores_the_outputs() -> None:
    model, x = small(), torch.randn(5, 6)
    expected = model(x)
    keys = [set(vars(m)) for m in model.modules()]
    qt.prepare(model, "w4a8")
    with qt.calibrating(model):
        model(x)
    model(x).sum().backward()
    model.eval()(x)
    qt.freeze(model)
    qt.unprepare(model)
    assert_same(model(x), expected)
    assert [set(vars(m)) for m in model.modules()] == keys
    with pytest.raises(dt.StateError, match="not prepared"):
        qt.unprepare(model)


def test_copies_can_be_unprepared() -> None:
    model = qt.prepare(zoo()["transformer"](), "w8a8")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        qt.unprepare(twin)
        assert type(twin) is nn.TransformerEncoderLayer
        assert not twin._forward_pre_hooks
        assert not twin._load_state_dict_pre_hooks
    assert model._forward_pre_hooks


@pytest.mark.parametrize("name", zoo())
def test_copies_and_pickles(name: str) -> None:
    model = qt.prepare(zoo()[name](), "w8a8")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert {k: bits(v) for k, v in twin.state_dict().items()} == {k: bits(v) for k, v in model.state_dict().items()}


def test_an_optimizer_from_before_keeps_working() -> None:
    model, x = small(), torch.randn(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = [id(p) for p in model.parameters()]
    qt.prepare(model, "w8a8")
    assert [id(p) for p in model.parameters()] == ids
    before = [bits(p) for p in model.parameters()]
    loss = [model(x).square().mean()]
    loss[0].backward()
    optimizer.step()
    assert all(bits(p) != b for p, b in zip(model.parameters(), before, strict=True))
    assert model(x).square().mean() < loss[0]


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16-g2"])
def test_float_checkpoints_load(recipe: str) -> None:
    source, model = small(), small()
    with torch.no_grad():
        source[0].weight.mul_(2)
    qt.prepare(model, recipe)
    float_keys = list(source.state_dict())
    assert [k for k in model.state_dict() if "_quantizer." not in k] == float_keys
    result = model.load_state_dict(source.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys
    assert all("_quantizer." in key for key in result.missing_keys)
    assert_same(model[0].weight, source[0].weight)


def test_checkpoints_of_a_different_recipe_are_rejected_with_a_diff() -> None:
    source = qt.prepare(small(), "w8a8")
    model = qt.prepare(small(), dt.Recipe([dt.Rule(weight="int4/axis0", input=INPUT)]))
    before = {k: bits(v) for k, v in model.state_dict().items()}
    with pytest.raises(dt.StateError, match=r"(?s)0\.weight_quantizer.*int8.*int4"):
        model.load_state_dict(source.state_dict())
    assert {k: bits(v) for k, v in model.state_dict().items()} == before


def test_checkpoints_are_safe_files(tmp_path: object) -> None:
    model, x = qt.prepare(small(), "w8a8"), torch.randn(5, 6)
    model(x)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    twin = qt.prepare(small(), "w8a8")
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    assert_same(twin.eval()(x), model.eval()(x))


def test_models_that_cannot_be_prepared() -> None:
    model = qt.prepare(small(), "w8a8")
    for each in (model, nn.Sequential(model), model[0]):
        with pytest.raises(dt.SpecError, match="already prepared"):
            qt.prepare(each, "w8a8")
    with torch.device("meta"):
        on_meta = small()
    with pytest.raises(dt.SpecError, match=r"meta.*0\.weight"):
        qt.prepare(on_meta, "w8a8")
    assert qt.plan(on_meta, "w8a8").quantized


def test_names_that_are_taken() -> None:
    model = small()
    model[0].weight_quantizer = nn.ReLU()
    before = snapshot(model)
    with pytest.raises(dt.SpecError, match="weight_quantizer"):
        qt.prepare(model, "w8a8")
    assert snapshot(model) == before


@pytest.mark.parametrize("call", [qt.freeze, qt.quantized_state, qt.unprepare], ids=lambda f: f.__name__)
def test_a_float_model_is_rejected(call: Callable[[nn.Module], object]) -> None:
    with pytest.raises(dt.StateError, match="not prepared"):
        call(small())


def test_evaluation_before_calibration_names_the_layer() -> None:
    model = qt.prepare(small(), "w8a8").eval()
    with pytest.raises(dt.NotCalibratedError, match=re.escape("0.input_quantizer")):
        model(torch.randn(2, 6))


def test_nan_names_the_layer() -> None:
    model = qt.prepare(small(), "w8a8")
    with torch.no_grad():
        model[0].bias[1] = float("nan")
    with pytest.raises(dt.NaNError, match=re.escape("2.input_quantizer")):
        model(torch.randn(2, 6))
    with pytest.raises(dt.NaNError, match=re.escape("2.input_quantizer")), qt.calibrating(model):
        model(torch.randn(2, 6))
    assert model.training
    assert not any(q.is_calibrating for q in quantizers_of(model).values())


# Calibration


@pytest.mark.parametrize("mode", [None, "learned", "fixed", "per_batch"])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "w4a4"])
@pytest.mark.parametrize("name", ["mlp", "conv_bn", "transformer", "lstm"])
def test_calibration_computes_in_float_and_evaluation_follows(name: str, recipe: str, mode: str | None) -> None:
    torch.manual_seed(0)
    model = zoo()[name]().eval()
    shape = {"mlp": (5, 6), "conv_bn": (3, 2, 8, 8), "transformer": (2, 3, 8), "lstm": (3, 2, 4)}[name]
    x = torch.randn(shape)
    expected = model(x)
    qt.prepare(model, dt.Recipe.preset(recipe, mode=mode))
    model.train()
    with qt.calibrating(model):
        got = model(x)
    assert model.training
    first = (lambda y: y[0]) if name == "lstm" else (lambda y: y)
    torch.testing.assert_close(first(got), first(expected), rtol=1e-5, atol=1e-6)
    assert all(q.is_initialized for q in quantizers_of(model).values() if not isinstance(q.mode, dt.PerBatch))
    model.eval()(x)


# Layers, by hand


def quantized(t: torch.Tensor, spec: str) -> torch.Tensor:
    """Fake-quantize with the NumPy core and the range of the data; the gradient passes without clipping."""
    a = array(t)
    params = dt.QuantParams.from_data(spec, a)
    y = torch.from_numpy(dt.fake_quantize(a, params))
    mask = torch.from_numpy(dt.fake_quantize_backward(np.ones_like(a), a, params))
    return y + (t - t.detach()) * mask


def check_layer(
    layer: nn.Module,
    by_hand: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    exact: bool = True,
    call: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Check the output and all gradients; `by_hand` is called with the parameters by name, and the inputs."""
    call = call or (lambda m, *a: m(*a))
    model = nn.Sequential(layer)
    qt.prepare(model, dt.Recipe(Both))
    results = []
    for run in (lambda *a: call(model[0], *a), None):
        own = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        parameters = {n: p for n, p in model[0].named_parameters() if "quantizer" not in n}
        model.zero_grad()
        y = run(*own) if run else by_hand(dict(parameters), *own)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        gradients = [t.grad for t in own if t.is_floating_point()]
        results.append([y.detach(), *gradients, *(p.grad.clone() for p in parameters.values())])
    for ours, theirs in zip(*results, strict=True):
        if exact:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def w(p: dict[str, torch.Tensor], name: str = "weight", axis: int = 0) -> torch.Tensor:
    return quantized(p[name], f"int8/axis{axis}")


def x8(x: torch.Tensor) -> torch.Tensor:
    return quantized(x, INPUT)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    check_layer(nn.Linear(6, 4, bias=bias), lambda p, x: F.linear(x8(x), w(p), p.get("bias")), torch.randn(shape))


def test_linear_forward_has_the_bits_of_the_composition() -> None:
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(5, 6)
    qt.prepare(model, dt.Recipe(Both))
    expected = F.linear(x8(x), w(dict(model[0].named_parameters())), model[0].bias)
    assert_same(model(x), expected)


def test_bilinear() -> None:
    torch.manual_seed(0)
    check_layer(
        nn.Bilinear(4, 5, 3),
        lambda p, a, b: F.bilinear(x8(a), x8(b), w(p), p["bias"]),
        torch.randn(6, 4),
        3 * torch.randn(6, 5),
    )


CONVS = [(nn.Conv1d, F.conv1d, 1), (nn.Conv2d, F.conv2d, 2), (nn.Conv3d, F.conv3d, 3)]
SETTINGS: list[dict[str, object]] = [
    {},
    {"stride": 2, "padding": 1, "bias": False},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"groups": 2, "padding": 1},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "replicate"},
    {"padding": "same", "padding_mode": "reflect"},
]


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("kind", "function", "rank"), CONVS, ids=["1d", "2d", "3d"])
def test_convolutions(
    kind: type, function: Callable[..., torch.Tensor], rank: int, settings: dict[str, object], batched: bool
) -> None:
    torch.manual_seed(0)
    layer = kind(2, 4, 3, **settings)
    twin = copy.deepcopy(layer)

    def by_hand(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return twin._conv_forward(x8(x), w(p), p.get("bias"))

    assert function is not None
    check_layer(layer, by_hand, torch.randn((3,) * batched + (2,) + (6,) * rank))


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format], ids=str)
def test_convolutions_in_any_memory_format(memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 4, 3).to(memory_format=memory)
    x = torch.randn(3, 2, 6, 6).contiguous(memory_format=memory)
    check_layer(layer, lambda p, x: F.conv2d(x8(x), w(p), p["bias"]), x)


TRANSPOSED = [
    (nn.ConvTranspose1d, F.conv_transpose1d, 1),
    (nn.ConvTranspose2d, F.conv_transpose2d, 2),
    (nn.ConvTranspose3d, F.conv_transpose3d, 3),
]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("kind", "function", "rank"), TRANSPOSED, ids=["1d", "2d", "3d"])
def test_transposed_convolutions(kind: type, function: Callable[..., torch.Tensor], rank: int, groups: int) -> None:
    torch.manual_seed(0)
    layer = kind(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups)

    def by_hand(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        settings = {"stride": 2, "padding": 1, "output_padding": 1, "groups": groups}
        return function(x8(x), w(p, axis=1), p["bias"], **settings)

    check_layer(layer, by_hand, torch.randn(2, 4, *(5,) * rank))


def test_transposed_convolutions_of_a_given_size() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    by_hand = lambda p, x: F.conv_transpose2d(x8(x), w(p, axis=1), p["bias"], stride=2, output_padding=1)  # noqa: E731
    check_layer(layer, by_hand, torch.randn(2, 2, 5, 5), call=lambda m, x: m(x, output_size=[12, 12]))
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    check_layer(layer, by_hand, torch.randn(2, 2, 5, 5), call=lambda m, x: m(x, [12, 12]))


def test_embeddings() -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 2, 2], [0, 4, 1]])
    check_layer(nn.Embedding(6, 4, padding_idx=1), lambda p, t: F.embedding(t, w(p), padding_idx=1), tokens)
    for mode in ("sum", "mean", "max"):
        check_layer(
            nn.EmbeddingBag(6, 4, mode=mode), lambda p, t, mode=mode: F.embedding_bag(t, w(p), mode=mode), tokens
        )
    weights = torch.rand(2, 3)
    check_layer(
        nn.EmbeddingBag(6, 4, mode="sum"),
        lambda p, t, s: F.embedding_bag(t, w(p), mode="sum", per_sample_weights=s),
        tokens,
        weights,
        call=lambda m, t, s: m(t, per_sample_weights=s),
    )


def test_embeddings_with_sparse_gradients() -> None:
    """They work, or are rejected before any step."""
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True))
    try:
        qt.prepare(model, "w8a16")
    except dt.DetentError:
        return
    if not qt.plan(nn.Sequential(nn.Embedding(6, 4, sparse=True)), "w8a16").quantized:
        return
    model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad is not None


def test_embeddings_with_a_largest_norm() -> None:
    """The layer bounds its float parameter and returns quantized values, or is rejected."""
    model, twin = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5)), nn.Sequential(nn.Embedding(6, 4, max_norm=0.5))
    twin.load_state_dict(model.state_dict())
    try:
        qt.prepare(model, "w8a16")
    except dt.DetentError:
        return
    if type(model[0]) is nn.Embedding:
        return
    tokens = torch.arange(6)
    with torch.no_grad():
        y = model(tokens)
        twin(tokens)
    assert_same(model[0].weight, twin[0].weight)
    assert_same(y, quantized(model[0].weight.detach(), WEIGHT))


def attention_by_hand(p: dict[str, torch.Tensor], x: torch.Tensor, heads: int, shared: bool = True) -> torch.Tensor:
    """Self-attention with quantized projections of a quantized input."""
    size = x.shape[-1]
    x = x8(x)
    if shared:
        q, k, v = F.linear(x, w(p, "in_proj_weight"), p["in_proj_bias"]).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
    assert mixed.shape[-1] == size
    return F.linear(mixed, w(p, "out_proj.weight"), p["out_proj.bias"])


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_attention(train: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    layer.train(train)

    def call(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not train and not m.input_quantizer.is_initialized:
            m.train()(x, x, x)
            m.eval()
        return m(x, x, x, need_weights=False)[0]

    check_layer(layer, lambda p, x: attention_by_hand(p, x, 2), torch.randn(2, 5, 8), call=call)


def test_attention_without_gradients_is_the_same() -> None:
    """Without gradients, torch would use its fast path."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    qt.prepare(model, dt.Recipe([dt.Rule(weight="int2/axis0", input=INPUT)]))
    model(x, x, x)
    model.eval()
    expected = model(x, x, x, need_weights=False)[0]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(x, x, x, need_weights=False)[0].clone(), expected.detach())
            torch.testing.assert_close(model(x, x, x)[0].clone(), expected.detach())


def test_attention_of_different_sizes() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
    float_model = copy.deepcopy(model)
    qt.prepare(model, dt.Recipe([dt.Rule(weight="int8/axis0")]))
    assert set(qt.quantized_state(model)) == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 3, 6), torch.randn(2, 3, 4)
    with torch.no_grad():
        for name, p in float_model.named_parameters():
            if name.endswith("weight"):
                p.copy_(quantized(p, WEIGHT))
    torch.testing.assert_close(model(q, k, v)[0], float_model(q, k, v)[0])


def test_the_output_projection_of_attention_alone() -> None:
    """Only the output projection is quantized, as planned, and the rest of the attention stays float."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    before = model(x, x, x)[0]
    recipe = dt.Recipe([dt.Rule("out_proj", weight="int2/axis0")])
    says = qt.plan(model, recipe).quantized
    qt.prepare(model, recipe)
    changed = not torch.equal(model(x, x, x)[0], before)
    assert changed == bool(says)


@pytest.mark.parametrize("mask", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("kind", ["layer", "encoder"])
def test_fast_paths_of_transformers_do_not_bypass_quantizers(kind: str, mask: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = layer if kind == "layer" else nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    x = torch.randn(2, 5, 8)
    options = {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])} if mask else {}
    qt.prepare(model, dt.Recipe([dt.Rule(weight="int2/axis0", input="uint2/tensor/affine")]))
    with qt.calibrating(model):
        model(x, **options)
    model.eval()
    expected = model(x, **options).detach()
    seen = set()
    for name, quantizer in quantizers_of(model).items():
        if name.endswith("input_quantizer"):
            real = quantizer.values_for
            quantizer.values_for = lambda x, real=real, name=name: (seen.add(name), real(x))[1]
    with torch.no_grad():
        got = model(x, **options)
    keep = ~options["src_key_padding_mask"] if mask else torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(got[keep], expected[keep], rtol=1e-4, atol=1e-4)
    assert seen == {name for name in quantizers_of(model) if name.endswith("input_quantizer")}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda k: k.__name__)
def test_recurrent_layers(kind: type) -> None:
    torch.manual_seed(0)
    settings = {"num_layers": 2, "bidirectional": True, **({"proj_size": 3} if kind is nn.LSTM else {})}
    layer, twin, x = kind(4, 5, **settings), kind(4, 5, **settings), torch.randn(6, 3, 4)
    twin.load_state_dict(layer.state_dict())
    model = nn.Sequential(layer)
    qt.prepare(model, "w8a16")
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if name.startswith("weight"):
                p.copy_(quantized(p, WEIGHT))
    for train in (True, False):
        ours, theirs = model.train(train)(x), twin.train(train)(x)
        torch.testing.assert_close(ours[0], theirs[0])
    for y in (ours[0], theirs[0]):
        y.square().sum().backward()
    for name, p in twin.named_parameters():  # nothing is clipped: weights follow their range
        torch.testing.assert_close(dict(layer.named_parameters())[name].grad, p.grad, rtol=1e-4, atol=1e-5)
    names = {f"0.{name}" for name, _ in twin.named_parameters() if name.startswith("weight")}
    assert set(qt.quantized_state(model)) == names
    assert layer.weight_ih_l0 is dict(layer.named_parameters())["weight_ih_l0"]


def test_recurrent_layers_move_and_copy() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.GRU(4, 5)), torch.randn(6, 3, 4)
    qt.prepare(model, "w8a16")
    expected = model(x)[0]
    assert_same(copy.deepcopy(model)(x)[0], expected)
    model.double()
    assert model(x.double())[0].dtype == torch.float64
    with torch.no_grad():
        model[0].weight_hh_l0.mul_(2)
    assert not torch.equal(model(x.double())[0].float(), expected)


def test_a_user_defined_layer() -> None:
    qt.register_layer(Gate, {"matrix": 1})
    torch.manual_seed(0)
    model = nn.Sequential(Gate())
    layer = qt.plan(model, dt.Recipe(Both)).layers[0]
    assert str(layer.weights["matrix"].granularity) == "axis1"
    check_layer(Gate(), lambda p, x: torch.sigmoid(x8(x) @ quantized(p["matrix"], "int8/axis1")), torch.randn(4, 5))


def test_a_subclass_keeps_its_own_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Scaled(nn.Conv2d):
        def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return super()._conv_forward(x, weight * 2, bias)

    torch.manual_seed(0)
    check_layer(Doubled(6, 4), lambda p, x: 2 * F.linear(x8(x), w(p), p["bias"]), torch.randn(5, 6))
    check_layer(Scaled(2, 3, 3), lambda p, x: F.conv2d(x8(x), 2 * w(p), p["bias"]), torch.randn(2, 2, 5, 5))


def test_placed_quantizers() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = qt.Quantizer(), qt.Quantizer()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.left(a) + self.right(b)

    model, a, b = Sum(), torch.randn(3, 4), 5 * torch.randn(3, 4)
    assert_same(model(a, b), a + b)
    qt.prepare(model, dt.Recipe([dt.Rule(types="Quantizer", input=INPUT)]))
    assert_same(model(a, b), x8(a) + x8(b))
    qt.unprepare(model)
    assert_same(model(a, b), a + b)


def test_outputs() -> None:
    torch.manual_seed(0)
    for layer, x in ((nn.Linear(6, 4), torch.randn(5, 6)), (nn.GRU(4, 5), torch.randn(6, 3, 4))):
        model = nn.Sequential(copy.deepcopy(layer))
        qt.prepare(model, dt.Recipe([dt.Rule(output=INPUT)]))
        got, expected = model(x), layer(x)
        got, expected = (t[0] if isinstance(t, tuple) else t for t in (got, expected))
        assert_same(got, x8(expected))


KEYWORDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], torch.Tensor], str]] = {
    "linear": (lambda: nn.Linear(8, 4), lambda m, x: m(input=x), "input_quantizer"),
    "conv": (lambda: nn.Conv1d(3, 4, 1), lambda m, x: m(input=x), "input_quantizer"),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 1), lambda m, x: m(input=x), "input_quantizer"),
    "bilinear": (lambda: nn.Bilinear(8, 8, 2), lambda m, x: m(x, input2=3 * x), "input2_quantizer"),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: m(query=x, key=x, value=x)[0],
        "input_quantizer",
    ),
    "mixed": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: m(x, key=x, value=x)[0],
        "input_quantizer",
    ),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keyword_arguments_are_quantized_too(name: str) -> None:
    make, call, quantizer = KEYWORDS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(2, 3, 8)
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        qt.prepare(each, dt.Recipe([dt.Rule(weight="int4/axis0", input="uint2/tensor/affine")]))
    positional = {"attention": (x, x, x), "mixed": (x, x, x), "bilinear": (x, 3 * x)}.get(name, (x,))
    expected = twin(*positional)
    got = call(layer, x)
    assert getattr(layer, quantizer).is_initialized
    assert_same(got, expected[0] if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("name", ["linear", "conv", "embedding"])
def test_empty_batches(name: str) -> None:
    layer, x = {
        "linear": (nn.Linear(6, 4), torch.randn(0, 6)),
        "conv": (nn.Conv1d(6, 4, 1), torch.randn(0, 6, 3)),
        "embedding": (nn.Embedding(6, 4), torch.zeros(0, dtype=torch.long)),
    }[name]
    shape = layer(x).shape
    model = qt.prepare(nn.Sequential(layer), "w8a8")
    y = model(x)
    assert y.shape == shape
    y.sum().backward()


@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
def test_autocast_gives_the_dtypes_of_the_float_model(kind: str) -> None:
    make = {
        "linear": lambda: nn.Linear(6, 4),
        "conv": lambda: nn.Conv1d(6, 4, 1),
        "transposed": lambda: nn.ConvTranspose1d(6, 4, 1),
    }[kind]
    x = torch.randn(3, 6) if kind == "linear" else torch.randn(2, 6, 5)
    model = nn.Sequential(make())
    types = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
        types.append((y.dtype, model[0].weight.grad.dtype))
        if len(types) == 1:
            qt.prepare(model, "w8a8")
    assert types[0] == types[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    model, x = small().to(dtype), torch.randn(5, 6).to(dtype)
    qt.prepare(model, "w8a8")
    y = model(x)
    assert y.dtype == dtype
    y.sum().backward()
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {q.scale.dtype for q in quantizers_of(model).values()} == {expected}
    assert {q.scale.dtype for q in quantizers_of(model.half()).values()} == {expected}


@pytest.mark.parametrize("mode", ["per_batch", "learned"])
def test_stochastic_weights_have_one_step_per_forward(mode: str) -> None:
    """Backward uses the random numbers of the forward pass."""
    spec = dt.QuantSpec("int4", "axis0", rounding="stochastic(3)")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 3, bias=False))
    qt.prepare(model, dt.Recipe([dt.Rule(weight=spec, mode=mode)]))
    quantizer, weight = model[0].weight_quantizer, model[0].weight
    for step in range(3):
        with torch.no_grad():
            weight.add_(0.001)
        model.zero_grad()
        y = model(torch.eye(40))
        y.square().sum().backward()
        params = dt.QuantParams.from_data(spec, array(weight))
        if mode == "learned":
            params = quantizer.params
        expected = dt.fake_quantize(array(weight), params, step=step)
        assert_same(y, np.ascontiguousarray(expected.T), step)
        g = 2 * expected
        if mode == "learned":
            _, gs, _ = dt.fake_quantize_learned_backward(g, array(weight), params, step=step)
            assert_same(quantizer.scale_shift.grad, torch.from_numpy(gs) / quantizer.initial_scale)


def test_functional_calls_use_the_given_weights() -> None:
    torch.manual_seed(0)
    for layer, x in ((nn.Linear(6, 4), torch.randn(3, 6)), (nn.Embedding(6, 4), torch.arange(6))):
        model = qt.prepare(nn.Sequential(layer), "w8a16")
        model(x)
        given = {name: p.detach() * 3 for name, p in model.named_parameters()}
        got = torch.func.functional_call(model, given, (x,))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        torch.testing.assert_close(got, model(x))


def test_compiled_models_train_as_eager_ones() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    x = torch.randn(4, 2, 6, 6)
    qt.prepare(eager, "w8a8")
    with qt.calibrating(eager):
        eager(x)
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for each in (eager, compiled):
            each(x).square().mean().backward()
    for (name, ours), theirs in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, msg=lambda m, name=name: f"{name}: {m}")
    for name, quantizer in quantizers_of(eager).items():
        if name.endswith("input_quantizer"):
            torch.testing.assert_close(quantizers_of(model)[name].scale, quantizer.scale)


def test_fixed_scales_of_weights_are_those_of_calibration() -> None:
    """Without training this is PTQ, and few bits need the MSE-optimal range."""
    torch.manual_seed(0)
    errors = {}
    for mode in ("ema", "fixed"):
        model = nn.Sequential(nn.Linear(256, 8, bias=False))
        qt.prepare(model, dt.Recipe([dt.Rule(weight="int3/axis0", mode=mode)]))
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(8, 256, generator=torch.Generator().manual_seed(1)))
        with qt.calibrating(model):
            model(torch.randn(2, 256))
        weight = model[0].weight.detach().numpy()
        errors[mode] = dt.metrics.mse(weight, qt.quantized_state(model)["0.weight"].dequantize())
        before = model[0].weight_quantizer.scale.clone()
        with torch.no_grad():
            model[0].weight.mul_(2)
        model(torch.randn(2, 256))
        assert torch.equal(model[0].weight_quantizer.scale, before) == (mode == "fixed")
    assert errors["fixed"] < 0.8 * errors["ema"]


@pytest.mark.parametrize("observer", [None, "mse", "mse(3)"])
def test_weights_below_8_bits_get_the_least_squared_error(observer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    qt.prepare(model, dt.Recipe([dt.Rule(weight="int4/group16", mode="fixed")]))
    with qt.calibrating(model, observer):
        model(torch.randn(2, 64))
    weight, scale = model[0].weight.detach().numpy(), model[0].weight_quantizer.scale.numpy()
    best = dt.observers.best_params(weight, "int4/group16").scale
    assert np.array_equal(scale, best) == (observer != "mse(3)")


def test_a_weight_with_nan_can_be_calibrated():
    """Its finite values set the scale, as at 8 bits; NaN stays NaN in forward."""
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    qt.prepare(model, dt.Recipe([dt.Rule(weight="int4/axis0", mode="fixed")]))
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nan
    with qt.calibrating(model):
        model(torch.randn(2, 64))
    assert torch.isfinite(model[0].weight_quantizer.scale).all()


@pytest.mark.parametrize("spec", ["int4/axis9", "int8/axis-3", "int8/group4@2"])
def test_an_axis_that_a_weight_does_not_have(spec):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("2", weight=spec)])
    for function in (qt.plan, qt.prepare):
        with pytest.raises(dt.SpecError, match=r"the spec int\d/.* for 2\.weight.* \(8, 8\) has no axis -?\d"):
            function(model, recipe)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_nested_calibrations_observe_each_their_own(observer: str) -> None:
    """The inner calibration ends without ending the outer one, which observes all data."""
    small, large = torch.linspace(0, 1, 24).reshape(6, 4), torch.linspace(0, 9, 24).reshape(6, 4)

    def calibrated(*batches: torch.Tensor) -> nn.Module:
        torch.manual_seed(0)
        model = qt.prepare(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "w8a8")
        with qt.calibrating(model, observer):
            for x in batches:
                model(x)
        return model

    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "w8a8")
    with qt.calibrating(model, observer):
        expected = model(small)
        with qt.calibrating(model, observer):
            model(small)
        assert torch.equal(model[0].input_quantizer.scale, calibrated(small)[0].input_quantizer.scale)
        assert torch.equal(model(small), expected)  # still float
        model(large)
        with pytest.raises(dt.NaNError), qt.calibrating(model, observer):
            model(large * torch.nan)
        assert not model.training
    assert model.training
    theirs = calibrated(small, small, small, large).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())
    assert not torch.equal(model(small), expected)
