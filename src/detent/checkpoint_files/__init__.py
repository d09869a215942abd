"""Files of language-model checkpoints, below the frontends: safetensors directories, GGUF files, and what is in them.

``tensor_source`` is the interface that all readers share: a lazy mapping of names to tensors.
"""

from detent.checkpoint_files.tensor_source import ArrayTensor, SourceTensor, StoredTensor, TensorSource

__all__ = ["ArrayTensor", "SourceTensor", "StoredTensor", "TensorSource"]
