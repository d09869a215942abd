"""A bug in a pass becomes a DetentError with the pass and the node; errors of the caller are not changed."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx_graphs import Maker, conv_chain, images, rows, weights

import detent as dt
import detent.onnx as qo
from detent.observers import MSE, MinMax
from detent.onnx import (
    accuracy_passes,
    fast_kernels,
    float_fallback,
    group_scales,
    layer_error,
    metric_search,
    pipeline,
    quantized_graph,
    quantizer_choice,
    range_search,
    smoothquant,
    subgraph_ranges,
)
from detent.onnx.float_fallback import NoiseByLayer
from detent.onnx.layer_error import IsolatedLayers, Probe
from detent.onnx.metric_search import ModelTrials
from detent.onnx.pass_errors import listening, running
from detent.onnx_model.sessions import ort_errors


class Case(NamedTuple):
    """How to fail in a pass: in the first call of a function for which ``when`` is true; and the expected place."""

    owner: object
    function: str
    place: str = ""
    when: Callable[..., bool] = lambda *_, **__: True
    model: Callable[[], ModelProto] = conv_chain
    data: Sequence[dict] = tuple(images(2))
    options: Mapping[str, object] = MappingProxyType({})
    settings: tuple = ()  # attributes of modules


def dense_chain():
    m = Maker()
    t = m.add("Relu", [m.matmul("x", 16, 32, name="fc1")])
    t = m.add("Relu", [m.matmul(t, 32, 32, name="fc2")])
    return m.model([("x", [1, 6, 16])], [m.matmul(t, 32, 4, name="fc3")])


def joined():
    """A Concat of a float tensor and a tensor behind a Resize."""
    m = Maker()
    fine = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    coarse = m.add("Relu", [m.conv(fine, 16, 16, strides=[2, 2], name="second")])
    scales = m.constant(np.float32([1, 1, 2, 2]))
    t = m.add("Concat", [fine, m.add("Resize", [coarse, "", scales], mode="linear")], axis=1)
    return m.model([("x", [2, 8, 8, 8])], [m.conv(t, 32, 4, name="last")])


def resized():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="first")])
    t = m.add("Resize", [m.conv(t, 64, 64, name="second"), "", m.constant(np.float32([1, 1, 2, 2]))], mode="linear")
    return m.model([("x", [1, 8, 8, 8])], [m.add("Sigmoid", [m.conv(t, 64, 1, 1, name="last")])])


def uneven():
    """A depthwise convolution whose channels differ much in size, so that float fallback keeps a layer in float."""
    m = Maker()
    sizes = np.logspace(-3, 1, 16, dtype=np.float32)
    spread = weights(16, 1, 3, 3) * sizes.reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv("x", 16, 16, group=16, weight=spread, bias=False, name="spread")])
    t = m.conv(t, 16, 16, 1, weight=weights(16, 16, 1, 1) / sizes.reshape(1, -1, 1, 1), name="mix")
    for i, channels in enumerate((16, 64, 64)):
        t = m.conv(m.add("Relu", [t]), channels, 64, name=f"wide{i}")
    return m.model([("x", [2, 16, 8, 8])], [t])


def looped():
    m = Maker()
    y = m.add("Loop", ["steps", m.constant(np.array(True)), m.matmul("x", 4, 4, name="fc0")], name="loop", body=body())
    m.constant(weights(4, 4), "w")
    return m.model([("x", [2, 4]), ("steps", [], TensorProto.INT64)], [y])


def body():
    nodes = [
        helper.make_node("Identity", ["on"], ["on_out"], name="on"),
        helper.make_node("MatMul", ["h", "w"], ["product"], name="fc"),
        helper.make_node("Tanh", ["product"], ["next"], name="tanh"),
    ]
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("h", TensorProto.FLOAT, None),
    ]
    outputs = [
        helper.make_tensor_value_info("on_out", TensorProto.BOOL, []),
        helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
    ]
    return helper.make_graph(nodes, "body", inputs, outputs)


STEPS = [{"x": each["x"][0, :2, :4].copy(), "steps": np.array(2)} for each in rows(2)]
SINGLE, MANY = images(2, batch=1), images(8, batch=1)
SKIPPED = {"skip": "second"}
GOAL = {"max_drop": 0.0, "metric": lambda outputs: -float(np.abs(outputs[next(iter(outputs))]).mean())}
NOISY = {
    "settings": (
        *((module, "NEGLIGIBLE_NOISE", 0.0) for module in (fast_kernels, float_fallback)),
        *((fast_kernels, name, value) for name, value in (("ACCEPTED_NOISE", 0.0), ("MAX_WIDE_WORK", 1))),
    )
}
NUMPY = SimpleNamespace(**{name: getattr(np, name) for name in ("minimum", "maximum", "inf", "isfinite")})


def of(shape):
    """Return a condition: the first argument is an array of this shape."""
    return lambda x, *_, **__: np.shape(x) == shape


PASSES = {
    "loading": Case(pipeline, "load_model"),
    "running the float model": Case(metric_search, "array_outputs", options={"metric": "cosine"}),
    "preparing the model": Case(pipeline, "to_normal_form"),
    "planning": Case(pipeline, "plan"),
    "choosing kernels": Case(fast_kernels, "prod", "layer 'second'", lambda x: tuple(x) == (16, 16, 3, 3)),
    "choosing samples": Case(accuracy_passes, "choose_samples"),
    "equalization": Case(Probe, "run", "layer 'second'", lambda self, *_: self.layer.name == "second", data=images(8)),
    "SmoothQuant": Case(smoothquant, "noise", "tensor 't4'", lambda x, _: x.shape[-1] == 4, dense_chain, rows(4)),
    "choosing last layers": Case(float_fallback, "fake_quantize", "layer 'last'", of((1, 64, 1, 1)), resized, SINGLE),
    "choosing joins": Case(float_fallback, "fake_quantize", "layer 'second'", of((16, 16, 3, 3)), joined),
    "fitting group scales": Case(
        group_scales, "_fitted", "layer 'fc2'", of((32, 32)), dense_chain, rows(4), {"recipe": "w4a16"}
    ),
    "calibration": Case(MSE, "observe", "tensor 't5'", lambda _, x: x.shape[1] == 4),
    "calibration of subgraphs": Case(
        NUMPY,
        "minimum",
        "layer 'loop/fc'",
        model=looped,
        data=STEPS,
        options={"prefer": "speed"},
        settings=((subgraph_ranges, "np", NUMPY),),
    ),
    "choosing ranges": Case(IsolatedLayers, "run", "layer 'second'", lambda _, name, *__: name == "second"),
    "measuring noise at the outputs": Case(float_fallback, "fake_quantize", "layer 'second'", of((16, 16, 3, 3))),
    "searching ranges": Case(range_search, "range_params", "tensor 't4'", lambda x, *_: x.tensor == "t4", data=MANY),
    "calibration of all layers": Case(
        MinMax, "observe", "tensor 't5'", lambda _, x: x.shape[1] == 4, data=MANY, options=SKIPPED
    ),
    "searching ranges of all layers": Case(
        range_search, "range_params", "tensor 't4'", lambda x, *_: x.tensor == "t4", data=MANY, options=SKIPPED
    ),
    "choosing weight bits": Case(
        NoiseByLayer, "noise_with", "layer 'second'", lambda _, x: [*x] == ["second"], **NOISY
    ),
    "float fallback": Case(NoiseByLayer, "noise", "layer 'second'", lambda _, x, *__: [*x] == ["second"], **NOISY),
    "searching ranges again": Case(
        range_search,
        "range_params",
        "tensor 't6'",
        lambda x, *_: x.tensor == "t6",
        uneven,
        images(8, channels=16),
        {"equalize": False},
    ),
    "bias correction": Case(IsolatedLayers, "run", "layer 'second'", lambda _, name, *__: name == "second"),
    "choosing weight scales": Case(quantized_graph, "_widened", "layer 'last'", lambda _, x, *__: x.shape == (4,)),
    "evaluating bias correction": Case(quantized_graph, "stored_codes", "layer 'second'", of((16, 16, 3, 3))),
    "meeting max_drop": Case(ModelTrials, "noise", "layer 'second'", lambda _, x: "second" in x, options=GOAL),
    "rewriting": Case(quantized_graph, "stored_codes", "layer 'second'", of((16, 16, 3, 3))),
    "measuring the metric": Case(metric_search, "make_session", options={"metric": "cosine"}),
    "comparing outputs": Case(pipeline, "compare_outputs"),
    "writing": Case(pipeline, "save"),
}


RUNS_THE_MODEL = [
    title
    for title, case in PASSES.items()
    # Observers change the message, and without the margin of all layers, that of the remaining ones is searched.
    if case.place and case.function != "observe" and title != "searching ranges of all layers"
]


def as_ours(function):
    """Return the function as if it were code of detent."""
    own = {**function.__globals__, "__name__": "detent.made_by_a_test"}
    return type(function)(function.__code__, own, closure=function.__closure__)


def broken(*_, **__):
    return {}["t1"]


@pytest.fixture
def current(monkeypatch):
    """Return a list whose last entry is the name of the current pass."""
    names = []

    @contextmanager
    def named(name):
        names.append(name)
        with running(name):
            yield

    for module in (accuracy_passes, pipeline, quantizer_choice):
        monkeypatch.setattr(module, "running", named)
    return names


def fail(monkeypatch, current, title, case, error):
    """Raise an error in a pass."""
    original = getattr(case.owner, case.function)

    def failing(*args, **options):
        if current[-1] == title and case.when(*args, **options):
            raise error
        return original(*args, **options)

    monkeypatch.setattr(case.owner, case.function, as_ours(failing))
    for setting in case.settings:
        monkeypatch.setattr(*setting)


@pytest.mark.parametrize("title", PASSES)
def test_a_bug_names_its_pass_and_the_layer(title, current, monkeypatch, tmp_path):
    case = PASSES[title]
    fail(monkeypatch, current, title, case, KeyError("t1"))
    where = f" at {case.place}" if case.place else ""
    with pytest.raises(dt.DetentError, match=f"^{title} failed{where} with KeyError: 't1'. This is a bug") as caught:
        qo.quantize(case.model(), tmp_path / "q.onnx", case.data, progress=False, **case.options)
    assert isinstance(caught.value.__cause__, KeyError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("title", RUNS_THE_MODEL)
def test_an_error_of_onnx_runtime_names_the_pass_and_the_layer(title, current, monkeypatch, tmp_path):
    case = PASSES[title]
    error = dt.UnsupportedError("ONNX Runtime failed to run the model: no")
    error.__cause__ = RuntimeError("no")
    fail(monkeypatch, current, title, case, error)
    with pytest.raises(dt.UnsupportedError) as caught:
        qo.quantize(case.model(), tmp_path / "q.onnx", case.data, progress=False, **case.options)
    assert str(caught.value) == f"while {title} at {case.place}: ONNX Runtime failed to run the model: no"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_every_pass_has_a_row():
    sources = "".join(inspect.getsource(module) for module in (accuracy_passes, pipeline, quantizer_choice))
    assert set(re.findall(r'running\("([^"]+)"\)', sources)) == set(PASSES)


def test_an_error_that_concerns_all_layers_names_no_layer(monkeypatch):
    monkeypatch.setattr(layer_error, "record_in_parts", as_ours(broken))
    with pytest.raises(dt.DetentError, match="choosing ranges failed with KeyError"):
        qo.decide(conv_chain(), images(2), progress=False)


def test_the_argument_of_a_function_is_named_if_nothing_else_is():
    def fail(layer):
        for tensor in ("x", "y"):  # a local variable, which may be stale
            del tensor
        return {}[layer.data]

    with pytest.raises(dt.DetentError, match="planning failed at layer 'fc1' with KeyError"), running("planning"):
        as_ours(fail)(SimpleNamespace(name="fc1", data="x"))


def test_a_bug_in_a_worker_names_the_pass_and_the_layer(monkeypatch, tmp_path):
    qo.save(conv_chain(), tmp_path / "m.onnx")
    monkeypatch.setattr(Probe, "run", as_ours(broken))
    expected = r"^while equalization: worker \S+ failed at layer 'second' with KeyError: 't1'"
    with ThreadPoolExecutor(2) as executor, pytest.raises(dt.WorkerError, match=expected):
        qo.decide(tmp_path / "m.onnx", images(8), progress=False, executor=executor, work_directory=tmp_path)


def test_an_error_of_onnx_runtime_in_a_worker_names_the_pass(monkeypatch, tmp_path):
    def run(self, x, weight):
        with ort_errors():
            raise RuntimeError("no")

    qo.save(conv_chain(), tmp_path / "m.onnx")
    monkeypatch.setattr(Probe, "run", run)
    expected = "^while equalization at layer 'second': ONNX Runtime failed to run the model: no"
    with ThreadPoolExecutor(2) as executor, pytest.raises(dt.UnsupportedError, match=expected):
        qo.decide(tmp_path / "m.onnx", images(8), progress=False, executor=executor, work_directory=tmp_path)


def test_a_bug_in_the_last_rewrite(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "rewrite", as_ours(broken))
    with pytest.raises(dt.DetentError, match="rewriting failed with KeyError"):
        qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False, effort="fast")


@pytest.mark.parametrize(("module", "title"), [("equalization", "equalization"), ("smoothquant", "SmoothQuant")])
def test_a_bug_in_channel_factors(module, title, monkeypatch, tmp_path):
    monkeypatch.setattr(getattr(accuracy_passes, module), "choose", as_ours(broken))
    with pytest.raises(dt.DetentError, match=f"{title} failed with KeyError"):
        qo.decide(conv_chain(), images(2), progress=False)


def test_a_bug_names_its_node(monkeypatch):
    decisions = qo.decide(conv_chain(), images(2), progress=False)
    monkeypatch.setattr(quantized_graph, "stored_codes", as_ours(broken))
    with running("rewriting"), pytest.raises(KeyError):
        qo.rewrite(conv_chain(), decisions)
    with pytest.raises(dt.DetentError, match="rewriting failed at layer 'first' with KeyError"), running("rewriting"):
        qo.rewrite(conv_chain(), decisions)


def test_errors_of_numpy_are_bugs_of_the_pass(tmp_path, monkeypatch):
    def add_shapes(*_, **__):
        return np.concatenate([np.zeros((2, 2)), np.zeros(3)])

    monkeypatch.setattr(quantizer_choice, "choose_float", as_ours(add_shapes))
    with pytest.raises(dt.DetentError, match="float fallback failed with ValueError"):
        qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False)


def failing_batches():
    yield from images(1)
    raise ValueError("the caller's own")


@pytest.mark.parametrize(
    ("data", "progress"),
    [(failing_batches, False), (lambda: map(int, ["a"]), False), (lambda: images(2), lambda *_: 1 / 0)],
    ids=["generator", "builtin", "progress"],
)
def test_errors_of_the_caller_stay_what_they_are(data, progress, tmp_path):
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        qo.quantize(conv_chain(), tmp_path / "q.onnx", data(), progress=progress)
    assert not isinstance(caught.value, dt.DetentError) or "bug" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), dt.SpecError("told")])
def test_deliberate_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, running("planning"):
        raise error
    assert caught.value is error


def test_a_weight_with_nan_is_named(tmp_path):
    m = Maker()
    y = m.matmul("x", 16, 4, name="fc", weight=np.full((16, 4), np.nan, np.float32))
    with pytest.raises(dt.RangeError, match=r"weight 'c0' of layer 'fc': .*not finite in 64 of "):
        qo.quantize(m.model([("x", [1, 6, 16])], [y]), tmp_path / "q.onnx", rows(2), "w8a16", progress=False)


def test_a_report_has_the_time_of_each_pass(tmp_path):
    report = qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False)
    assert {"loading", "calibration", "choosing ranges", "float fallback", "rewriting", "writing"} <= set(report.passes)
    assert 0 < sum(report.passes.values()) <= report.seconds
    assert json.loads(report.to_json())["passes"] == report.passes
    names = []
    with listening(lambda name, seconds: names.append((name, seconds))):
        fast = qo.decide(conv_chain(), images(2), progress=False, effort="fast")
    assert fast.layers
    assert {name for name, _ in names} < set(report.passes), "fast has fewer passes"


def test_a_long_job_announces_the_time_of_each_effort(monkeypatch):
    texts = []
    with listening(lambda *_: None, texts.append):
        qo.decide(conv_chain(), images(2), progress=False)
        assert texts == [], "a short job announces nothing"
        monkeypatch.setattr(accuracy_passes, "MIN_SECONDS_ANNOUNCED", 0.0)
        qo.decide(conv_chain(), images(2), progress=False, effort="fast")
    (text,) = texts
    assert re.fullmatch(
        r"effort fast takes about \d+ s on this machine \(balanced about \d+ s, best about \d+ s\)", text
    )


def test_a_search_is_estimated_to_take_longer_than_a_fast_job(monkeypatch):
    texts = []
    monkeypatch.setattr(accuracy_passes, "MIN_SECONDS_ANNOUNCED", 0.0)
    monkeypatch.setattr(accuracy_passes, "_duration", lambda seconds: f"{seconds:.9f}")
    with listening(lambda *_: None, texts.append):
        qo.decide(conv_chain(), images(8), progress=False)
    balanced, fast, best = map(float, re.findall(r"about ([\d.]+)", texts[0]))
    assert fast < balanced <= best
