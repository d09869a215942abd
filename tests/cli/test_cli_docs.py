"""The shell lines of docs/howto/cli.md run, in the order of the page."""

import re
import shlex

import numpy as np

from detent.cli import main
from detent.onnx_model import make_session

from .cli_cases import write_classifier, write_data, write_model, write_photos

FENCE = re.compile(r"^```sh\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {"quantize", "verify", "inspect", "compare", "sensitivity", "bench", "doctor"}


def lines(root):
    text = (root / "docs/howto/cli.md").read_text(encoding="utf-8")
    return [line for match in FENCE.finditer(text) for line in match["code"].splitlines() if line.strip()]


def predicted_classes(model, data):
    with np.load(data) as arrays:
        return make_session(model).run(None, {"x": arrays["x"]})[0].argmax(1)


def test_every_command_is_shown(root):
    assert {shlex.split(line)[1] for line in lines(root)} == COMMANDS


def test_shell_lines_run(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_model("model.onnx", hidden=256)  # hidden layers, whose weights may have 4 bits
    write_data("calibration.npz")
    np.savetxt("labels.txt", predicted_classes("model.onnx", write_data("test.npz", 40)), fmt="%d")
    write_classifier("classifier.onnx", size=16)
    write_photos("photos")
    for line in lines(root):
        program, *arguments = shlex.split(line)
        assert program == "detent"
        code = main(arguments)
        out, err = capsys.readouterr()
        assert code == 0, f"{line}\n{err}"
        assert out
    for name in (
        "model.w8a8.onnx",
        "report.html",
        "weights-only.onnx",
        "comparison.html",
        "mix.toml",
        "model.mix.onnx",
    ):
        assert (tmp_path / name).is_file()
    assert not (tmp_path / "planned.onnx").exists()
