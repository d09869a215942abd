"""Phrases and names that the glossary of docs/concepts.md replaced do not come back.

Each rule is tried on a bad text first, so that it is known to complain, and then on the project.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

from word_check import VAGUE_NAMES, check_names, check_text, files_of, findings  # noqa: E402

DIRECTORIES = ("src", "docs", "examples", "zoo", "benchmarks")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


@pytest.mark.parametrize("path", [*DIRECTORIES, *PAGES])
def test_no_phrase_or_name_came_back(path):
    results = [str(each) for file in files_of(ROOT / path) for each in findings(file)]
    assert not results, "\n".join(results)


@pytest.mark.parametrize(
    "text",
    [
        "'many' is no number of bytes",
        "a weight has none",
        "batches that were held back",
        "layers that run in integers",
        "converted from operator set 11",
        "give a folder of files",
        "three layers, of which none is quantized",
        "if the latter is set",
        "the layers that hurt most",
        "serialised and normalised",
        "a hostile file",
        "train as ever",
    ],
)
def test_a_bad_phrase_is_noticed(text):
    assert list(check_text("page", 1, text))


@pytest.mark.parametrize(
    "text",
    ["there is no calibration data", "no longer used", "is no longer read", "a quantized layer", "`folder` in code"],
)
def test_a_plain_phrase_is_not(text):
    assert not list(check_text("page", 1, text))


@pytest.mark.parametrize("name", sorted(VAGUE_NAMES))
def test_a_vague_name_is_noticed(name):
    for code in (f"{name} = 1", f"def f({name}): pass", f"def {name}(): pass", f"self.{name} = 1"):
        assert [each.text for each in check_names("module.py", ast.parse(code))] == [name]


def test_docstrings_begin_with_a_verb_or_a_noun(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""A module."""\n\n\ndef f():\n    """What it does."""\n')
    assert [each.line for each in findings(file)] == [5]
