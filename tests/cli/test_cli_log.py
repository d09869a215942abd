"""The log of the library: silent by default, on stderr with --verbose."""

import json
import logging
import re
import subprocess
import sys

import pytest

import detent as dt
import detent.onnx as qo
from detent.cli import main
from detent.cli.screen import hide_log, show_log

from .cli_cases import environment

LINE = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING) detent[.\w]*: \S")
QUICKLY = ("--no-rank", "--no-bench", "--no-verify", "--force")


@pytest.fixture
def inside(shop, tmp_path, monkeypatch):
    """A new current directory with model and data."""
    for name in ("model.onnx", "few.npz"):
        (tmp_path / name).write_bytes((shop / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log_lines(text):
    return [line for line in text.splitlines() if LINE.match(line)]


@pytest.mark.parametrize("place", ["program", "command"])
def test_verbose_shows_the_log_on_stderr(inside, capsys, place):
    before, after = (["-v"], []) if place == "program" else ([], ["--verbose"])
    assert main([*before, "quantize", "model.onnx", "-d", "few.npz", *QUICKLY, "--json", *after]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"]
    lines = log_lines(err)
    assert any(re.search(r"detent\.observers\.passes: calibrated \d+ observers with 4 batches", line) for line in lines)
    assert any("calibration took" in line for line in lines)
    assert any("wrote model.w8a8.onnx" in line for line in lines)


def test_commands_without_verbose_show_no_log(inside, capsys):
    assert main(["quantize", "model.onnx", "-d", "few.npz", *QUICKLY]) == 0
    assert log_lines(capsys.readouterr().err) == []


def test_verbose_ends_with_the_command(inside, capsys):
    handlers = list(logging.getLogger("detent").handlers)
    assert main(["-v", "inspect", "model.onnx"]) == 0
    assert logging.getLogger("detent").handlers == handlers
    assert logging.getLogger("detent").level == logging.NOTSET
    assert main(["-v", "inspect", "nothing.onnx"]) == 2
    assert logging.getLogger("detent").handlers == handlers
    capsys.readouterr()


def test_library_prints_nothing_by_default(inside):
    code = "import detent.onnx as qo; qo.quantize('model.onnx', 'q.onnx', 'few.npz', progress=False)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_library_logs_to_the_callers_handlers(inside, caplog):
    with caplog.at_level(logging.INFO, logger="detent"):
        qo.quantize("model.onnx", "q.onnx", "few.npz", progress=False)
        dt.verify("model.onnx", "q.onnx", "few.npz")
    names = {record.name for record in caplog.records}
    assert {"detent.observers.passes", "detent.onnx.pass_errors", "detent.verification.levels"} <= names
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_log_does_not_drive_the_terminal(capsys):
    show_log()
    try:
        logging.getLogger("detent.test").warning("layer %s", "fc\x1b[2J")
    finally:
        hide_log()
    assert capsys.readouterr().err.rstrip().endswith(r"WARNING detent.test: layer fc\x1b[2J")
    logging.getLogger("detent.test").warning("after the end")
    assert capsys.readouterr().err == ""
