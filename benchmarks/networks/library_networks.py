"""Small networks of the package ``transformers``, with random weights: architectures that nobody wrote for detent.

They were added after all rules of detent were final, and no rule was changed after they were measured.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from networks.records import GROUPS, SYMBOLS
from networks.textures import TEXTURES

_PICTURES: Mapping[str, Any] = MappingProxyType({"num_labels": TEXTURES})
_TOKENS: Mapping[str, Any] = MappingProxyType({"num_labels": GROUPS, "vocab_size": SYMBOLS, "pad_token_id": 0})
_BERT: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 128,
        "embedding_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 64,
    }
)
# Options of the configurations; all others have the defaults of the package.
PICTURE_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "MobileNetV1": {"depth_multiplier": 0.5, "image_size": 64},
        "MobileViTV2": {"width_multiplier": 0.5, "image_size": 64},
        "SwiftFormer": {"depths": [2, 2, 2, 2], "embed_dims": [24, 48, 96, 128], "image_size": 64},
        "PvtV2": {
            "image_size": 64,
            "hidden_sizes": [32, 64, 96, 128],
            "depths": [1, 1, 2, 1],
            "num_attention_heads": [1, 2, 3, 4],
        },
        "Segformer": {
            "hidden_sizes": [32, 64, 96, 128],
            "depths": [1, 1, 2, 1],
            "num_attention_heads": [1, 2, 3, 4],
        },
        "Levit": {
            "image_size": 64,
            "hidden_sizes": [64, 96, 128],
            "num_attention_heads": [2, 3, 4],
            "depths": [2, 2, 2],
            "key_dim": [16, 16, 16],
        },
        "FocalNet": {"image_size": 64, "embed_dim": 48, "depths": [1, 1, 2, 1]},
        "Dinov2": {
            "image_size": 64,
            "patch_size": 8,
            "hidden_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
        },
        "TextNet": {},
    }
)
TOKEN_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DistilBert": {"dim": 128, "n_layers": 4, "n_heads": 4, "hidden_dim": 512, "max_position_embeddings": 64},
        "SqueezeBert": _BERT,
        "ConvBert": _BERT,
        "Electra": _BERT,
    }
)


class Scores(nn.Module):
    """A model of the package that returns only its scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of all classes."""
        scores: Tensor = self.model(inputs).logits
        return scores


def picture_classifier(name: str) -> Scores:
    """Build a classifier of textures; ``name`` begins the names of its classes in the package."""
    return _model(name, "ImageClassification", {**_PICTURES, **PICTURE_OPTIONS[name]})


def token_classifier(name: str) -> Scores:
    """Build a classifier of expressions; ``name`` begins the names of its classes in the package."""
    return _model(name, "SequenceClassification", {**_TOKENS, **TOKEN_OPTIONS[name]})


def _model(name: str, task: str, options: Mapping[str, Any]) -> Scores:
    package = import_module("transformers")  # only if it is used, because this takes seconds
    config = getattr(package, f"{name}Config")(**options)
    config._attn_implementation = "eager"  # plain matmuls and Softmax, which every exporter supports
    return Scores(getattr(package, f"{name}For{task}")(config))
