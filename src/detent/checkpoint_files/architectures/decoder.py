"""Rules and metadata that most architectures share: decoders with RMS norm, rope and a gated feed-forward layer."""

from collections.abc import Mapping

from detent.checkpoint_files.architectures.architecture import TensorRule
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import MetadataEntry
from detent.errors import UnsupportedError

__all__ = [
    "attention_rules",
    "check_activation",
    "count_entry",
    "decoder_keys",
    "expert_rules",
    "feed_forward_rules",
    "float_entry",
    "model_rules",
    "norm_rules",
    "rope_keys",
]

UNSCALED = ("default", "llama3")  # llama3 scaling is a tensor of divisors
BLOCK = "model.layers.{block}"


def model_rules(offset: float = 0.0) -> tuple[TensorRule, ...]:
    """Return the rules for tensors outside of blocks; ``offset`` is added to the norm."""
    return (
        TensorRule("token_embd", "model.embed_tokens", ("vocabulary", "hidden")),
        TensorRule("output_norm", "model.norm", ("hidden",), offset=offset),
        TensorRule("output", "lm_head", ("vocabulary", "hidden")),
    )


def norm_rules() -> tuple[TensorRule, ...]:
    """Return the rules for the norms before attention and before the feed-forward layer."""
    return (
        TensorRule("blk.{block}.attn_norm", f"{BLOCK}.input_layernorm", ("hidden",)),
        TensorRule("blk.{block}.ffn_norm", f"{BLOCK}.post_attention_layernorm", ("hidden",)),
    )


def attention_rules(*, is_reordered: bool = False) -> tuple[TensorRule, ...]:
    """Return the rules for queries, keys, values and the output of attention, each with an optional bias."""
    heads, kv_heads = ("heads", "kv_heads") if is_reordered else ("", "")
    return (
        TensorRule("blk.{block}.attn_q", f"{BLOCK}.self_attn.q_proj", ("query", "hidden"), "optional", heads),
        TensorRule("blk.{block}.attn_k", f"{BLOCK}.self_attn.k_proj", ("key", "hidden"), "optional", kv_heads),
        TensorRule("blk.{block}.attn_v", f"{BLOCK}.self_attn.v_proj", ("key", "hidden"), "optional"),
        TensorRule("blk.{block}.attn_output", f"{BLOCK}.self_attn.o_proj", ("hidden", "query"), "optional"),
    )


def feed_forward_rules(
    source: str = f"{BLOCK}.mlp", suffix: str = "", inner: str = "inner", bias: str = "no"
) -> tuple[TensorRule, ...]:
    """Return the rules for a gated feed-forward layer."""
    return (
        TensorRule(f"blk.{{block}}.ffn_gate{suffix}", f"{source}.gate_proj", (inner, "hidden"), bias),
        TensorRule(f"blk.{{block}}.ffn_up{suffix}", f"{source}.up_proj", (inner, "hidden"), bias),
        TensorRule(f"blk.{{block}}.ffn_down{suffix}", f"{source}.down_proj", ("hidden", inner), bias),
    )


def expert_rules(router: str, expert: str, names: tuple[str, str, str], inner: str) -> tuple[TensorRule, ...]:
    """Return the rules for experts: a router, and stacked gate, up and down matrices.

    ``names`` are those of the three matrices of an expert. transformers can also store them in two tensors for all
    experts, whose rows of gate and up follow each other.
    """
    fused = f"{BLOCK}.mlp.experts"
    up, down = ("experts", inner, "hidden"), ("experts", "hidden", inner)
    gate_up = f"{fused}.gate_up_proj"
    return (
        TensorRule("blk.{block}.ffn_gate_inp", router, ("experts", "hidden"), fused=f"{BLOCK}.mlp.gate"),
        TensorRule("blk.{block}.ffn_gate_exps", f"{expert}.{names[0]}", up, fused=gate_up, fused_part=(0, 2)),
        TensorRule("blk.{block}.ffn_up_exps", f"{expert}.{names[1]}", up, fused=gate_up, fused_part=(1, 2)),
        TensorRule("blk.{block}.ffn_down_exps", f"{expert}.{names[2]}", down, fused=f"{fused}.down_proj"),
    )


def count_entry(key: str, value: int) -> MetadataEntry:
    """Make an entry for a count."""
    return MetadataEntry(key, "uint32", value)


def float_entry(key: str, value: float) -> MetadataEntry:
    """Make an entry for a float32."""
    return MetadataEntry(key, "float32", value)


def decoder_keys(name: str, config: ModelConfig, sizes: Mapping[str, int]) -> list[MetadataEntry]:
    """Return the metadata of a decoder with RMS norm and rope, for the architecture ``name``."""
    entries = [
        count_entry(f"{name}.block_count", config.integer("num_hidden_layers")),
        count_entry(f"{name}.context_length", config.integer("max_position_embeddings")),
        count_entry(f"{name}.embedding_length", sizes["hidden"]),
        count_entry(f"{name}.feed_forward_length", sizes["inner"]),
        count_entry(f"{name}.attention.head_count", sizes["heads"]),
        count_entry(f"{name}.attention.head_count_kv", sizes["kv_heads"]),
        float_entry(f"{name}.attention.layer_norm_rms_epsilon", config.number("rms_norm_eps")),
        count_entry(f"{name}.vocab_size", sizes["vocabulary"]),
    ]
    if config.get("head_dim") is not None:
        entries += [
            count_entry(f"{name}.attention.key_length", sizes["head"]),
            count_entry(f"{name}.attention.value_length", sizes["head"]),
        ]
    return entries


def rope_keys(name: str, config: ModelConfig) -> list[MetadataEntry]:
    """Return rope base and rope scaling.

    Raises:
        UnsupportedError: GGUF files cannot express the kind of scaling.
    """
    rope = config.rope()
    entries = []
    if rope.get("rope_theta") is not None:
        entries.append(float_entry(f"{name}.rope.freq_base", rope.number("rope_theta")))
    kind = str(rope.get("rope_type") or "default").lower()
    if kind in UNSCALED:
        return entries
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"config.json: rope_type is {kind!r}, expected default, linear, llama3 or yarn")
    entries += [
        MetadataEntry(f"{name}.rope.scaling.type", "string", kind),
        float_entry(f"{name}.rope.scaling.factor", rope.number("factor")),
    ]
    if kind == "yarn":
        original = rope.integer("original_max_position_embeddings")
        entries.append(count_entry(f"{name}.rope.scaling.original_context_length", original))
        for key, names in (
            ("yarn_attn_factor", ("attention_factor", "attn_factor")),
            ("yarn_beta_fast", ("beta_fast",)),
            ("yarn_beta_slow", ("beta_slow",)),
        ):
            if rope.get(*names) is not None:
                entries.append(float_entry(f"{name}.rope.scaling.{key}", rope.number(*names)))
    return entries


def check_activation(config: ModelConfig, key: str, *names: str) -> None:
    """Raise UnsupportedError unless the activation function is one that llama.cpp computes for the architecture."""
    given = config.get(key)
    if given is not None and given not in names:
        raise UnsupportedError(
            f"config.json: {key} is {given!r}, but llama.cpp computes {names[0]} for {config.classes[0]}"
        )
