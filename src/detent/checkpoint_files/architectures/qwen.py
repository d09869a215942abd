"""qwen2, qwen2moe, qwen3, qwen3moe: Qwen 1.5 to 3, dense and with experts.

Rows are not reordered. Qwen 2 has biases for queries, keys and values; Qwen 3 has norms of queries and keys instead.
Qwen2-MoE adds a shared expert whose output is scaled by a gate. llama.cpp normalizes the weights of the chosen experts
in qwen3moe only; other configurations are rejected. Sliding windows are not part of GGUF files.
"""

from functools import partial

from detent.checkpoint_files.architectures.architecture import Architecture, TensorRule, block_sizes
from detent.checkpoint_files.architectures.decoder import (
    BLOCK,
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
from detent.checkpoint_files.target_model import MetadataEntry
from detent.errors import UnsupportedError

__all__ = ["QWEN2", "QWEN2_MOE", "QWEN3", "QWEN3_MOE"]


def _metadata(config: ModelConfig, name: str) -> list[MetadataEntry]:
    check_activation(config, "hidden_act", "silu")
    return [*decoder_keys(name, config, block_sizes(config)), *rope_keys(name, config)]


def _moe_sizes(config: ModelConfig) -> dict[str, int]:
    return {
        **block_sizes(config),
        "experts": config.integer("num_experts", "num_local_experts"),
        "expert_inner": config.integer("moe_intermediate_size"),
        "shared_inner": config.integer("shared_expert_intermediate_size", default=0, minimum=0),
    }


def _moe_metadata(config: ModelConfig, name: str) -> list[MetadataEntry]:
    normalizes = name == "qwen3moe"
    if config.is_true("norm_topk_prob") is not normalizes:
        raise UnsupportedError(
            f"config.json: norm_topk_prob is {str(not normalizes).lower()}, but llama.cpp "
            f"{'normalizes' if normalizes else 'does not normalize'} the weights of experts in {name} models"
        )
    sizes = _moe_sizes(config)
    entries = [
        *_metadata(config, name),
        count_entry(f"{name}.expert_count", sizes["experts"]),
        count_entry(f"{name}.expert_used_count", config.integer("num_experts_per_tok")),
        count_entry(f"{name}.expert_feed_forward_length", sizes["expert_inner"]),
    ]
    if sizes["shared_inner"]:
        entries.append(count_entry(f"{name}.expert_shared_feed_forward_length", sizes["shared_inner"]))
    return entries


_COMMON = (*model_rules(), *norm_rules(), *attention_rules())
_HEAD_NORMS = (
    TensorRule("blk.{block}.attn_q_norm", f"{BLOCK}.self_attn.q_norm", ("head",)),
    TensorRule("blk.{block}.attn_k_norm", f"{BLOCK}.self_attn.k_norm", ("head",)),
)
_EXPERTS = expert_rules(
    f"{BLOCK}.mlp.gate",
    f"{BLOCK}.mlp.experts.{{expert}}",
    ("gate_proj", "up_proj", "down_proj"),
    "expert_inner",
)
_SHARED_EXPERT = (
    TensorRule("blk.{block}.ffn_gate_inp_shexp", f"{BLOCK}.mlp.shared_expert_gate", ("one", "hidden")),
    *feed_forward_rules(f"{BLOCK}.mlp.shared_expert", "_shexp", "shared_inner"),
)

QWEN2 = Architecture(
    "qwen2",
    ("Qwen2ForCausalLM",),
    (*_COMMON, *feed_forward_rules()),
    block_sizes,
    partial(_metadata, name="qwen2"),
)
QWEN2_MOE = Architecture(
    "qwen2moe",
    ("Qwen2MoeForCausalLM",),
    (*_COMMON, *_EXPERTS, *_SHARED_EXPERT),
    _moe_sizes,
    partial(_moe_metadata, name="qwen2moe"),
)
QWEN3 = Architecture(
    "qwen3",
    ("Qwen3ForCausalLM",),
    (*_COMMON, *_HEAD_NORMS, *feed_forward_rules()),
    block_sizes,
    partial(_metadata, name="qwen3"),
)
QWEN3_MOE = Architecture(
    "qwen3moe",
    ("Qwen3MoeForCausalLM",),
    (*_COMMON, *_HEAD_NORMS, *_EXPERTS),
    _moe_sizes,
    partial(_moe_metadata, name="qwen3moe"),
)
