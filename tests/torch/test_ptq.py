"""qt.quantize: post-training quantization of a live module."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import detent as dt
import detent.torch as qt

DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(12)]


def small_cnn():
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 8, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(8),
            relu=nn.ReLU(),
            depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8),
            relu2=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(8, 4),
        )
    )
    with torch.no_grad():
        for each in DATA:
            model(each)
        model.norm.weight.uniform_(0.1, 3)
        model.norm.bias.uniform_(-1, 1)
    return model.eval()


def sqnr_db(model, reference, data):
    with torch.no_grad():
        expected, got = (torch.cat([each(batch) for batch in data]) for each in (reference, model))
    return 10 * torch.log10(expected.square().sum() / (expected - got).square().sum()).item()


@pytest.fixture(scope="module")
def quantized():
    return qt.quantize(small_cnn(), DATA)


def test_the_model_is_returned_prepared_with_fixed_scales():
    model = small_cnn()
    parameters = dict(model.named_parameters())
    assert qt.quantize(model, DATA) is model
    assert all(model.get_parameter(name) is each for name, each in parameters.items())
    quantizers = [each for each in model.modules() if isinstance(each, qt.FakeQuantize)]
    assert len(quantizers) == 6
    assert all(isinstance(each.mode, dt.Fixed) for each in quantizers)
    assert not model.training


@pytest.mark.parametrize("recipe", ["w8a8", "w4a8", "w4a4"])
def test_the_noise_is_lower_than_by_calibration_alone(recipe):
    model, plain = small_cnn(), small_cnn()
    reference = copy.deepcopy(model)
    qt.prepare(plain, dt.Recipe.preset(recipe, mode=dt.Fixed()))
    with qt.calibrating(plain):
        for batch in DATA:
            plain(batch)
    qt.quantize(model, DATA, recipe)
    unseen = [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(100 + i)) for i in range(8)]
    assert sqnr_db(model, reference, unseen) > sqnr_db(plain, reference, unseen)


def test_the_report(quantized):
    report = qt.ptq_report(quantized)
    assert (report.batches, report.held_out) == (12, 3)
    assert report.output_sqnr_db == report.outputs_sqnr_db["output"] > 30
    assert report.output_sqnr_db >= report.plain_sqnr_db["output"]
    assert [step.partition(":")[0] for step in report.steps] == ["equalization", "ranges", "bias correction"]
    assert "held-out samples" in str(report)


def test_the_report_needs_a_model_of_quantize():
    with pytest.raises(dt.errors.StateError, match="not prepared"):
        qt.ptq_report(small_cnn())
    with pytest.raises(dt.errors.StateError, match=r"needs a model from qt\.quantize"):
        qt.ptq_report(qt.prepare(small_cnn(), "w8a8"))


def test_an_iterator_is_read_once():
    model = qt.quantize(small_cnn(), iter(DATA))
    assert qt.ptq_report(model).batches == 12


def test_results_do_not_depend_on_the_training_flag(quantized):
    model = small_cnn().train()
    qt.quantize(model, DATA)
    assert model.training
    assert model.state_dict().keys() == quantized.state_dict().keys()
    for name, each in quantized.state_dict().items():
        assert torch.equal(model.state_dict()[name], each), name


def test_a_data_loader_with_labels():
    images = torch.cat(DATA)
    loader = DataLoader(TensorDataset(images, torch.arange(len(images))), batch_size=4)
    model = qt.quantize(small_cnn(), loader)
    assert qt.ptq_report(model).steps[-1].startswith("used the first 1 element of each batch of 2")
    assert qt.ptq_report(model).batches == 12


def test_a_function_calls_the_model(quantized):
    batches = [{"pictures": each, "labels": None} for each in DATA]
    model = qt.quantize(small_cnn(), batches, forward=lambda model, batch: model(batch["pictures"]))
    scales = [each.fc.input_quantizer.scale.item() for each in (model, quantized)]
    assert scales[0] == pytest.approx(scales[1])


def test_several_outputs_and_keyword_arguments():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x, shift=0.0):
            return {"left": self.left(x + shift), "right": self.right(x), "count": torch.tensor(len(x))}

    data = [{"x": torch.randn(8, 6), "shift": torch.randn(8, 1), "label": 3} for _ in range(8)]
    report = qt.ptq_report(qt.quantize(TwoHeads(), data))
    assert set(report.outputs_sqnr_db) == {"output 0", "output 1"}
    assert "'label'" in report.steps[-1]


def test_a_model_that_cannot_be_traced_is_not_equalized():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.first(x) if x.sum() > 0 else -self.first(x))

    report = qt.ptq_report(qt.quantize(Branching(), [torch.randn(8, 6) for _ in range(8)]))
    assert report.steps[0].startswith("equalization: skipped, because torch.fx cannot trace the model")


def test_weight_only_recipes_need_no_data():
    model = qt.quantize(small_cnn(), recipe="w8a16")
    assert qt.ptq_report(model).output_sqnr_db is None
    assert model.fc.weight_quantizer.is_initialized
    with pytest.raises(dt.errors.NotCalibratedError, match="recipe 'w8a8' quantizes activations"):
        qt.quantize(small_cnn())


def test_weights_below_8_bits_have_the_scales_with_the_least_error():
    model = qt.quantize(
        nn.Sequential(nn.Linear(16, 8)), [torch.randn(8, 16)], dt.Recipe([dt.Rule(weight="int3/axis0")])
    )
    weight = model[0].weight.detach().numpy()
    expected = dt.observers.best_params(weight, model[0].weight_quantizer.spec)
    np.testing.assert_array_equal(model[0].weight_quantizer.params.scale, expected.scale)


def test_modes_of_rules_are_kept_and_training_continues():
    model = small_cnn()
    recipe = dt.Recipe([*dt.Recipe.preset("w4a8").rules, dt.Rule("depthwise", mode=dt.Learned())])
    qt.quantize(model, DATA, recipe)
    modes = {name: type(model.get_submodule(name).input_quantizer.mode) for name in ("conv", "depthwise", "fc")}
    assert modes == {"conv": dt.Fixed, "depthwise": dt.Learned, "fc": dt.Fixed}
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = model.depthwise.weight.clone()
    model(DATA[0]).square().sum().backward()
    assert model.depthwise.input_quantizer.scale_shift.grad is not None
    optimizer.step()
    assert not torch.equal(model.depthwise.weight, before)


def test_the_observer_of_a_rule_is_used_as_it_is():
    rules = [dt.Rule(weight="int8/axis0", input="uint8/affine", observer="percentile(1, 99)")]
    model = qt.quantize(nn.Sequential(nn.Linear(6, 2)), [torch.randn(64, 6) for _ in range(8)], dt.Recipe(rules))
    plain = qt.prepare(nn.Sequential(nn.Linear(6, 2)), dt.Recipe(rules))
    assert model[0].input_quantizer.params.scale * 255 < 6
    assert plain[0].input_quantizer.observer.kind == "percentile"


def test_ranges_of_a_chosen_observer_are_not_equalized():
    model, plain = small_cnn(), small_cnn()
    qt.quantize(model, DATA, observer="minmax", bias_correction=False)
    qt.prepare(plain, dt.Recipe.preset("w8a8", mode=dt.Fixed()))
    with qt.calibrating(plain, observer="minmax"):
        for batch in DATA:
            plain(batch)
    assert qt.ptq_report(model).steps == ("equalization: skipped, because observer minmax sets the ranges",)
    for name, each in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], each), name


def test_exported_file_is_verified(quantized, tmp_path):
    pytest.importorskip("onnxscript")
    path = qt.export_onnx(quantized, DATA[0], tmp_path / "model.onnx")
    report = dt.verify(quantized, path, DATA[:2])
    assert report.ok
    assert report.differing_codes == 0


def test_the_report_survives_copies_and_ends_with_the_preparation(quantized):
    copied = pickle.loads(pickle.dumps(quantized))
    assert qt.ptq_report(copied) == qt.ptq_report(quantized)
    qt.unprepare(copied)
    with pytest.raises(dt.errors.StateError):
        qt.ptq_report(copied)


def bad_nan():
    bad = DATA[0].clone()
    bad[1, 2, 3, 4] = float("nan")
    return [*DATA[:9], bad]


class Interrupting:
    def __iter__(self):
        yield from DATA[:9]
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (bad_nan(), dt.errors.NaNError, "batch 9 of data contains 1 NaN"),
        ([], dt.errors.SpecError, "got no batches"),
        ([*DATA[:9], torch.randn(2, 5, 8, 8)], dt.errors.UnsupportedError, "the model fails on batch 9 of data"),
        (DATA[0], dt.errors.SpecError, r"pass \[data\] for one batch"),
        ([torch.zeros(0, 3, 8, 8)], dt.errors.DetentError, "no data reached a quantizer"),
        (["text"], dt.errors.DtypeError, "batch 0"),
        (Interrupting(), KeyboardInterrupt, None),
    ],
)
def test_a_model_is_unchanged_if_an_error_is_raised(data, error, text):
    model = small_cnn()
    before, classes = copy.deepcopy(model.state_dict()), [type(each) for each in model.modules()]
    with pytest.raises(error, match=text):
        qt.quantize(model, data)
    assert [type(each) for each in model.modules()] == classes
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_changes_are_undone_if_a_late_step_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("late")

    monkeypatch.setattr(qt.ptq, "mean_errors", fail)
    model = small_cnn()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="late"):
        qt.quantize(model, DATA)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert type(model.conv) is nn.Conv2d


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"recipe": "w8a9"}, "w8a9"),
        ({"observer": "median"}, "median"),
        ({"forward": 3}, "expected a function"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, text):
    model = small_cnn()
    with pytest.raises(dt.errors.SpecError, match=text):
        qt.quantize(model, DATA, **arguments)
    assert type(model.conv) is nn.Conv2d


def test_a_prepared_model_is_rejected(quantized):
    with pytest.raises(dt.errors.SpecError, match="already prepared"):
        qt.quantize(quantized, DATA)
    assert qt.ptq_report(quantized).batches == 12
