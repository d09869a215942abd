"""Integer products equal exact arithmetic bit for bit: every layer, extreme codes, any batch and thread count."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import integer_product  # noqa: E402
from detent.torch.exported_bias import bias_codes  # noqa: E402
from detent.torch.integer_probe import IntegerKernels  # noqa: E402
from detent.torch.integer_product import InputCodes, Requantization, WeightCodes  # noqa: E402
from detent.torch.layers import Convolution  # noqa: E402
from detent.torch.preparation import quantizers_of  # noqa: E402

LAYERS = {
    "linear": (nn.Linear(70, 33), (9, 70)),
    "linear_wide": (nn.Linear(600, 17), (5, 600)),
    "linear_no_bias": (nn.Linear(33, 8, bias=False), (7, 33)),
    "linear_one": (nn.Linear(1, 1), (1, 1)),
    "linear_tokens": (nn.Linear(16, 24), (2, 5, 16)),
    "conv1d": (nn.Conv1d(6, 8, 3, padding=1), (3, 6, 11)),
    "conv2d": (nn.Conv2d(16, 24, 3, padding=1), (2, 16, 7, 9)),
    "conv2d_no_bias": (nn.Conv2d(16, 24, 3, bias=False), (2, 16, 7, 9)),
    "conv2d_1x1": (nn.Conv2d(32, 16, 1), (3, 32, 5, 5)),
    "conv2d_strided": (nn.Conv2d(5, 7, 5, stride=2, padding=2), (2, 5, 11, 13)),
    "conv2d_dilated": (nn.Conv2d(8, 8, 3, dilation=2, padding=2), (2, 8, 9, 9)),
    "conv2d_grouped": (nn.Conv2d(12, 24, 3, groups=3, padding=1), (2, 12, 6, 6)),
    "conv2d_depthwise": (nn.Conv2d(16, 16, 3, groups=16, padding=1), (2, 16, 8, 8)),
    "conv2d_multiplier": (nn.Conv2d(8, 16, 3, groups=8), (2, 8, 8, 8)),
    "conv2d_reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 6, 6)),
    "conv2d_same": (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 6, 6)),
    "conv2d_first": (nn.Conv2d(1, 8, 3), (2, 1, 9, 9)),
    "conv3d": (nn.Conv3d(4, 6, 2), (2, 4, 5, 5, 5)),
}
EXACT = IntegerKernels(matmul=True, convolution=True, float_convolution=True)
FLOATS = {"float": EXACT._replace(matmul=False, convolution=False), "float64": IntegerKernels(False, False, False)}


def prepared(name, *, recipe="w8a8", data=None, **options):
    torch.manual_seed(3)
    layer, shape = copy.deepcopy(LAYERS[name][0]), LAYERS[name][1]
    model = qt.prepare(nn.Sequential(layer), recipe, **({"arithmetic": "integer"} | options))
    model[0]._modules.pop("output_quantizer", None)  # placed for the model's output
    x = torch.randn(shape) * 2 + 0.3 if data is None else data
    with qt.calibrating(model):
        model(x)
    return model, x


def expected(layer, x, *, bias_is_float=False):
    """Compute the layer's output by the formulas of the module, in float64 and NumPy."""
    inputs, weights = layer.input_quantizer.params, layer.exported_weight("weight")
    codes = dt.quantize(layer.padded(x).numpy() if x.ndim > 2 and layer.weight.ndim > 2 else x.numpy(), inputs).codes
    a, w = (
        torch.from_numpy(codes.astype(np.float64) - int(inputs.zero_point)),
        torch.from_numpy(weights.codes.astype(float)),
    )
    kind = layer.kind.matmul(layer)
    sums = kind.forward(a, w, None).numpy()
    scale = np.float32(inputs.scale) * weights.params.scale.astype(np.float32)
    axis = (-1,) if layer.weight.ndim == 2 else (-1, *(1,) * (layer.weight.ndim - 2))
    scale_here = scale.reshape(axis)
    if layer.bias is None:
        return sums.astype(np.float32) * scale_here
    bias = layer.bias.detach()
    if bias_is_float:
        return sums.astype(np.float32) * scale_here + bias.numpy().reshape(axis)
    units = bias_codes(bias, torch.from_numpy(scale)).numpy().reshape(axis)
    return (sums + units).astype(np.float32) * scale_here


def run(model, x):
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("name", LAYERS)
def test_output_is_exact(name):
    model, x = prepared(name)
    y = run(model, x)
    assert np.array_equal(y.numpy(), expected(model[0], x, bias_is_float=name == "linear_tokens"))
    assert torch.equal(model.train()[0].input_quantizer.scale, model[0].input_quantizer.scale)


@pytest.mark.parametrize("name", LAYERS)
def test_training_computes_the_same_output(name):
    model, x = prepared(name, recipe=dt.Recipe.preset("w8a8", mode="fixed"))
    assert torch.equal(model.train()(x).detach(), run(model, x))


@pytest.mark.parametrize("kernels", FLOATS)
@pytest.mark.parametrize("name", LAYERS)
def test_float_kernels_give_the_same_bits(name, kernels, monkeypatch):
    model, x = prepared(name)
    first = run(model, x)
    monkeypatch.setattr(integer_product, "integer_kernels", lambda: FLOATS[kernels])
    assert torch.equal(run(model, x), first)


@pytest.mark.parametrize("recipe", ["w8a8", "w4a4", "w2a8"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d_depthwise"])
def test_signed_and_narrow_inputs(name, recipe):
    rule = dt.Rule(weight="int4/axis0", input="int8/tensor", mode="ema(0.9)") if recipe == "w8a8" else None
    model, x = prepared(name, recipe=dt.Recipe([rule]) if rule else recipe)
    assert np.array_equal(run(model, x).numpy(), expected(model[0], x))


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_alone_equals_the_row_in_a_batch(name):
    model, x = prepared(name)
    y = run(model, x)
    rows = torch.cat([run(model, x[i : i + 1]) for i in range(len(x))])
    assert torch.equal(y, rows)
    assert torch.equal(run(model, torch.cat([x] * 5))[: len(x)], y)


@pytest.mark.parametrize("name", ["linear_wide", "conv2d", "conv2d_depthwise"])
def test_one_and_two_threads_are_equal(name):
    model, x = prepared(name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(model, torch.cat([x] * 20))
        torch.set_num_threads(2)
        assert torch.equal(run(model, torch.cat([x] * 20)), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_format_is_kept(layout):
    model, x = prepared("conv2d")
    y = run(model, x.contiguous(memory_format=layout))
    assert y.is_contiguous(memory_format=layout)
    assert torch.equal(y, run(model, x))
    assert model.train()(x.contiguous(memory_format=layout)).is_contiguous(memory_format=layout)


EXTREMES = ((255, 127), (255, -128), (0, 127), (255, 0), (128, -127))
SHAPES = {
    "matmul": (None, (5, 1200), (9, 1200)),
    "conv3x3": (Convolution((1, 1), (1, 1), (1, 1)), (2, 48, 6, 6), (16, 48, 3, 3)),
    "conv1x1": (Convolution((1, 1), (0, 0), (1, 1)), (2, 700, 3, 3), (8, 700, 1, 1)),
    "strided": (Convolution((2, 2), (2, 2), (1, 1)), (1, 32, 9, 9), (8, 32, 5, 5)),
    "grouped": (Convolution((1, 1), (1, 1), (1, 1), 4), (1, 64, 5, 5), (8, 16, 3, 3)),
    "depthwise": (Convolution((1, 1), (1, 1), (1, 1), 16), (1, 16, 5, 5), (16, 1, 3, 3)),
}


@pytest.mark.parametrize("pair", EXTREMES)
@pytest.mark.parametrize("zero_point", [0, 3, 255])
@pytest.mark.parametrize("shape", SHAPES)
def test_extreme_codes(shape, zero_point, pair):
    kind, x_shape, w_shape = SHAPES[shape]
    x, w = torch.full(x_shape, pair[0], dtype=torch.uint8), torch.full(w_shape, pair[1], dtype=torch.int8)
    x.flatten()[::7] = 255 - pair[0]
    w.flatten()[::5] = -1 - pair[1]
    scale, bias = torch.full((w_shape[0],), 0.5), torch.linspace(-1e6, 1e6, w_shape[0])
    wide = x.double() - zero_point, w.double()
    sums = wide[0] @ wide[1].t() if kind is None else kind.forward(*wide, None)
    shape = (-1,) if kind is None else (-1, 1, 1)
    got = integer_product.integer_product(
        InputCodes(x, np.float32(0.25), zero_point), WeightCodes(w, scale), bias, kind
    )
    assert torch.equal(got, (sums + (bias.double() / 0.125).round().reshape(shape)).float() * 0.125)
    got = integer_product.integer_product(
        InputCodes(x, np.float32(0.25), zero_point), WeightCodes(w, scale), None, kind
    )
    assert torch.equal(got, sums.float() * 0.125)


def test_sums_beyond_float32_are_exact():
    x, w = torch.full((1, 900, 2, 2), 255, dtype=torch.uint8), torch.full((2, 900, 1, 1), 127, dtype=torch.int8)
    w[1, 0] = 126
    kind, bias = Convolution((1, 1), (0, 0), (1, 1)), torch.tensor([1.0, 3.0])
    got = integer_product.integer_product(InputCodes(x, np.float32(1), 0), WeightCodes(w, torch.ones(2)), bias, kind)
    sums = torch.tensor([255.0 * 127 * 900 + 1, 255.0 * 127 * 900 - 255 + 3], dtype=torch.float64)
    assert torch.equal(got[0, :, 0, 0], sums.float())


def test_fused_requantization_rounds_the_sums_once():
    x = torch.arange(256, dtype=torch.uint8).reshape(-1, 1)
    weight = WeightCodes(torch.tensor([[1]], dtype=torch.int8), torch.tensor([0.0123]))
    got = integer_product.integer_product(
        InputCodes(x, np.float32(0.017), 0), weight, None, None, Requantization(np.float32(0.0001), 3, 0, 255)
    )
    multiplier = np.float32(np.float32(0.017) * np.float32(0.0123)) / np.float32(0.0001)
    codes = np.clip(np.rint(np.arange(256, dtype=np.float32) * multiplier) + 3, 0, 255)
    assert np.array_equal(got.numpy().ravel(), (codes.astype(np.float32) - 3) * np.float32(0.0001))


def test_gradients_are_those_of_float_products():
    for name in ("linear", "conv2d", "conv2d_depthwise"):
        gradients = []
        for arithmetic in ("float", "integer"):
            model, x = prepared(name, arithmetic=arithmetic, recipe=dt.Recipe.preset("w8a8", mode="learned"))
            x = x.clone().requires_grad_()
            y = model.train()(x)
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
            gradients.append([x.grad, *(each.grad for each in model.parameters())])
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.equal(ours, theirs)


def test_gradient_accumulation_reuses_the_weight():
    model, x = prepared("conv2d")
    model.train()
    first = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    quantizers_of(model)["0.input_quantizer"].observing = False
    for _ in range(3):
        again = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    assert torch.allclose(first, again, rtol=1e-3)


def test_nan_shows_in_the_output():
    model, x = prepared("linear", recipe=dt.Recipe.preset("w8a8", mode="fixed"))
    x[2, 3] = torch.nan
    y = run(model, x)
    assert torch.isnan(y[2]).all()
    assert not torch.isnan(y[:2]).any()


def test_copies_and_pickles():
    model, x = prepared("conv2d")
    y = run(model, x)
    assert torch.equal(run(copy.deepcopy(model), x), y)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), x), y)
    other, _ = prepared("conv2d", data=x / 2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other, x), y)
    assert type(qt.unprepare(model)[0]) is nn.Conv2d
    assert "arithmetic" not in vars(model[0])


def test_autocast_returns_its_dtype():
    model, x = prepared("linear")
    exact = run(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(model, x)
        loss = model.train()(x).float().sum()
    assert torch.equal(y, exact.bfloat16())
    loss.backward()
    assert torch.isfinite(model[0].weight.grad).all()


def test_empty_batches():
    model, _ = prepared("linear")
    assert run(model, torch.empty(0, 70)).shape == (0, 33)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["linear", "linear_tokens", "conv2d", "conv2d_depthwise", "conv2d_first"])
def test_codes_give_the_same_gradients(name, layout):
    if layout == torch.channels_last and LAYERS[name][0].weight.ndim != 4:
        pytest.skip("not a picture")
    results = []
    for memory in ("float", "codes"):
        model, x = prepared(name, memory=memory)
        x = (x * 1.5).contiguous(memory_format=layout).requires_grad_()  # some elements are clipped
        y = model.train()(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append([y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad])
    assert (results[0][1] == 0).any()
    for kept, codes in zip(*results, strict=True):
        assert torch.equal(kept, codes)


def saved_sizes(model, x):
    sizes = []

    def pack(tensor):
        sizes.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sizes


def test_memory_auto_keeps_what_autograd_keeps():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    qt.prepare(net, "w8a8", arithmetic="integer")
    x = torch.randn(16, 8)
    net(x)
    codes = [dtype for dtype, count in saved_sizes(net, x) if dtype == torch.uint8 and count == 128]
    assert len(codes) == 1  # only the output of GELU is not kept by autograd


def test_unknown_memory_is_rejected():
    with pytest.raises(dt.errors.SpecError, match="got memory='bits'"):
        qt.prepare(nn.Linear(2, 2), "w8a8", memory="bits")


def test_codes_have_no_second_derivatives():
    model, x = prepared("linear", memory="codes")
    loss = model.train()(x).square().sum()
    with pytest.raises(dt.errors.UnsupportedError, match="memory='float'"):
        torch.autograd.grad(loss, model[0].weight, create_graph=True)
