"""gpt2: GPT-2, whose linear layers are stored as (inputs, outputs) and are transposed."""

from detent.checkpoint_files.architectures.architecture import Architecture, TensorRule
from detent.checkpoint_files.architectures.decoder import check_activation, count_entry, float_entry
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import MetadataEntry
from detent.errors import UnsupportedError

__all__ = ["GPT2"]

_BLOCK = "transformer.h.{block}"


def _sizes(config: ModelConfig) -> dict[str, int]:
    hidden = config.integer("n_embd")
    return {
        "vocabulary": config.integer("vocab_size"),
        "hidden": hidden,
        "inner": config.integer("n_inner", default=4 * hidden),
        "query_key_value": 3 * hidden,
        "context": config.integer("n_positions", "n_ctx"),
    }


def _metadata(config: ModelConfig) -> list[MetadataEntry]:
    check_activation(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    if config.is_true("scale_attn_by_inverse_layer_idx"):
        raise UnsupportedError("config.json: scale_attn_by_inverse_layer_idx is true, which llama.cpp does not compute")
    sizes = _sizes(config)
    return [
        count_entry("gpt2.block_count", config.integer("n_layer")),
        count_entry("gpt2.context_length", sizes["context"]),
        count_entry("gpt2.embedding_length", sizes["hidden"]),
        count_entry("gpt2.feed_forward_length", sizes["inner"]),
        count_entry("gpt2.attention.head_count", config.integer("n_head")),
        float_entry("gpt2.attention.layer_norm_epsilon", config.number("layer_norm_epsilon", default=1e-5)),
        count_entry("gpt2.vocab_size", sizes["vocabulary"]),
    ]


def _linear(target: str, source: str, rows: str, columns: str) -> TensorRule:
    return TensorRule(f"blk.{{block}}.{target}", f"{_BLOCK}.{source}", (rows, columns), "yes", is_transposed=True)


GPT2 = Architecture(
    "gpt2",
    ("GPT2LMHeadModel",),
    (
        TensorRule("token_embd", "transformer.wte", ("vocabulary", "hidden")),
        TensorRule("position_embd", "transformer.wpe", ("context", "hidden")),
        TensorRule("output_norm", "transformer.ln_f", ("hidden",), "yes"),
        TensorRule("output", "lm_head", ("vocabulary", "hidden"), is_optional=True),
        TensorRule("blk.{block}.attn_norm", f"{_BLOCK}.ln_1", ("hidden",), "yes"),
        TensorRule("blk.{block}.ffn_norm", f"{_BLOCK}.ln_2", ("hidden",), "yes"),
        _linear("attn_qkv", "attn.c_attn", "query_key_value", "hidden"),
        _linear("attn_output", "attn.c_proj", "hidden", "hidden"),
        _linear("ffn_up", "mlp.c_fc", "inner", "hidden"),
        _linear("ffn_down", "mlp.c_proj", "hidden", "inner"),
    ),
    _sizes,
    _metadata,
    unused=(".attn.bias", ".attn.masked_bias"),
    prefixes=(("transformer.", ""),),
)
