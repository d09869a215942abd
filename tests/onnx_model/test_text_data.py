"""Texts as data: inputs filled by name, lengths, and every kind of bad file."""

import json
from dataclasses import replace

import numpy as np
import pytest

import detent as dt
from detent.onnx_model import DataFiles
from detent.onnx_model.batches import open_batches
from detent.onnx_model.model_inputs import InputInfo
from detent.onnx_model.text_data import _read_texts, _roles

I64 = np.dtype("int64")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "rare"]
IDS = InputInfo("input_ids", I64, (None, None))
MASK = InputInfo("attention_mask", I64, (None, None))
TYPES = InputInfo("token_type_ids", I64, (None, None))


@pytest.fixture
def tokenizer(tmp_path):
    """The path of a small tokenizer: words, with [CLS] and [SEP] around a text."""
    pytest.importorskip("tokenizers")
    return write_tokenizer(tmp_path / "tokenizer.json")


def write_tokenizer(path, **changes):
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
    }
    path.write_text(json.dumps({**document, **changes}), encoding="utf-8")
    return path


def write_texts(folder, *lines):
    path = folder / "texts.txt"
    path.write_bytes("\n".join(lines).encode())
    return path


def read(path, inputs, tokenizer, **options):
    return list(open_batches(DataFiles(path, tokenizer=tokenizer, **options), inputs))


def refusal(path, inputs, tokenizer, error, *words, **options):
    with pytest.raises(error) as caught:
        read(path, inputs, tokenizer, **options)
    assert isinstance(caught.value, dt.DetentError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_inputs_are_filled_by_name(tmp_path, tokenizer):
    path = write_texts(tmp_path, "a b c", "", "  b  ", "what a")
    batches = open_batches(DataFiles(path, 2, tokenizer=tokenizer), [MASK, TYPES, IDS])
    feeds = list(batches)
    assert list(feeds[0]) == ["attention_mask", "token_type_ids", "input_ids"]
    assert feeds[0]["input_ids"].tolist() == [[2, 4, 5, 6, 3], [2, 5, 3, 0, 0]]
    assert feeds[0]["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert feeds[0]["token_type_ids"].tolist() == [[0] * 5] * 2
    assert feeds[1]["input_ids"].tolist() == [[2, 1, 4, 3]]
    assert {array.dtype for array in feeds[0].values()} == {I64}
    assert batches.notes == (
        "texts: 3 lines, at most 512 tokens, filling attention_mask (attention mask), token_type_ids (token types), "
        "input_ids (token ids)",
    )
    assert [feed["input_ids"].shape for feed in batches.subset([1])] == [(1, 4)]


def test_lengths(tmp_path, tokenizer):
    path = write_texts(tmp_path, "a b c a b c", "a")
    fixed = InputInfo("tokens", np.dtype("int32"), (None, 5))
    feeds = read(path, [fixed], tokenizer)
    assert [feed["tokens"].tolist() for feed in feeds] == [[[2, 4, 5, 6, 3]], [[2, 4, 3, 0, 0]]]
    assert feeds[0]["tokens"].dtype == np.int32
    assert read(path, [IDS], tokenizer, preprocess="length=4")[0]["input_ids"].shape == (1, 4)
    refusal(path, [fixed], tokenizer, dt.ShapeError, "[5] tokens", "length is 4", preprocess="length=4")
    other = InputInfo("attention_mask", I64, (None, 6))
    refusal(path, [fixed, other], tokenizer, dt.ShapeError, "[5, 6] tokens")


def test_settings_of_the_tokenizer_file(tmp_path, tokenizer):
    write_tokenizer(
        tokenizer,
        truncation={"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 7,
            "pad_type_id": 0,
            "pad_token": "rare",
        },
    )
    (feed,) = read(write_texts(tmp_path, "a b c", "b"), [IDS, MASK], tokenizer, batch_size=2)
    assert feed["input_ids"].tolist() == [[2, 4, 5, 3], [7, 2, 5, 3]]
    assert feed["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_tokens_outside_the_table(tmp_path, tokenizer):
    path = write_texts(tmp_path, "a b", "c", "a rare b")
    small = InputInfo("input_ids", I64, (None, None), rows=7)
    message = ["texts.txt line 3", "'a rare b'", "'rare' with id 7", "7 rows", "8 tokens", "own tokenizer"]
    with pytest.raises(dt.RangeError) as caught:  # when the data are opened, before any batch is read
        open_batches(DataFiles(path, tokenizer=tokenizer), [small])
    assert not [word for word in message if word not in str(caught.value)], str(caught.value)
    assert len(read(write_texts(tmp_path, "a b", "c"), [small], tokenizer)) == 2  # no text has the token


def test_a_pad_id_outside_the_table_is_an_error_if_texts_are_padded(tmp_path):
    pytest.importorskip("tokenizers")
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 99}
    path = write_tokenizer(tmp_path / "t.json", padding={**padding, "pad_type_id": 0, "pad_token": "[PAD]"})
    texts, small = write_texts(tmp_path, "a b", "c"), replace(IDS, rows=50)
    with pytest.raises(
        dt.RangeError, match=r"padded with token id 99, but the embedding table of input .* has 50 rows"
    ):
        open_batches(DataFiles(texts, batch_size=2, tokenizer=path), [small])
    assert open_batches(DataFiles(texts, tokenizer=path), [small]).count == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [("{}", ["not a tokenizer.json"]), ("no JSON", ["not a tokenizer.json"]), ("\0", ["not a tokenizer.json"])],
)
def test_bad_tokenizers(tmp_path, tokenizer, content, words):
    tokenizer.write_text(content)
    refusal(write_texts(tmp_path, "a"), [IDS], tokenizer, dt.FileFormatError, "tokenizer.json", *words)


def test_texts_that_the_tokenizer_rejects(tmp_path, tokenizer):
    vocabulary = {"a": 0, "[CLS]": 2, "[SEP]": 3}
    write_tokenizer(tokenizer, model={"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"})
    path = write_texts(tmp_path, "a", "a z")
    refusal(path, [IDS], tokenizer, dt.FileFormatError, "texts.txt line 2", "cannot encode 'a z'")


def test_lengths_without_room_for_special_tokens(tmp_path, tokenizer):
    refusal(write_texts(tmp_path, "a"), [IDS], tokenizer, dt.ShapeError, "length of 2", preprocess="length=2")


def test_missing_tokenizers(tmp_path, tokenizer, monkeypatch):
    path = write_texts(tmp_path, "a")
    refusal(path, [IDS], None, dt.SpecError, "texts.txt", "--tokenizer")
    refusal(path, [IDS], tmp_path / "none.json", dt.FileFormatError, "none.json", "no such file")
    monkeypatch.setattr("detent.onnx_model.text_data.MAX_TOKENIZER_BYTES", 10)
    refusal(path, [IDS], tokenizer, dt.FileFormatError, "at most 10")


def test_fixed_batch_sizes(tmp_path, tokenizer):
    fixed = InputInfo("ids", I64, (2, None))
    assert [feed["ids"].shape for feed in read(write_texts(tmp_path, "a", "b c", "c"), [fixed], tokenizer)] == [(2, 4)]
    refusal(write_texts(tmp_path, "a"), [fixed], tokenizer, dt.ShapeError, "got 1 texts", "batch size is 2")


def test_the_tokenizer_of_a_real_model(tmp_path):
    pytest.importorskip("tokenizers")
    zoo = pytest.importorskip("zoo.minilm")
    path = zoo.package_file(zoo.MODEL, "model/tokenizer.json")
    vocabulary = zoo.package_file(zoo.MODEL, "model/vocab.txt").read_text(encoding="utf-8").splitlines()
    lines = ["Quantization of neural networks!", "Café au lait, s'il vous plaît."]
    tokens = InputInfo("tokens", I64, (None, None), rows=len(vocabulary))
    (feed,) = read(write_texts(tmp_path, *lines), [tokens], path, batch_size=2)
    assert feed["tokens"].tolist() == zoo.WordPiece(vocabulary)(lines).tolist()
    small = InputInfo("tokens", I64, (None, None), rows=5000)
    refusal(write_texts(tmp_path, *lines), [small], path, dt.RangeError, "line 1", "5000 rows", "30522 tokens")


# Without the package


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    refusal(write_texts(tmp_path, "a"), [IDS], tmp_path / "t.json", dt.UnsupportedError, "pip install 'detent[text]'")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"fine\nnot \xff fine", ["line 2", "not UTF-8"]),
        (b"fine\n\nwith \0 NUL", ["line 3", "NUL"]),
        (b"", ["no texts"]),
        (b" \n\n\t\n", ["no texts"]),
        (b"x" * 70, ["line 1", "70 characters", "at most 64"]),
        (b"x\n" * 101, ["202 bytes", "at most 200"]),
    ],
)
def test_bad_texts_are_named(tmp_path, monkeypatch, data, words):
    monkeypatch.setattr("detent.onnx_model.text_data.MAX_LINE_CHARS", 64)
    monkeypatch.setattr("detent.onnx_model.text_data.MAX_TEXT_BYTES", 200)
    (tmp_path / "texts.txt").write_bytes(data)
    refusal(tmp_path / "texts.txt", [IDS], tmp_path / "t.json", dt.FileFormatError, "texts.txt", *words)


def test_texts_are_lines(tmp_path):
    (tmp_path / "texts.txt").write_bytes("\ufefffirst\r\n\r\nlast \u2028 line".encode())
    assert [(text.line, text.text) for text in _read_texts(tmp_path / "texts.txt")] == [
        (1, "first"),
        (3, "last \u2028 line"),
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x"], {"x": "token ids"}),
        (
            ["input_ids", "input_mask", "segment_ids"],
            {"input_ids": "token ids", "input_mask": "attention mask", "segment_ids": "token types"},
        ),
        (["tokens", "position_ids"], {"tokens": "token ids", "position_ids": "positions"}),
    ],
)
def test_roles(names, expected):
    inputs = [InputInfo(name, I64, (None, None)) for name in names]
    assert {info.name: role for role, info in _roles(inputs, "data").items()} == expected


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([IDS, InputInfo("pixels", I64, (None, None))], ["'pixels'", "input_ids, attention_mask, token_type_ids"]),
        ([IDS, InputInfo("ids", I64, (None, None))], ["'ids'"]),
        ([InputInfo("input_ids", I64, (None, 3, 4))], ["(any, 3, 4)"]),
        ([InputInfo("input_ids", np.dtype(object), (None, 3))], ["object"]),
        ([MASK, TYPES], ["no input for token ids"]),
    ],
)
def test_inputs_that_do_not_fit(inputs, words):
    with pytest.raises(dt.SpecError) as caught:
        _roles(inputs, "texts.txt")
    assert not [word for word in ("texts.txt", *words) if word not in str(caught.value)], str(caught.value)
