"""Fused requantization in training: codes are rounded once from the sums, as in evaluation and in exported files."""

import copy
import pickle

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.kernels import current_kernels, use_kernels  # noqa: E402
from detent.torch.fused_requantization import SumUnits  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402
from detent.verification.kernel_oracle import requantize  # noqa: E402

WIDTH = 24


def images(*shape):
    return torch.randint(-40, 120, shape).float() / 40


NETWORKS = {
    "linear": (lambda: [nn.Linear(WIDTH, 16), nn.Linear(16, 9)], (400, WIDTH)),
    "linear without bias": (lambda: [nn.Linear(WIDTH, 16, bias=False), nn.ReLU(), nn.Linear(16, 9)], (400, WIDTH)),
    "conv": (lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1)], (24, 3, 12, 12)),
    "conv, pool": (lambda: [nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 5, 1)], (64, 3, 12, 12)),
    "conv, flatten": (lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 7)], (24, 3, 12, 12)),
    "conv1d": (lambda: [nn.Conv1d(3, 8, 3), nn.Conv1d(8, 5, 1)], (60, 3, 50)),
    "output": (lambda: [nn.Conv2d(3, 8, 3)], (24, 3, 12, 12)),
}


def second_quantizer(model):
    """Return the quantizer behind the first layer: its own output quantizer, or the next layer's input quantizer."""
    quantizers = quantizers_of(model)
    names = [name for name in quantizers if name.endswith(("input_quantizer", "output_quantizer"))]
    return quantizers[names[1]]


def scale_with_ties(unit):
    """Return a scale near a multiple of the unit, for which the codes of most sums differ between the two rules."""
    sums = np.arange(-16000, 16000, dtype=np.float32)
    differing = {}
    for near in (unit * np.float32(ratio) for ratio in (120, 126, 128, 130, 136)):
        for ulps in range(-4, 5):
            scale = np.float32(near) + np.float32(ulps) * np.spacing(np.float32(near))
            plain, fused = np.rint(sums * unit / scale), np.rint(sums * (unit / scale))
            differing[float(scale)] = int((plain != fused).sum())
    return np.float32(max(differing, key=differing.__getitem__))


def with_ties(name, *, channels_last=False, memory="auto"):
    """Return an integer network and its input; many outputs of the first layer are ties for the next quantizer."""
    torch.manual_seed(5)
    make, shape = NETWORKS[name]
    model = nn.Sequential(*make())
    with torch.no_grad():  # one weight scale for all channels, which is a power of 2
        model[0].weight.copy_((model[0].weight.sign() * torch.randint(1, 127, model[0].weight.shape)) / 128)
        model[0].weight.reshape(len(model[0].weight), -1)[:, 0] = 127 / 128
        if model[0].bias is not None:
            model[0].bias.mul_(20)
    x = images(*shape)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    qt.prepare(model, dt.Recipe.preset("w8a8", mode=dt.EMA(0.9)), arithmetic="integer", memory=memory)
    with qt.calibrating(model):
        model(x)
    for quantizer in quantizers_of(model).values():
        quantizer.observing = False
    unit = np.float32(model[0].input_quantizer.params.scale) * np.float32(1 / 128)
    following = second_quantizer(model)
    scale = scale_with_ties(unit)
    zero_point = 0 if any(isinstance(each, nn.ReLU) for each in model) else 100
    following.set_params(dt.QuantParams(following.spec, scale, zero_point))
    return model, x


def outputs(model, x, *, training):
    model.train(training)
    if not training:
        with torch.no_grad():
            return model(x)
    return model(x)


def unlinked(model):
    """Return a copy in which codes follow section 2 of the numerics."""
    other = copy.deepcopy(model)
    for quantizer in quantizers_of(other).values():
        quantizer.sum_units = None
    return other


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_has_the_codes_of_evaluation(name, channels_last):
    if channels_last and len(NETWORKS[name][1]) != 4:
        pytest.skip("channels_last needs images")
    model, x = with_ties(name, channels_last=channels_last)
    evaluated = outputs(model, x, training=False)
    assert torch.equal(outputs(model, x, training=True), evaluated)
    with use_kernels("reference"):
        assert torch.equal(outputs(model, x, training=True), evaluated)
    with torch.no_grad():
        model.train()
        assert torch.equal(model(x), evaluated)
    model.eval()
    assert torch.equal(model(x), evaluated)  # evaluation with gradients
    differing = outputs(unlinked(model), x, training=True) != evaluated
    assert differing.any()  # otherwise, there were no ties


def test_training_has_the_codes_of_the_oracle():
    model, x = with_ties("output")
    layer = model[0]
    y = outputs(model, x, training=True)
    inputs, weights, target = (
        layer.input_quantizer.params,
        layer.exported_weight("weight"),
        layer.output_quantizer.params,
    )
    codes = torch.from_numpy(dt.quantize(x.numpy(), inputs).codes.astype(np.float64) - int(inputs.zero_point))
    sums = nn.functional.conv2d(codes, torch.from_numpy(weights.codes.astype(np.float64))).movedim(1, -1).numpy()
    unit = np.float32(inputs.scale) * weights.params.scale.astype(np.float32).ravel()
    bias = np.rint(layer.bias.detach().numpy().astype(np.float64) / unit.astype(np.float64))
    expected = requantize(sums + bias, unit / np.float32(target.scale), int(target.zero_point), np.dtype("uint8"))
    values = (expected.astype(np.float32) - np.float32(target.zero_point)) * np.float32(target.scale)
    assert np.array_equal(y.detach().movedim(1, -1).numpy(), values)


@pytest.mark.parametrize("name", ["linear", "conv", "conv, pool"])
def test_gradients_use_the_codes_of_forward(name):
    gradients = []
    for memory in ("float", "codes"):
        for kernels in ("auto", "reference"):
            model, x = with_ties(name, memory=memory)
            with use_kernels(kernels):
                y = outputs(model, x, training=True)
                (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
            gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            assert torch.equal(one, other)
    model, x = with_ties(name)
    y = outputs(unlinked(model), x, training=True)
    assert y.requires_grad


@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_ranges_are_observed_first(mode):
    torch.manual_seed(0)
    recipe = dt.Recipe.preset("w8a8", mode=mode)
    model = qt.prepare(nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8)), recipe, arithmetic="integer")
    x = torch.randn(500, WIDTH)
    plain = unlinked(model)
    y, other = model.train()(x), plain.train()(x)
    for (key, value), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, theirs), key  # ranges and scales are those of the float output
    step = model[2].input_quantizer.params.scale * model[2].weight.abs().max().item()
    assert (y - other).abs().max() <= 2 * float(step)
    for quantizer in quantizers_of(model).values():
        quantizer.observing = False
    trained = model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), trained)


@pytest.mark.parametrize("name", ["linear", "conv", "conv, pool", "output"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_compiled_training_has_the_codes_of_eager_mode(name):
    torch._dynamo.reset()
    model, x = with_ties(name)
    other = copy.deepcopy(model)
    compiled = torch.compile(other.train(), backend="aot_eager", fullgraph=True)
    first, second = model.train()(x), compiled(x)
    assert torch.equal(first, second)
    for y in (first, second):
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    for (key, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), key
    assert torch.equal(compiled(x), first)


def test_values_that_are_no_sums_follow_the_plain_rule():
    model, x = with_ties("linear")
    model.train()(x)
    layer, other = model[1], unlinked(model)[1]
    data = torch.randn(50, 16) * 3
    assert torch.equal(layer(data), other(data))


def test_separate_requantization_has_no_links():
    layers = [nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 9)]
    model = qt.prepare(nn.Sequential(*layers), "w8a8", arithmetic="integer", requantization="separate")
    assert all(quantizer.sum_units is None for quantizer in quantizers_of(model).values())
    assert model[0].next_quantizer is not None  # evaluation is fused
    with pytest.raises(dt.errors.SpecError, match="got requantization='none'"):
        qt.prepare(nn.Linear(2, 2), "w8a8", requantization="none")


def test_float_arithmetic_has_no_links():
    model = qt.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "w8a8")
    assert all(quantizer.sum_units is None for quantizer in quantizers_of(model).values())


def test_layers_before_a_batch_norm_write_no_units():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    qt.prepare(model, "w8a8", arithmetic="integer")
    x = torch.randn(8, 3, 5, 5)
    plain = unlinked(model)
    assert torch.equal(model.train()(x), plain.train()(x))
    assert model[3].input_quantizer.sum_units.units is None


def test_copies_have_links_of_their_own():
    model, x = with_ties("linear")
    y = outputs(model, x, training=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        link = other[1].input_quantizer.sum_units
        assert isinstance(link, SumUnits)
        assert link is not model[1].input_quantizer.sum_units
        assert link.units is None
        assert torch.equal(outputs(other, x, training=True), y)
    assert current_kernels() in ("auto", "native", "reference")
