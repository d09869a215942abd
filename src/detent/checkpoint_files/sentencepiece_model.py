"""Reader of ``tokenizer.model``: the pieces of a SentencePiece vocabulary, without the package sentencepiece.

The file is a protocol buffer. Only three parts are needed: pieces (text, score, type), the kind of the model (BPE or
unigram), and whether a space is put before texts. Files are untrusted: lengths are checked before anything is read.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from detent.errors import FileFormatError, UnsupportedError

__all__ = ["Piece", "SentencePieceModel", "read_sentencepiece"]

MAX_FILE_BYTES = 1 << 28
MAX_PIECES = 1 << 22
BPE = 2  # the kind of model, in the trainer's options
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the file
NORMAL, UNUSED, BYTE = 1, 5, 6  # types of pieces; the same numbers as in GGUF files


@dataclass(frozen=True)
class Piece:
    """A token: its text, its score, and its type (the numbers of GGUF files)."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """A vocabulary.

    Attributes:
        pieces: tokens by id.
        adds_space: whether a space is put before each text.
    """

    pieces: tuple[Piece, ...]
    adds_space: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a SentencePiece file.

    Raises:
        FileFormatError: the file is too large, truncated or not a SentencePiece model.
        UnsupportedError: the model is not BPE.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise FileFormatError(f"{path} has {path.stat().st_size:,} bytes, expected at most {MAX_FILE_BYTES:,}")
    try:
        return _parsed(path.read_bytes())
    except (FileFormatError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not a SentencePiece model: {error}") from error


def _parsed(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    kind, adds_space = 1, True
    for number, value in _fields(data):
        if number == PIECES and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif number == TRAINER and isinstance(value, bytes):
            kind = next((int(each) for field, each in _fields(value) if field == 3 and isinstance(each, int)), kind)
        elif number == NORMALIZER and isinstance(value, bytes):
            flags = [bool(each) for field, each in _fields(value) if field == 3 and isinstance(each, int)]
            adds_space = flags[-1] if flags else adds_space
        if len(pieces) > MAX_PIECES:
            raise FileFormatError(f"more than {MAX_PIECES:,} pieces")
    if not pieces:
        raise FileFormatError("it has no pieces")
    if kind != BPE:
        raise UnsupportedError("the SentencePiece model is not BPE, but unigram, word or char: expected BPE")
    return SentencePieceModel(tuple(pieces), adds_space)


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not isfinite(score) or not NORMAL <= kind <= BYTE:
        raise FileFormatError(f"piece {text[:40]!r} has score {score} and type {kind}")
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Return the fields of a protocol buffer: integers, float32 and byte strings."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise FileFormatError(f"invalid field of wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise FileFormatError(f"a field at byte {at} has {size} bytes, but only {len(data) - at} are left")
        part = data[at : at + size]
        at += size
        yield number, struct.unpack("<f", part)[0] if wire == FIXED32 else part


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise FileFormatError(f"truncated varint at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FileFormatError(f"invalid varint at byte {at}")
