"""gemma2, gemma3: Gemma 2 and 3, the text part of models with images included.

Norms are stored with an offset of 1, because the models multiply by 1 + weight. llama.cpp derives the scale of
attention from the size of the model, and the layers with a sliding window from their number; configurations that differ
are rejected.
"""

from detent.checkpoint_files.architectures.architecture import Architecture, TensorRule, block_sizes
from detent.checkpoint_files.architectures.decoder import (
    BLOCK,
    attention_rules,
    check_activation,
    count_entry,
    decoder_keys,
    feed_forward_rules,
    float_entry,
    model_rules,
    rope_keys,
)
from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import MetadataEntry
from detent.errors import UnsupportedError

__all__ = ["GEMMA2", "GEMMA3"]

ACTIVATION = "gelu_pytorch_tanh"
BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}  # models of 27B scale attention by the width of the model
FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6}  # blocks; the last one of each group attends to all tokens


def _check(config: ModelConfig, name: str) -> None:
    """Raise UnsupportedError for configurations that llama.cpp would compute differently."""
    check_activation(config, "hidden_activation", ACTIVATION)
    sizes, blocks = block_sizes(config), config.integer("num_hidden_layers")
    scalar = config.number("query_pre_attn_scalar", default=sizes["head"])
    expected = sizes["hidden"] / sizes["heads"] if blocks == BLOCKS_OF_27B[name] else sizes["head"]
    if scalar != expected:
        raise UnsupportedError(
            f"config.json: query_pre_attn_scalar is {scalar:g}, but llama.cpp computes attention with {expected:g} for "
            f"{name} models of {blocks} blocks"
        )
    every = FULL_ATTENTION_EVERY[name]
    kinds = ["full_attention" if (block + 1) % every == 0 else "sliding_attention" for block in range(blocks)]
    given = config.get("layer_types")
    if given is not None and given != kinds:
        raise UnsupportedError(
            f"config.json: layer_types differ from those of llama.cpp, where every block but each {every}th has a "
            "sliding window"
        )


def _gemma2_metadata(config: ModelConfig) -> list[MetadataEntry]:
    _check(config, "gemma2")
    return [
        *_with_head_sizes("gemma2", config),
        *rope_keys("gemma2", config),
        float_entry("gemma2.attn_logit_softcapping", config.number("attn_logit_softcapping", default=50.0)),
        float_entry("gemma2.final_logit_softcapping", config.number("final_logit_softcapping", default=30.0)),
        count_entry("gemma2.attention.sliding_window", config.integer("sliding_window", default=4096)),
    ]


def _gemma3_metadata(config: ModelConfig) -> list[MetadataEntry]:
    _check(config, "gemma3")
    entries = [*_with_head_sizes("gemma3", config), *rope_keys("gemma3", config)]
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("config.json: attn_logit_softcapping is set, but llama.cpp ignores it for gemma3")
    if config.get("final_logit_softcapping") is not None:
        entries.append(float_entry("gemma3.final_logit_softcapping", config.number("final_logit_softcapping")))
    local = config.rope("sliding_attention")
    entries += [
        count_entry("gemma3.attention.sliding_window", config.integer("sliding_window", default=4096)),
        float_entry("gemma3.rope.freq_base_swa", local.number("rope_theta", default=10000.0)),
    ]
    return entries


def _with_head_sizes(name: str, config: ModelConfig) -> list[MetadataEntry]:
    """Return the shared entries; the sizes of heads are always present, because llama.cpp's defaults differ."""
    sizes = block_sizes(config)
    entries = decoder_keys(name, config, sizes)
    keys = {entry.key for entry in entries}
    for key in (f"{name}.attention.key_length", f"{name}.attention.value_length"):
        if key not in keys:
            entries.append(count_entry(key, sizes["head"]))
    return entries


_NORMS = (
    ("attn_norm", "input_layernorm", "hidden"),
    ("post_attention_norm", "post_attention_layernorm", "hidden"),
    ("ffn_norm", "pre_feedforward_layernorm", "hidden"),
    ("post_ffw_norm", "post_feedforward_layernorm", "hidden"),
)
_HEAD_NORMS = (("attn_q_norm", "self_attn.q_norm", "head"), ("attn_k_norm", "self_attn.k_norm", "head"))


def _norm_rules(norms: tuple[tuple[str, str, str], ...]) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(f"blk.{{block}}.{target}", f"{BLOCK}.{source}", (size,), offset=1.0)
        for target, source, size in norms
    )


_COMMON = (*model_rules(offset=1.0), *_norm_rules(_NORMS), *attention_rules(), *feed_forward_rules())

GEMMA2 = Architecture(
    "gemma2",
    ("Gemma2ForCausalLM",),
    _COMMON,
    block_sizes,
    _gemma2_metadata,
    drops_output=True,
)
GEMMA3 = Architecture(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    (*_COMMON, *_norm_rules(_HEAD_NORMS)),
    block_sizes,
    _gemma3_metadata,
    unused=(".rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector."),
    prefixes=(("model.", "language_model.model."), ("model.", "model.language_model.")),
    drops_output=True,
)
