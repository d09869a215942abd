"""Level 2 of prepared models: the bound on rounding errors, and rounded biases."""

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper
from qdq_models import change
from torch import nn

import detent as dt
import detent.torch as qt
from detent.onnx_model import load
from detent.onnx_model.qdq_reader import open_quantized
from detent.ops import quantize
from detent.verification import torch_segments
from detent.verification.torch_source import TorchSource

LOWEST = float(np.finfo(np.float32).min)


class Masked(nn.Module):
    """Logits with a mask."""

    def __init__(self, mask):
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 8)
        self.mask = mask

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        hidden = torch.arange(8) < 3
        if self.mask == "finfo":
            return y.masked_fill(hidden, torch.finfo(y.dtype).min)
        return y + hidden * self.mask if self.mask else y


def exported(tmp_path, mask):
    torch.manual_seed(0)
    model, data = Masked(mask), torch.randn(6, 16)
    qt.prepare(model, "w8a8")
    with qt.calibrating(model):
        model(data)
    model.eval()
    return model, load(qt.export_onnx(model, data, tmp_path / "net.onnx")), [data]


def times(model, factor):
    """A model that multiplies its first output."""
    output = model.graph.output[0].name
    last = next(node for node in model.graph.node if output in node.output)
    last.output[0] = "before"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
    model.graph.node.append(helper.make_node("Mul", ["before", "factor"], [output], "times"))
    return model


MASKS = ["finfo", LOWEST, -1e9, -1e4, 0.0]


@pytest.mark.parametrize(
    "mask",
    [each if each in {"finfo", -1e4} else pytest.param(each, marks=pytest.mark.slow) for each in MASKS],
    ids=str,
)
def test_masks_do_not_hide_changed_logits(tmp_path, mask):
    model, file, data = exported(tmp_path, mask)
    report = dt.verify(model, file, data)
    assert report.ok
    for factor in (1.001, 1e6) if mask != "finfo" else (0.999,):
        changed = dt.verify(model, times(load(tmp_path / "net.onnx"), factor), data, levels=(2,))
        assert not changed.ok
        assert changed.segments.differing_outputs == 1
        assert changed.first_difference.node == "output output"


def test_a_file_of_zero_biases_with_wide_units_is_not_ok(tmp_path):
    model, file, data = exported(tmp_path, 0.0)
    assert dt.verify(model, file, data, levels=(2,)).ok
    for part, value in (("codes", 0), ("scale", 1e6)):
        file = change(file, f"second.bias_{part}", lambda values, value=value: values.fill(value))
    report = dt.verify(model, file, data, levels=(2,))
    assert not report.ok
    assert report.first_difference.node == "output output"


def test_biases_are_rounded_as_in_the_file(tmp_path):
    model, file, _ = exported(tmp_path, 0.0)
    rounded = [("first.weight", "first.input_quantizer"), ("second.weight", "second.input_quantizer")]
    copy = torch_segments._as_exported(model, rounded)
    constants = {each.name: numpy_helper.to_array(each) for each in file.graph.initializer}
    for name in ("first", "second"):
        expected = constants[f"{name}.bias_codes"].astype(np.float32) * constants[f"{name}.bias_scale"]
        bias = copy.get_submodule(name).bias.detach().numpy()
        assert np.array_equal(bias, expected)
        assert not np.array_equal(bias, model.get_submodule(name).bias.detach().numpy())
    kept = torch_segments._as_exported(model, rounded[:1])
    assert torch.equal(kept.second.bias, model.second.bias)


class Tied(nn.Module):
    """Two layers that share a weight and have separate biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(3 * torch.relu(self.first(x)))


def test_layers_with_one_weight_have_their_own_biases(tmp_path):
    torch.manual_seed(0)
    model, data = Tied(), torch.randn(32, 16)
    qt.prepare(model, "w8a8")
    with qt.calibrating(model):
        model(data)
    model.eval()
    path = qt.export_onnx(model, data, tmp_path / "net.onnx")
    assert len([each for each in load(path).graph.initializer if each.data_type == 6]) == 2
    assert dt.verify(model, path, [data]).ok


@pytest.mark.parametrize(
    ("weight", "layer"), [("int8/axis0", "first"), ("int4/axis0", "first"), ("int4/axis0", "second")]
)
def test_of_layers_with_one_weight_only_those_with_8_bit_inputs_have_rounded_biases(tmp_path, weight, layer):
    torch.manual_seed(0)
    model, data = Tied(), torch.randn(32, 16)
    qt.prepare(model, dt.Recipe([dt.Rule(weight=weight), dt.Rule(match=layer, input="uint8/tensor/affine")]))
    with qt.calibrating(model):
        model(data)
    model.eval()
    path = qt.export_onnx(model, data, tmp_path / "net.onnx")
    assert len([each for each in load(path).graph.initializer if each.data_type == 6]) == 1
    assert dt.verify(model, path, [data], levels=(2,)).ok
    file = change(load(path), "first.bias_codes", lambda codes: codes.__iadd__(1))  # named after the weight
    assert not dt.verify(model, file, [data], levels=(2,)).ok


# Bounds


def test_bounds_are_those_of_the_measured_noise():
    x = np.float32([1.0, 2.0, 4.0])
    assert np.allclose(torch_segments._bound(x, x.astype(np.float64)), 8 * 2**-23 * 4.0)
    exact = x + np.float64([0.0, 1e-3, 0.0])
    assert np.allclose(torch_segments._bound(x, exact), 16e-3, rtol=0.01)


@pytest.mark.parametrize("huge", [LOWEST, -1e9, 1e4, np.inf, np.nan], ids=str)
def test_huge_values_have_bounds_of_their_own(huge):
    x = np.float32([[1.0, huge, 2.0], [huge, -3.0, 0.0]])
    exact = x.astype(np.float64)
    exact[0, 1] *= 1 + 2**-24
    bound = torch_segments._bound(x, exact)
    ordinary = np.abs(x) < 10
    assert (bound[ordinary] <= 8 * 2**-23 * 3.0).all()
    if np.isfinite(huge):
        assert (bound[~ordinary] >= np.float32(8 * 2**-23 * abs(huge))).all()
        assert np.isfinite(bound).all()


def test_large_values_among_others_are_not_huge():
    x = np.float32([1.0, 30.0, 900.0, 2e4, 5e5])
    assert np.allclose(torch_segments._bound(x, x.astype(np.float64)), 8 * 2**-23 * 5e5)
    few = np.float32([1e-9, 3.0])  # the tail of a GELU: another erf gives 0
    assert np.allclose(torch_segments._bound(few, few.astype(np.float64)), 8 * 2**-23 * 3.0)
    assert torch_segments._bound(np.zeros((0, 3), np.float32), np.zeros((0, 3))).shape == (0, 3)
    assert torch_segments._bound(np.float32(2.0), np.float64(2.0)).shape == ()


def test_codes_next_to_a_rounding_boundary_are_within_the_bound(tmp_path):
    torch.manual_seed(0)
    model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    with qt.calibrating(model):
        model(torch.tensor([[-1.0, 1.0, 0.5, 2.0]]))
    model.eval()
    path = qt.export_onnx(model, torch.zeros(1, 4), tmp_path / "net.onnx")
    source = TorchSource(model, open_quantized(path))
    params = model[0].input_quantizer.params
    steps = np.float32([[20.5, 20.4, 20.0, 100.0]])
    x = steps * params.scale
    ((node, _),) = source.segments.readers
    codes = quantize(x, params).codes
    assert codes.tolist() == [[code + int(params.zero_point) for code in (20, 20, 20, 100)]]
    for moved, within, differing in [((0, 0), 0, 0), ((1, 0), 1, 0), ((1, 1), 2, 1), ((-1, 0), 2, 2)]:
        got = (codes + np.int32([[*moved, 0, 0]])).astype(codes.dtype)
        source.segments.run({"input": x}, {node: got}, [np.zeros((1, 2), np.float32)])
        result = source.segments.result()
        assert (result.codes_within_bound, result.differing_codes) == (within, differing)
