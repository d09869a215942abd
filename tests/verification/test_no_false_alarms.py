"""Unchanged files pass every level, for any graph, recipe, target and number of threads."""

import importlib
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

import detent as dt
import detent.onnx as qo
from detent.errors import DetentError, UnsupportedError
from detent.onnx_model.targets import TARGETS
from detent.recipe import PRESETS
from detent.verification import levels
from zoo import ZOO

sys.path.append(str(Path(__file__).parents[1] / "tools"))
random_model = importlib.import_module("random_graphs").random_model

GRAPHS, QUICK, PART = 300, 8, 20
RECIPES = ("w8a8", "w8a8", "w4a8", "w8a16", "w4a16-g32", "w2a8")
OPTIONS = (
    {},
    {"keep_float": "none"},
    {"observer": "mse", "keep_float": "none"},
    {"bias_correction": False},
    {"equalize": False, "smooth": False, "keep_float": "none"},
)


def options_with(threads):
    """Session options of ONNX Runtime with a fixed number of threads."""

    class Options(ort.SessionOptions):
        def __setattr__(self, name, value):
            super().__setattr__(name, threads if name == "intra_op_num_threads" else value)

    return Options


@pytest.fixture(autouse=True)
def without_openvino(monkeypatch):
    monkeypatch.setattr(levels, "is_installed", lambda: False)


def quantized(seed, tmp_path):
    """Return a random graph, its file and data; None if there is nothing to quantize."""
    model, batches = random_model(seed, extended=seed % 3 > 0)
    recipe, options = RECIPES[seed % len(RECIPES)], OPTIONS[seed // len(RECIPES) % len(OPTIONS)]
    target = list(TARGETS)[seed // 2 % len(TARGETS)]
    path = tmp_path / f"{seed}.onnx"
    try:
        qo.quantize(model, path, batches, recipe, target=target, compare=False, progress=False, **options)
    except UnsupportedError as error:
        if "no layer was quantized" not in str(error):
            raise
        return None
    return model, path, batches[:1]


def check(seeds, tmp_path, monkeypatch):
    """Verify files of random graphs with one and two threads; return the number of files."""
    count, alarms = 0, []
    for seed in seeds:
        case = quantized(seed, tmp_path)
        if case is None:
            continue
        count += 1
        for threads in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(ort, "SessionOptions", options_with(threads))
                report = dt.verify(*case)
            if not report.ok or report.not_compared:
                alarms.append((seed, threads, report.failure, report.not_compared))
    assert not alarms
    return count


def test_random_graphs(tmp_path, monkeypatch):
    assert check(range(QUICK), tmp_path, monkeypatch) > QUICK // 2


def test_graphs_that_once_failed(tmp_path, monkeypatch):
    # A convolution in an If body, whose optimized graph ONNX Runtime refuses; a tensor with the codes of another one; a
    # weight of 4 numbers with searched scales; a grouped transposed convolution with more biases than scales.
    assert check([53, 84, 167, 296], tmp_path, monkeypatch) == 4


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, GRAPHS, PART))
def test_many_random_graphs(start, tmp_path, monkeypatch):
    assert check(range(start, start + PART), tmp_path, monkeypatch) > PART // 2


def test_threads_are_those_asked_for(monkeypatch):
    monkeypatch.setattr(ort, "SessionOptions", options_with(1))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 0
    assert options.intra_op_num_threads == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("name", [name for name in ZOO if name != "smart-turn"])  # that one is quantized already
def test_real_models(name, target, tmp_path):
    model = ZOO[name]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    path, feeds = model.write(tmp_path), list(model.feeds(3))
    verified = 0
    for preset in PRESETS:
        file = tmp_path / f"{preset}.onnx"
        try:
            qo.quantize(path, file, feeds[:2], preset, target=target, compare=False, progress=False)
        except DetentError:  # what this target cannot run, or nothing to quantize
            continue
        verified += 1
        report = dt.verify(path, file, feeds[2:])
        assert report.ok, (preset, report.failure)
        assert not report.not_compared
        file.unlink()
    assert verified
