"""--workers and --ray: same file, clear errors, and the workers in the progress bar."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from detent.cli.workers import WatchedExecutor

from .cli_cases import detent, write_data, write_model


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # commands run here
    write_model(tmp_path / "model.onnx")
    write_data(tmp_path / "calib.npz", 12)
    return tmp_path


QUANTIZE = ("quantize", "model.onnx", "--data", "calib.npz", "--no-verify", "--no-bench", "--no-rank", "--quiet")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_workers_write_the_same_file(desk):
    assert detent(*QUANTIZE, "-o", "one.onnx").returncode == 0
    assert detent(*QUANTIZE, "-o", "two.onnx", "--workers", "2").returncode == 0
    assert digest(desk / "one.onnx") == digest(desk / "two.onnx")


def test_workers_measure_the_same_sensitivity(desk):
    command = ("sensitivity", "model.onnx", "--data", "calib.npz", "--json")
    one, two = detent(*command), detent(*command, "--workers", "2")
    assert (one.returncode, one.stdout) == (two.returncode, two.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "2", "--ray", "auto"), "got --workers and --ray: pass one of them"),
        (("--work-directory", "."), "got --work-directory without workers"),
        (("--workers", "2", "--work-directory", "nowhere"), "cannot write to nowhere"),
    ],
)
def test_options_that_do_not_fit(desk, options, message):
    result = detent(*QUANTIZE, "-o", "out.onnx", *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (desk / "out.onnx").exists()


def test_without_ray_one_line_says_how_to_install_it(desk):
    (desk / "hidden").mkdir()
    (desk / "hidden" / "ray.py").write_text("raise ImportError('hidden by a test')", encoding="utf-8")
    for command in ((*QUANTIZE, "-o", "out.onnx"), ("doctor",)):
        result = detent(*command, "--ray", "auto", path=desk / "hidden")
        assert result.returncode == 3
        assert "Ray is not installed: pip install 'detent[ray]'" in result.stderr


def test_the_doctor_needs_a_cluster_to_see_files(desk):
    result = detent("doctor", "--see", "model.onnx")
    assert result.returncode == 2
    assert "got --see without --ray" in result.stderr


def test_the_label_counts_workers_and_items():
    changes = []
    with ThreadPoolExecutor(1) as pool:
        watched = WatchedExecutor(pool)
        watched.on_change = lambda: changes.append(watched.label)
        for name in ("a:1", "b:2", "a:1"):
            watched.submit(SimpleNamespace, worker=name).result()
        watched.submit(int, "no number").exception()
    counts = [label.rpartition(",")[0] for label in changes]
    assert counts == ["1 worker, 1 item", "2 workers, 2 items", "2 workers, 3 items"]
    assert changes[-1].endswith("/s")


def test_a_cancelled_item_does_not_count():
    watched = WatchedExecutor(SimpleNamespace(submit=lambda *_: Future()))
    watched.submit(int).cancel()
    assert watched.label.startswith("0 workers, 0 items")
