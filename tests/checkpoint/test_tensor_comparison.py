import json
from math import inf

import numpy as np
import pytest
from safetensors.numpy import save_file

import detent as dt
import detent.checkpoint as qc

from .tiny_checkpoints import CONFIG, llama_tensors, write_checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compare")
    write_checkpoint(directory / "tiny")
    qc.quantize(directory / "tiny", directory / "q8.gguf", "gguf:Q8_0", vocabulary=False)
    return directory


def test_a_checkpoint_equals_itself(files):
    comparison = qc.compare(files / "tiny", files / "tiny")
    assert comparison.is_equal
    assert len(comparison.tensors) == 21


def test_a_quantized_file_is_compared_with_its_source(files):
    comparison = qc.compare(files / "tiny", files / "q8.gguf")
    assert comparison.only == ((), ())
    by_name = {tensor.name: tensor for tensor in comparison.tensors}
    up = llama_tensors()["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    expected = dt.metrics.sqnr_db(up, dt.fake_quantize(up, "q8_0"))
    assert by_name["blk.1.ffn_up.weight"].sqnr_db == pytest.approx(expected, abs=1e-6)
    assert by_name["blk.1.ffn_up.weight"].types == ("bfloat16", "q8_0")
    assert by_name["output_norm.weight"].sqnr_db == inf
    assert not comparison.is_equal
    assert json.loads(comparison.to_json())["is_equal"] is False
    assert "21 tensors in both" in str(comparison)


def test_names_and_shapes_that_differ_are_listed(files, tmp_path):
    config = CONFIG | {"num_hidden_layers": 1, "vocab_size": 32}
    other = write_checkpoint(tmp_path / "other", llama_tensors(config), config)
    comparison = qc.compare(files / "tiny", other)
    assert len(comparison.only[0]) == 9
    by_name = {tensor.name: tensor for tensor in comparison.tensors}
    assert by_name["lm_head.weight"].note == "shapes (96, 256) and (32, 256)"
    assert by_name["lm_head.weight"].sqnr_db is None
    assert "only in" in str(comparison)


def compared(tmp_path, first, second, metadata=None):
    for name, array in (("a", first), ("b", second)):
        save_file({"x": np.asarray(array)}, tmp_path / f"{name}.safetensors", metadata)
    comparison = qc.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    json.loads(comparison.to_json())
    return comparison


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_tensors_of_any_rank_and_type_are_compared(tmp_path, shape, dtype):
    x = np.zeros(shape, dtype)
    y = np.ones(shape, dtype)
    assert compared(tmp_path, x, x).is_equal
    comparison = compared(tmp_path, x, y)
    assert [tensor.name for tensor in comparison.tensors] == ["x"]
    assert not comparison.is_equal


def test_shapes_with_equal_rows_are_not_equal(tmp_path):
    x = np.ones((2, 3, 4, 5), np.float32)
    comparison = compared(tmp_path, x, x.reshape(2, 60))
    assert comparison.tensors[0].note == "shapes (2, 3, 4, 5) and (2, 60)"
    assert not comparison.is_equal
    assert compared(tmp_path, np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32)).is_equal
    assert compared(tmp_path, np.zeros((4, 0), np.float32), np.zeros((4, 0), np.float32)).is_equal


def test_values_that_are_not_finite_are_equal_or_not_compared(tmp_path):
    x = np.array([1, np.nan, np.inf], np.float32)
    assert compared(tmp_path, x, x).is_equal
    comparison = compared(tmp_path, x, np.ones(3, np.float32))
    assert (comparison.tensors[0].sqnr_db, comparison.tensors[0].note) == (None, "NaN or infinities")
    assert not comparison.is_equal
    assert "NaN or infinities" in str(comparison)


def test_metadata_of_safetensors_do_not_make_a_gguf_file(tmp_path):
    x = np.ones((2, 3), np.float32)
    assert compared(tmp_path, x, x, {"general.architecture": "llama"}).is_equal


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.int64([2**53, 1]), np.int64([2**53 + 1, 1])),
        (np.float64([1.0, np.nan]), np.float64([1.0 + 1e-12, np.nan])),
        (np.float64([1.0 + 1e-12]), np.float32([1.0])),
    ],
)
def test_values_that_are_equal_only_as_float32_differ(tmp_path, first, second):
    comparison = compared(tmp_path, first, second)
    assert not comparison.is_equal
    assert comparison.tensors[0].note == "different, but equal as float32"
    assert compared(tmp_path, first, first).is_equal
