"""Block formats against ggml: bytes and values, with and without importance; and against bytes stored here."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from ggml_referee import (
    TYPES,
    data_sets,
    dequantized_by_ggml,
    first_difference,
    importances,
    quantized_by_ggml,
)

import detent as dt
from detent.gguf import BLOCK_FORMATS, get_block_format

GOLDEN = Path(__file__).with_name("golden_blocks.json")
SIZES = {  # bytes per block and elements per block, from the definition of the file format
    "q4_0": (18, 32),
    "q4_1": (20, 32),
    "q5_0": (22, 32),
    "q5_1": (24, 32),
    "q8_0": (34, 32),
    "q2_k": (84, 256),
    "q3_k": (110, 256),
    "q4_k": (144, 256),
    "q5_k": (176, 256),
    "q6_k": (210, 256),
    "iq4_nl": (18, 32),
    "iq4_xs": (136, 256),
    "gguf.mxfp4": (17, 32),
}


def quantized(form, x, importance=None):
    return dt.quantize(x, form, importance=importance, scales="keep").packed


def assert_equals_ggml(form, x, importance):
    ours, theirs = quantized(form, x, importance), quantized_by_ggml(form, x, importance).reshape(-1)
    assert first_difference(form, ours, theirs) is None


def test_every_format_has_the_sizes_of_the_file_format():
    assert {name: (form.block_bytes, form.block_size) for name, form in BLOCK_FORMATS.items()} == SIZES
    assert set(TYPES) == set(BLOCK_FORMATS)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_bytes_equal_those_of_ggml(name, kernels):
    form = get_block_format(name)
    with dt.use_kernels(kernels):
        for x in data_sets(17 * 512 * 6).values():
            assert_equals_ggml(form, x, None)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_bytes_with_importance_equal_those_of_ggml(name, kernels):
    form = get_block_format(name)
    with dt.use_kernels(kernels):
        for importance in importances(512).values():
            for x in data_sets(17 * 512 * 3, seed=3).values():
                assert_equals_ggml(form, x, importance)


@pytest.mark.parametrize("name", TYPES)
def test_values_equal_those_of_ggml_for_any_bytes(name):
    form = get_block_format(name)
    blocks = np.random.default_rng(5).integers(0, 256, (301, form.block_bytes), np.uint8)
    for at in form.scale_offsets:
        blocks[:, at + 1] &= 0xBB  # finite scales
    tensor = dt.BlockTensor(blocks, form, (301, form.block_size))
    expected = dequantized_by_ggml(form, blocks).reshape(tensor.shape)
    assert tensor.dequantize().tobytes() == expected.tobytes()
    with dt.use_kernels("reference"):
        assert tensor.dequantize().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_values_equal_those_of_the_gguf_package(name):
    quants = pytest.importorskip("gguf.quants")
    form = get_block_format(name)
    packed = quantized(form, data_sets(17 * 512 * 4, seed=7)["heavy_tailed"])
    expected = quants.dequantize(packed, quants.GGMLQuantizationType(form.gguf_type)).reshape(-1)
    assert dt.BlockTensor(packed, form, expected.shape).dequantize().tobytes() == expected.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_ten_million_elements_equal_those_of_ggml(name):
    form = get_block_format(name)
    for x in data_sets(10_000_000, seed=11, columns=2048).values():
        for importance in (None, importances(2048, seed=11)["usual"]):
            assert_equals_ggml(form, x, importance)


def golden_data():
    """Return data that need no random generator, so that they stay equal on every machine and in every version."""
    i = np.arange(3 * 512, dtype=np.int64)
    noise = (i * 2654435761 + 12345) % 65536
    spread = np.array([1.0, 0.125, 8.0], np.float32).repeat(512)
    x = ((noise - 32768).astype(np.float32) / np.float32(32768)) ** 3 * spread
    return x.reshape(3, 512), ((i[:512] * 40503) % 256 + 1).astype(np.float32) / np.float32(64)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_bytes_equal_the_stored_ones(name, kernels):
    x, importance = golden_data()
    stored = json.loads(GOLDEN.read_text())[name]
    with dt.use_kernels(kernels):
        assert quantized(name, x).tobytes().hex() == stored["plain"]
        assert quantized(name, x, importance).tobytes().hex() == stored["weighted"]


@pytest.mark.parametrize("name", TYPES)
def test_stored_bytes_are_those_of_ggml(name):
    x, importance = golden_data()
    stored, form = json.loads(GOLDEN.read_text())[name], get_block_format(name)
    assert quantized_by_ggml(form, x).tobytes().hex() == stored["plain"]
    assert quantized_by_ggml(form, x, importance).tobytes().hex() == stored["weighted"]


@pytest.mark.parametrize("name", [each for each in TYPES if get_block_format(each).uses_importance])
def test_importance_changes_bytes(name):
    x, importance = golden_data()
    assert not np.array_equal(quantized(name, x), quantized(name, x, importance))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_exponents_of_mxfp4_equal_those_of_ggml_next_to_powers_of_two(kernels):
    powers, steps = np.meshgrid(np.arange(-126, 128), np.arange(-3, 17))
    largest = np.ldexp(1 - steps.ravel() * 2.0**-24, powers.ravel()).astype(np.float32)  # log2 of some rounds up
    x = largest[:, None] * np.linspace(1, -1, 32, dtype=np.float32)
    with dt.use_kernels(kernels):
        assert_equals_ggml(dt.gguf.mxfp4, x, None)
    exponents = dt.quantize(x, dt.gguf.mxfp4, scales="keep").blocks[:, 0].astype(int)
    assert (exponents[largest >= 2.0**-125] == np.floor(np.log2(largest))[largest >= 2.0**-125] + 125).all()
    assert (exponents[largest >= 2.0**-125] > np.frexp(largest)[1][largest >= 2.0**-125] + 124).any()


def test_mxfp4_of_gguf_rounds_ties_to_smaller_magnitudes_and_the_spec_to_even():
    x = np.array([[4, 0.75, 2.5, -0.75, *[0] * 28]], np.float32)
    assert dt.quantize(x, "gguf.mxfp4").dequantize()[0, :4].tolist() == [4, 0.5, 2, -0.5]
    assert dt.quantize(x, "mxfp4").dequantize()[0, :4].tolist() == [4, 1, 2, -1]


def test_mxfp4_rejects_blocks_below_the_lowest_exponent():
    x = np.full((2, 64), 1e-3, np.float32)
    x[1, 32:] = 1e-39
    with pytest.raises(dt.ParamsError, match=r"1 of 4 gguf.mxfp4 blocks are below 2\^-127.*first in block 3.*1e-39"):
        dt.quantize(x, dt.gguf.mxfp4)
    assert not dt.quantize(x, dt.gguf.mxfp4, scales="keep").dequantize()[1, 32:].any()
    x[1, 32:] = 3e38  # the same byte as that of a tiny block is correct here
    assert dt.quantize(x, dt.gguf.mxfp4).dequantize()[1, 32] > 2e38


def test_mxfp4_of_gguf_keeps_its_name_in_recipes_and_pickles():
    recipe = dt.Recipe([dt.Rule("blk.*_exps", weight=dt.gguf.mxfp4)])
    assert dt.Recipe.from_json(recipe.to_json()) == recipe
    assert pickle.loads(pickle.dumps(dt.gguf.mxfp4)) is dt.gguf.mxfp4
    assert (repr(dt.gguf.mxfp4), str(dt.gguf.mxfp4)) == ("dt.gguf.mxfp4", "gguf.mxfp4")


def test_importance_reduces_the_weighted_error():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 1024)).astype(np.float32)
    importance = np.exp(rng.normal(size=1024) * 2).astype(np.float32)
    for name in ("q2_k", "q3_k", "q4_k", "q4_0", "iq4_nl"):
        plain, weighted = (
            float((importance * (dt.fake_quantize(x, name, importance=each) - x) ** 2).sum())
            for each in (None, importance)
        )
        assert weighted < plain


def test_more_bits_give_less_error():
    x = np.random.default_rng(0).normal(size=(16, 1024)).astype(np.float32)
    names = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
    sqnr = [dt.metrics.sqnr_db(x, dt.fake_quantize(x, name)) for name in names]
    assert sqnr == sorted(sqnr)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_data_of_other_types_are_quantized_in_float32(dtype):
    x = np.random.default_rng(1).normal(size=(2, 256)).astype(dtype)
    q = dt.quantize(x, "q4_k")
    assert q.dtype == x.dtype
    assert q.packed.tobytes() == dt.quantize(x.astype(np.float32), "q4_k").packed.tobytes()
    assert dt.fake_quantize(x, "q4_k").tobytes() == q.dequantize().tobytes()
    assert q.dequantize().tobytes() == q.dequantize("float32").astype(dtype).tobytes()
