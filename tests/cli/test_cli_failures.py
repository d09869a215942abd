"""Failures that the input does not cause: a missing package, a read-only directory, a full disk, Ctrl-C."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from detent.cli import main

from .cli_cases import TIMEOUT, detent, started, write_model

LONG = 3000  # batches; calibration then takes seconds


def without(folder, *modules):
    """Fill a directory for PYTHONPATH with modules that fail to import."""
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ImportError('no module named {name}', name={name!r})\n")
    return folder


# A missing package


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_the_libraries_of_the_command_line(tmp_path, module):
    done = detent("doctor", path=without(tmp_path, module))
    assert done.returncode == 3
    assert done.stderr == "error: the detent command needs typer and rich: pip install 'detent[cli]'\n"
    assert done.stdout == ""
    json_run = detent("doctor", "--json", path=tmp_path)
    assert json.loads(json_run.stdout) == {"ok": False, "error": done.stderr[len("error: ") :].strip(), "exit_code": 3}


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("onnx", "onnx", ["quantize", "model.onnx", "-d", "few.npz", "-o", "x.onnx"]),
        ("onnxruntime", "onnx", ["bench", "model.onnx", "model.w8a8.onnx"]),
        ("jinja2", "report", ["quantize", "model.onnx", "-d", "few.npz", "-o", "x.onnx", "--report", "x.html"]),
        ("torch", "torch", ["demo"]),
    ],
    ids=["onnx", "onnxruntime", "jinja2", "torch"],
)
def test_missing_extra_is_one_line(shop, tmp_path, module, extra, arguments):
    done = detent(*arguments, cwd=shop, path=without(tmp_path, module))
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"error: this command needs {module}, which is not installed: pip install 'detent[{extra}]'"
    ]
    assert done.stdout == ""
    assert not (shop / "x.onnx").exists()


def test_other_import_errors_are_bugs_and_shown(shop, tmp_path):
    (tmp_path / "onnx.py").write_text("import no_such_module_of_ours\n")
    done = detent("inspect", "model.onnx", cwd=shop, path=tmp_path)
    assert done.returncode == 1
    assert "no_such_module_of_ours" in done.stderr


# Read-only directories


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(shop, tmp_path):
    tmp_path.chmod(0o500)
    try:
        done = detent("quantize", "model.onnx", "-d", "few.npz", "-o", tmp_path / "a.onnx", cwd=shop)
    finally:
        tmp_path.chmod(0o700)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that root cannot write to")
def test_folder_that_takes_no_file(shop):
    done = detent("quantize", "model.onnx", "-d", "few.npz", "-o", "/proc/self/a.onnx", cwd=shop)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: /proc/self cannot be written to")
    assert "Traceback" not in done.stderr


def test_full_disk(shop, monkeypatch, capsys):
    def write(*args):
        raise OSError(28, "No space left on device", "x.onnx")

    monkeypatch.chdir(shop)
    monkeypatch.setattr("detent.storage.write_atomic", write)
    assert main(["quantize", "model.onnx", "-d", "few.npz", "-o", "x.onnx"]) == 2
    assert "error: x.onnx: No space left on device" in capsys.readouterr().err
    assert not (shop / "x.onnx").exists()


# Ctrl-C


@pytest.fixture(scope="module")
def long_job(tmp_path_factory):
    """A directory with a model and so many batches that calibration takes a while."""
    folder = tmp_path_factory.mktemp("long")
    write_model(folder / "model.onnx", channels=32)
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 8)).astype(np.float32)
    np.savez(folder / "calib.npz", x=np.concatenate([x] * (LONG // 8)))
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("kept", [False, True], ids=["new", "existing"])
def test_interrupt_leaves_nothing_behind(long_job, tmp_path, kept):
    for name in ("model.onnx", "calib.npz"):
        shutil.copy(long_job / name, tmp_path / name)
    if kept:
        (tmp_path / "model.w8a8.onnx").write_bytes(b"what was there before")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    running = started("quantize", "model.onnx", "-d", "calib.npz", "--force", cwd=tmp_path)
    assert running.stderr.readline().startswith("quantizing model.onnx with 2,700 batches")
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130
    assert err.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in err
    assert out == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_interrupt_of_a_dry_run(long_job, tmp_path):
    running = started(
        "quantize", long_job / "model.onnx", "-d", long_job / "calib.npz", "-o", tmp_path / "a.onnx", "--dry-run"
    )
    assert running.stderr.readline().startswith("dry run")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130
    assert not list(tmp_path.iterdir())


# Errors as JSON


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["inspect", "nothing.onnx"], "nothing.onnx: there is no such file"),
        (["quantize", "model.onnx", "-d", "few.npz", "-o", "x.onnx", "--skip", "haed"], "did you mean 'head'"),
        (["bench", "model.onnx", "model.w8a8.onnx", "--threads", "-1"], "--threads"),
        (["quantize", "--nothing"], "No such option"),
        (["nothing"], "No such command"),
    ],
    ids=["file", "skip", "range", "option", "command"],
)
def test_an_error_is_a_document_as_well(shop, monkeypatch, capsys, arguments, error):
    monkeypatch.chdir(shop)
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document.keys() == {"ok", "error", "exit_code"}
    assert (document["ok"], document["exit_code"]) == (False, 2)
    assert error in document["error"]
    assert error.split()[0] in err


def test_an_interrupt_is_a_document_as_well(shop, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.chdir(shop)
    monkeypatch.setattr("detent.cli.model_contents.model_contents", interrupted)
    assert main(["inspect", "model.onnx", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ok": False, "error": "interrupted", "exit_code": 130}
    assert err == "error: interrupted\n"
