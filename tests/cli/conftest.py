"""A small model, its data and its quantized files, written once by the command line itself."""

import pytest

from .cli_cases import detent, write_data, write_model


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """A directory with model.onnx, calib.npz (24 samples), few.npz (4), and model.w8a8.onnx with its report a.json."""
    folder = tmp_path_factory.mktemp("shop")
    write_model(folder / "model.onnx")
    write_data(folder / "calib.npz")
    write_data(folder / "few.npz", samples=4)
    done = detent("quantize", "model.onnx", "--data", "calib.npz", "--report", "a.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "quantize.txt").write_text(done.stdout, encoding="utf-8")
    (folder / "quantize.err").write_text(done.stderr, encoding="utf-8")
    return folder
