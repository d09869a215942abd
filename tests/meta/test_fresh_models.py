"""Models that were not used for development: separate from the others, with data that differ between the parts."""

import importlib

import numpy as np
import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def load(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        yield importlib.import_module


def test_fresh_models_are_not_unseen_models(load):
    models = load("unseen_models")
    assert not set(models.FRESH) & set(models.UNSEEN)
    assert set(models.FRESH) | set(models.UNSEEN) <= set(models.ALL_UNSEEN)


def test_no_file_of_a_package_is_in_both_sets(load):
    files = [
        {(model.package, model.file) for model in models.values()}
        for models in (load("package_models").PACKAGE_MODELS, load("fresh_packages").FRESH_PACKAGE_MODELS)
    ]
    assert not files[0] & files[1]


@pytest.mark.parametrize("name", ["file-type", "seal-detector"])
def test_held_out_inputs_of_a_package_model_differ_from_calibration(load, name):
    model = load("fresh_packages").FRESH_PACKAGE_MODELS[name]
    feeds = list(model.feeds(4))
    arrays = [next(iter(feed.values())) for feed in feeds]
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays)
    assert len({array.tobytes() for array in arrays}) == 4
    again = [next(iter(feed.values())) for feed in model.feeds(2)]
    assert all(np.array_equal(a, b) for a, b in zip(again, arrays[:2], strict=True))


def test_parts_of_a_short_file_are_padded(load, monkeypatch):
    packages = load("fresh_packages")
    monkeypatch.setattr(packages, "documents", lambda count: [b"abc"] * count)
    (feed,) = packages._file_parts(1)
    first, middle, last = feed["bytes"].reshape(3, packages.PART)
    assert bytes(first[:3].astype(np.uint8)) == bytes(last[-3:].astype(np.uint8)) == b"abc"
    assert sum(part.tolist().count(packages.PADDING) for part in (first, middle, last)) == 3 * (packages.PART - 3)


def generators(load):
    textures, records = load("networks.textures"), load("networks.records")
    return {
        "textures": lambda seed: vars(textures.textures(6, 32, seed)).values(),
        "heartbeats": lambda seed: records.heartbeats(6, 64, seed),
        "expressions": lambda seed: records.expressions(6, 24, seed),
        "measurements": lambda seed: records.measurements(6, 12, seed),
        "solids": lambda seed: records.solids(6, 32, seed),
        "spectrograms": lambda seed: records.spectrograms(6, 1024, seed),
    }


@pytest.mark.parametrize("name", ["textures", "heartbeats", "expressions", "measurements", "solids", "spectrograms"])
def test_data_depend_on_the_seed(load, name):
    generate = generators(load)[name]
    first, second = list(generate(1)), list(generate(2))
    assert all(len(array) == 6 and np.isfinite(array).all() for array in first)
    assert not np.array_equal(first[0], second[0])


def test_brackets_of_an_expression_match(load):
    records = load("networks.records")
    rows, enclosing, _ = records.expressions(4, 40, 1)
    for symbols, kinds in zip(rows.tolist(), enclosing.tolist(), strict=True):
        stack = []
        for symbol, kind in zip(symbols, kinds, strict=True):
            if symbol <= records.BRACKETS:
                stack.append(symbol)
            elif symbol <= 2 * records.BRACKETS:
                assert stack.pop() == symbol - records.BRACKETS
            assert kind == (stack[-1] if stack else 0)


def test_the_option_fresh_chooses_fresh_models(load):
    benchmark, models = load("onnx_unseen"), load("unseen_models")
    assert benchmark.chosen_models(is_quick=False, is_fresh=True) == list(models.FRESH)
    assert benchmark.chosen_models(is_quick=False, is_fresh=False) == list(models.UNSEEN)
    assert set(benchmark.chosen_models(is_quick=True, is_fresh=True)) <= set(models.FRESH)
