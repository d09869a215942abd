"""Texts as data: a .txt file with one text per line, and a tokenizer.json of the package ``tokenizers``.

The tokens fill the model's inputs by name:

================ ================================================================== ===================
input            names                                                              values
================ ================================================================== ===================
token ids        a model's only input, input_ids, ids, tokens, ...                  padded with the pad id
attention mask   attention_mask, input_mask, mask, ...                              1 for tokens, 0 for padding
token types      token_type_ids, segment_ids, ...                                   types, padded with 0
positions        position_ids, positions, ...                                       0, 1, 2, ...
================ ================================================================== ===================

If the model fixes the number of tokens, texts are truncated and padded to it. Otherwise they are padded to the longest
text of their batch, and truncated to ``length`` of the preprocessing, to the limit in the tokenizer file, or to 512
tokens. Blank lines are left out.

Files are untrusted: their sizes are limited before they are read. A token id without a row in the model's embedding
table is an error here, before ONNX Runtime reads outside the table.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detent.errors import FileFormatError, RangeError, ShapeError, SpecError, UnsupportedError, install_hint
from detent.onnx_model.data_files import DataFiles, DataListing, FileBatches, batch_size_of, cut, left_out
from detent.onnx_model.model_inputs import Array, Feed, InputInfo
from detent.tables import counted

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

__all__ = ["SUFFIXES", "open_texts"]

SUFFIXES = frozenset({".txt"})
FIELDS = ("length",)  # of Preprocessing
MAX_TEXT_BYTES, MAX_TOKENIZER_BYTES = 1 << 28, 1 << 28
MAX_LINE_CHARS = 1 << 20
MAX_TOKENS = 512  # if neither the model nor the tokenizer has a limit
MAX_CHARS_SHOWN = 60
PAD_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")
IDS, MASK, TYPES, POSITIONS = "token ids", "attention mask", "token types", "positions"
# The first pattern that occurs in the name of an input says what it holds.
ROLES = {
    MASK: re.compile("mask"),
    TYPES: re.compile("type|segment"),
    POSITIONS: re.compile("position"),
    IDS: re.compile("id|token|input"),
}


@dataclass(frozen=True)
class _Text:
    line: int  # number of the line, from 1
    text: str


@dataclass(frozen=True)
class _Encoder:
    """A tokenizer, the inputs that it fills, and the number of tokens per text."""

    tokenizer: "Tokenizer"
    inputs: dict[str, InputInfo]  # maps roles to inputs
    fixed_length: int | None
    pad: int
    pads_left: bool
    where: str

    def feed(self, texts: Sequence[_Text]) -> Feed:
        """Return the inputs for a batch of texts."""
        encodings = [self.encode(text) for text in texts]
        length = self.fixed_length or max(1, *(len(encoding.ids) for encoding in encodings))
        shape = len(texts), length
        values: dict[str, Array] = {
            IDS: np.full(shape, self.pad, np.int64),
            MASK: np.zeros(shape, np.int64),
            TYPES: np.zeros(shape, np.int64),
            POSITIONS: np.broadcast_to(np.arange(length, dtype=np.int64), shape),
        }
        for row, encoding in enumerate(encodings):
            count = len(encoding.ids)
            part = slice(length - count, length) if self.pads_left else slice(0, count)
            values[IDS][row, part] = encoding.ids
            values[MASK][row, part] = 1
            values[TYPES][row, part] = encoding.type_ids
        return {info.name: info.convert(values[role], self.where) for role, info in self.inputs.items()}

    def encode(self, text: _Text) -> "Encoding":
        """Tokenize a text, and check that the embedding table has a row for each token."""
        try:
            encoding = self.tokenizer.encode(text.text)
        except Exception as error:  # the package raises the class Exception itself
            raise FileFormatError(
                f"{self.where} line {text.line}: the tokenizer cannot encode {text.text[:MAX_CHARS_SHOWN]!r}: {error}"
            ) from error
        rows = self.inputs[IDS].rows
        outside = [] if rows is None else [i for i, token in enumerate(encoding.ids) if token >= rows]
        if outside:
            token = encoding.ids[outside[0]]
            raise RangeError(
                f"{self.where} line {text.line}: text {text.text[:MAX_CHARS_SHOWN]!r} has the token "
                f"{encoding.tokens[outside[0]][:MAX_CHARS_SHOWN]!r} with id {token}, but the embedding table of input "
                f"{self.inputs[IDS].name!r} has {rows} rows (the tokenizer has {self.vocabulary} tokens): pass the "
                "model's own tokenizer"
            )
        return encoding

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the tokenizer."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))


def open_texts(files: DataFiles, listing: DataListing, inputs: Sequence[InputInfo]) -> FileBatches:
    """Open a text file as batches of token ids, attention masks and token types.

    Raises:
        UnsupportedError: the package ``tokenizers`` is not installed.
        SpecError, ShapeError: the tokenizer is missing, or the inputs do not fit texts.
        FileFormatError: a file is damaged, too large or not UTF-8.
        RangeError: a token has no row in the model's embedding table.
    """
    where = fspath(listing.root)
    files.reject_unused("texts", preprocess=FIELDS, tokenizer=True)
    if files.tokenizer is None:
        raise SpecError(f"{where}: texts need a tokenizer: pass the model's tokenizer.json (--tokenizer)")
    texts = _read_texts(listing.root)
    encoder = _make_encoder(Path(files.tokenizer), files.preprocessing.length, inputs, where)
    size, is_fixed = batch_size_of(inputs, files.batch_size, where)
    batches = cut(len(texts), size, is_fixed=is_fixed, what="texts", where=where)
    rows = encoder.inputs[IDS].rows
    is_padded = encoder.fixed_length is not None or size > 1
    if rows is not None and is_padded and encoder.pad >= rows:
        raise RangeError(
            f"{fspath(files.tokenizer)}: texts are padded with token id {encoder.pad}, but the embedding table of "
            f"input {encoder.inputs[IDS].name!r} has {rows} rows: pass the model's own tokenizer"
        )
    if rows is not None and encoder.vocabulary > rows:  # some token has no row: check all texts before anything runs
        for text in texts:
            encoder.encode(text)

    def read(numbers: Sequence[int] | None) -> Iterator[Feed]:
        for batch in batches if numbers is None else (batches[number] for number in numbers):
            yield encoder.feed([texts[i] for i in batch])

    truncation = encoder.tokenizer.truncation or {}
    limit = encoder.fixed_length or truncation.get("max_length", MAX_TOKENS)
    filled = ", ".join(f"{info.name} ({role})" for role, info in encoder.inputs.items())
    length = f"{limit} tokens each" if encoder.fixed_length else f"at most {limit} tokens"
    note = f"texts: {counted(len(texts), 'line', ',')}, {length}, filling {filled}{left_out(len(texts), batches)}"
    return FileBatches(where, len(batches), read, note=note)


def _read_texts(path: Path) -> list[_Text]:
    where = fspath(path)
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise FileFormatError(f"{where} has {size:,} bytes, expected at most {MAX_TEXT_BYTES:,}: pass fewer texts")
    texts = list[_Text]()
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise FileFormatError(
                f"{where} line {number} is not UTF-8 ({error.reason}): save the file as UTF-8"
            ) from error
        if "\0" in text:
            raise FileFormatError(f"{where} line {number} contains a NUL character: pass a file with one text per line")
        if len(text) > MAX_LINE_CHARS:
            raise FileFormatError(
                f"{where} line {number} has {len(text):,} characters, expected at most {MAX_LINE_CHARS:,}: break it"
            )
        if text:
            texts.append(_Text(number, text))
    if not texts:
        raise FileFormatError(f"{where} has no texts: write one text per line")
    return texts


def _make_encoder(path: Path, length: int | None, inputs: Sequence[InputInfo], where: str) -> _Encoder:
    roles = _roles(inputs, where)
    fixed = {info.shape[1] for info in inputs if info.shape is not None} - {None}
    if len(fixed) > 1 or (length is not None and fixed - {length}):
        raise ShapeError(
            f"{where}: the inputs have {sorted(size for size in fixed if size)} tokens, and length is {length}: "
            "expected one number of tokens"
        )
    tokenizer = _read_tokenizer(path)
    fixed_length = next((int(size) for size in fixed if size), None)
    padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
    limit = fixed_length or length or truncation.get("max_length") or MAX_TOKENS
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if limit <= special:
        raise ShapeError(
            f"{where}: a length of {limit} leaves no room for texts, because the tokenizer adds {special} tokens: use "
            "a larger length"
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    ids = (tokenizer.token_to_id(token) for token in PAD_TOKENS)
    pad = padding["pad_id"] if padding else next((number for number in ids if number is not None), 0)
    return _Encoder(tokenizer, roles, fixed_length, pad, padding.get("direction") == "left", where)


def _roles(inputs: Sequence[InputInfo], where: str) -> dict[str, InputInfo]:
    """Map the roles of inputs to the inputs."""
    roles: dict[str, InputInfo] = {}
    for info in inputs:
        names = (role for role, pattern in ROLES.items() if pattern.search(info.name.lower()))
        role = IDS if len(inputs) == 1 else next(names, None)
        if role is None or role in roles or info.dtype.kind not in "iuf" or len(info.shape or (1, 1)) != 2:
            raise SpecError(
                f"{where}: input {info.name!r} of type {info.dtype} and shape {info.shape_text} cannot be filled with "
                "texts: expected inputs of shape (batch, tokens) with names such as input_ids, attention_mask, "
                "token_type_ids; pass .npz files for other inputs"
            )
        roles[role] = info
    if IDS not in roles:
        raise SpecError(f"{where}: the model has no input for token ids, such as input_ids: pass .npz files")
    return roles


def _read_tokenizer(path: Path) -> Any:  # noqa: ANN401 - the package may be missing
    where = fspath(path)
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise UnsupportedError(f"{where}: texts need the package tokenizers: {install_hint('tokenizers')}") from error
    if not path.is_file():
        raise FileFormatError(f"{where}: there is no such file")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise FileFormatError(
            f"{where} has {path.stat().st_size:,} bytes, expected at most {MAX_TOKENIZER_BYTES:,}: pass "
            "a tokenizer.json"
        )
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises the class Exception itself
        raise FileFormatError(
            f"{where} is not a tokenizer.json: {str(error)[:200]}: export the tokenizer again"
        ) from error
