"""QuantSpec: resolved defaults, short strings, replace."""

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

import detent as dt
from detent.spec import NAMED_SPECS, get_spec, stored_nbytes


@pytest.mark.parametrize(
    ("format_", "symmetric", "convention", "expected"),
    [
        ("int8", None, "onnx", (True, -127, 127)),
        ("int8", False, "onnx", (False, -128, 127)),
        ("int8", None, "torch", (True, -128, 127)),
        ("int4", None, "rlx", (True, -7, 7)),
        ("int2", None, "entrenar", (True, -1, 1)),
        ("uint8", None, "onnx", (False, 0, 255)),
        ("uint8", True, "onnx", (True, 0, 255)),
        ("float8_e4m3fn", None, "torch", (True, -448.0, 448.0)),
        ("nf4", True, "onnx", (True, -1.0, 1.0)),
    ],
)
def test_symmetry_and_range(format_, symmetric, convention, expected):
    spec = dt.QuantSpec(format_, symmetric=symmetric, convention=convention)
    assert (spec.symmetric, spec.qmin, spec.qmax) == expected


@pytest.mark.parametrize("name", dt.convention.PRESETS)
def test_rounding_is_the_conventions_for_integers_only(name):
    convention = dt.convention.PRESETS[name]
    assert dt.QuantSpec("int8", convention=name).rounding == convention.rounding
    assert dt.QuantSpec("nf4", convention=name).rounding == dt.rounding.half_even


def test_equal_meaning_is_equal_spec():
    spelled = dt.QuantSpec(dt.int8, dt.PerTensor(), True, dt.Convention.onnx, dt.rounding.half_even, -127, 127, "float")
    assert spelled == dt.QuantSpec("int8")
    assert hash(spelled) == hash(dt.QuantSpec("int8"))


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("int4", {}),
        ("int4/group128", {"granularity": dt.PerGroup(128)}),
        ("int4/affine", {"symmetric": False}),
        ("int4/torch", {"convention": "torch"}),
        ("int4/axis-1/torsh", {"granularity": dt.PerAxis(-1), "convention": "torsh"}),
        ("int4/block2x3/symmetric/rlx", {"granularity": dt.PerBlock(2, 3), "convention": "rlx"}),
    ],
)
def test_parse(text, changes):
    assert dt.QuantSpec.parse(text) == get_spec(text) == dt.QuantSpec("int4", **changes)


@pytest.mark.parametrize("name", NAMED_SPECS)
def test_named_specs(name):
    spec = getattr(dt, name)
    assert dt.QuantSpec.parse(name) == spec
    assert (str(spec), repr(spec)) == (name, f"dt.{name}")
    assert dt.QuantSpec.from_json(spec.to_json()) == spec
    changed = dt.QuantSpec.parse(f"{name}/group8")
    assert changed == spec.replace(granularity=dt.PerGroup(8))
    assert changed.scale_format == spec.scale_format


@pytest.mark.parametrize(
    ("name", "format_", "size", "scale_format"),
    [
        ("mxfp4", dt.float4_e2m1fn, 32, "e8m0"),
        ("mxfp8", dt.float8_e4m3fn, 32, "e8m0"),
        ("mxfp8_e5m2", dt.float8_e5m2, 32, "e8m0"),
        ("nvfp4", dt.float4_e2m1fn, 16, "e4m3"),
    ],
)
def test_named_specs_are_what_their_names_say(name, format_, size, scale_format):
    spec = NAMED_SPECS[name]
    assert (spec.format, spec.granularity, spec.scale_format) == (format_, dt.PerGroup(size), scale_format)


def test_get_spec_takes_formats_and_specs():
    spec = dt.QuantSpec("int8", qmin=-100)
    assert get_spec(spec) is spec
    assert get_spec(dt.uint4) == dt.QuantSpec("uint4")


def test_replace_rederives_what_was_derived():
    spec = dt.QuantSpec("int8")
    assert spec.replace(convention="torch").qmin == -128
    assert spec.replace(symmetric=False).qmin == -128
    assert spec.replace(convention="oxicuda").rounding == dt.rounding.half_away
    assert spec.replace(format="uint8") == dt.QuantSpec("uint8")


def test_replace_keeps_what_was_given():
    spec = dt.QuantSpec("int8", qmin=-100, rounding="floor")
    changed = spec.replace(convention="oxicuda", granularity="axis0")
    assert (changed.qmin, changed.rounding, changed.granularity) == (-100, dt.rounding.floor, dt.PerAxis(0))


def test_dataclasses_replace_keeps_every_field():
    assert dataclasses.replace(dt.QuantSpec("int8"), convention="torch").qmin == -127


@pytest.mark.parametrize(
    ("spec", "levels", "zero_point"),
    [
        (dt.QuantSpec("int8"), 255, 0),
        (dt.QuantSpec("uint4", symmetric=True), 16, 8),
        (dt.QuantSpec("uint8", symmetric=True, qmin=0, qmax=254), 255, 127),
        (dt.QuantSpec("float8_e4m3fn"), 254, 0),
        (dt.QuantSpec("float8_e5m2"), 248, 0),
        (dt.QuantSpec("float4_e2m1fn"), 16, 0),
        (dt.QuantSpec("nf4"), 16, 0),
    ],
    ids=repr,
)
def test_levels_and_symmetric_zero_point(spec, levels, zero_point):
    assert (spec.num_levels, spec.symmetric_zero_point) == (levels, zero_point)


def test_json_writes_out_every_field():
    assert set(dt.QuantSpec("int8").to_dict()) == {"version", *(f.name for f in dataclasses.fields(dt.QuantSpec))}


def test_specs_of_another_process_hash_as_ours():
    """Hashes of strings differ between processes, so a pickle must not contain a cached hash."""
    code = (
        "import pickle, sys, detent as dt; s = dt.QuantSpec('int8'); hash(s); sys.stdout.buffer.write(pickle.dumps(s))"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}
    sent = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=60).stdout
    assert pickle.loads(sent) in {dt.QuantSpec("int8")}


def test_stored_bytes_are_packed_or_take_the_first_width_that_a_file_has():
    spec = dt.QuantSpec.parse("int3/axis0")
    assert stored_nbytes(spec, (8, 64)) == 8 * 64 * 3 // 8 + 8 * 4
    assert stored_nbytes(spec, (8, 64), widths=(4, 8, 16)) == 8 * 64 // 2 + 8 * 4 + 8 // 2
