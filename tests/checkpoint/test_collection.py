"""collect: sums of squared inputs equal those of a direct computation, for every kind of layer."""

import numpy as np
import pytest
import torch

import detent.checkpoint as qc
from detent.checkpoint import collection
from detent.checkpoint_files.architectures import gguf_model
from detent.checkpoint_files.importance_files import read_importance
from detent.checkpoint_files.mixtures import is_float_tensor
from detent.errors import DtypeError, FileFormatError, RangeError, ShapeError, SpecError, UnsupportedError
from tests.checkpoint_files.small_language_models import NAMES, random_tokens, save_model
from tests.checkpoint_files.test_vocabulary import TEXT, byte_level, save

TOKENS = random_tokens(48)


def inputs_of(model, tokens, names):
    """Return the inputs of modules in one forward pass, by name, as (tokens, columns)."""
    inputs = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given))
    with torch.no_grad():
        model(torch.tensor(tokens)[None])
    return inputs


@pytest.mark.parametrize("name", NAMES)
def test_every_quantized_weight_of_a_block_gets_importance(name, tmp_path):
    save_model(name, tmp_path)
    importance = qc.collect(tmp_path, TOKENS, chunk_size=16)
    target = gguf_model(qc.open(tmp_path), vocabulary=False)
    expected = {
        each.name: each for each in target.tensors if each.name.startswith("blk.") and not is_float_tensor(each)
    }
    assert set(importance) == set(expected)
    for key, tensor in expected.items():
        weights = importance.weights(key, tensor.shape)
        assert weights.shape == (tensor.shape[0] if len(tensor.shape) == 3 else 1, tensor.columns)
    assert (importance.chunk_count, importance.chunk_size, importance.datasets) == (3, 16, ("tokens",))


def test_sums_of_linear_layers_equal_a_direct_computation(tmp_path):
    model = save_model("llama", tmp_path)
    name = "model.layers.1.mlp.down_proj"
    chunks = TOKENS.reshape(3, 16)
    rows = np.concatenate([inputs_of(model, chunk, [name])[name][0][0].numpy() for chunk in chunks])
    column = qc.collect(tmp_path, TOKENS, chunk_size=16).columns["blk.1.ffn_down.weight"]
    assert column.counts.tolist() == [48]
    assert np.allclose(column.sums[0], (rows.astype(np.float64) ** 2).sum(axis=0), rtol=1e-5, atol=0)


def test_experts_get_the_tokens_that_the_router_sends_them(tmp_path):
    model = save_model("mixtral", tmp_path)
    experts = "model.layers.0.mlp.experts"
    states, chosen, _ = inputs_of(model, TOKENS, [experts])[experts]
    importance = qc.collect(tmp_path, TOKENS, chunk_size=48)
    gate, down = (importance.columns[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "down"))
    module = model.get_submodule(experts)
    sums, inner_sums, counts = np.zeros((4, 256)), np.zeros((4, 256)), np.zeros(4)
    for state, indices in zip(states, chosen.tolist(), strict=True):
        for expert in indices:
            first, second = (state @ module.gate_up_proj[expert].T).detach().chunk(2)
            sums[expert] += state.double().square().numpy()
            inner_sums[expert] += (torch.nn.functional.silu(first) * second).double().square().numpy()
            counts[expert] += 1
    assert counts.sum() == 2 * 48
    assert np.array_equal(gate.counts, counts)
    assert np.allclose(gate.sums, sums, rtol=1e-5, atol=1e-12)
    assert np.allclose(down.sums, inner_sums, rtol=1e-4, atol=1e-12)


def test_parts_of_a_text_merge_in_any_order_to_the_same_file(tmp_path):
    save_model("llama", tmp_path)
    whole = qc.collect(tmp_path, TOKENS, chunk_size=16)
    whole.save(tmp_path / "whole.gguf")
    parts = [qc.collect(tmp_path, TOKENS[start : start + 16], chunk_size=16) for start in (0, 16, 32)]
    parts[2].merged(parts[0]).merged(parts[1]).save(tmp_path / "merged.gguf")
    assert (tmp_path / "merged.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_text_is_tokenized_and_quantization_uses_the_file(tmp_path):
    save_model("llama", tmp_path, vocab_size=500)
    save(byte_level("gpt-2"), tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 4, encoding="utf-8")
    seen = []
    importance = qc.collect(
        tmp_path,
        tmp_path / "text.txt",
        tmp_path / "imatrix.dat",
        chunk_size=32,
        max_chunks=2,
        include_output=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]
    assert importance.datasets == ("text.txt",)
    assert "output.weight" in importance
    again = read_importance(tmp_path / "imatrix.dat")
    assert np.allclose(again["blk.0.attn_q.weight"], importance["blk.0.attn_q.weight"], rtol=1e-6)
    plain = qc.quantize(tmp_path, tmp_path / "plain.gguf", to="gguf:Q4_K_M")
    weighted = qc.quantize(tmp_path, tmp_path / "weighted.gguf", to="gguf:Q4_K_M", importance=tmp_path / "imatrix.dat")
    assert plain.nbytes_after <= weighted.nbytes_after + 1024
    tensors = [qc.open(tmp_path / f"{name}.gguf")["blk.0.attn_q.weight"].read() for name in ("plain", "weighted")]
    assert not np.array_equal(*tensors)


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (TOKENS, {"chunk_size": 49}, ShapeError, "got 48 tokens, expected at least 49"),
        (TOKENS, {"chunk_size": 0}, SpecError, "chunk_size must be an integer of at least 1"),
        ([[1, 2], [3]], {}, DtypeError, "rows of different lengths"),
        (TOKENS + 1000, {}, RangeError, "expected 0 to 95"),
        (TOKENS * 1.0, {}, DtypeError, "expected a list of integers"),
        (TOKENS.reshape(2, 24), {}, DtypeError, "expected a list of integers"),
        ("some text", {}, FileFormatError, "failed to load the tokenizer"),
    ],
)
def test_bad_input_is_rejected(data, options, error, message, tmp_path):
    save_model("llama", tmp_path)
    with pytest.raises(error, match=message):
        qc.collect(tmp_path, data, tmp_path / "out.gguf", **{"chunk_size": 16, **options})
    assert not (tmp_path / "out.gguf").exists()


def test_sources_that_transformers_cannot_run_are_rejected(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        qc.collect(tmp_path / "absent", TOKENS)
    save_model("llama", tmp_path)
    source = qc.open(tmp_path)
    source.config = None
    with pytest.raises(UnsupportedError, match="pass a directory"):
        qc.collect(source, TOKENS)


def test_the_name_of_a_file_is_not_taken_as_a_text(tmp_path):
    save_model("llama", tmp_path)
    (tmp_path / "text.txt").write_text("some words", encoding="utf-8")
    with pytest.raises(SpecError, match=r"names a file: pass pathlib\.Path"):
        qc.collect(tmp_path, str(tmp_path / "text.txt"))


def test_resume_reads_what_the_same_call_has_written(tmp_path, monkeypatch):
    save_model("llama", tmp_path / "model")
    output = tmp_path / "imatrix.gguf"
    qc.collect(tmp_path / "model", TOKENS, output, chunk_size=16)
    written = output.read_bytes()
    loads = []
    load_model = collection._load_model
    monkeypatch.setattr(collection, "_load_model", lambda path: loads.append(path) or load_model(path))
    again = qc.collect(tmp_path / "model", TOKENS, output, chunk_size=16, resume=True)
    assert (loads, again.origin) == ([], read_importance(output).origin)
    for options in ({"chunk_size": 8}, {"chunk_size": 16, "max_chunks": 1}, {"chunk_size": 16, "include_output": True}):
        qc.collect(tmp_path / "model", TOKENS, output, resume=True, **options)
    qc.collect(tmp_path / "model", TOKENS[1:], output, chunk_size=16, resume=True)
    assert len(loads) == 4
    output.write_bytes(written[:100])  # a damaged file is measured again
    qc.collect(tmp_path / "model", TOKENS, output, chunk_size=16, resume=True)
    assert (len(loads), output.read_bytes()) == (5, written)
