"""Accuracy of qt.quantize on trained networks, compared with plain calibration and with qo.quantize."""

import importlib

import pytest

pytest.importorskip("onnxscript")
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def benchmark_script(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        yield importlib.import_module("torch_ptq")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "tcn", "separable-outliers"])
def test_files_are_as_accurate_as_those_of_the_onnx_frontend(benchmark_script, name, tmp_path):
    trained = benchmark_script.subject(name)
    for recipe in ("w8a8", "w4a8"):
        row = benchmark_script.measure(name, trained, recipe, tmp_path)
        assert row.verified
        assert row.torch_db > row.plain_db
        assert row.torch_db > row.onnx_db - benchmark_script.MAX_BELOW_ONNX_DB
