"""detent quantize --text: importance is measured, stored next to the output, and used."""

import pytest

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
