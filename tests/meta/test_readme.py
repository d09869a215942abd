"""The README's tables are rendered from the committed results, and its commands run as they stand there.

Its Python blocks and links are checked with those of all pages, in test_docs_snippets.py.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [words for block in BLOCKS for line in block.splitlines() if (words := shlex.split(line, comments=True))]
OURS = [words for words in COMMANDS if words[0] == "detent"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render_readme")


def test_tables_are_rendered_from_the_committed_results(render):
    assert render.placed(README, render.rendered(*render.results())) == README, "run benchmarks/render_readme.py"


def test_another_number_makes_another_table(render):
    onnx_result, qat, speed = render.results()
    before = render.rendered(onnx_result, qat, speed)
    for row in onnx_result["rows"]:
        row["size_ratio"] = 7.0
    for row in speed["rows"]:
        row["times_copy"] = 7.0
    for row in qat["rows"]:
        row["accuracy"] *= 0.5
    after = render.rendered(onnx_result, qat, speed)
    assert all(before[name] != after[name] for name in before)


def test_every_command_is_of_a_kind_that_is_checked_here():
    assert {words[0] for words in COMMANDS} == {"make", "detent"}
    assert [words[1] for words in COMMANDS if words[0] == "make"] == ["demo", "test"]
    assert {words[1] for words in COMMANDS if words[0] == "make"} <= TARGETS


def test_the_demo_is_the_command():
    recipe = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "$(VENV)/bin/detent demo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the README speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    rng = np.random.default_rng(0)
    shapes = {"v": (8, 6, 3, 3), "w": (8 * 36, 4)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 6, 6, 6] x) => (float[N, 4] y) {
          [conv] a = Conv<pads = [1, 1, 1, 1]>(x, v) b = Relu(a) c = Flatten(b) [head] y = MatMul(c, w) }""")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in tensors.items())
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "calib.npz", x=rng.normal(size=(64, 6, 6, 6)).astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def done(folder):
    """What each command says, in the order of the page."""
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "100"}
    found = {}
    for words in OURS:
        command = [sys.executable, "-m", *words]
        found[words[1]] = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    return found


@pytest.mark.parametrize("name", [words[1] for words in OURS])
def test_command_runs(done, name):
    assert done[name].returncode == 0, done[name].stderr + done[name].stdout


def test_quantize_says_what_the_page_promises(done, folder):
    said = done["quantize"].stdout
    assert re.search(r"verified: ok: .* [1-9][0-9,]* codes compared, none differ", " ".join(said.split()))
    assert "--skip" in said
    assert re.search(r"\d+ of \d+", said)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "verified" in page.lower()
    assert not re.search(r"""(src|href)\s*=\s*["']https?://""", page)


def test_verify_says_what_the_page_promises(done):
    assert done["verify"].stdout.lstrip().startswith("ok: the file is what its source and its decisions make it")
