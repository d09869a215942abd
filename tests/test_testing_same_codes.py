"""`assert_same_codes` passes for an unchanged export. If one code was changed, it fails and shows the position."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import detent as dt
import detent.torch as qt
from detent.testing import assert_same_codes


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, its file, and data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    data = [torch.randn(8, 12) for _ in range(3)]
    qt.prepare(model, "w8a8")
    with qt.calibrating(model):
        for batch in data:
            model(batch)
    qt.freeze(model)
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    qt.export_onnx(model, data[0], path)
    return model, path, data


def test_a_true_export_passes_and_says_how_much_was_compared(exported):
    report = assert_same_codes(*exported)
    assert report.ok
    assert report.levels == (1,)
    assert report.batches == 3
    weights, biases, activations = 12 * 16 + 16 * 4, 16 + 4, 3 * 8 * (12 + 16)
    assert report.compared_codes == weights + biases + activations


def test_one_changed_code_fails_with_its_place(exported):
    model, path, data = exported
    changed = onnx.load(path)
    tensor = next(each for each in changed.graph.initializer if [*each.dims] == [4, 16] or [*each.dims] == [16, 4])
    codes = numpy_helper.to_array(tensor).copy()
    codes.flat[7] ^= 1
    tensor.CopyFrom(numpy_helper.from_array(codes, tensor.name))
    with pytest.raises(
        AssertionError, match=r"not ok: constant .* 1 of \d+ values changed.*is \d+, expected \d+"
    ) as caught:
        assert_same_codes(model, changed, data)
    assert isinstance(caught.value, dt.VerificationError)
    first = caught.value.report.first_difference
    assert tensor.name in str(caught.value)
    assert first.index == tuple(int(i) for i in np.unravel_index(7, codes.shape))
    assert f"[{first.index[0]}, {first.index[1]}]" in str(caught.value)


def test_the_traceback_ends_at_the_line_of_the_test(exported):
    model, path, data = exported
    other = qt.prepare(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), "w8a8")
    other(data[0])
    with pytest.raises(dt.VerificationError) as caught:
        assert_same_codes(qt.freeze(other), path, data)
    hidden = [entry.name for entry in caught.traceback if "__tracebackhide__" in entry.frame.code.raw.co_varnames]
    assert hidden == ["assert_same_codes"]
    assert model is not other


def test_nothing_to_compare_is_an_error_and_no_success(exported):
    model, path, _ = exported
    with pytest.raises(dt.DetentError):
        assert_same_codes(model, path, [])


def test_import_is_light():
    code = "import detent.testing, sys; print(*sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == ""
