"""Commands on checkpoints of language models."""

import json

import numpy as np
import pytest

import detent.checkpoint as qc
from detent import storage
from detent.cli import main
from tests.checkpoint.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(directory / "tiny")
    qc.quantize(directory / "tiny", directory / "ready.gguf", vocabulary=False)
    return directory


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(folder / "tiny")

    def call(*arguments):
        code = main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


QUANTIZE = ("quantize", "tiny", "--to", "gguf:Q4_K_M", "--no-vocabulary")


def test_quantize_writes_verifies_and_prints_a_summary(run, folder, tmp_path):
    code, out, _ = run(*QUANTIZE, "--report", "r.html")
    assert code == 0
    assert (tmp_path / "tiny-Q4_K_M.gguf").read_bytes() == (folder / "ready.gguf").read_bytes()
    assert out.splitlines()[0] == "tiny-Q4_K_M.gguf"
    assert "2.72 MB -> 829 kB" in out
    assert "verified: bytes that differ: 0 of 827,072" in out
    assert "blk.0.attn_q.weight (Q4_K)" in out
    page = (tmp_path / "r.html").read_text()
    assert "<td" in page
    assert "blk.1.ffn_down.weight" in page


def test_quantize_prints_json(run, tmp_path):
    code, out, _ = run(*QUANTIZE, "-o", "x.gguf", "--json", "--report", "r.json")
    document = json.loads(out)
    assert code == 0
    assert document["verification"]["ok"] is True
    assert document["types"]["Q4_K"]["tensors"] == 13
    assert json.loads((tmp_path / "r.json").read_text())["nbytes_after"] == document["nbytes_after"]


def test_a_dry_run_has_the_exact_size_and_writes_nothing(run, folder, tmp_path):
    code, out, _ = run(*QUANTIZE, "--dry-run", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["nbytes_after"] == (folder / "ready.gguf").stat().st_size
    assert document["seconds"] > 0
    assert document["peak_nbytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_workers_give_the_same_file(run, folder, tmp_path):
    code, _, _ = run(*QUANTIZE, "--workers", "2", "--no-verify")
    assert code == 0
    assert (tmp_path / "tiny-Q4_K_M.gguf").read_bytes() == (folder / "ready.gguf").read_bytes()


def test_a_low_sqnr_exits_1(run, tmp_path):
    code, _, err = run(*QUANTIZE, "--fail-below-sqnr", "40")
    assert code == 1
    assert "below the limit of 40 dB" in err
    assert (tmp_path / "tiny-Q4_K_M.gguf").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "tiny"), "pass --to, for example --to gguf:Q4_K_M"),
        (("quantize", "missing", "--to", "gguf:Q4_K_M"), "no such file or directory"),
        (("quantize", "tiny", "--to", "gguf:Q9"), "unknown mixture"),
        (("quantize", "tiny", "--to", "onnx"), "such as 'gguf:Q4_K_M'"),
        ((*QUANTIZE, "--data", "x.npz"), "--data cannot be combined with --to"),
        ((*QUANTIZE, "--fail-below-sqnr", "3", "--no-verify"), "drop --no-verify"),
        ((*QUANTIZE, "-o", "x.bin"), "ends in .gguf"),
        ((*QUANTIZE, "--text", "t.txt", "--dry-run"), "cannot be combined with --dry-run"),
        (("quantize", "model.onnx", "--importance", "x"), "--importance needs --to"),
    ],
)
def test_wrong_options_exit_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_existing_file_is_replaced_only_with_force(run, tmp_path):
    (tmp_path / "tiny-Q4_K_M.gguf").write_bytes(b"old")
    code, _, err = run(*QUANTIZE)
    assert code == 2
    assert "--force" in err
    assert run(*QUANTIZE, "--force", "--no-verify")[0] == 0
    assert (tmp_path / "tiny-Q4_K_M.gguf").stat().st_size > 3


@pytest.mark.parametrize("name", ["tiny", "ready.gguf", "tiny/model-00001-of-00002.safetensors"])
def test_inspect_shows_checkpoints(run, folder, name):
    code, out, _ = run("inspect", folder / name, "--all")
    assert code == 0
    assert "bits per weight" in out
    code, text, _ = run("inspect", folder / name, "--json")
    document = json.loads(text)
    assert code == 0
    assert all(tensor["name"] in out for tensor in document["tensors"])


def test_inspect_shows_types_and_metadata_of_gguf_files(run, folder):
    _, out, _ = run("inspect", folder / "ready.gguf")
    assert "general.architecture: llama" in out
    assert "13 q4_k" in out
    _, text, _ = run("inspect", folder / "ready.gguf", "--json")
    by_name = {tensor["name"]: tensor for tensor in json.loads(text)["tensors"]}
    assert by_name["blk.0.ffn_up.weight"]["bits_per_weight"] == 4.5


def test_compare_shows_the_sqnr_of_each_tensor(run, folder):
    code, out, _ = run("compare", folder / "tiny", folder / "ready.gguf")
    assert code == 0
    assert "21 tensors in both" in out
    assert "dB" in out
    code, text, _ = run("compare", folder / "tiny", folder / "ready.gguf", "--json")
    assert len(json.loads(text)["tensors"]) == 21


def test_verify_finds_a_changed_byte(run, folder, tmp_path):
    code, out, _ = run("verify", folder / "tiny", folder / "ready.gguf")
    assert code == 0
    assert out.startswith("ok: every tensor")
    data = bytearray((folder / "ready.gguf").read_bytes())
    data[-100] ^= 1
    (tmp_path / "x.gguf").write_bytes(data)
    code, out, _ = run("verify", folder / "tiny", tmp_path / "x.gguf")
    assert code == 1
    assert out.startswith("not ok: tensor ")


@pytest.mark.parametrize("option", [("--fail-below-sqnr", "nan"), ("--batch-size", "3"), ("--tokenizer", "x.json")])
def test_verify_refuses_options_that_have_no_meaning(run, folder, option):
    code, _, err = run("verify", "tiny", folder / "ready.gguf", *option)
    assert code == 2
    assert option[0] in err


def test_compare_reads_two_small_float32_files(run, tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        arrays = {"w": np.full((2, 3), value, np.float32), "s": np.float32(value).reshape(())}
        storage.write_atomic(tmp_path / f"{name}.safetensors", storage.dumps(arrays, {}))
    code, out, _ = run("compare", "a.safetensors", "b.safetensors")
    assert code == 0
    assert "2 tensors in both, 28 B and 28 B; 0 have equal values" in out
    code, text, _ = run("compare", "a.safetensors", "a.safetensors", "--json")
    assert (code, json.loads(text)["is_equal"]) == (0, True)
    code, out, _ = run("inspect", "a.safetensors")
    assert code == 0
    assert "range" in out  # small files are still shown with the range of each array


def test_compare_of_a_checkpoint_with_another_kind_of_file_says_what_to_compare(run, tmp_path):
    storage.write_atomic(tmp_path / "a.safetensors", storage.dumps({"w": np.ones(3, np.float32)}, {}))
    (tmp_path / "m.onnx").write_bytes(b"no model")
    code, _, err = run("compare", "m.onnx", "a.safetensors")
    assert code == 2
    assert "a.safetensors is a checkpoint, but m.onnx is not: compare two checkpoints" in err
