"""Architectures: names, shapes and metadata of GGUF files, and the errors for checkpoints that do not fit."""

import numpy as np
import pytest

from detent.checkpoint_files.architectures import ARCHITECTURES, gguf_model
from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource
from detent.errors import FileFormatError, SpecError, UnsupportedError
from tests.checkpoint_files.gguf_files import llama_arrays, llama_config, llama_source


def described(**changes):
    return gguf_model(llama_source(llama_config(**changes)), vocabulary=False)


def test_a_llama_has_the_tensors_of_gguf_files_in_the_order_of_llama_cpp():
    model = described()
    names = [tensor.name for tensor in model.tensors]
    assert names[:3] == ["output.weight", "output_norm.weight", "token_embd.weight"]
    assert names[3:12] == [
        f"blk.0.{name}.weight"
        for name in (
            "attn_k",
            "attn_norm",
            "attn_output",
            "attn_q",
            "attn_v",
            "ffn_down",
            "ffn_gate",
            "ffn_norm",
            "ffn_up",
        )
    ]
    assert model.architecture == model.value("general.architecture") == "llama"
    assert model.value("llama.attention.head_count_kv") == 1
    assert model.value("llama.rope.dimension_count") == 4
    assert model.value("llama.rope.freq_base") == 10000.0
    assert model.value("tokenizer.ggml.model") == "no_vocab"


def test_queries_and_keys_of_a_llama_are_reordered_and_values_are_not():
    model, source = described(), llama_source()
    tensors = {tensor.name: tensor.rows(source) for tensor in model.tensors}
    arrays = llama_arrays()
    queries = arrays["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(tensors["blk.1.attn_q.weight"], queries[[0, 2, 1, 3, 4, 6, 5, 7]])
    assert np.array_equal(tensors["blk.1.attn_v.weight"], arrays["model.layers.1.self_attn.v_proj.weight"])


def test_a_tied_model_has_no_output_matrix():
    arrays = llama_arrays()
    del arrays["lm_head.weight"]
    source = llama_source(llama_config(tie_word_embeddings=True), arrays)
    assert "output.weight" not in {tensor.name for tensor in gguf_model(source, vocabulary=False).tensors}
    kept = llama_source(llama_config(tie_word_embeddings=True))  # transformers ignores the matrix, too
    assert "output.weight" not in {tensor.name for tensor in gguf_model(kept, vocabulary=False).tensors}
    with pytest.raises(FileFormatError, match=r"no tensor 'lm_head\.weight'"):
        gguf_model(llama_source(arrays=arrays), vocabulary=False)


def test_llama3_scaling_of_rope_is_a_tensor_of_divisors():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = described(head_dim=4, rope_scaling={**rope, "original_max_position_embeddings": 64})
    (divisors,) = [tensor for tensor in model.tensors if tensor.name == "rope_freqs.weight"]
    values = divisors.rows(TensorSource([]))[0]
    assert values[0] == 1.0  # wavelength 6.28, below 64 / 4
    assert values[1] == 8.0  # wavelength 628, above 64
    with pytest.raises(FileFormatError, match="low factor below the high one"):
        described(rope_scaling={**rope, "low_freq_factor": 4.0})


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"llama.rope.scaling.type": "linear"}),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 16},
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"llama.rope.freq_base": 5e5}),
        ({"head_dim": 4}, {"llama.attention.key_length": 4, "llama.attention.value_length": 4}),
    ],
)
def test_options_of_the_configuration_become_metadata(changes, keys):
    model = described(**changes)
    assert {key: model.value(key) for key in keys} == keys


def test_experts_in_one_tensor_equal_experts_in_many():
    config = llama_config(architectures=["MixtralForCausalLM"], num_local_experts=3, num_experts_per_tok=2)
    arrays = {name: array for name, array in llama_arrays().items() if ".mlp." not in name}
    rng = np.random.default_rng(1)
    separate, fused = dict(arrays), dict(arrays)
    for block in range(2):
        gate, up = rng.normal(size=(2, 3, 16, 8)).astype(np.float32)
        down = rng.normal(size=(3, 8, 16)).astype(np.float32)
        router = rng.normal(size=(3, 8)).astype(np.float32)
        moe = f"model.layers.{block}.block_sparse_moe"
        separate[f"{moe}.gate.weight"] = fused[f"{moe}.gate.weight"] = router
        for expert in range(3):
            for name, stack in (("w1", gate), ("w2", down), ("w3", up)):
                separate[f"{moe}.experts.{expert}.{name}.weight"] = stack[expert]
        fused[f"model.layers.{block}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"model.layers.{block}.mlp.experts.down_proj"] = down
    sources = [llama_source(config, arrays) for arrays in (separate, fused)]
    models = [gguf_model(source, vocabulary=False) for source in sources]
    for one, other in zip(models[0].tensors, models[1].tensors, strict=True):
        assert (one.name, one.shape) == (other.name, other.shape)
        assert np.array_equal(one.rows(sources[0]), other.rows(sources[1]))
    assert models[0].expert_count == 3
    assert {tensor.name: tensor.shape for tensor in models[0].tensors}["blk.0.ffn_down_exps.weight"] == (3, 8, 16)


def test_an_unknown_architecture_names_the_missing_entry():
    with pytest.raises(UnsupportedError, match=r"no entry for 'LamaForCausalLM'.*did you mean 'LlamaForCausalLM'"):
        described(architectures=["LamaForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures is None"),
        ({"architectures": []}, "expected a list of names"),
        ({"hidden_size": "8"}, "hidden_size is '8', expected an integer"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 3}, "not a multiple of num_attention_heads 3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"intermediate_size": 32}, "has shape \\(16, 8\\), but config.json says \\(32, 8\\)"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, "no rule for 9 tensors: 'model.layers.1"),
        ({"head_dim": 3}, "heads have 3 elements, expected an even number"),
        ({"head_dim": 1 << 30, "rope_scaling": {"type": "llama3"}}, "has shape .*, but config.json says"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 30},
            "no tensor 'model.layers.0.block_sparse_moe.gate.weight'",
        ),
        ({"vocab_size": 11}, "says \\(11, 8\\)"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x'"),
    ],
)
def test_a_configuration_that_is_invalid_or_contradicts_the_tensors_is_rejected(changes, message):
    with pytest.raises(FileFormatError, match=message):
        described(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but llama.cpp computes silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_rejected(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        described(**changes)


def test_a_source_without_configuration_or_directory_is_rejected():
    with pytest.raises(FileFormatError, match=r"no config\.json"):
        gguf_model(TensorSource([]))
    with pytest.raises(FileFormatError, match="vocabulary=False"):
        gguf_model(llama_source())


def test_tensors_without_a_rule_are_named():
    arrays = {**llama_arrays(), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    gguf_model(llama_source(arrays=arrays), vocabulary=False)
    arrays["model.layers.0.self_attn.q_proj.qzeros"] = np.ones(2, np.int32)
    with pytest.raises(FileFormatError, match="no rule for 1 tensor: 'model"):
        gguf_model(llama_source(arrays=arrays), vocabulary=False)


def test_the_table_has_the_promised_architectures():
    names = {architecture.name for architecture in ARCHITECTURES.values()}
    assert names == {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2"}
    assert {"MistralForCausalLM", "MixtralForCausalLM"} <= set(ARCHITECTURES)


def gguf_source(tokenizer, *, has_size=False):
    """Return an opened GGUF file in memory, with a vocabulary of two tokens."""
    entries = {
        "general.architecture": ("string", "gemma3"),
        "tokenizer.ggml.model": ("string", tokenizer),
        "tokenizer.ggml.pre": ("string", "default"),
        "tokenizer.ggml.tokens": ("array:string", ["a", "b"]),
        "tokenizer.chat_template": ("string", "{{ x }}"),
    }
    entries |= {"gemma3.vocab_size": ("uint32", 7)} if has_size else {}
    return TensorSource(
        [ArrayTensor("token_embd.weight", np.ones((2, 32), np.float32))],
        metadata={key: value for key, (_, value) in entries.items()},
        metadata_types={key: kind for key, (kind, _) in entries.items()},
    )


@pytest.mark.parametrize(("has_size", "size"), [(False, 2), (True, 7)])
def test_the_vocabulary_of_a_gguf_file_can_be_left_out(has_size, size):
    source = gguf_source("llama", has_size=has_size)
    model = gguf_model(source, vocabulary=False)
    assert {entry.key for entry in model.metadata} == {
        "general.architecture",
        "tokenizer.ggml.model",
        "gemma3.vocab_size",
    }
    assert (model.value("tokenizer.ggml.model"), model.value("{arch}.vocab_size")) == ("no_vocab", size)
    assert {entry.key for entry in gguf_model(source).metadata} == set(source.metadata)


def test_the_pre_tokenizer_of_a_gguf_file_can_be_replaced():
    model = gguf_model(gguf_source("gpt2"), pre_tokenizer="qwen2")
    assert [entry.value for entry in model.metadata if entry.key == "tokenizer.ggml.pre"] == ["qwen2"]
    with pytest.raises(
        SpecError, match=r"pre_tokenizer='qwen2', but the GGUF file has the vocabulary 'llama'.*omit it"
    ):
        gguf_model(gguf_source("llama"), pre_tokenizer="qwen2")


def test_a_pre_tokenizer_needs_a_vocabulary():
    with pytest.raises(SpecError, match="expected only one of them"):
        gguf_model(llama_source(llama_config()), pre_tokenizer="gpt-2", vocabulary=False)
