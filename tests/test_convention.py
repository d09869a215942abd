"""Conventions: each preset equals its row in the table of docs/numerics.md."""

import dataclasses

import pytest

import detent as dt
from detent.convention import PRESETS, get_convention
from detent.ste import get_estimator

EPS = ("eps", 2.0**-23)
UNIT = ("unit", 0.0)
EVEN, AWAY = dt.rounding.half_even, dt.rounding.half_away
COLUMNS = ("division", "rounding", "zero_point", "symmetric_scale", "narrow", "include_zero", "zero_range", "mask")
# fmt: off
TABLE = {
    "onnx":               ("divide", EVEN, "after", "qmax", True, True, UNIT, "code_inclusive"),
    "torch":              ("reciprocal", EVEN, "after", "half_span", False, True, EPS, "code_inclusive"),
    "torch_fused":        ("reciprocal", EVEN, "after", "tight", False, True, EPS, "code_inclusive"),
    "compressed_tensors": ("divide", EVEN, "before", "half_span", False, True, EPS, "identity"),
    "oxicuda":            ("divide", AWAY, "before", "qmax", False, False, ("width", 1e-8), "value_inclusive"),
    "entrenar":           ("divide", AWAY, "before", "qmax", True, False, ("eps", 1e-10), "identity"),
    "torsh":              ("divide", AWAY, "after", "half_span", False, False, ("unit_at_qmin", 0.0), "identity"),
    "rlx":                ("divide", AWAY, "after", "qmax", True, True, ("eps", 1e-12), "identity"),
    "baracuda":           ("reciprocal", EVEN, "after", "qmax", False, True, UNIT, "code_inclusive"),
    "baracuda_channel":   ("divide", EVEN, "after", "qmax", False, True, UNIT, "code_inclusive"),
    "baracuda_token":     ("divide", EVEN, "before", "qmax", False, True, UNIT, "code_exclusive"),
}
# fmt: on


@pytest.mark.parametrize("name", TABLE)
def test_preset_is_its_row(name):
    preset = PRESETS[name]
    row = dict(zip(COLUMNS, TABLE[name], strict=True))
    row |= {"zero_point": f"{row['zero_point']}_round", "zero_range": dt.ZeroRange(*row["zero_range"]), "name": name}
    assert {field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)} == row


def test_every_preset_has_a_row():
    assert set(PRESETS) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_names_repr_and_dictionaries(name):
    preset = PRESETS[name]
    assert getattr(dt.Convention, name) is get_convention(name) is get_convention(preset) is preset
    assert eval(repr(preset), {"dt": dt}) is preset
    assert dt.Convention.from_dict(preset.to_dict()) == preset


def test_a_convention_of_ones_own():
    mine = dataclasses.replace(dt.Convention.onnx, name="mine", division="reciprocal", rounding="floor")
    assert mine.rounding == dt.rounding.floor
    assert mine != dt.Convention.onnx
    assert dt.Convention.from_dict(mine.to_dict()) == mine
    assert hash(dt.Convention.from_dict(mine.to_dict())) == hash(mine)
    assert dt.QuantSpec.from_json(dt.QuantSpec("int8", convention=mine).to_json()).convention == mine
    assert repr(mine).startswith("dt.Convention(name='mine', division='reciprocal'")


@pytest.mark.parametrize(
    ("mask", "estimator"),
    [
        ("identity", dt.ste.Identity()),
        ("code_inclusive", dt.ste.Clipped("code", "inclusive")),
        ("code_exclusive", dt.ste.Clipped("code", "exclusive")),
        ("value_inclusive", dt.ste.Clipped("value", "inclusive")),
        ("value_exclusive", dt.ste.Clipped("value", "exclusive")),
    ],
)
def test_mask_names_the_default_estimator(mask, estimator):
    assert get_estimator(None, dataclasses.replace(dt.Convention.onnx, name="mine", mask=mask)) == estimator
