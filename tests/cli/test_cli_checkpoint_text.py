"""detent quantize --text: importance is measured, stored next to the output, and used."""

import os

import pytest

from detent.checkpoint import collection, partial_file, row_stream
from detent.checkpoint.partial_file import PartialFile
from detent.checkpoint_files.importance_files import read_importance
from detent.cli import main
from tests.checkpoint_files.small_language_models import save_model
from tests.checkpoint_files.test_vocabulary import TEXT, byte_level, save


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model("llama", tmp_path / "model", vocab_size=500)
    save(byte_level("gpt-2"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 12, encoding="utf-8")
    return tmp_path


COMMAND = ("quantize", "model", "--to", "gguf:Q4_K_M", "--text", "text.txt")


def test_text_measures_importance_and_keeps_its_file(model, capsys):
    assert main([*COMMAND]) == 0
    assert "bytes that differ: 0 of" in capsys.readouterr().out
    importance = read_importance(model / "model-Q4_K_M.imatrix.gguf")
    assert importance.datasets == ("text.txt",)
    again = [*COMMAND[:-2], "--importance", "model-Q4_K_M.imatrix.gguf", "-o", "again.gguf"]
    assert main(again) == 0
    assert (model / "again.gguf").read_bytes() == (model / "model-Q4_K_M.gguf").read_bytes()


@pytest.mark.parametrize("option", [("--importance", "x.gguf"), ("--dry-run",)])
def test_text_cannot_be_combined_with(option, model, capsys):
    assert main([*COMMAND, *option]) == 2
    assert f"cannot be combined with {option[0]}" in capsys.readouterr().err


def killed(*_, **__):
    raise KeyboardInterrupt


def test_a_run_that_was_killed_while_it_quantized_keeps_the_importance(model, monkeypatch, capsys):
    command = [*COMMAND, "-o", "out.gguf"]
    assert main(command) == 0
    expected = (model / "out.gguf").read_bytes()
    for name in ("out.gguf", "out.imatrix.gguf"):
        (model / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "finish", killed)
        patch.setattr(partial_file, "SECONDS_BETWEEN_SYNCS", 0)
        assert main(command) != 0
    assert not (model / "out.gguf").exists()
    assert (model / ".out.gguf.journal").exists()
    with monkeypatch.context() as patch:
        patch.setattr(collection, "_load_model", killed)  # nothing is measured again
        patch.setattr(row_stream, "encode", killed)  # and nothing is quantized again
        assert main(command) == 0
    assert (model / "out.gguf").read_bytes() == expected
    assert sorted(path.name for path in model.iterdir() if path.name.startswith(".")) == []
    capsys.readouterr()


def test_importance_of_another_text_or_model_is_not_used(model, capsys):
    command = [*COMMAND, "-o", "out.gguf"]
    assert main(command) == 0
    (model / "out.gguf").unlink()
    (model / "text.txt").write_text("other " + TEXT * 12, encoding="utf-8")
    assert main(command) == 2
    assert "out.imatrix.gguf" in capsys.readouterr().err
    before = read_importance(model / "out.imatrix.gguf")
    assert main([*command, "--force"]) == 0
    after = read_importance(model / "out.imatrix.gguf")
    assert before.origin != after.origin
    (model / "out.gguf").unlink()
    os.utime(model / "model" / "model.safetensors", ns=(0, 0))
    assert main(command) == 2
