"""llama: LLaMA 1 to 3, Mistral and Mixtral.

Rows of query and key weights are reordered, because llama.cpp rotates neighboring rows. Llama 3 scaling of rope is a
tensor with one divisor per frequency: 1 for short wavelengths, ``factor`` for long ones, and between them
1 / ((1 - s) / factor + s), where s = (context / wavelength - low) / (high - low). Sliding windows of Mistral are not
part of GGUF files: llama.cpp attends to all tokens.
"""

from math import pi

import numpy as np

from detent.checkpoint_files.architectures.architecture import Architecture, block_sizes
from detent.checkpoint_files.architectures.decoder import (
    attention_rules,
    check_activation,
    count_entry,
    decoder_keys,
    expert_rules,
    feed_forward_rules,
    model_rules,
    norm_rules,
    rope_keys,
)
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import Constant, MetadataEntry, TargetTensor
from detent.errors import FileFormatError

__all__ = ["LLAMA", "MIXTRAL"]


def _metadata(config: ModelConfig) -> list[MetadataEntry]:
    check_activation(config, "hidden_act", "silu")
    sizes = block_sizes(config)
    return [
        *decoder_keys("llama", config, sizes),
        *rope_keys("llama", config),
        count_entry("llama.rope.dimension_count", sizes["head"]),
    ]


def _mixtral_sizes(config: ModelConfig) -> dict[str, int]:
    return {**block_sizes(config), "experts": config.integer("num_local_experts")}


def _mixtral_metadata(config: ModelConfig) -> list[MetadataEntry]:
    return [
        *_metadata(config),
        count_entry("llama.expert_count", config.integer("num_local_experts")),
        count_entry("llama.expert_used_count", config.integer("num_experts_per_tok")),
    ]


def _rope_divisors(config: ModelConfig) -> list[TargetTensor]:
    """Return the tensor of llama3 rope scaling, if the configuration has it."""
    rope = config.rope()
    if str(rope.get("rope_type") or "").lower() != "llama3":
        return []
    head = config.head_size
    base, factor = rope.number("rope_theta", default=10000.0), rope.number("factor", default=8.0)
    low, high = rope.number("low_freq_factor", default=1.0), rope.number("high_freq_factor", default=4.0)
    context = rope.number("original_max_position_embeddings", default=8192)
    if not (base > 0 and factor > 0 and 0 < low < high and context > 0):
        raise FileFormatError(
            f"config.json: rope has theta {base}, factor {factor}, low_freq_factor {low}, high_freq_factor {high} and "
            f"original context {context}, expected positive numbers, and a low factor below the high one"
        )
    divisors = []
    for frequency in 1.0 / np.float32(base) ** (np.arange(0, head, 2, dtype=np.float32) / np.float32(head)):
        wavelength = 2 * pi / float(frequency)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            share = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - share) / factor + share))
    return [TargetTensor("rope_freqs.weight", (head // 2,), (), Constant(tuple(divisors)))]


_ATTENTION = (*model_rules(), *norm_rules(), *attention_rules(is_reordered=True))

LLAMA = Architecture(
    "llama",
    ("LlamaForCausalLM", "MistralForCausalLM"),
    (*_ATTENTION, *feed_forward_rules(bias="optional")),
    block_sizes,
    _metadata,
    constants=_rope_divisors,
)

_MOE = "model.layers.{block}.block_sparse_moe"

MIXTRAL = Architecture(
    "llama",
    ("MixtralForCausalLM",),
    (*_ATTENTION, *expert_rules(f"{_MOE}.gate", f"{_MOE}.experts.{{expert}}", ("w1", "w3", "w2"), "inner")),
    _mixtral_sizes,
    _mixtral_metadata,
)
