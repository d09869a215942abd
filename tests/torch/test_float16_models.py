"""Float16 models from PyTorch's exporter; ONNX Runtime 1.31 crashes on some, unless one optimizer is disabled."""

import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import detent as dt
import detent.onnx as qo


class Encoder(nn.Module):
    """A transformer encoder layer behind an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, activation="gelu")
        self.head = nn.Linear(32, 5)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)).mean(1))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.manual_seed(0)
    model = Encoder().half().eval()
    path = tmp_path_factory.mktemp("float16") / "encoder.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (torch.zeros(2, 7, dtype=torch.int64),), dynamo=True, verbose=False)
    onnx.save(program.model_proto, path)
    return path


def test_a_float16_transformer_is_quantized_and_verified(path, tmp_path):
    rng = np.random.default_rng(0)
    feeds = [rng.integers(0, 50, (2, 7)) for _ in range(8)]
    report = qo.quantize(path, tmp_path / "q.onnx", feeds, "w8a8-dynamic", progress=False)
    assert report.output_sqnr_db > 25
    assert dt.verify(path, tmp_path / "q.onnx", feeds[:2]).ok
