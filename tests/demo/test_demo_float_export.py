"""Folding batch norms keeps the outputs of the float network, and the exported file has the same outputs."""

import copy

import numpy as np
import torch
from torch import nn

from detent.demo.network import TrainingRun, logits_of, make_network, read_digits, repeatable
from detent.demo.network_comparison import export_float, without_norms
from detent.metrics import sqnr_db
from detent.onnx_model import load, make_session


def trained():
    train, test = read_digits()
    with repeatable(3):
        return TrainingRun(train.first(320), 2, 3e-3, 0).train(make_network(), lambda: None), test.first(64)


def test_folded_network_computes_the_same():
    model, test = trained()
    before = copy.deepcopy(model.state_dict())
    folded = without_norms(model)
    assert not [each for each in folded if isinstance(each, nn.BatchNorm2d)]
    assert [name for name, _ in folded.named_children() if name.startswith("conv1")] == ["conv1", "conv1_relu"]
    assert sqnr_db(logits_of(model, test).numpy(), logits_of(folded, test).numpy()) > 100
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_file_computes_the_same_and_names_no_paths(tmp_path):
    model, test = trained()
    path = export_float(model, torch.from_numpy(test.images[:2]), tmp_path / "float.onnx")
    session = make_session(path, threads=1)
    logits = session.run(None, {"input": test.images})[0]
    assert sqnr_db(logits_of(model, test).numpy(), logits) > 100
    assert [size.dim_param for size in load(path).graph.input[0].type.tensor_type.shape.dim][:1] == ["batch"]
    assert b"site-packages" not in path.read_bytes()
    assert np.isfinite(logits).all()


def test_a_training_run_depends_only_on_its_seed():
    train, test = read_digits()
    logits = []
    for course in (0, 0, 1):
        with repeatable(3):
            model = TrainingRun(train.first(192), 1, 1e-3, course).train(make_network(), lambda: None)
            logits.append(logits_of(model, test.first(32)).numpy())
    assert np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])
