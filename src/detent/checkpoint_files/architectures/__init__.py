"""Architectures of language models: how a checkpoint of transformers becomes a GGUF file.

``gguf_model(source)`` returns the metadata of the file and its tensors, each with its sources and its layout. An
architecture is one table entry (``Architecture``) in a module of this package, and its name in ``architecture_table``.
"""

from detent.checkpoint_files.architectures.architecture import Architecture, TensorRule
from detent.checkpoint_files.architectures.architecture_table import ARCHITECTURES, find_architecture, gguf_model
from detent.checkpoint_files.target_model import GgufModel, MetadataEntry, TargetTensor

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "GgufModel",
    "MetadataEntry",
    "TargetTensor",
    "TensorRule",
    "find_architecture",
    "gguf_model",
]
