"""Small models of every architecture, with random weights, made by transformers."""

import warnings
from copy import deepcopy

import numpy as np
import pytest

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.1 * i for i in range(32)],
    "short_factor": [1.0 + 0.05 * i for i in range(32)],
    "original_max_position_embeddings": 128,
}
# Name of a case: class of the configuration, class of the model, arguments of the configuration.
CASES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-rope": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 64}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "mixtral-8": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2-yarn": ("Qwen2Config", "Qwen2ForCausalLM", {"rope_parameters": YARN_ROPE}),
    "qwen2moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 256}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 64, "norm_topk_prob": True}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 64, "query_pre_attn_scalar": 64, "num_hidden_layers": 7, "sliding_window": 16},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "phi3-long": ("Phi3Config", "Phi3ForCausalLM", {"rope_parameters": LONG_ROPE}),
}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64, "n_inner": 256}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
NAMES = (*CASES, "gpt2")


def make_model(name, **options):
    """Return a float32 model with random weights, all of which bfloat16 can represent; norms and biases vary too."""
    transformers = pytest.importorskip("transformers")
    import torch

    config_class, model_class, arguments = CASES.get(name, ("GPT2Config", "GPT2LMHeadModel", GPT2))
    sizes = SIZES if name in CASES else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, config_class)(**{**sizes, **arguments, **options})
        model = getattr(transformers, model_class)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = ("norm" in key or "ln_" in key) and key.endswith("weight")
            center = 1.0 if is_norm and "gemma" not in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            values = center + noise * (0.1 if parameter.ndim == 1 else 0.06)
            parameter.copy_(values.to(torch.bfloat16))
    return model.eval()


def save_model(name, directory, **options):
    """Write a small model to a directory in bfloat16, as transformers does; return the float32 model."""
    model = make_model(name, **options)
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    return model


def float_logits(model, tokens):
    """Return the logits of a model in float32 arithmetic."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(map(int, tokens))])).logits[0].numpy()


def random_tokens(count=40, vocabulary=96):
    return np.random.default_rng(0).integers(3, vocabulary, count)
