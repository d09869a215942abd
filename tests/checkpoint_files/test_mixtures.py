"""Mixtures: the choice of types by llama.cpp's rules. ``test_llama_cpp.py`` compares them with llama.cpp itself."""

import gguf
import pytest

from detent.checkpoint_files.mixtures import (
    FILE_TYPES,
    MIXTURES,
    choose_types,
    file_metadata,
    get_mixture,
    tensor_types,
)
from detent.checkpoint_files.target_model import GgufModel, MetadataEntry, TargetTensor
from detent.errors import SpecError


def model(blocks=16, columns=256, *, heads=(8, 8), experts=0, tied=False, architecture="llama", qkv=False):
    """A model with the names and shapes that decide on types."""
    key = architecture
    entries = [
        MetadataEntry(f"{key}.block_count", "uint32", blocks),
        MetadataEntry(f"{key}.attention.head_count", "uint32", heads[0]),
        MetadataEntry(f"{key}.attention.head_count_kv", "uint32", heads[1]),
    ]
    shapes = {"token_embd": (64, columns), "output_norm": (columns,)} | ({} if tied else {"output": (64, columns)})
    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    if experts:
        entries.append(MetadataEntry(f"{key}.expert_count", "uint32", experts))
    for block in range(blocks):
        names = ("attn_qkv",) if qkv else ("attn_q", "attn_k", "attn_v")
        for name in (*names, "attn_output"):
            shapes[f"blk.{block}.{name}"] = (32, columns)
        for name in ("ffn_up", "ffn_gate", "ffn_down"):
            shapes[f"blk.{block}.{name}{suffix}"] = (*stack, 32, columns)
        shapes[f"blk.{block}.ffn_norm"] = (columns,)
        if experts:
            shapes[f"blk.{block}.ffn_gate_inp"] = (experts, columns)
    tensors = [TargetTensor(f"{name}.weight", shape, ()) for name, shape in shapes.items()]
    return GgufModel(architecture, tuple(entries), tuple(tensors))


def blocks_with(types, name, wanted):
    return [int(key.split(".")[1]) for key, value in types.items() if f".{name}." in key and value == wanted]


def test_q4_k_m_gives_more_bits_to_eighths_and_every_third_block():
    types = tensor_types(model(), "Q4_K_M")
    more = [0, 1, 4, 7, 10, 13, 14, 15]
    assert blocks_with(types, "attn_v", "Q6_K") == blocks_with(types, "ffn_down", "Q6_K") == more
    assert {types[f"blk.{block}.{name}.weight"] for block in range(16) for name in ("attn_q", "ffn_up")} == {"Q4_K"}
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert types["blk.3.ffn_norm.weight"] == types["output_norm.weight"] == "F32"


def test_a_tied_embedding_has_the_type_of_the_output():
    assert tensor_types(model(tied=True), "Q4_K_M")["token_embd.weight"] == "Q6_K"
    assert tensor_types(model(tied=True), "Q8_0")["token_embd.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("Q2_K", {"attn_v": "Q3_K", "ffn_down": "Q3_K", "attn_output": "Q3_K", "attn_q": "Q2_K"}),
        ("Q3_K_S", {"attn_v": "Q3_K", "ffn_down": "Q3_K", "attn_output": "Q3_K"}),
        ("Q3_K_L", {"attn_v": "Q5_K", "ffn_down": "Q5_K", "attn_output": "Q5_K", "attn_q": "Q3_K"}),
        ("Q6_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"}),
        ("Q5_K_S", {"attn_v": "Q5_K", "ffn_down": "Q5_K"}),
        ("BF16", {"attn_v": "BF16", "ffn_down": "BF16"}),
    ],
)
def test_types_of_a_middle_block(mixture, expected):
    types = tensor_types(model(), mixture)
    assert {name: types[f"blk.9.{name}.weight"] for name in expected} == expected


def test_first_blocks_get_more_bits():
    q3 = tensor_types(model(), "Q3_K_M")
    assert blocks_with(q3, "attn_v", "Q5_K") == [0, 1]
    assert blocks_with(q3, "ffn_down", "Q5_K") == [0]
    q4 = tensor_types(model(), "Q4_K_S")
    assert blocks_with(q4, "attn_v", "Q5_K") == [0, 1, 2, 3]
    assert blocks_with(q4, "ffn_down", "Q5_K") == [0, 1]


def test_importance_changes_the_first_blocks():
    assert blocks_with(tensor_types(model(), "Q4_0", importance=True), "ffn_down", "Q4_1") == [0, 1]
    assert blocks_with(tensor_types(model(), "Q4_0"), "ffn_down", "Q4_1") == []
    assert blocks_with(tensor_types(model(), "IQ4_XS"), "ffn_down", "Q5_K") == [0, 1]
    assert blocks_with(tensor_types(model(), "IQ4_XS", importance=True), "ffn_down", "Q5_K") == []


def test_grouped_query_attention_gives_values_more_bits():
    assert tensor_types(model(heads=(8, 2)), "Q2_K")["blk.9.attn_v.weight"] == "Q4_K"
    assert tensor_types(model(heads=(8, 2)), "IQ4_NL")["blk.9.attn_v.weight"] == "Q5_K"


def test_models_of_8_experts_and_of_70b_have_rules_of_their_own():
    types = tensor_types(model(experts=8), "Q4_K_M")
    assert (types["blk.9.attn_k.weight"], types["blk.9.attn_v.weight"]) == ("Q8_0", "Q8_0")
    assert types["blk.9.attn_output.weight"] == "Q5_K"
    assert types["blk.9.ffn_gate_inp.weight"] == "F32"
    types = tensor_types(model(80, heads=(8, 1)), "Q4_K_M")
    assert types["blk.10.attn_v.weight"] == "Q5_K"
    assert tensor_types(model(80, heads=(8, 8)), "Q4_K_M")["blk.10.attn_v.weight"] == "Q4_K"


def test_mxfp4_moe_is_for_experts():
    types = tensor_types(model(experts=4), "MXFP4_MOE")
    assert types["blk.9.ffn_up_exps.weight"] == "MXFP4"
    assert {types["blk.9.attn_q.weight"], types["output.weight"], types["token_embd.weight"]} == {"Q8_0"}
    assert set(tensor_types(model(), "MXFP4_MOE").values()) == {"Q8_0", "F32"}


@pytest.mark.parametrize(
    ("mixture", "columns", "default", "output", "more"),
    [
        ("Q4_K_M", 320, "Q5_0", "Q8_0", "Q8_0"),
        ("Q2_K", 320, "Q4_0", "Q8_0", "Q4_0"),
        ("Q5_K_M", 320, "Q5_1", "Q8_0", "Q8_0"),
        ("IQ4_XS", 320, "IQ4_NL", "Q8_0", "Q5_1"),
        ("Q6_K", 320, "Q8_0", "Q8_0", "Q8_0"),
        ("Q4_0", 320, "Q4_0", "Q8_0", "Q4_0"),
        ("Q4_K_M", 80, "F16", "F16", "F16"),
    ],
)
def test_rows_that_do_not_fit_fall_back_and_the_choice_says_why(mixture, columns, default, output, more):
    choice = choose_types(model(columns=columns), mixture)
    assert choice.types["blk.9.attn_q.weight"] == default
    assert choice.types["blk.0.ffn_down.weight"] == more
    if mixture == "Q4_0":  # the output is Q6_K, whose blocks do not fit
        assert choice.fallbacks["output.weight"] == f"Q8_0 instead of Q6_K: rows of {columns} are not a multiple of 256"
    elif default != get_mixture(mixture).default:
        assert choice.fallbacks["blk.9.attn_q.weight"].startswith(
            f"{default} instead of {get_mixture(mixture).default}"
        )
    assert choice.types["output.weight"] == output


def test_names_are_checked():
    with pytest.raises(SpecError, match="unknown mixture 'Q4_K_X': did you mean 'Q4_K_"):
        tensor_types(model(), "Q4_K_X")
    with pytest.raises(SpecError, match="Q2_K_S needs an importance matrix"):
        tensor_types(model(), "q2_k_s")
    assert tensor_types(model(), "q2_k_s", importance=True)["blk.9.attn_q.weight"] == "Q2_K"


def test_file_types_are_those_of_the_gguf_package():
    for name, mixture in MIXTURES.items():
        member = "ALL_F32" if name == "F32" else f"MOSTLY_{name}"
        assert FILE_TYPES[name] == gguf.LlamaFileType[member] == file_metadata(name)[0].value
        assert mixture.default in gguf.GGMLQuantizationType.__members__
    assert file_metadata("Q4_0")[1].value == gguf.GGML_QUANT_VERSION
