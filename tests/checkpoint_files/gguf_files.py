"""Writes GGUF files for tests: a model, types by tensor, and the bytes of detent's block formats."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

import detent as dt
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.checkpoint_files.mixtures import file_metadata
from detent.checkpoint_files.safetensors_files import open_safetensors
from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource

ELEMENTS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def open_model(directory):
    return open_safetensors(Path(directory))


def tensor_bytes(tensor, source, type_name, importance=None):
    """Return the bytes of a tensor; experts are quantized one by one."""
    rows = tensor.rows(source)
    if type_name in ELEMENTS:
        return rows.astype(ELEMENTS[type_name]).tobytes()
    weights = None if importance is None else importance.weights(tensor.name, tensor.shape)
    if weights is None:
        return dt.quantize(rows, type_name.lower(), scales="keep").packed.tobytes()
    parts = np.split(rows, len(weights))
    pairs = zip(parts, weights, strict=True)
    return b"".join(
        dt.quantize(part, type_name.lower(), importance=each, scales="keep").packed.tobytes() for part, each in pairs
    )


def write_gguf(path, model, source, choice, importance=None):
    """Write a file; return the bytes of its tensors by name."""
    entries = [*model.metadata, *file_metadata(choice.mixture)]
    layout = gguf_layout(entries, [(tensor.name, tensor.shape, choice.types[tensor.name]) for tensor in model.tensors])
    data = {
        tensor.name: tensor_bytes(tensor, source, choice.types[tensor.name], importance) for tensor in model.tensors
    }
    with Path(path).open("wb") as file:
        file.write(layout.header)
        for placed in layout.tensors:
            file.seek(placed.offset)
            file.write(data[placed.name])
        file.truncate(layout.nbytes)
    return data


def llama_config(**changes):
    """Return the config.json of a small llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        **changes,
    }


def llama_arrays(seed=0):
    """Return the arrays of the model that ``llama_config`` describes."""
    shapes = {"model.embed_tokens": (10, 8), "model.norm": (8,), "lm_head": (10, 8)}
    for block in range(2):
        parts = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
        shapes |= {f"model.layers.{block}.self_attn.{name}": shape for name, shape in parts.items()}
        parts = {"gate_proj": (16, 8), "up_proj": (16, 8), "down_proj": (8, 16)}
        shapes |= {f"model.layers.{block}.mlp.{name}": shape for name, shape in parts.items()}
        shapes |= {f"model.layers.{block}.{name}_layernorm": (8,) for name in ("input", "post_attention")}
    rng = np.random.default_rng(seed)
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_source(config=None, arrays=None, path=None):
    arrays = llama_arrays() if arrays is None else arrays
    config = llama_config() if config is None else config
    return TensorSource([ArrayTensor(name, array) for name, array in arrays.items()], config=config, path=path)


def read_json(path):
    return json.loads(Path(path).read_text())
