"""MiniLM as an ONNX file, and sentences from news articles as its inputs."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from detent.onnx_model import save
from zoo.minilm import DATA, MODEL, WordPiece, load_minilm, package_file

__all__ = ["export_minilm", "read_sentences", "token_batches"]

OPSET = 18
MAX_TOKENS = 256
NEWS = "test/test_data/lee_background.cor"
ARTICLES_PER_BATCH, SENTENCES_PER_ARTICLE = 4, 2
MIN_LETTERS, MAX_LETTERS = 40, 400


def export_minilm(path: Path) -> None:
    """Write all-MiniLM-L6-v2 as an ONNX file for any number of texts and tokens; this takes about ten seconds.

    Raises:
        UnsupportedError: the package of the model is not installed.
    """
    model, tokenizer = load_minilm()
    texts, tokens = (torch.export.Dim(name, min=least, max=MAX_TOKENS) for name, least in (("texts", 1), ("tokens", 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings from inside torch
        program = torch.onnx.export(
            model,
            (tokenizer(["a sentence", "and a longer one"]),),
            dynamo=True,
            opset_version=OPSET,
            input_names=["tokens"],
            output_names=["embeddings"],
            dynamic_shapes={"tokens": {0: texts, 1: tokens}},
            verbose=False,
        )
    save(cast(torch.onnx.ONNXProgram, program).model_proto, path)  # None only without dynamo=True


def read_sentences() -> list[list[str]]:
    """Read the sentences of 300 news articles (Lee et al. 2005), as one list per article.

    Raises:
        UnsupportedError: gensim is not installed; its test data contain the articles.

    >>> len(read_sentences())
    300
    """
    lines = package_file(DATA, NEWS).read_text(encoding="utf-8").splitlines()
    split = (re.split(r"(?<=[.!?])\s+(?=[A-Z])", line) for line in lines)
    return [[text for text in texts if MIN_LETTERS <= len(text) <= MAX_LETTERS] for texts in split]


def token_batches(count: int) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Yield batches of eight sentences, two from each of four articles, as tokens.

    >>> next(token_batches(1))["tokens"].shape[0]
    8
    """
    words = package_file(MODEL, "model/vocab.txt").read_text(encoding="utf-8").splitlines()
    tokenizer = WordPiece(words)
    articles = [texts for texts in read_sentences() if len(texts) >= SENTENCES_PER_ARTICLE]
    for i in range(count):
        rng = np.random.default_rng([6, i])
        chosen = rng.choice(len(articles), ARTICLES_PER_BATCH, replace=False)
        texts = [text for k in chosen for text in rng.choice(articles[k], SENTENCES_PER_ARTICLE, replace=False)]
        yield {"tokens": tokenizer(texts).numpy()}
