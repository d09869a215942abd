"""The quick demo end to end: reproducible results, restored settings, and the files it lists."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import onnxruntime
import pytest
import torch

import detent as dt
from detent import demo

LABELS = ["float", "W4 PTQ", "W4 QAT"]


class Listener:
    """Lines and progress that a run reports."""

    def __init__(self):
        self.lines, self.steps = [], []

    def progress(self, stage, done, total):
        self.steps.append((stage, done, total))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Run the demo, and record its messages."""
    heard = Listener()
    result = demo.run(tmp_path_factory.mktemp("first"), quick=True, say=heard.lines.append, progress=heard.progress)
    return result, heard


@pytest.fixture(scope="module")
def second(tmp_path_factory, first):
    """A second run, in a program with other settings of PyTorch; and the settings before and after."""
    assert first
    torch.manual_seed(99)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    before = state()
    try:
        with torch.no_grad():
            result = demo.run(tmp_path_factory.mktemp("second"), quick=True)
        return result, before, state()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def state():
    return {
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "strict": torch.are_deterministic_algorithms_enabled(),
        "kernels": dt.get_num_threads(),
        "numpy": hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),  # noqa: NPY002 - it is left alone
    }


def test_all_codes_are_equal(first):
    result, _ = first
    assert [row.label for row in result.rows] == LABELS
    assert result.ok
    assert (result.differing_codes, list(result.verifications)) == (0, LABELS[1:])
    assert result.compared_codes == sum(report.compared_codes for report in result.verifications.values()) > 1_000_000
    assert str(result).splitlines()[-1] == f"codes that differ: 0 of {result.compared_codes}"


def test_figures_are_plausible(first):
    plain, *quantized = first[0].rows
    assert plain.accuracy_torch > 0.9
    assert (plain.sqnr_db, plain.ratio, plain.equal_predictions) == (None, 1.0, plain.samples)
    for row in quantized:
        assert row.accuracy_torch > 0.85
        assert row.ratio > 4
        assert row.sqnr_db > 10
        assert row.equal_predictions >= 0.95 * row.samples


def test_numbers_are_the_same_each_time(first, second):
    assert [asdict(row) for row in first[0].rows] == [asdict(row) for row in second[0].rows]
    for one, other in zip(first[0].files[1:], second[0].files[1:], strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_settings_of_the_program_are_as_before(second):
    _, before, after = second
    assert before == after
    assert before["dtype"] == torch.float64  # otherwise the comparison would be trivial


def test_files_are_those_that_the_result_names(first):
    result, _ = first
    folder = result.report_path.parent
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in result.files)
    assert result.files[0] == result.report_path == folder / "demo-report.html"


def test_kept_model_is_the_row(first):
    result, _ = first
    path = result.report_path.with_name("demo-w4-qat.onnx")
    assert path.stat().st_size == result["W4 QAT"].nbytes
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    test = demo.network.read_digits()[1].first(result["W4 QAT"].samples)
    predicted = session.run(None, {"input": test.images})[0].argmax(1)
    assert (predicted == test.labels).mean() == result["W4 QAT"].accuracy_onnxruntime


def test_kept_images_are_some_to_train_on_and_fit_the_kept_models(first):
    folder = first[0].report_path.parent
    train, _ = demo.network.read_digits()
    with np.load(folder / "demo-calibration.npz", allow_pickle=False) as stored:
        assert np.array_equal(stored["input"], train.images[: len(stored["input"])])
    report = dt.verify(
        folder / "demo-w4-qat.onnx", folder / "demo-w4-qat.onnx", folder / "demo-calibration.npz", levels=(1,)
    )
    assert report.ok
    assert report.batches == 256


def test_page_has_the_table_and_the_line(first):
    result, _ = first
    page = result.report_path.read_text(encoding="utf-8").replace("\u00a0", " ")
    cells = [cell for row in result.rows for cell in row.cells()]
    for text in (*cells, result.codes_line(), "depthwise3"):
        assert text in page, text
    assert "/tmp" not in page


def test_progress_goes_from_nothing_to_all_in_each_stage(first):
    _, heard = first
    stages = list(dict.fromkeys(stage for stage, _, _ in heard.steps))
    assert stages == [*LABELS, "report"]
    for stage in stages:
        steps = [(done, total) for name, done, total in heard.steps if name == stage]
        assert steps == [(i, steps[0][1]) for i in range(steps[0][1] + 1)], stage


def test_every_row_is_reported(first):
    result, heard = first
    assert len(heard.lines) == 1 + len(result.rows) + 1
    assert all(line.startswith(f"{label}:") for label, line in zip(LABELS, heard.lines[1:-1], strict=True))
    assert all(path.name in heard.lines[-1] for path in result.files)


def test_json_has_every_row(first):
    about = json.loads(first[0].to_json())
    assert about["ok"] is True
    assert [row["label"] for row in about["rows"]] == LABELS
    assert (about["differing_codes"], about["compared_codes"]) == (0, first[0].compared_codes)


# Errors, raised before training starts


def test_a_missing_directory(tmp_path):
    with pytest.raises(dt.FileFormatError, match="is not a directory: create it"):
        demo.run(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(dt.FileFormatError, match="cannot be written to"):
        demo.run(tmp_path)


def test_a_directory_on_a_read_only_file_system(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(dt.FileFormatError, match=r"cannot be written to \(Read-only file system\)"):
        demo.run(tmp_path)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0", 1 << 31], ids=repr)
def test_a_seed_that_cannot_be(seed, tmp_path):
    with pytest.raises(dt.SpecError, match="seed must be an integer"):
        demo.run(tmp_path, seed=seed)


def test_a_missing_package_is_one_line_with_the_command(tmp_path, monkeypatch):
    find_spec = demo.start.find_spec
    monkeypatch.setattr(
        "detent.demo.start.find_spec", lambda name: None if name in {"onnxscript", "jinja2"} else find_spec(name)
    )
    with pytest.raises(dt.UnsupportedError) as caught:
        demo.run(tmp_path)
    assert str(caught.value) == "the demo needs onnxscript, jinja2: pip install 'detent[all]'"


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def interrupt(stage, done, total):
        if done == 2:
            raise KeyboardInterrupt

    before = state()
    with pytest.raises(KeyboardInterrupt):
        demo.run(tmp_path, quick=True, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert state() == before


def test_import_is_light():
    code = "import detent.demo, sys; print(*sorted({'torch', 'onnx', 'onnxruntime', 'jinja2'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == ""


@pytest.mark.slow
def test_whole_demo(tmp_path):
    """Run the full demo as the README describes it; it takes a minute on an idle machine."""
    result = demo.run(tmp_path)
    assert [row.label for row in result.rows] == [
        "float",
        *(f"W{bits} {way}" for bits in (8, 4, 2) for way in ("PTQ", "QAT")),
    ]
    assert result.ok
    assert result.differing_codes == 0
    plain = result["float"]
    assert plain.accuracy_torch > 0.97
    for label in ("W8 PTQ", "W8 QAT", "W4 QAT"):
        assert abs(result[label].accuracy_torch - plain.accuracy_torch) <= 0.01, label
        assert abs(result[label].accuracy_onnxruntime - plain.accuracy_onnxruntime) <= 0.01, label
    assert result["W2 QAT"].accuracy_torch > result["W2 PTQ"].accuracy_torch
    assert result["W8 PTQ"].sqnr_db > result["W4 PTQ"].sqnr_db > result["W2 PTQ"].sqnr_db
    kernels = result.verifications["W8 QAT"].kernels
    assert sum(row.compared for row in kernels) > 0
    assert not any(row.differing for row in kernels)
    assert result.verification.levels == (1, 2, 3)
