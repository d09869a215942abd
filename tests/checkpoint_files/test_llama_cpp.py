"""llama.cpp as referee: architectures, mixtures and logits. Runs with ``make test-llama``; skipped otherwise."""

import gguf
import numpy as np
import pytest

import detent.checkpoint as qc
from detent.checkpoint_files.architectures import gguf_model
from detent.checkpoint_files.importance_files import ColumnSums, Importance
from detent.checkpoint_files.mixtures import FILE_TYPES, choose_types, is_float_tensor
from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource
from tests.checkpoint_files.gguf_files import llama_config, open_model, write_gguf
from tests.checkpoint_files.small_language_models import NAMES, float_logits, random_tokens, save_model

pytestmark = pytest.mark.slow
QUANTIZED = [name for name in FILE_TYPES if name not in ("F32", "F16", "BF16", "Q2_K_S", "MXFP4_MOE")]


def tensors_of(path):
    """Return type and bytes of every tensor of a GGUF file, as the gguf package reads it."""
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in gguf.GGUFReader(path).tensors}


def differing(path, reference):
    ours, theirs = tensors_of(path), tensors_of(reference)
    assert list(ours) == list(theirs)
    return {name: (ours[name][0], theirs[name][0]) for name in ours if ours[name] != theirs[name]}


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_computes_what_transformers_computes(name, tmp_path, llama_cpp):
    model = save_model(name, tmp_path)
    source = open_model(tmp_path)
    target = gguf_model(source, vocabulary=False)
    write_gguf(tmp_path / "f32.gguf", target, source, choose_types(target, "F32"))
    tokens = random_tokens()
    expected, logits = float_logits(model, tokens), llama_cpp.logits(tmp_path / "f32.gguf", tokens)
    assert np.abs(logits - expected).max() < 2e-3 * expected.std()
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_equals_that_of_llama_cpp_tensor_by_tensor_and_its_logits_to_the_bit(name, tmp_path, llama_cpp):
    save_model(name, tmp_path)
    source = open_model(tmp_path)
    target = gguf_model(source, vocabulary=False)
    write_gguf(tmp_path / "bf16.gguf", target, source, choose_types(target, "BF16"))
    for mixture in ("Q4_K_M", "Q2_K"):
        write_gguf(tmp_path / "ours.gguf", target, source, choose_types(target, mixture))
        llama_cpp.quantize(tmp_path / "bf16.gguf", tmp_path / "theirs.gguf", FILE_TYPES[mixture])
        assert differing(tmp_path / "ours.gguf", tmp_path / "theirs.gguf") == {}
        ours, theirs = (llama_cpp.logits(tmp_path / f"{each}.gguf", random_tokens()) for each in ("ours", "theirs"))
        assert ours.tobytes() == theirs.tobytes()


def deep_llama(blocks, *, columns=256, heads=(8, 2), architecture="LlamaForCausalLM", seed=0):
    """Return a source with many narrow blocks; types depend on the number of blocks, not on the number of rows."""
    head = columns // heads[0]
    config = llama_config(
        architectures=[architecture],
        hidden_size=columns,
        intermediate_size=columns,
        num_hidden_layers=blocks,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=32,
    )
    shapes = {"model.embed_tokens": (32, columns), "model.norm": (columns,), "lm_head": (32, columns)}
    for block in range(blocks):
        layer = f"model.layers.{block}"
        shapes |= {f"{layer}.{name}_layernorm": (columns,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (columns, columns) for name in ("q", "o")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (heads[1] * head, columns) for name in ("k", "v")}
        shapes |= {f"{layer}.mlp.{name}_proj": (columns, columns) for name in ("gate", "up", "down")}
    rng = np.random.default_rng(seed)
    pool = rng.normal(size=1 << 17).astype(np.float32)
    arrays = {f"{name}.weight": np.resize(np.roll(pool, len(name)), shape) for name, shape in shapes.items()}
    return TensorSource([ArrayTensor(name, array) for name, array in arrays.items()], config=config)


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (17, {}),
        (17, {"heads": (8, 8)}),
        (9, {"columns": 320, "heads": (4, 1)}),
        (80, {"columns": 64, "heads": (8, 1)}),
        (80, {"columns": 64, "heads": (8, 1), "architecture": "Qwen2ForCausalLM"}),
    ],
    ids=["17 blocks", "no shared heads", "rows of 320", "80 blocks", "80 blocks of qwen2"],
)
def test_all_mixtures_have_the_types_of_llama_cpp(blocks, options, tmp_path, llama_cpp):
    source = deep_llama(blocks, **options)
    target = gguf_model(source, vocabulary=False)
    write_gguf(tmp_path / "bf16.gguf", target, source, choose_types(target, "BF16"))
    for mixture in QUANTIZED:
        llama_cpp.quantize(tmp_path / "bf16.gguf", tmp_path / "theirs.gguf", FILE_TYPES[mixture])
        theirs = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "theirs.gguf").tensors}
        assert choose_types(target, mixture).types == theirs, mixture


def test_quantize_of_a_directory_and_of_a_gguf_file_equal_llama_cpp(tmp_path, llama_cpp):
    save_model("qwen2moe", tmp_path)
    importance = random_importance(gguf_model(open_model(tmp_path), vocabulary=False))
    importance.save(tmp_path / "imatrix.gguf")
    qc.quantize(tmp_path, tmp_path / "bf16.gguf", to="gguf:BF16", vocabulary=False)
    llama_cpp.quantize(tmp_path / "bf16.gguf", tmp_path / "theirs.gguf", FILE_TYPES["Q3_K_M"], importance)
    for number, source in enumerate((tmp_path, tmp_path / "bf16.gguf")):
        path = tmp_path / f"ours-{number}.gguf"
        qc.quantize(source, path, to="gguf:Q3_K_M", importance=tmp_path / "imatrix.gguf", vocabulary=False)
        assert differing(path, tmp_path / "theirs.gguf") == {}
    assert llama_cpp.logits(path, random_tokens()).shape == (40, 96)


def random_importance(target):
    """Return importance for all quantized weights of blocks; one expert got no tokens."""
    rng = np.random.default_rng(1)
    columns = {}
    for tensor in target.tensors:
        if tensor.name.startswith("blk.") and not is_float_tensor(tensor):
            matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
            counts = rng.integers(1, 100, matrices).astype(np.float64)
            counts[-1] = counts[-1] if matrices == 1 else 0
            columns[tensor.name] = ColumnSums(rng.gamma(0.5, 10, (matrices, tensor.columns)), counts)
    return Importance(columns)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_mixtures_with_importance_equal_those_of_llama_cpp(name, tmp_path, llama_cpp):
    save_model(name, tmp_path)
    source = open_model(tmp_path)
    target = gguf_model(source, vocabulary=False)
    importance = random_importance(target)
    write_gguf(tmp_path / "bf16.gguf", target, source, choose_types(target, "BF16"))
    for mixture in ("Q4_K_M", "Q2_K_S", "Q4_0"):
        choice = choose_types(target, mixture, importance=True)
        write_gguf(tmp_path / "ours.gguf", target, source, choice, importance)
        llama_cpp.quantize(tmp_path / "bf16.gguf", tmp_path / "theirs.gguf", FILE_TYPES[mixture], importance)
        assert differing(tmp_path / "ours.gguf", tmp_path / "theirs.gguf") == {}


def test_all_mixtures_with_importance_have_the_types_of_llama_cpp(tmp_path, llama_cpp):
    source = deep_llama(17)
    target = gguf_model(source, vocabulary=False)
    write_gguf(tmp_path / "bf16.gguf", target, source, choose_types(target, "BF16"))
    importance = random_importance(target)
    for mixture in (*QUANTIZED, "Q2_K_S"):
        llama_cpp.quantize(tmp_path / "bf16.gguf", tmp_path / "theirs.gguf", FILE_TYPES[mixture], importance)
        theirs = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "theirs.gguf").tensors}
        assert choose_types(target, mixture, importance=True).types == theirs, mixture
