"""Every script in examples/ runs in an empty directory and prints something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
# much as qat_cnn.py and qat_transformer.py, and longer
SLOW = {"qat_accumulate.py", "qat_compile.py", "qat_language_model.py", "qat_minilm.py"}
TIMEOUT = 300 if os.environ.get("DETENT_KERNELS") != "reference" else 600  # seconds; the reference kernels are slow


def run(script, directory):
    """Run the script in an empty directory with warnings as errors; return its output."""
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, f"{script.name} failed:\n{done.stderr}"
    assert done.stdout.strip(), f"{script.name} printed nothing"
    return done.stdout


def test_quickstart_is_there():
    assert "quickstart.py" in [script.name for script in EXAMPLES]


@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=pytest.mark.slow) if each.name in SLOW else each for each in EXAMPLES],
    ids=lambda script: script.name,
)
def test_example_runs(script, tmp_path):
    run(script, tmp_path)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("raise SystemExit(3)", "failed"),
        ("import warnings; warnings.warn('old'); print('done')", "failed"),
        ("", "printed nothing"),
    ],
)
def test_runner_notices_a_bad_example(source, complaint, tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(source)
    with pytest.raises(AssertionError, match=complaint):
        run(script, tmp_path)
