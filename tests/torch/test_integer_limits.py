"""Integer products are refused per layer with the reason, or replaced by float products with arithmetic='auto'."""

from __future__ import annotations

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.errors import SpecError  # noqa: E402
from detent.torch.integer_limits import has_product, integer_problem  # noqa: E402
from detent.torch.integer_product import MAX_TERMS  # noqa: E402

INT8, UINT8 = dt.QuantSpec.parse("int8/axis0"), dt.QuantSpec.parse("uint8/tensor/affine")
REFUSED = {
    "weight-only": (nn.Linear(4, 2), INT8, None, "its input is not quantized"),
    "float weight": (nn.Linear(4, 2), None, UINT8, "its weight is not quantized"),
    "wide input": (
        nn.Linear(4, 2),
        INT8,
        "uint16/tensor",
        "uint16, but integer kernels need integers of at most 8 bits",
    ),
    "float input": (nn.Linear(4, 2), INT8, "float8_e4m3fn/tensor", "float8_e4m3fn"),
    "wide weight": (nn.Linear(4, 2), "int16/axis0", UINT8, "its weight has format int16"),
    "tokens": (nn.Linear(4, 2), INT8, "uint8/token", "one scale for the tensor"),
    "groups": (nn.Linear(4, 2), "int8/group2", UINT8, "one per output channel or tensor"),
    "affine weight": (nn.Linear(4, 2), "uint8/axis0", UINT8, "its weight has a zero point"),
    "stochastic": (nn.Linear(4, 2), INT8, UINT8.replace(rounding=dt.rounding.stochastic(1)), "rounded stochastically"),
    "terms": (nn.Linear(MAX_TERMS + 1, 1, device="meta"), INT8, UINT8, "33,156 terms, but only 33,155 fit int32"),
    "double": (nn.Linear(4, 2, dtype=torch.float64), INT8, UINT8, "float64"),
    "device": (nn.Linear(4, 2, device="meta"), INT8, UINT8, "on device meta"),
    "transposed": (nn.ConvTranspose2d(2, 2, 1), INT8, UINT8, "only Linear and convolution layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_reasons(case):
    layer, weight, x, reason = REFUSED[case]
    parsed = [dt.QuantSpec.parse(each) if isinstance(each, str) else each for each in (weight, x)]
    assert reason in integer_problem(layer, *parsed)


def test_longest_sum_is_possible():
    assert integer_problem(nn.Linear(MAX_TERMS, 1), INT8, UINT8) == ""


def mixed():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_plan_lists_every_refused_layer():
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("0", input="uint8/tensor")])
    with pytest.raises(
        SpecError, match=r"not possible in 1 layer:\n  2: its input is not quantized\nuse arithmetic='auto'"
    ):
        qt.plan(mixed(), recipe, arithmetic="integer")


def test_auto_keeps_float_products_with_the_reason():
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0"), dt.Rule("0", input="uint8/tensor")])
    model = qt.prepare(mixed(), recipe, arithmetic="auto")
    assert [model[0].arithmetic, model[2].arithmetic] == ["integer", "float"]
    text = str(qt.plan(mixed(), recipe, arithmetic="auto"))
    assert "float products: its input is not quantized" in text
    assert "integer products in 1 layers" in text


def test_rules_override_the_argument():
    recipe = dt.Recipe([*dt.Recipe.preset("w8a8").rules, dt.Rule("2", arithmetic="float")])
    model = qt.prepare(mixed(), recipe, arithmetic="integer")
    assert [model[0].arithmetic, model[2].arithmetic] == ["integer", "float"]
    recipe = dt.Recipe([*dt.Recipe.preset("w8a8").rules, dt.Rule("2", arithmetic="integer")])
    model = qt.prepare(mixed(), recipe)
    assert [model[0].arithmetic, model[2].arithmetic] == ["float", "integer"]
    assert dt.Recipe.from_toml(recipe.to_toml()) == recipe


def test_look_ups_need_no_product():
    assert not has_product(nn.Embedding(3, 4))
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
    assert qt.plan(model, "w8a8", arithmetic="integer").layers[1].arithmetic == "integer"


def test_unknown_arithmetic_is_rejected():
    with pytest.raises(SpecError, match="got arithmetic='int'"):
        qt.plan(mixed(), "w8a8", arithmetic="int")
    with pytest.raises(SpecError, match="got arithmetic='integers': did you mean 'integer'"):
        dt.Rule(arithmetic="integers")


def test_health_and_state_name_the_arithmetic():
    model = qt.prepare(mixed(), "w8a8", arithmetic="integer")
    model(torch.randn(8, 4))
    report = qt.health(model)
    assert "integer products in 2 of 2 layers: " in str(report)
    assert b'"arithmetic": "integer"' in bytes(model.state_dict()["0.weight_quantizer._extra_state"].tolist())
    other = qt.prepare(mixed(), "w8a8")
    other.load_state_dict(model.state_dict())
    assert qt.health(other).arithmetic == ""
