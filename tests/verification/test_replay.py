"""Replay detects files that were changed after they were written, and decisions that do not fit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from onnx import helper, numpy_helper

import detent as dt
import detent.onnx as qo
from detent.onnx.stored_decisions import read_decisions
from detent.onnx_model import array_of, make_tensor
from detent.onnx_model.provenance import Provenance, fields_of, packed


def model():
    rng = np.random.default_rng(0)
    square = [numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float32), name) for name in ("w1", "w2")]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "w2"], ["y"], name="second"),
    ]
    ends = [[helper.make_tensor_value_info(name, 1, ["n", 8])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", *ends, square)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


DATA = [np.random.default_rng(i).normal(size=(4, 8)).astype(np.float32) for i in range(3)]


def changed(file, name, change):
    for tensor in file.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(make_tensor(name, change(array_of(tensor)), tensor.data_type))
            return name
    raise AssertionError(name)


def one_code(values):
    values = values.copy()
    values[3, 2] ^= 1
    return values


def one_ulp(values):
    return np.nextafter(values, np.float32(np.inf)).astype(np.float32)


def first_ulp(values):
    values = values.copy()
    values[0] = np.nextafter(values[0], np.float32(np.inf))
    return values


@pytest.fixture
def file(tmp_path):
    return qo.load(qo.quantize(model(), tmp_path / "q.onnx", DATA, progress=False, smooth=False).output)


def test_nothing_differs_in_a_file_as_it_was_written(file):
    report = dt.verify(model(), file, DATA)
    assert report.ok
    assert report.differing_codes == 0
    assert report.compared_codes > 100


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w1_codes", one_code),
        ("w2_scale", first_ulp),
        ("x_scale", one_ulp),
        ("zero_point", lambda values: values + 1),
        ("zero_point_1", lambda values: values + 1),
    ],
)
def test_changed_constants_are_caught_and_named(file, name, change):
    changed(file, name, change)
    report = dt.verify(model(), file)
    assert not report.ok
    assert report.first_difference.tensor == name
    with pytest.raises(dt.VerificationError, match=name):
        dt.verify(model(), file, raise_on_difference=True)


def test_a_swapped_axis_is_caught(file):
    node = next(node for node in file.graph.node if node.input[0] == "w1_codes")
    node.attribute[0].i = 0
    report = dt.verify(model(), file)
    difference = report.first_difference
    assert not report.ok
    assert (difference.node, difference.tensor, difference.expected, difference.got) == (
        node.name,
        "attribute axis",
        1,
        0,
    )


def test_a_file_is_of_its_own_source_and_of_no_other(file):
    assert dt.verify(model(), file).ok
    other = model()
    changed(other, "w1", one_ulp)
    report = dt.verify(other, file, DATA)
    assert not report.ok
    assert report.first_difference.cause == "the file was not made from this source"
    stored = model()  # the same numbers, stored in another way
    for tensor in stored.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values.ravel().tolist())
    assert dt.verify(stored, file).ok


def test_a_file_without_decisions_is_not_ok(file):
    del file.metadata_props[:]
    report = dt.verify(model(), file, DATA)
    assert not report.ok
    assert report.failure.startswith("not replayed: the file has no decisions")
    assert not dt.verify(model(), file, DATA, levels=(2,)).ok
    assert dt.verify(model(), file, DATA, levels=(3,)).ok


def test_what_was_decided_is_listed(file):
    report = dt.verify(model(), file)
    assert report.replay.decided == (
        "target onnxruntime, opset 17",
        "1 weight format: 2 int8/axis1/symmetric/onnx [qmin=-64, qmax=64]",
        "2 activation scales with zero point: scales from 0.0345 to 0.0576",
    )
    assert "accepted within bounds: 2 activation scales with zero point" in str(report)


def test_segments_are_equal_to_the_bit(file):
    report = dt.verify(model(), file, DATA)
    assert report.ok
    assert report.segments.compared_codes == 3 * (4 * 8 + 4 * 8)
    assert (report.segments.compared_outputs, report.segments.bound) == (3, "")


def test_execution_alone_catches_a_changed_graph(file):
    file.graph.node[[node.name for node in file.graph.node].index("relu")].op_type = "Abs"
    report = dt.verify(model(), file, DATA, levels=(2,))
    assert not report.ok
    assert report.replay is None
    assert report.segments.differing_codes > 0
    assert "(relu, first)" in report.failure


def rewritten(file, change):
    """Change the decisions recorded in a file, and store them as a JSON object."""
    entry = next(each for each in file.metadata_props if each.key == "detent")
    fields = fields_of(entry.value)
    change(fields["decisions"])
    entry.value = json.dumps(fields)
    return file


def stored_as(file, form):
    """Store the decisions and the version of the metadata in another form."""
    entry = next(each for each in file.metadata_props if each.key == "detent")
    entry.value = json.dumps(form(fields_of(entry.value)))
    return file


def decisions_of(file):
    return read_decisions(file, Provenance.read(file)).decisions


FORMS = {
    "as an object": lambda fields: fields,
    "packed": lambda fields: {**fields, "decisions": packed(fields["decisions"])},
    "version 2": lambda fields: {**fields, "version": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_decisions_in_every_form_are_replayed(file, form):
    expected = decisions_of(file)
    stored = stored_as(file, FORMS[form])
    assert dt.verify(model(), stored).ok
    assert decisions_of(stored) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda each: each.update(rewrite_version=99), "rewrite_version 99"),
        (lambda each: each.update(version=99), "version 99"),
    ],
)
def test_other_versions_are_not_replayed(file, change, reason):
    report = dt.verify(model(), rewritten(file, change))
    assert not report.ok
    assert report.replay.reason.startswith("the file's decisions have ")
    assert reason in report.failure


def nest(entry):
    value = entry
    for _ in range(5000):
        value["layers"] = value = {}


MALFORMED = {
    "no version": lambda each: each.pop("version"),
    "text": lambda each: each.update(layers="all"),
    "unknown key": lambda each: each.update(color=3),
    "repeated": lambda each: each.update(target="openvino"),
    "twice": lambda each: each["layers"].append(each["layers"][0]),
    "no such constant": lambda each: each["layers"][0]["weight_scale"].update(initializer="nothing"),
    "constant of another type": lambda each: each["layers"][0]["weight_scale"].update(initializer="w1_codes"),
    "huge": lambda each: each["layers"][0].update(weight_scale={"fill": 1.0, "shape": [1 << 40]}),
    "huge in all": lambda each: each.update(constants={str(i): {"fill": 1.0, "shape": [60000]} for i in range(100)}),
    "fill of bfloat16": lambda each: each["layers"][0].update(
        weight_scale={"fill": 1.0, "shape": [8], "dtype": "bfloat16"}
    ),
    "short bytes of bfloat16": lambda each: each["layers"][0].update(
        weight_scale={"base85": "00", "shape": [8], "dtype": "bfloat16"}
    ),
    "short bytes": lambda each: each["layers"][0].update(weight_scale={"base85": "00", "shape": [8]}),
    "not base85": lambda each: each["layers"][0].update(weight_scale={"base85": '""', "shape": [8]}),
    "another dtype": lambda each: each["layers"][0].update(weight_scale={"fill": 1, "shape": [8], "dtype": "object"}),
    "scale of 0": lambda each: each["placements"][0]["range"].update(scale=0),
    "scale of nan": lambda each: each["placements"][0]["range"].update(scale="nan"),
    "zero point": lambda each: each["placements"][0]["range"].update(zero_point=1 << 70),
    "no range": lambda each: each["placements"][0].pop("range"),
    "range as text": lambda each: each["placements"][0].update(range="wide"),
    "ranges apart": lambda each: each.update(ranges={"x": each["placements"][0].pop("range")}),
    "placement as text": lambda each: each["placements"].insert(0, "x"),
    "unknown spec": lambda each: each["layers"][0].update(weight=9),
    "negative spec": lambda each: each["layers"][0].update(weight=-1),
    "spec as text": lambda each: each["layers"][0].update(weight="int8/axis1"),
    "spec of another kind": lambda each: each["specs"].insert(0, 7),
    "specs as text": lambda each: each.update(specs="int8"),
    "group of its own": lambda each: each["placements"][0].update(group="nothing"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_decisions_are_refused(file, name):
    with pytest.raises(dt.FileFormatError, match="decisions of the file"):
        dt.verify(model(), rewritten(file, MALFORMED[name]))


def test_metadata_that_are_nested_too_deep_are_refused(file):
    entry = next(each for each in file.metadata_props if each.key == "detent")
    entry.value = '{"decisions":' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(dt.FileFormatError, match="detent"):
        dt.verify(model(), file)


CONTRADICTING = {
    "unknown layer": lambda each: each["layers"][0].update(name="nothing"),
    "layer missing": lambda each: each["layers"].pop(),
    "tensor": lambda each: each["placements"][0].update(tensor="nothing"),
    "opset": lambda each: each.update(opset=25),
    "ir_version": lambda each: each.update(ir_version=9),
    "scale": lambda each: each["layers"][0].update(weight_scale={"fill": 0.5, "shape": [8]}),
    "constant": lambda each: each.update(constants={"c": {"fill": 1.0, "shape": [2]}}),
}


@pytest.mark.parametrize("name", CONTRADICTING)
def test_decisions_for_another_model_are_not_ok(file, name):
    report = dt.verify(model(), rewritten(file, CONTRADICTING[name]))
    assert not report.ok
    assert report.first_difference is not None


def test_another_activation_scale_is_another_decision(file):
    """The scale is listed in ``decided``; data show the resulting SQNR."""
    scale = np.float32(0.25)
    changed(file, "x_scale", lambda values: np.full_like(values, scale))
    rewritten(file, lambda each: each["placements"][0]["range"].update(scale=float(scale)))
    report = dt.verify(model(), file, DATA)
    assert report.ok
    assert "2 activation scales with zero point: scales from 0.0576 to 0.25" in report.replay.decided
    assert (
        report.output_sqnr_db < dt.verify(model(), qo.rewrite(model(), qo.decide(model(), DATA)), DATA).output_sqnr_db
    )


def table():
    """A table with per-group scales; the rank of its indices is a decision."""
    rng = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(rng.normal(size=(32, 8)).astype(np.float32), "table"),
        numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float32), "w"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["rows"], name="words"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="fc"),
    ]
    given = helper.make_tensor_value_info("i", 7, [1, 3])
    graph = helper.make_graph(nodes, "lookup", [given], [helper.make_tensor_value_info("y", 1, [1, 3, 8])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_the_rank_of_indices_follows_from_the_model():
    recipe = dt.Recipe([dt.Rule("*", weight="int8/group4")])
    decisions = qo.decide(table(), None, recipe)
    assert dt.verify(table(), qo.rewrite(table(), decisions)).ok
    layers = tuple(replace(each, index_rank=3) if each.index_rank else each for each in decisions.layers)
    with pytest.raises(dt.SpecError, match="index_rank must be 2"):
        qo.rewrite(table(), replace(decisions, layers=layers))


def masked():
    """A constant with huge mask values: 4 ulp of the largest would hide any other change."""
    rng = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float32), "w"),
        numpy_helper.from_array(np.float32([0, 0, 0, 0, -3e38, -3e38, 1, 2]), "logs"),
    ]
    nodes = [
        helper.make_node("Softplus", ["logs"], ["mask"], name="computed"),
        helper.make_node("MatMul", ["x", "w"], ["a"], name="fc"),
        helper.make_node("Add", ["a", "mask"], ["y"], name="add"),
    ]
    ends = [[helper.make_tensor_value_info(name, 1, ["n", 8])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_computed_constants_are_compared_number_by_number():
    decisions = qo.decide(masked(), DATA, progress=False)
    value = decisions.constants["mask"].copy()
    value[0] = np.nextafter(value[0], np.float32(2))
    assert dt.verify(masked(), qo.rewrite(masked(), replace(decisions, constants={"mask": value}))).ok
    value[0] += np.float32(1e-3)
    with pytest.raises(dt.SpecError, match="up to 4 ulp"):
        qo.rewrite(masked(), replace(decisions, constants={"mask": value}))


def test_a_plan_of_a_model_as_it_is_carries_no_decisions():
    plan = qo.plan(masked(), "w8a16")
    file = qo.insert(plan)
    assert not dt.verify(masked(), file).ok
    prepared = qo.prepare(masked())
    assert dt.verify(prepared, qo.insert(qo.plan(prepared, "w8a16"))).ok


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ((1,), "ok: the file matches its source and its decisions; "),
        ((3,), "ok: everything compared matches; the file was not replayed"),
        ((1, 2), " dB"),
    ],
)
def test_the_headline_says_what_was_compared(file, levels, expected):
    headline = dt.verify(model(), file, DATA, levels=levels).headline
    assert expected in headline
    assert "; 0 codes" not in headline
    assert dt.verify(file, file, DATA, levels=(1, 2)).headline.startswith("ok: the file is a copy of its source")


def test_malformed_metadata_of_a_source_are_refused(file):
    source = qo.load(file)
    for entry in source.metadata_props:
        entry.value = "["
    with pytest.raises(dt.FileFormatError, match="metadata entry"):
        dt.verify(source, file)


def test_an_unknown_target_is_refused(file):
    entry = next(each for each in file.metadata_props if each.key == "detent")
    entry.value = entry.value.replace('"target":"onnxruntime"', '"target":"abacus"')
    with pytest.raises(dt.FileFormatError, match="abacus"):
        dt.verify(model(), file)
