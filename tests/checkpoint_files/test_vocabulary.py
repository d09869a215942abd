"""Vocabularies: what tokenizer files become in GGUF files; llama.cpp tokenizes texts as the tokenizer does."""

import json
import struct

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from detent.checkpoint_files.architectures import gguf_model
from detent.checkpoint_files.mixtures import choose_types
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.pre_tokenizers import CHECK_TEXT, name_of_pattern, name_of_tokens
from detent.checkpoint_files.sentencepiece_model import read_sentencepiece
from detent.checkpoint_files.vocabulary import read_vocabulary
from detent.errors import FileFormatError, SpecError, UnsupportedError
from tests.checkpoint_files.gguf_files import llama_arrays, llama_config, llama_source, write_gguf

SIZE = 500
TEXT = (
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, and we'll see what 3.14159 means!\n"
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; \tnaïve café — 東京 \N{ROCKET}\n\n   indented\n"
)
TEXTS = [TEXT, CHECK_TEXT, "hello world", "  two spaces", "x" * 50, "a\nb\r\nc\td", "<s>not special</s> <|user|> hi"]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern):
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "dbrx": split(CONTRACTIONS + r"\p{N}{1,3}" + REST),
    "qwen2": split(CONTRACTIONS + r"\p{N}" + REST),
}


def byte_level(name):
    """Return a small byte-level BPE tokenizer that is trained on the test text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[name], decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 8,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken("<|user|>", special=False, normalized=False), AddedToken("Deich", normalized=True)]
    )
    template = {"single": "<s> $A", "pair": "<s> $A <s> $B", "special_tokens": [("<s>", 0)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer


def byte_fallback():
    """Return a small BPE tokenizer as SentencePiece has: spaces are a character, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}"), normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=SIZE - 8, special_tokens=special[:3], show_progress=False)
    tokenizer.train_from_iterator([TEXT.replace("\n", " ").replace("\t", " ")] * 4, trainer)
    content = json.loads(tokenizer.to_str())  # byte tokens are part of the vocabulary, not added tokens
    vocabulary = {text: token for token, text in enumerate(special)}
    for text in sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)[3 : SIZE - 256]:
        vocabulary[text] = len(vocabulary)
    content["model"]["merges"] = [
        merge for merge in content["model"]["merges"] if {*merge, "".join(merge)} <= vocabulary.keys()
    ]
    content["model"]["vocab"] = vocabulary
    tokenizer = Tokenizer.from_str(json.dumps(content))
    template = {"single": "<s> $A", "pair": "<s> $A <s> $B", "special_tokens": [("<s>", 1)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer


def save(tokenizer, directory, **settings):
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    return directory


def config(size=SIZE):
    return ModelConfig.from_json(llama_config(vocab_size=size))


def values(vocabulary):
    return {entry.key.removeprefix("tokenizer."): entry.value for entry in vocabulary.entries()}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_byte_level_vocabulary_has_tokens_merges_and_pre_tokenizer(name, tmp_path):
    tokenizer = byte_level(name)
    vocabulary = read_vocabulary(
        save(tokenizer, tmp_path, chat_template="{{ messages }}", eos_token={"content": "</s>"}), config()
    )
    entries = values(vocabulary)
    assert (entries["ggml.model"], entries["ggml.pre"]) == ("gpt2", name)
    tokens, types = entries["ggml.tokens"], entries["ggml.token_type"]
    assert len(tokens) == len(types) == SIZE
    for text, token in tokenizer.get_vocab().items():
        assert tokens[token] == text
    assert types[0] == types[1] == types[tokenizer.token_to_id("<|user|>")] == 3
    assert types[tokenizer.token_to_id("Deich")] == 4
    assert types[5] == 1
    assert (tokens[-1], types[-1]) == (f"[PAD{SIZE - 1}]", 5)
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    assert list(entries["ggml.merges"]) == merges
    assert (entries["ggml.bos_token_id"], entries["ggml.eos_token_id"]) == (0, 1)
    assert (entries["ggml.add_bos_token"], entries["ggml.add_eos_token"]) == (True, False)
    assert entries["chat_template"] == "{{ messages }}"


def test_merges_that_are_ignored_distinguish_llama_3(tmp_path):
    content = json.loads(byte_level("dbrx").to_str())
    content["model"]["ignore_merges"] = True
    assert name_of_pattern(content) == "llama-bpe"
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x"
    assert name_of_pattern(content) is None
    assert name_of_tokens([1, 2, 3]) is None


def test_an_unknown_pre_tokenizer_has_to_be_named(tmp_path):
    tokenizer = byte_level("gpt-2")
    tokenizer.pre_tokenizer = split(r"\w+|\W+")
    save(tokenizer, tmp_path)
    with pytest.raises(UnsupportedError, match=r"pre-tokenizer in tokenizer.json is not known.*--pre-tokenizer"):
        read_vocabulary(tmp_path, config())
    assert read_vocabulary(tmp_path, config(), pre_tokenizer="tekken").pre_tokenizer == "tekken"
    with pytest.raises(SpecError, match=r"expected a name of llama.cpp"):
        read_vocabulary(tmp_path, config(), pre_tokenizer=" ")


def test_byte_fallback_becomes_a_sentencepiece_vocabulary(tmp_path):
    tokenizer = byte_fallback()
    entries = values(read_vocabulary(save(tokenizer, tmp_path, unk_token="<unk>"), config()))
    assert (entries["ggml.model"], entries["ggml.pre"]) == ("llama", "default")
    types, scores = entries["ggml.token_type"], entries["ggml.scores"]
    assert types[:4] == (2, 3, 3, 6)
    assert entries["ggml.add_space_prefix"] is True
    first, second = (
        tokenizer.token_to_id("".join(pair)) for pair in json.loads(tokenizer.to_str())["model"]["merges"][:2]
    )
    assert (scores[first], scores[second]) == (0.0, -1.0)


def field(number, wire, data):
    return bytes([number << 3 | wire]) + (bytes([len(data)]) + data if wire == 2 else data)


def sentencepiece_bytes(pieces, *, kind=2, adds_space=True):
    parts = []
    for text, score, piece_type in pieces:
        body = field(1, 2, text.encode()) + field(2, 5, struct.pack("<f", score)) + field(3, 0, bytes([piece_type]))
        parts.append(field(1, 2, body))
    return b"".join([*parts, field(2, 2, field(3, 0, bytes([kind]))), field(3, 2, field(3, 0, bytes([adds_space])))])


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0x0A>", 0.0, 6), ("\u2581the", -1.5, 1)]


def test_a_sentencepiece_file_is_read(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes(PIECES, adds_space=False))
    added = {"added_tokens_decoder": {"5": {"content": "<|end|>", "special": False}, "6": {"content": "a\u2581b"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**added, "bos_token": "<s>", "add_bos_token": True}))
    entries = values(read_vocabulary(tmp_path, config(8)))
    assert entries["ggml.tokens"] == ("<unk>", "<s>", "</s>", "<0x0A>", "\u2581the", "<|end|>", "a b", "[PAD7]")
    assert entries["ggml.token_type"] == (2, 3, 3, 6, 1, 3, 4, 5)
    assert entries["ggml.scores"] == (0.0, 0.0, 0.0, 0.0, -1.5, -1000.0, -1000.0, -10000.0)
    assert entries["ggml.add_space_prefix"] is False
    assert entries["ggml.add_bos_token"] is True


def test_the_package_sentencepiece_reads_the_same(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(TEXT.split(". ") * 20))
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    model = read_sentencepiece(tmp_path / "tokenizer.model")
    reference = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert len(model.pieces) == reference.vocab_size()
    for token, piece in enumerate(model.pieces):
        assert (piece.text, piece.score) == (reference.id_to_piece(token), reference.get_score(token))
        assert (piece.type == 6, piece.type == 3) == (reference.is_byte(token), reference.is_control(token))


@pytest.mark.parametrize("size", range(0, 60, 3))
def test_damaged_sentencepiece_files_are_rejected(tmp_path, size):
    data = sentencepiece_bytes(PIECES)
    (tmp_path / "tokenizer.model").write_bytes(data[:size])
    with pytest.raises((FileFormatError, UnsupportedError)):
        read_vocabulary(tmp_path, config(8))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes(PIECES, kind=1))
    with pytest.raises(UnsupportedError, match="not BPE"):
        read_vocabulary(tmp_path, config(8))


def test_tokenizers_that_do_not_fit_are_rejected(tmp_path):
    with pytest.raises(FileFormatError, match=r"neither tokenizer.json nor tokenizer.model"):
        read_vocabulary(tmp_path, config())
    save(byte_level("gpt-2"), tmp_path)
    with pytest.raises(FileFormatError, match=r"config.json says vocab_size 100"):
        read_vocabulary(tmp_path, config(100))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(UnsupportedError, match="expected byte-level BPE"):
        read_vocabulary(tmp_path, config())
    for text in ("[]", "{", '{"model": {"type": "BPE", "byte_fallback": true}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(FileFormatError):
            read_vocabulary(tmp_path, config())


def tokens_of(llama_cpp, directory, tmp_path):
    arrays = {name: array for name, array in llama_arrays().items() if "embed" not in name and "lm_head" not in name}
    arrays |= {name: np.ones((SIZE, 8), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    source = llama_source(llama_config(vocab_size=SIZE), arrays, directory)
    model = gguf_model(source)
    write_gguf(tmp_path / "model.gguf", model, source, choose_types(model, "F32"))
    return llama_cpp.tokenize(tmp_path / "model.gguf", TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_llama_cpp_tokenizes_as_byte_level_tokenizers_do(name, tmp_path, llama_cpp):
    tokenizer = byte_level(name)
    tokens = tokens_of(llama_cpp, save(tokenizer, tmp_path / "model"), tmp_path)
    for text, given in zip(TEXTS, tokens, strict=True):
        assert given == tokenizer.encode(text).ids, text


@pytest.mark.slow
def test_llama_cpp_tokenizes_as_byte_fallback_does(tmp_path, llama_cpp):
    tokenizer = byte_fallback()
    tokens = tokens_of(llama_cpp, save(tokenizer, tmp_path / "model", unk_token="<unk>"), tmp_path)
    for text, given in zip(TEXTS[:-1], tokens[:-1], strict=True):
        assert given == tokenizer.encode(text).ids, text
