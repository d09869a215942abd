"""The exported MiniLM computes the same embeddings as in torch."""

import numpy as np
import pytest
import torch

from detent.onnx_model import load, make_session
from zoo.exported import export_minilm, read_sentences, token_batches
from zoo.minilm import load_minilm


@pytest.mark.slow
def test_the_file_computes_what_torch_does(tmp_path):
    export_minilm(tmp_path / "minilm.onnx")
    graph = load(tmp_path / "minilm.onnx")
    assert {entry.domain: entry.version for entry in graph.opset_import} == {"": 18}
    assert not graph.functions
    session = make_session(tmp_path / "minilm.onnx", threads=1)
    model, tokenizer = load_minilm()
    for texts in (["a"], ["king", "a much longer sentence, with more words"], ["one"] * 9):
        tokens = tokenizer(texts)
        with torch.no_grad():
            expected = model(tokens).numpy()
        assert np.abs(session.run(None, {"tokens": tokens.numpy()})[0] - expected).max() < 2e-6


def test_sentences_are_sentences():
    articles = read_sentences()
    assert len(articles) == 300
    texts = [text for article in articles for text in article]
    assert len(texts) > 1500
    assert all(40 <= len(text) <= 400 for text in texts)


def test_batches_differ_in_length():
    lengths = {feed["tokens"].shape[1] for feed in token_batches(6)}
    assert len(lengths) > 2
    assert all(feed["tokens"].shape[0] == 8 and feed["tokens"].dtype == np.int64 for feed in token_batches(2))
