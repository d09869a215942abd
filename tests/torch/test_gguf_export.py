"""export_gguf: the file has the bytes of the prepared model."""

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import detent as dt
import detent.torch as qt
from detent.checkpoint_files.architectures import gguf_model
from detent.errors import FileFormatError, RangeError, SpecError, UnsupportedError
from detent.torch.arrays import to_array
from tests.checkpoint_files.small_language_models import random_tokens, save_model


def file_tensors(path):
    return {each.name: (each.tensor_type.name, each.data) for each in gguf.GGUFReader(path).tensors}


def target_names(model, directory):
    """Return names in the file by names of weights, from the table of the architecture."""
    from detent.torch.gguf_export import _source

    target = gguf_model(_source(model, directory), vocabulary=False)
    return {tensor.sources[0]: tensor for tensor in target.tensors if len(tensor.sources) == 1}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_the_bytes_are_those_of_quantized_state(name, tmp_path):
    model = save_model(name, tmp_path)
    rules = [dt.Rule(types=("Linear",), weight="q4_k"), dt.Rule("lm_head", skip=True)]
    if name != "phi3":
        rules.insert(1, dt.Rule("*v_proj", weight="q2_k"))
    qt.prepare(model, dt.Recipe(rules))
    path = qt.export_gguf(model, tmp_path, tmp_path / "model.gguf", vocabulary=False)
    tensors, targets = file_tensors(path), target_names(model, tmp_path)
    state = qt.quantized_state(model)
    for source, weight in state.items():
        kind, data = tensors[targets[source].name]
        assert kind == weight.format.name.upper()
        rows = weight.packed.reshape(weight.shape[0], -1)
        if name == "llama" and ("q_proj" in source or "k_proj" in source):
            heads = 4 if "q_proj" in source else 1
            rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        assert np.array_equal(data, rows), source
    floats = {source: target for source, target in targets.items() if source not in state}
    parameters = dict(model.named_parameters())
    for source, target in floats.items():
        kind, data = tensors[target.name]
        values = to_array(parameters[source].detach()) + np.float32(target.offset)
        assert kind == "F32"
        assert np.array_equal(data, values), source


def test_training_changes_the_bytes_and_the_file_follows(tmp_path):
    model = qt.prepare(save_model("llama", tmp_path), "q4_k")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    tokens = torch.tensor(random_tokens(32))[None]
    before = qt.quantized_state(model)["model.layers.0.mlp.up_proj.weight"]
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    after = qt.quantized_state(model)["model.layers.0.mlp.up_proj.weight"]
    assert before != after
    path = qt.export_gguf(model, tmp_path, tmp_path / "model.gguf", vocabulary=False)
    assert file_tensors(path)["blk.0.ffn_up.weight"][1].tobytes() == after.packed.tobytes()
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q4_K_S


def test_a_tied_embedding_is_one_tensor(tmp_path):
    model = qt.prepare(save_model("llama-rope", tmp_path), "q4_k")
    path = qt.export_gguf(model, tmp_path, tmp_path / "model.gguf", vocabulary=False)
    tensors = file_tensors(path)
    assert "output.weight" not in tensors
    state = qt.quantized_state(model)
    assert state["lm_head.weight"] == state["model.embed_tokens.weight"]
    assert tensors["token_embd.weight"][1].tobytes() == state["lm_head.weight"].packed.tobytes()


def test_float_tensors_have_the_type_of_their_parameter(tmp_path):
    model = save_model("mixtral", tmp_path).to(torch.bfloat16)
    qt.prepare(model, dt.Recipe([dt.Rule("*proj", types=("Linear",), weight="q4_k")]))
    tensors = file_tensors(qt.export_gguf(model, tmp_path, tmp_path / "model.gguf", vocabulary=False))
    kinds = {name: kind for name, (kind, _) in tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_up_exps.weight"] == kinds["token_embd.weight"] == "BF16"
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"


def test_what_gguf_files_cannot_store_is_rejected(tmp_path):
    model = save_model("llama", tmp_path)
    with pytest.raises(UnsupportedError, match="which GGUF files cannot store"):
        qt.export_gguf(qt.prepare(model, "w8a16"), tmp_path, tmp_path / "model.gguf", vocabulary=False)
    skipped = qt.prepare(save_model("llama", tmp_path), dt.Recipe([dt.Rule(skip=True)]))
    with pytest.raises(SpecError, match="no weight has a block format"):
        qt.export_gguf(skipped, tmp_path, tmp_path / "model.gguf", vocabulary=False)
    other = qt.prepare(nn.Sequential(nn.Linear(32, 8)), "q8_0")
    with pytest.raises(FileFormatError, match="no tensor 'model"):
        qt.export_gguf(other, tmp_path, tmp_path / "model.gguf", vocabulary=False)
    with pytest.raises(FileFormatError, match="pass the directory of the float model"):
        qt.export_gguf(other, tmp_path / "absent", tmp_path / "model.gguf", vocabulary=False)
    assert not (tmp_path / "model.gguf").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = qt.prepare(save_model("llama", tmp_path), "q4_k")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(RangeError, match=r"norm\.weight contains NaN"):
        qt.export_gguf(model, tmp_path, tmp_path / "model.gguf", vocabulary=False)
    assert not (tmp_path / "model.gguf").exists()
