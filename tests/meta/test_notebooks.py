"""Every notebook runs from top to bottom, and shows the outputs that it gives today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "tools"
sys.path.insert(0, str(TOOLS))

from run_notebook import execute, outputs_of, read_notebook, text_of  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT = 300  # seconds
DIGITS = re.compile(r"\d[\d,.]*")  # the last digits of a measured float may differ between CPUs


def shape_of(text):
    """The text with its numbers left out."""
    return re.sub(r"\s+", " ", DIGITS.sub("0", text))


def test_there_is_a_notebook():
    assert "quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_and_shows_its_outputs(path, tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, str(TOOLS / "run_notebook.py"), str(path), "executed.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    stored, fresh = (outputs_of(read_notebook(file)) for file in (path, tmp_path / "executed.ipynb"))
    assert any(stored), f"it shows no outputs: python tests/tools/run_notebook.py {path.name}"
    for number, (expected, got) in enumerate(zip(stored, fresh, strict=True), 1):
        assert shape_of(text_of(got)) == shape_of(text_of(expected)), f"cell {number}"


def test_a_failing_cell_fails():
    cell = {"cell_type": "code", "source": ["print(1)\n", "1 / 0"], "outputs": []}
    with pytest.raises(ZeroDivisionError):
        execute({"nbformat": 4, "cells": [cell]})


def test_outputs_are_what_is_printed_and_the_last_value():
    cell = {"cell_type": "code", "source": ["print('a')\n", "x = 3\n", "x + 1"], "outputs": []}
    (outputs,) = execute({"nbformat": 4, "cells": [cell]})
    assert text_of(outputs) == "a\n4"
