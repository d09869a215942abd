"""phi3: Phi-3 and Phi-4, whose query, key and value weights, and gate and up weights, are one tensor each.

Long contexts scale each rope frequency: the factors are two tensors, and the scale of attention is a metadata entry.
"""

from math import log, sqrt

from detent.checkpoint_files.architectures.architecture import Architecture, TensorRule, block_sizes
from detent.checkpoint_files.architectures.decoder import (
    BLOCK,
    check_activation,
    count_entry,
    decoder_keys,
    float_entry,
    model_rules,
    norm_rules,
)
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import Constant, MetadataEntry, TargetTensor
from detent.errors import FileFormatError, UnsupportedError

__all__ = ["PHI3"]

LONG_ROPE = ("longrope", "su")


def _sizes(config: ModelConfig) -> dict[str, int]:
    sizes = block_sizes(config)
    return {**sizes, "query_key_value": sizes["query"] + 2 * sizes["key"], "gate_and_up": 2 * sizes["inner"]}


def _rotated(config: ModelConfig) -> int:
    """Return the number of elements of a head that rope rotates."""
    share = config.rope().number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
    return int(share * config.head_size)


def _contexts(config: ModelConfig) -> tuple[int, int]:
    """Return the context length, and that before rope scaling."""
    context = config.integer("max_position_embeddings")
    given = config.rope().get("original_max_position_embeddings")
    holder = config if given is None else config.rope()
    return context, holder.integer("original_max_position_embeddings", default=context)


def _metadata(config: ModelConfig) -> list[MetadataEntry]:
    check_activation(config, "hidden_act", "silu")
    context, original = _contexts(config)
    rope = config.rope()
    entries = [
        *decoder_keys("phi3", config, _sizes(config)),
        count_entry("phi3.rope.scaling.original_context_length", original),
        count_entry("phi3.rope.dimension_count", _rotated(config)),
        float_entry("phi3.rope.freq_base", rope.number("rope_theta", default=10000.0)),
        count_entry("phi3.attention.sliding_window", config.integer("sliding_window", default=0, minimum=0)),
    ]
    kind = str(rope.get("rope_type") or "default").lower()
    if kind in LONG_ROPE:
        scale = context / original
        factor = sqrt(1 + log(scale) / log(original)) if scale > 1 else 1.0
        entries.append(float_entry("phi3.rope.scaling.attn_factor", factor))
    elif kind != "default":
        raise UnsupportedError(f"config.json: rope_type is {kind!r}, expected default or longrope")
    return entries


def _rope_factors(config: ModelConfig) -> list[TargetTensor]:
    rope, pairs = config.rope(), _rotated(config) // 2
    if str(rope.get("rope_type") or "default").lower() not in LONG_ROPE:
        return []
    tensors = []
    for kind in ("long", "short"):
        factors = rope.get(f"{kind}_factor")
        if not isinstance(factors, list | tuple) or len(factors) != pairs:
            raise FileFormatError(f"config.json: {kind}_factor of rope must have {pairs} numbers, one per frequency")
        values = tuple(ModelConfig({"factor": each}, ()).number("factor") for each in factors)
        tensors.append(TargetTensor(f"rope_factors_{kind}.weight", (pairs,), (), Constant(values)))
    return tensors


PHI3 = Architecture(
    "phi3",
    ("Phi3ForCausalLM",),
    (
        *model_rules(),
        *norm_rules(),
        TensorRule("blk.{block}.attn_qkv", f"{BLOCK}.self_attn.qkv_proj", ("query_key_value", "hidden")),
        TensorRule("blk.{block}.attn_output", f"{BLOCK}.self_attn.o_proj", ("hidden", "query")),
        TensorRule("blk.{block}.ffn_up", f"{BLOCK}.mlp.gate_up_proj", ("gate_and_up", "hidden")),
        TensorRule("blk.{block}.ffn_down", f"{BLOCK}.mlp.down_proj", ("hidden", "inner")),
    ),
    _sizes,
    _metadata,
    constants=_rope_factors,
)
