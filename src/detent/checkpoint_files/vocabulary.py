"""Vocabulary: the tokenizer files of a directory as metadata of a GGUF file.

There are two kinds:

- byte-level BPE ("gpt2" in GGUF files): tokens, merges, and the name of the pre-tokenizer; from ``tokenizer.json``.
- SentencePiece BPE ("llama"): tokens and scores; from ``tokenizer.model``. Without that file, ``tokenizer.json`` has
  the same tokens and an ordered list of merges; the score of a token is then minus the rank of its first merge.

Tokens that were added to a vocabulary are control tokens if they are special or look like it (``<|...|>``), otherwise
user-defined. Ids without a token are named ``[PAD<id>]``, up to the size of the model's vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.pre_tokenizers import CHECK_TEXT, name_of_pattern, name_of_tokens
from detent.checkpoint_files.sentencepiece_model import read_sentencepiece
from detent.checkpoint_files.target_model import MetadataEntry
from detent.checkpoint_files.text_files import read_text
from detent.errors import FileFormatError, SpecError, UnsupportedError, install_hint

__all__ = ["Vocabulary", "read_vocabulary", "vocabulary_entries"]

MAX_JSON_BYTES = 1 << 28
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens in GGUF files
ADDED_SCORE, UNUSED_SCORE = -1000.0, -10000.0
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece vocabularies
SPECIAL_TOKENS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # control tokens that some tokenizers do not mark as such
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in tokenizer files and GGUF files


@dataclass
class Vocabulary:
    """Tokens of a model, by id.

    Attributes:
        kind: "gpt2" or "llama", the names in GGUF files.
        pre_tokenizer: name of the pre-tokenizer.
        texts: texts of the tokens.
        types: types of the tokens, as numbers of GGUF files.
        scores: scores of the tokens, for "llama".
        merges: for "gpt2", as "left right".
        special: ids of special tokens by role: "bos", "eos", "unknown", "padding".
        adds: whether a token is added to texts, by role: "bos", "eos".
        adds_space: whether a space is put before texts; None if llama.cpp's default applies.
        chat_template: Jinja template for chats, or "".
    """

    kind: str
    pre_tokenizer: str
    texts: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    adds_space: bool | None = None
    chat_template: str = ""

    def entries(self) -> list[MetadataEntry]:
        """Return the metadata of a GGUF file."""
        key = "tokenizer.ggml."
        entries = [
            MetadataEntry(f"{key}model", "string", self.kind),
            MetadataEntry(f"{key}pre", "string", self.pre_tokenizer),
            MetadataEntry(f"{key}tokens", "array:string", tuple(self.texts)),
            MetadataEntry(f"{key}token_type", "array:int32", tuple(self.types)),
        ]
        if self.kind == "llama":
            entries.append(MetadataEntry(f"{key}scores", "array:float32", tuple(self.scores)))
        else:
            entries.append(MetadataEntry(f"{key}merges", "array:string", tuple(self.merges)))
        entries += [MetadataEntry(f"{key}{role}_token_id", "uint32", token) for role, token in self.special.items()]
        entries += [MetadataEntry(f"{key}add_{role}_token", "bool", value) for role, value in self.adds.items()]
        if self.adds_space is not None:
            entries.append(MetadataEntry(f"{key}add_space_prefix", "bool", self.adds_space))
        if self.chat_template:
            entries.append(MetadataEntry("tokenizer.chat_template", "string", self.chat_template))
        return entries


def vocabulary_entries(
    directory: Path, config: ModelConfig, *, pre_tokenizer: str | None = None
) -> list[MetadataEntry]:
    """Return the metadata of the vocabulary in a directory; see ``read_vocabulary``."""
    return read_vocabulary(directory, config, pre_tokenizer=pre_tokenizer).entries()


def read_vocabulary(directory: Path, config: ModelConfig, *, pre_tokenizer: str | None = None) -> Vocabulary:
    """Read the tokenizer files of a directory.

    Args:
        directory: directory with ``tokenizer.json`` or ``tokenizer.model``.
        config: configuration of the model; its ``vocab_size`` is the number of tokens.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer; None finds it.

    Raises:
        FileFormatError: no tokenizer, a damaged file, or more tokens than the model's vocabulary.
        UnsupportedError: a kind of tokenizer that is not supported, an unknown pre-tokenizer, or a missing package.
        SpecError: an invalid name of a pre-tokenizer.
    """
    if pre_tokenizer is not None and (not isinstance(pre_tokenizer, str) or not pre_tokenizer.strip()):
        raise SpecError(f"got pre_tokenizer={pre_tokenizer!r}, expected a name of llama.cpp, such as 'llama-bpe'")
    files = _TokenizerFiles(directory)
    size = config.integer("vocab_size")
    if files.is_byte_level:
        vocabulary = _byte_level(files, size, pre_tokenizer)
    elif files.sentencepiece is not None:
        vocabulary = _sentencepiece(files, files.sentencepiece, size)
    elif files.has_byte_fallback:
        vocabulary = _ranked(files, size)
    else:
        raise files.unsupported()
    vocabulary.special = files.special_ids(config, len(vocabulary.texts))
    vocabulary.adds = files.added_roles(vocabulary.special)
    vocabulary.chat_template = files.chat_template()
    return vocabulary


class _TokenizerFiles:
    """The tokenizer files of a directory; each is read once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = _read_json(directory / "tokenizer.json")
        self.settings = _read_json(directory / "tokenizer_config.json") or {}
        path = directory / "tokenizer.model"
        self.sentencepiece = path if path.is_file() else None
        self._encoder: Any = None
        if self.tokenizer is None and self.sentencepiece is None:
            raise FileFormatError(
                f"{directory} has neither tokenizer.json nor tokenizer.model: add the tokenizer files of the model, or "
                "leave out the vocabulary (vocabulary=False, --no-vocabulary)"
            )

    @property
    def model(self) -> Mapping[str, Any]:
        """The model of ``tokenizer.json``, or an empty mapping."""
        model = (self.tokenizer or {}).get("model")
        return model if isinstance(model, Mapping) else {}

    @property
    def is_byte_level(self) -> bool:
        decoder = (self.tokenizer or {}).get("decoder")
        steps = [decoder, *(decoder.get("decoders") or [])] if isinstance(decoder, Mapping) else []
        has_bytes = any(isinstance(step, Mapping) and step.get("type") == "ByteLevel" for step in steps)
        return self.model.get("type") == "BPE" and has_bytes

    @property
    def has_byte_fallback(self) -> bool:
        return self.model.get("type") == "BPE" and self.model.get("byte_fallback") is True

    def unsupported(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.directory}: the tokenizer is {brief(self.model.get('type'))}, expected byte-level BPE, or "
            "SentencePiece BPE with byte fallback"
        )

    def encoder(self) -> Any:  # noqa: ANN401 - the package may be missing
        """Return the tokenizer of the package ``tokenizers``."""
        if self._encoder is None:
            self._encoder = _load_tokenizer(self.directory / "tokenizer.json")
        return self._encoder

    def tokens(self, size: int) -> dict[int, str]:
        """Return the texts of all tokens in ``tokenizer.json``, added ones included, by id."""
        texts = {int(token): text for text, token in self.encoder().get_vocab(with_added_tokens=True).items()}
        highest = max(texts, default=0)
        if highest >= size:
            raise FileFormatError(
                f"{self.directory}: the tokenizer has a token with id {highest}, but config.json says vocab_size {size}"
            )
        return texts

    def added(self) -> dict[int, tuple[str, bool, bool]]:
        """Return added tokens by id: text, whether it is special, and whether it is normalized."""
        if self.tokenizer is not None:
            return {
                int(token): (each.content, bool(each.special), bool(each.normalized))
                for token, each in self.encoder().get_added_tokens_decoder().items()
            }
        decoder = self.settings.get("added_tokens_decoder")
        added = {}
        for token, each in decoder.items() if isinstance(decoder, Mapping) else ():
            if token.isdecimal() and isinstance(each, Mapping) and isinstance(each.get("content"), str):
                added[int(token)] = (each["content"], each.get("special") is True, True)
        extra = _read_json(self.directory / "added_tokens.json") or {}
        for text, token in extra.items():
            if isinstance(token, int):
                added.setdefault(token, (text, False, True))
        return added

    def special_ids(self, config: ModelConfig, size: int) -> dict[str, int]:
        """Return the ids of special tokens by role; tokenizer_config.json has priority over config.json."""
        texts = {text: token for token, (text, _, _) in self.added().items()}
        ids: dict[str, int] = {}
        for role, name in ROLES.items():
            given = self.settings.get(f"{role}_token")
            text = given.get("content") if isinstance(given, Mapping) else given
            token = texts.get(text) if isinstance(text, str) else None
            if token is None and role != "unk":
                value = config.get(f"{role}_token_id")
                token = value[0] if isinstance(value, list) and value else value
            if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size:
                ids[name] = token
        return ids

    def added_roles(self, special: Mapping[str, int]) -> dict[str, bool]:
        """Return whether BOS and EOS are added to a text: as configured, or as the tokenizer does."""
        adds: dict[str, bool] = {}
        ids: Sequence[int] = self.encoder().encode("a").ids if self.tokenizer is not None else ()
        for role, at in (("bos", 0), ("eos", -1)):
            given = self.settings.get(f"add_{role}_token")
            if isinstance(given, bool):
                adds[role] = given
            elif ids and role in special:
                adds[role] = ids[at] == special[role]
        return adds

    def adds_space(self) -> bool | None:
        """Return whether ``tokenizer.json`` puts a space before texts; None if it does not say."""
        for part in ("normalizer", "pre_tokenizer"):
            step = (self.tokenizer or {}).get(part)
            steps = step.get("normalizers") or step.get("pretokenizers") or [step] if isinstance(step, Mapping) else []
            for each in steps if isinstance(steps, list) else ():
                kind = each.get("type") if isinstance(each, Mapping) else None
                if kind == "Prepend":
                    return True
                if kind == "Metaspace":
                    return bool(each.get("prepend_scheme", "always") != "never")
        return False if self.tokenizer is not None else None

    def chat_template(self) -> str:
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return read_text(path, MAX_JSON_BYTES)
        given = self.settings.get("chat_template")
        if isinstance(given, list):
            named = {each.get("name"): each.get("template") for each in given if isinstance(each, Mapping)}
            given = named.get("default")
        return given if isinstance(given, str) else ""


def _byte_level(files: _TokenizerFiles, size: int, pre_tokenizer: str | None) -> Vocabulary:
    encoder = files.encoder()
    name = pre_tokenizer or name_of_tokens(encoder.encode(CHECK_TEXT).ids) or name_of_pattern(files.tokenizer or {})
    if name is None:
        raise UnsupportedError(
            f"{files.directory}: the pre-tokenizer in tokenizer.json is not known: pass the name that llama.cpp has "
            "for it (pre_tokenizer=, --pre-tokenizer), such as llama-bpe, qwen2, gpt-2 or tekken"
        )
    texts = [f"[PAD{token}]" for token in range(size)]
    types = [UNUSED] * size
    for token, text in files.tokens(size).items():
        texts[token], types[token] = text, NORMAL
    for token, (text, is_special, is_normalized) in files.added().items():
        if not is_normalized:
            ids = encoder.encode(text, add_special_tokens=False).ids
            text = encoder.decode(ids, skip_special_tokens=False)  # noqa: PLW2901 - the normalized text
        texts[token], types[token] = _added_token(text, is_special)
    dot = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # stands for a space in byte-level vocabularies
    merges = [" ".join(part.replace(" ", dot) for part in pair) for pair in _merges(files)]
    return Vocabulary("gpt2", name, texts, types, merges=merges)


def _sentencepiece(files: _TokenizerFiles, path: Path, size: int) -> Vocabulary:
    model = read_sentencepiece(path)
    texts = [f"[PAD{token}]" for token in range(size)]
    scores, types = [UNUSED_SCORE] * size, [UNUSED] * size
    if len(model.pieces) > size:
        raise FileFormatError(f"{path} has {len(model.pieces)} tokens, but config.json says vocab_size {size}")
    for token, piece in enumerate(model.pieces):
        texts[token], scores[token], types[token] = piece.text, piece.score, piece.type
    for token, (text, is_special, _) in files.added().items():
        if token < size:  # as in llama.cpp's files, an added token keeps neither type nor score of its piece
            texts[token], types[token] = _added_token(text, is_special)
            scores[token] = ADDED_SCORE
    return Vocabulary("llama", "default", texts, types, scores, adds_space=model.adds_space)


def _ranked(files: _TokenizerFiles, size: int) -> Vocabulary:
    """Make a SentencePiece vocabulary from merges: an earlier merge has a higher score."""
    texts = [f"[PAD{token}]" for token in range(size)]
    scores, types = [UNUSED_SCORE] * size, [UNUSED] * size
    merges = _merges(files)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    for token, text in files.tokens(size).items():
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[token], types[token] = text, BYTE if is_byte else NORMAL
        scores[token] = -float(ranks.get(text, len(merges)))
    for token, (text, is_special, _) in files.added().items():
        texts[token], types[token] = _added_token(text, is_special)
        scores[token] = ADDED_SCORE
    unknown = files.model.get("unk_token")
    if isinstance(unknown, str) and unknown in texts:
        types[texts.index(unknown)] = UNKNOWN
    return Vocabulary("llama", "default", texts, types, scores, adds_space=files.adds_space())


def _added_token(text: str, is_special: bool) -> tuple[str, int]:
    """Return text and type of an added token."""
    looks_special = text in SPECIAL_TOKENS or any(
        text.startswith(start) and text.endswith(end)
        for start, end in (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    )
    if is_special or looks_special:
        return text, CONTROL
    return text.replace(SPACE, " "), USER_DEFINED


def _merges(files: _TokenizerFiles) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged; older files have them as "left right"."""
    merges = files.model.get("merges")
    path = files.directory / "tokenizer.json"
    if not isinstance(merges, list):
        raise FileFormatError(f"{path} has no list of merges")
    pairs = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise FileFormatError(f"{path} has the merge {brief(merge)}, expected a pair of tokens")
        pairs.append((pair[0], pair[1]))
    return pairs


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError, MemoryError) as error:
        raise FileFormatError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileFormatError(f"{path} contains {brief(value)}, expected a JSON object")
    return value


def _load_tokenizer(path: Path) -> Any:  # noqa: ANN401 - the package may be missing
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise UnsupportedError(f"{path}: vocabularies need the package tokenizers: {install_hint('gguf')}") from error
    try:
        return Tokenizer.from_str(read_text(path, MAX_JSON_BYTES))
    except FileFormatError:
        raise
    except BaseException as error:  # the package raises the class Exception itself, and on bugs a PanicException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileFormatError(f"{path} is not a tokenizer.json: {str(error)[:200]}") from error
