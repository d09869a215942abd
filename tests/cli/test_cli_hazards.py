"""Hazards: code in the current directory, overwritten files, wasted work, and names that control a terminal."""

import json
import re
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from onnx import helper

import detent.onnx as qo
import detent.report as qr
from detent.cli import main
from detent.cli.exits import check_can_write, fail
from detent.cli.model_contents import model_contents
from detent.cli.screen import Screen
from detent.errors import SpecError, UnsupportedError
from detent.evaluate import dry_run, dry_run_estimate, random_inputs
from detent.evaluate.speed import parse_shapes
from detent.recipe import get_recipe, skip_flag

from .cli_cases import TIMEOUT, started, write_model


@pytest.fixture
def inside(shop, monkeypatch):
    """Make the shop the current directory; the test must not leave a new file in it."""
    monkeypatch.chdir(shop)
    before = {path.name: path.read_bytes() for path in shop.iterdir()}
    yield shop
    assert {path.name: path.read_bytes() for path in shop.iterdir()} == before


# Dry runs


def test_dry_run_runs_nothing_of_the_current_directory(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model.onnx")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("tempfile", "json", "onnx"):
        (here / f"{name}.py").write_text("import pathlib\npathlib.Path('ran').touch()\nraise SystemExit(7)\n")
    monkeypatch.chdir(here)
    estimate = dry_run(model, recipe="w8a16")
    assert estimate.nbytes_after > 0
    assert not Path("ran").exists()


def test_dry_run_that_leaves_without_a_word(monkeypatch):
    monkeypatch.setattr(dry_run_estimate, "_CODE", "import os; os._exit(9)")
    with pytest.raises(UnsupportedError, match=r"dry run failed \(exit code 9\)"):
        dry_run("a.onnx")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_interrupted_dry_run_leaves_no_directory(shop, tmp_path):
    arguments = ("quantize", shop / "model.onnx", "-d", shop / "calib.npz", "-o", tmp_path / "a.onnx", "--dry-run")
    running = started(*arguments, TMPDIR=str(tmp_path))
    assert running.stderr.readline().startswith("dry run")
    end = time.monotonic() + TIMEOUT
    while not any(path.is_dir() for path in tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.002)
    running.send_signal(signal.SIGINT)  # only to the parent process, as a supervisor does
    running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # not all files: ONNX Runtime leaves one


# Files


def test_folder_that_takes_no_file_is_told_at_once(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(SpecError, match=r"cannot be written to \(Permission denied\): choose another directory"):
        check_can_write(tmp_path / "a.onnx", force=True)
    check_can_write(tmp_path / "a.onnx", force=True, is_written=False)


@pytest.mark.parametrize("flag", ["-o", "--report"])
def test_folder_that_takes_no_file_costs_no_calibration(inside, tmp_path, monkeypatch, capsys, flag):
    whole = tempfile.TemporaryFile

    def refuse(**options):
        if options["dir"] == tmp_path:
            raise PermissionError(13, "Permission denied")
        return whole(**options)

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(qo, "quantize", lambda *args, **options: pytest.fail("quantized in vain"))
    goal = tmp_path / ("x.onnx" if flag == "-o" else "x.json")
    assert main(["quantize", "model.onnx", "-d", "few.npz", "--force", flag, str(goal)]) == 2
    assert f"error: {goal.parent} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["quantize", "model.onnx", "-d", "few.npz", "-o", "x.json", "--report", "./x.json"], "--output and --report"),
        (["quantize", "model.onnx", "-d", "few.npz", "-o", "few.npz"], "--output and --data"),
        (["quantize", "model.onnx", "-o", "m.toml", "--recipe", "m.toml"], "--output and --recipe"),
        (["quantize", "model.onnx", "-o", "x.onnx", "--recipe", "m.json", "-r", "m.json"], "--report and --recipe"),
        (["quantize", "model.onnx", "-o", "x.onnx", "--resume-file", "../{}/x.onnx"], "--output and --resume-file"),
        (
            [
                "sensitivity",
                "model.onnx",
                "-d",
                "few.npz",
                "--budget",
                "50%",
                "--save-recipe",
                "x.json",
                "-r",
                "x.json",
            ],
            "--save-recipe and --report",
        ),
        (["compare", "a.json", "a.json", "--report", "a.json"], "--report and A"),
    ],
    ids=["output", "data", "recipe", "report", "resume file", "sensitivity", "compare"],
)
def test_no_file_is_written_over_another(inside, capsys, arguments, options):
    for name in {"m.toml", "m.json"} & set(arguments):
        get_recipe("w8a16").save(name)
    try:
        code = main([each.format(inside.name) for each in arguments] + ["--force"])
    finally:
        for name in ("m.toml", "m.json"):
            (inside / name).unlink(missing_ok=True)
    assert code == 2
    assert f"{options} are the same file" in capsys.readouterr().err


def test_inspect_counts_data_outside(tmp_path):
    model = write_model(tmp_path / "model.onnx")
    whole = model.stat().st_size
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    assert model.stat().st_size < whole / 2
    nbytes = model_contents(model).document["nbytes"]
    assert nbytes == sum(path.stat().st_size for path in tmp_path.iterdir()) > 0.9 * whole


# Reports


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_compare_takes_both_kinds_of_reports(inside, tmp_path, capsys, suffix):
    page = qr.Report.load("a.json")
    replace(page, title="another").save(tmp_path / f"b{suffix}")
    assert main(["compare", "a.json", str(tmp_path / f"b{suffix}"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["b"]["title"] == "another"
    assert document["has_common_layers"]


def test_compare_of_a_page_of_somebody_else(inside, tmp_path, capsys):
    (tmp_path / "b.html").write_text("<html></html>")
    assert main(["compare", "a.json", str(tmp_path / "b.html")]) == 2
    assert "has no report-data element" in capsys.readouterr().err


def test_report_of_widths_needs_a_budget(inside, capsys):
    arguments = ["sensitivity", "model.onnx", "-d", "few.npz", "--widths", "4,8", "--report", "x.json"]
    assert main(arguments) == 2
    assert "pass --budget" in capsys.readouterr().err


def test_report_of_a_mix_is_of_what_was_measured(inside, tmp_path, capsys):
    goal = tmp_path / "x.json"
    arguments = ["sensitivity", "model.onnx", "-d", "few.npz", "--widths", "4,8", "--budget", "60%", "-r", str(goal)]
    assert main(arguments) == 0
    page = qr.Report.load(goal)
    assert page.noise_share_basis == "sensitivity"
    assert page.sqnr_db == pytest.approx(page.mix.measured_sqnr_db, abs=0.5)
    assert not page.reproduction.data


# Numbers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "model.onnx", "model.onnx", "--shape", "x=999999999999999999999,3,6,6"], "sizes of 1 to 10 digits"),
        (["bench", "model.onnx", "model.onnx", "--shape", f"x={'9' * 5000},8,8,8"], "sizes of 1 to 10 digits"),
        (["bench", "model.onnx", "model.onnx", "--shape", "x=4294967296,8,8,8"], "has 2,199,023,255,552 elements"),
        (["bench", "model.onnx", "model.onnx", "--threads", "99999999999999999999"], "--threads"),
        (
            ["sensitivity", "model.onnx", "-d", "few.npz", "--widths", f"4,{'8' * 5000}"],
            "expected numbers of bits from 2 to 8",
        ),
        (["quantize", "model.onnx", "-d", "few.npz", "-o", "x.onnx", "--seed", "-1"], "--seed"),
    ],
    ids=["size", "digits", "elements", "threads", "widths", "seed"],
)
def test_numbers_beyond_all_bounds(inside, capsys, arguments, message):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err) < 1000


def test_shapes_that_are_large_but_sane(shop):
    assert parse_shapes(["x=01,8x8,8"]) == {"x": (1, 8, 8, 8)}
    assert random_inputs(shop / "model.onnx", {"x": (300, 8, 8, 8)})["x"].shape == (300, 8, 8, 8)


# Names


EVIL = "fc\x1b[2J\x07\x9b31m\r\x7f"
SHOWN = r"fc\x1b[2J\x07\x9b31m\x0d\x7f"


def test_names_do_not_drive_the_terminal(capsys):
    screen = Screen()
    screen.say(f"{EVIL}\nnext")
    screen.table(("layer", "dB"), [(f"{EVIL}\nforged", "1")])
    screen.note(EVIL)
    screen.warn(EVIL)
    with pytest.raises(typer.Exit):
        fail(EVIL)
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [SHOWN, "next"]
    assert rf"{SHOWN}\nforged" in out
    assert [line.rpartition(": ")[2] for line in err.splitlines()] == [SHOWN] * 3
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err)


def test_flag_skips_just_that_layer(tmp_path):
    names = ("head[0]", "head0", "he*d0")
    tensors = [onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), f"w{i}") for i in range(3)]
    nodes = [helper.make_node("MatMul", [f"t{i}", f"w{i}"], [f"t{i + 1}"], name=name) for i, name in enumerate(names)]
    ends = [[helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4])] for name in ("t0", "t3")]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for name in names:
        flag, pattern = shlex.split(skip_flag(name))
        assert flag == "--skip"
        assert [layer.name for layer in qo.plan(model, "w8a16", skip=[pattern]).layers if layer.reason] == [name]
        plain = [layer.name for layer in qo.plan(model, "w8a16", skip=[name]).layers if layer.reason]
        assert name in plain
