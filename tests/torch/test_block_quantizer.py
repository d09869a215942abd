"""Block formats in the PyTorch frontend: what is trained is what the bytes contain."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import detent as dt
import detent.torch as qt


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 256), nn.Linear(256, 320), nn.ReLU(), nn.Linear(320, 7), nn.Linear(7, 3))


TOKENS = torch.arange(12).reshape(3, 4)


def output_of_bytes(model, state):
    """Compute the output of the network from the dequantized bytes."""
    weights = {name: torch.from_numpy(each.dequantize()) for name, each in state.items()}
    x = nn.functional.embedding(TOKENS, weights["0.weight"])
    x = torch.relu(nn.functional.linear(x, weights["1.weight"], model[1].bias))
    x = nn.functional.linear(x, weights["3.weight"], model[3].bias)
    return nn.functional.linear(x, model[4].weight, model[4].bias)


def test_fake_quantize_has_the_bits_of_arrays_and_passes_gradients():
    x = torch.randn(3, 512, requires_grad=True)
    for name in dt.gguf.BLOCK_FORMATS:
        x.grad = None
        y = qt.fake_quantize(x, name)
        assert y.detach().numpy().tobytes() == dt.fake_quantize(x.detach().numpy(), name).tobytes()
        g = torch.randn_like(y)
        y.backward(g)
        assert torch.equal(x.grad, g)


def test_fake_quantize_rejects_what_has_no_meaning():
    with pytest.raises(dt.SpecError, match="omit scale="):
        qt.fake_quantize(torch.randn(256), "q4_k", scale=torch.ones(()))
    with pytest.raises(dt.SpecError, match="omit scale="):
        qt.fake_quantize(torch.randn(256), "q4_k", ste=dt.ste.Clipped())
    with pytest.raises(dt.ShapeError, match="multiple of 256"):
        qt.fake_quantize(torch.randn(100), "q4_k")


def test_half_precision_data():
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    y = qt.fake_quantize(x, dt.gguf.q4_k)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, qt.fake_quantize(x.float(), dt.gguf.q4_k).to(torch.bfloat16))


def test_the_plan_has_fallbacks_and_says_why():
    plan = qt.plan(network(), "q4_k")
    assert [{name: str(spec) for name, spec in layer.weights.items()} for layer in plan.layers] == [
        {"weight": "q4_k"},
        {"weight": "q4_k"},
        {"weight": "q5_0"},
        {},
    ]
    assert "q5_0 instead of q4_k: 320" in str(plan)
    assert "7, the size of the weight's last axis, is not a multiple of 256" in plan.layers[3].reason
    assert plan.layers[1].nbytes_after == 320 * 144


@pytest.mark.parametrize("name", ["q4_k", "q2_k", "q8_0", "iq4_nl"])
def test_training_sees_the_values_of_the_bytes(name):
    model = qt.prepare(network(), name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        y = model(TOKENS)
        assert torch.equal(y, output_of_bytes(model, qt.quantized_state(model)))
        optimizer.zero_grad()
        y.square().sum().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        first, second = model(TOKENS), model(TOKENS)  # the second one from the cache
    assert torch.equal(first, output_of_bytes(model, qt.quantized_state(model)))
    assert torch.equal(first, second)


def test_gradients_are_those_of_a_float_network_with_the_dequantized_weights():
    model = qt.prepare(network(), "q4_k")
    model(TOKENS).square().sum().backward()
    twin = network()
    with torch.no_grad():
        for name, each in qt.quantized_state(model).items():
            twin.get_parameter(name).copy_(torch.from_numpy(each.dequantize()))
    twin(TOKENS).square().sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_inputs_can_be_quantized_too():
    rule = dt.Rule(types=("Linear",), weight="q4_0", input="int8/token", mode="per_batch")
    model = qt.prepare(nn.Sequential(nn.Linear(64, 8)), dt.Recipe([rule]))
    x = torch.randn(5, 64)
    weight = torch.from_numpy(qt.quantized_state(model)["0.weight"].dequantize())
    expected = nn.functional.linear(qt.fake_quantize(x, "int8/token"), weight, model[0].bias)
    assert torch.equal(model(x), expected)


def test_tied_weights_have_one_quantizer():
    model = nn.Sequential(nn.Embedding(16, 256), nn.Linear(256, 16, bias=False))
    model[1].weight = model[0].weight
    qt.prepare(model, "q4_k")
    assert model[0].weight_quantizer is model[1].weight_quantizer
    state = qt.quantized_state(model)
    assert state["0.weight"] == state["1.weight"]


def test_checkpoints_copies_and_unprepare():
    model = qt.prepare(network(), "q4_k")
    model.load_state_dict(network().state_dict(), strict=False)
    same = qt.prepare(network(), "q4_k")
    same.load_state_dict(model.state_dict())
    assert torch.equal(same(TOKENS), model(TOKENS))
    assert torch.equal(copy.deepcopy(model)(TOKENS), model(TOKENS))
    with pytest.raises((dt.StateError, RuntimeError), match="another one"):
        qt.prepare(network(), "q4_0").load_state_dict(model.state_dict())
    qt.unprepare(model)
    assert [type(each) for each in model] == [type(each) for each in network()]
    assert torch.equal(model(TOKENS), network()(TOKENS))


def test_what_needs_params_says_so(tmp_path):
    model = qt.prepare(network(), "q4_k")
    with pytest.raises(dt.UnsupportedError, match="ONNX files cannot store"):
        qt.export_onnx(model.eval(), (TOKENS,), tmp_path / "model.onnx")
    with pytest.raises(dt.SpecError, match="no integer product"):
        qt.plan(network(), "q4_k", arithmetic="integer")
    with pytest.raises(dt.SpecError, match="omit ste"):
        qt.prepare(network(), dt.Recipe.preset("q4_k", ste="clipped"))
    with pytest.raises(dt.SpecError, match="derives its scales itself"):
        qt.FakeQuantize("q4_k")


def test_bad_weights_are_named():
    model = qt.prepare(network(), "q4_k")
    with torch.no_grad():
        model[1].weight[2, 3] = float("nan")
    assert torch.isnan(model(TOKENS)).any()  # a diverging run must show
    with pytest.raises(dt.NaNError, match=r"1\.weight: x contains 1 NaN.*first at \(2, 3\)"):
        qt.quantized_state(model)
    with torch.no_grad():
        model[1].weight.fill_(1e-9)
    with pytest.raises(dt.ParamsError, match=r"1\.weight: float16 cannot represent"):
        qt.quantized_state(model)


@pytest.mark.slow
def test_compiled_code_has_the_bits_of_eager_mode():
    model = qt.prepare(nn.Sequential(nn.Linear(256, 8)), "q4_k")
    x = torch.randn(4, 256)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    compiled(x).sum().backward()
    assert model[0].weight.grad is not None


def test_training_reduces_the_loss_of_two_bits():
    torch.manual_seed(0)
    x, target = torch.randn(64, 256), torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    qt.prepare(model, "q2_k")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert np.isfinite(losses).all()
