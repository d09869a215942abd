"""The README's results are rendered from the committed benchmarks, and its commands run as shown.

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


def test_results_are_rendered_from_the_committed_benchmarks(render):
    assert render.placed(README, render.rendered(*render.results())) == README, "run benchmarks/render_readme.py"


def test_quotes_in_howtos_are_rendered(render):
    for page, sections in render.quotes(*render.results()[:3]).items():
        text = page.read_text(encoding="utf-8")
        assert render.placed(text, sections) == text, "run benchmarks/render_readme.py"


@pytest.mark.parametrize(
    ("result", "key", "line"),
    [(0, "ratio", 0), (1, "accuracy", 1), (2, "ratio", 2), (3, "times_copy", 3)],
    ids=["files", "accuracy", "cost", "kernels"],
)
def test_a_changed_result_changes_its_line(render, result, key, line):
    results = render.results()
    before = render.rendered(*results)["readme-results"].splitlines()
    for row in results[result]["rows"]:
        if key in row:
            row[key] *= 0.5
    after = render.rendered(*results)["readme-results"].splitlines()
    assert [number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [line]


def test_runs_on_different_machines_are_named_with_their_machine_and_date(render):
    one = {"machine": {"cpu": "A", "level": "v4"}, "date": "2026-01-01"}
    later = one | {"date": "2026-01-02"}
    assert render._machines({"x": one, "y": one}) == "Measured on A (v4), 2026-01-01."
    assert render._machines({"x": later, "y": one, "z": one}) == (
        "Measured in several runs: x on A (v4), 2026-01-02; y and z on A (v4), 2026-01-01."
    )


def test_every_command_is_of_a_kind_that_is_checked_here():
    assert {words[0] for words in COMMANDS} == {"make", "detent", "pip"}
    assert [words for words in COMMANDS if words[0] == "pip"] == [["pip", "install", ".[all]"]]
    assert [words[1] for words in COMMANDS if words[0] == "make"] == ["demo", "test"]
    assert {words[1] for words in COMMANDS if words[0] == "make"} <= TARGETS


def test_the_demo_is_the_command():
    recipe = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "$(VENV)/bin/detent demo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the files that the README names."""
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
    """The finished process of each command, in the order of the page."""
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "100"}
    processes = {}
    for words in OURS:
        command = [sys.executable, "-m", *words]
        processes[words[1]] = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    return processes


@pytest.mark.parametrize("name", [words[1] for words in OURS])
def test_command_runs(done, name):
    assert done[name].returncode == 0, done[name].stderr + done[name].stdout


def without_values(text):
    """The words of an output, without numbers, units, reasons of float layers and names of files, layers, outputs."""
    text = re.sub(r"^  float kernel: .*$", "", text, flags=re.MULTILINE)
    words = re.sub(
        r"\S*[\d_]\S*|\S+\.(onnx|html)|--skip \S+|\b([kM]?B|ms|µs|faster|slower|threads?)\b|[(),:]", " ", text
    )
    return set(words.split())


def test_the_sample_output_has_the_words_of_the_command(done):
    sample = re.search(r"<!-- sample:begin -->\n```text\n(.*?)```", README, re.DOTALL)
    assert sample is not None
    assert without_values(sample[1]) - without_values(done["quantize"].stdout) == set()


def test_quantize_prints_what_the_page_promises(done, folder):
    output = done["quantize"].stdout
    assert re.search(r"verified: ok: .* [1-9][0-9,]* codes compared, none differ", " ".join(output.split()))
    assert "--skip" in output
    assert re.search(r"\d+ of \d+", output)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "verified" in page.lower()
    assert not re.search(r"""(src|href)\s*=\s*["']https?://""", page)


def test_verify_prints_ok(done):
    assert done["verify"].stdout.lstrip().startswith("ok: the file matches its source and its decisions")
