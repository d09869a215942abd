"""Real models: quantized with default settings, verified, and run."""

import pytest

import detent as dt
import detent.onnx as qo
from zoo import ZOO

NAMES = [name for name in ZOO if name != "smart-turn"]  # already quantized


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "onnxruntime-avx2"])
@pytest.mark.parametrize("name", NAMES)
def test_no_code_differs(name, target, folder, tmp_path):
    model = ZOO[name]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    path, feeds = model.write(folder), list(model.feeds(5))
    report = qo.quantize(path, tmp_path / "q.onnx", feeds[:4], target=target, progress=False)
    assert any(layer.runs_on_integer_kernel for layer in report.layers)
    assert not [layer for layer in report.layers if layer.reason and layer.kernel]
    proof = dt.verify(path, report.output, feeds[4:], levels=(1, 3))
    assert proof.ok, str(proof)
    assert proof.differing_codes == 0
    assert proof.compared_codes > 1000
    assert sum(kernel.compared for kernel in proof.kernels) > 1000
    assert sum(kernel.differing for kernel in proof.kernels) == 0


@pytest.mark.slow
def test_quantized_models_are_rejected(folder):
    model = ZOO["smart-turn"]
    if not model.is_installed:
        pytest.skip("pipecat-ai is not installed")
    with pytest.raises(dt.UnsupportedError, match="already quantized"):
        qo.prepare(model.write(folder))


def test_a_small_model(folder, tmp_path):
    model = ZOO["silero-vad"]
    if not model.is_installed:
        pytest.skip("silero-vad is not installed")
    feeds = list(model.feeds(3))
    report = qo.quantize(model.write(folder), tmp_path / "q.onnx", feeds[:2], progress=False)
    proof = dt.verify(model.write(folder), report.output, feeds[2:])
    assert proof.ok, str(proof)
    assert str(proof).startswith("ok: the file matches its source and its decisions")
