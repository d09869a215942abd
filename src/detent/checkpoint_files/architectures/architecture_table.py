"""The table of architectures, and ``gguf_model``, which applies an entry to a checkpoint."""

from collections.abc import Mapping
from types import MappingProxyType

from detent.checkpoint_files.architectures.architecture import Architecture, order_in_file, target_tensors
from detent.checkpoint_files.architectures.gemma import GEMMA2, GEMMA3
from detent.checkpoint_files.architectures.gpt2 import GPT2
from detent.checkpoint_files.architectures.llama import LLAMA, MIXTRAL
from detent.checkpoint_files.architectures.phi3 import PHI3
from detent.checkpoint_files.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import (
    ExpertRows,
    GgufModel,
    MetadataEntry,
    SourceRows,
    TargetTensor,
)
from detent.checkpoint_files.tensor_source import TensorSource
from detent.checkpoint_files.vocabulary import vocabulary_entries
from detent.errors import FileFormatError, SpecError, UnsupportedError, closest

__all__ = ["ARCHITECTURES", "find_architecture", "gguf_model"]

_ENTRIES = (LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, GPT2)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({name: each for each in _ENTRIES for name in each.classes})
_BY_TYPES = ("general.file_type", "general.quantization_version")  # depend on the types that are written
_TOKENIZER = "tokenizer."
_SPLIT = "split."  # keys that describe parts of a file


def find_architecture(config: ModelConfig) -> Architecture:
    """Return the entry of a model class.

    Raises:
        SpecError: a pre-tokenizer for a file without a vocabulary, or without a BPE vocabulary.
        UnsupportedError: no entry; the message names the missing one.
    """
    for name in config.classes:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    name = config.classes[0]
    raise UnsupportedError(
        f"no entry for {name[:100]!r} in detent.checkpoint_files.architectures{closest(name, ARCHITECTURES)} expected "
        f"{', '.join(ARCHITECTURES)}; a new architecture is one more entry"
    )


def gguf_model(source: TensorSource, *, pre_tokenizer: str | None = None, vocabulary: bool = True) -> GgufModel:
    """Describe the GGUF file of a checkpoint: metadata, and every tensor with the source that it is computed from.

    Args:
        source: an opened directory with ``config.json``, or an opened GGUF file, whose content is kept.
        pre_tokenizer: name that llama.cpp has for the pre-tokenizer of a BPE vocabulary; if None, it is found, or kept
            if the source is a GGUF file.
        vocabulary: if False, the file has no vocabulary, and llama.cpp accepts only token ids.

    Raises:
        UnsupportedError: no table entry for the architecture, or an option that llama.cpp does not compute.
        FileFormatError: the configuration is invalid or contradicts the tensors; tensors or the tokenizer are missing.
    """
    if pre_tokenizer is not None and not vocabulary:
        raise SpecError(f"got pre_tokenizer={pre_tokenizer!r} and vocabulary=False, expected only one of them")
    if "general.architecture" in source.metadata:
        return _copied_model(source, pre_tokenizer, vocabulary=vocabulary)
    config = ModelConfig.from_json(source.config)
    architecture = find_architecture(config)
    tensors = target_tensors(architecture, config, source)
    name = source.path.resolve().name if source.path is not None else ""
    metadata = [
        MetadataEntry("general.architecture", "string", architecture.name),
        MetadataEntry("general.type", "string", "model"),
        MetadataEntry("general.name", "string", name or architecture.name),
        *architecture.metadata(config),
    ]
    if not vocabulary:
        metadata.append(MetadataEntry("tokenizer.ggml.model", "string", "no_vocab"))
    elif source.path is None:
        raise FileFormatError("the source has no directory with tokenizer files: pass vocabulary=False")
    else:
        metadata += vocabulary_entries(source.path, config, pre_tokenizer=pre_tokenizer)
    return GgufModel(architecture.name, tuple(metadata), tensors)


def _copied_model(source: TensorSource, pre_tokenizer: str | None, *, vocabulary: bool) -> GgufModel:
    """Describe an opened GGUF file: its own metadata and tensors, with or without its vocabulary."""
    types: Mapping[str, str] = getattr(source, "metadata_types", {})
    missing = [key for key in source.metadata if key not in types]
    if missing:
        raise FileFormatError(f"the types of metadata are unknown, first of {missing[0]!r}: open the file with qc.open")
    metadata = [
        MetadataEntry(key, types[key], value)
        for key, value in source.metadata.items()
        if key not in _BY_TYPES and not key.startswith(_SPLIT)
    ]
    tensors = [_copied_tensor(name, source[name].shape) for name in sorted(source, key=order_in_file)]
    name = source.metadata["general.architecture"]
    if not isinstance(name, str):
        raise FileFormatError(f"general.architecture is {name!r:.60}, expected a string")
    if not vocabulary:
        metadata = _without_vocabulary(metadata, source, name)
    elif pre_tokenizer is not None:
        metadata = _with_pre_tokenizer(metadata, pre_tokenizer)
    return GgufModel(name, tuple(metadata), tuple(tensors))


def _without_vocabulary(metadata: list[MetadataEntry], source: TensorSource, name: str) -> list[MetadataEntry]:
    """Drop the tokenizer; add the size of the vocabulary, which llama.cpp otherwise takes from the tokens."""
    kept = [entry for entry in metadata if not entry.key.startswith(_TOKENIZER)]
    kept.append(MetadataEntry(f"{_TOKENIZER}ggml.model", "string", "no_vocab"))
    embedding, key = source.get("token_embd.weight"), f"{name}.vocab_size"
    if embedding is not None and embedding.shape and all(entry.key != key for entry in kept):
        kept.append(MetadataEntry(key, "uint32", embedding.shape[0]))
    return kept


def _with_pre_tokenizer(metadata: list[MetadataEntry], pre_tokenizer: str) -> list[MetadataEntry]:
    model = next((entry.value for entry in metadata if entry.key == f"{_TOKENIZER}ggml.model"), None)
    if model != "gpt2":
        raise SpecError(
            f"got pre_tokenizer={pre_tokenizer!r}, but the GGUF file has the vocabulary {model!r:.60}, and only "
            "byte-level BPE ('gpt2') has pre-tokenizers: omit it"
        )
    key = f"{_TOKENIZER}ggml.pre"
    return [*(entry for entry in metadata if entry.key != key), MetadataEntry(key, "string", pre_tokenizer)]


def _copied_tensor(name: str, shape: tuple[int, ...]) -> TargetTensor:
    if len(shape) > 3:
        raise UnsupportedError(f"tensor {name[:100]!r} has {len(shape)} axes, expected at most 3")
    layout = ExpertRows(0, shape[1]) if len(shape) == 3 else SourceRows()
    return TargetTensor(name, shape, (name,), layout)
