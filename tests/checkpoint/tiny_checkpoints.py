"""Small checkpoints of random weights, in the layout of Hugging Face."""

import json

import ml_dtypes
import numpy as np

HIDDEN, FEED_FORWARD, VOCABULARY, HEADS = 256, 512, 96, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}


def llama_tensors(config=CONFIG, seed=0, dtype=ml_dtypes.bfloat16):
    generator = np.random.default_rng(seed)
    hidden, inner, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))

    def weight(*shape):
        return (generator.standard_t(4, size=shape) * 0.02).astype(np.float32).astype(dtype)

    tensors = {"model.embed_tokens.weight": weight(vocabulary, hidden), "model.norm.weight": weight(hidden) + dtype(1)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight(hidden, hidden)
        tensors[f"{prefix}mlp.gate_proj.weight"] = weight(inner, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = weight(inner, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = weight(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = weight(hidden) + dtype(1)
    tensors["lm_head.weight"] = weight(vocabulary, hidden)
    return tensors


def mixtral_tensors(experts=4, seed=0):
    """Return the tensors of a Mixtral: the feed-forward layer of each expert instead of one."""
    tensors = {name: each for name, each in llama_tensors(seed=seed).items() if ".mlp." not in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        tensors[f"{prefix}gate.weight"] = llama_tensors(seed=seed)["lm_head.weight"][:experts]
        for expert in range(experts):
            matrices = llama_tensors(seed=seed + expert + 1)
            for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                name = f"model.layers.{layer}.mlp.{theirs}_proj.weight"
                tensors[f"{prefix}experts.{expert}.{ours}.weight"] = matrices[name]
    return tensors


def mixtral_config(experts=4):
    named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return CONFIG | named | {"num_local_experts": experts, "num_experts_per_tok": 2}


def write_shard(path, tensors):
    header, position = {}, 0
    for name, array in tensors.items():
        span = [position, position + array.nbytes]
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        position = span[1]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def write_checkpoint(directory, tensors=None, config=CONFIG, shards=2):
    """Write config.json, shards and their index; return the directory."""
    directory.mkdir(exist_ok=True)
    tensors = llama_tensors(config) if tensors is None else tensors
    names = list(tensors)
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        write_shard(directory / file, part)
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
