"""Candidates and names of layers, sizes of files, and invalid metrics."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from report_models import example_mix, example_sensitivity, example_verification, feeds, float_model, quantized

import detent.report as qr
import detent.sensitivity as qs
from detent.errors import FileFormatError, SpecError
from detent.report.document import matching_candidate

# Candidates


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        ("int8/axis1/symmetric/onnx", ("int2/axis0", "int8/axis0"), "int8/axis0"),
        ("int4/group32@0/symmetric/onnx", ("int4/group3", "int4/group32"), "int4/group32"),
        ("int4/group32@0/symmetric/onnx", ("int4/group3", "int4/axis0"), ""),
        ("int4/axis0", ("int4/tensor", "int4/axis0"), "int4/axis0"),
        ("int4/axis1/affine/onnx", ("int4/axis0", "int4/axis0/affine"), "int4/axis0/affine"),
        ("int16/axis1", ("int2/axis0", "int8/axis0"), ""),
        ("", ("int8/axis0",), ""),
        ("unknown", ("int8/axis0",), ""),
    ],
)
def test_matching_candidate_a_spec(spec, options, expected):
    assert matching_candidate(spec, options) == expected


def test_noise_share_is_that_of_the_option_a_layer_has(tmp_path):
    model, path, result = quantized(tmp_path, "w8a16")
    sensitivity = qs.measure(model, feeds(), widths=(2, 8))
    page = qr.build(path, feeds(), source=model, result=result, sensitivity=sensitivity)
    noise = {layer.name: layer.noise["int8/axis0"] for layer in sensitivity.layers}
    total = sum(noise.values())
    assert page.noise_share_basis == "sensitivity"
    assert {layer.name: layer.noise_share for layer in page.layers} == {
        name: pytest.approx(value / total, rel=1e-3) for name, value in noise.items()
    }


def test_layers_of_no_measured_option_have_no_noise_share_by_it(tmp_path):
    model, path, result = quantized(tmp_path, "w8a16")
    sensitivity = qs.measure(model, feeds(), widths=(2, 4))
    page = qr.build(path, feeds(), source=model, result=result, sensitivity=sensitivity)
    assert page.noise_share_basis == "output"


def test_noise_share_of_a_recipe_that_was_measured(tmp_path):
    model, path, result = quantized(tmp_path)
    sensitivity = qs.measure(model, feeds(), "w8a8")
    page = qr.build(path, feeds(), source=model, result=result, sensitivity=sensitivity)
    assert page.noise_share_basis == "sensitivity"
    assert all(layer.noise_share is not None for layer in page.layers if layer.is_quantized)


# Names


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
@pytest.mark.parametrize("is_known", [False, True], ids=["file", "result"])
def test_nodes_that_are_called_like_parameters(tmp_path, recipe, is_known):
    names = ("fc.weight", "b.weight", "last")
    _, path, result = quantized(tmp_path, recipe, float_model(names=names))
    page = qr.build(path, feeds(), result=result if is_known else None)
    assert sorted(layer.name for layer in page.layers) == sorted(names)
    assert page.reproduction.origin == "onnx"
    assert "--skip fc.weight" in page.to_html()


# Sizes


def test_size_of_data_in_a_file_of_any_name(tmp_path):
    _, path, _ = quantized(tmp_path)
    whole = qr.build(path).nbytes_after
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="model.weights", size_threshold=0)
    (tmp_path / "small.onnx.0123.data").write_bytes(bytes(100_000))  # of another model
    page = qr.build(path)
    assert page.nbytes_after == path.stat().st_size + (tmp_path / "model.weights").stat().st_size > 0.9 * whole


def test_size_of_the_float_model_with_data_outside(tmp_path):
    model, path, _ = quantized(tmp_path)
    source = tmp_path / "float.onnx"
    onnx.save(model, source, save_as_external_data=True, location="float.onnx.data", size_threshold=0)
    nbytes = qr.build(path, source=source).nbytes_before
    assert nbytes == source.stat().st_size + (tmp_path / "float.onnx.data").stat().st_size


# Metrics


@pytest.mark.parametrize("agreement", [-0.1, 1.5, float("nan"), float("inf")])
def test_no_share(agreement):
    with pytest.raises(SpecError, match="from 0 to 1"):
        qr.Report("a", 1, 1, agreement=agreement)


@pytest.mark.parametrize(
    ("key", "value"), [("agreement", "nan"), ("agreement", 2), ("version", True), ("version", 1.0)], ids=str
)
def test_hostile_values(key, value):
    about = {**json.loads(qr.Report("a", 1, 1).to_json()), key: value}
    with pytest.raises(FileFormatError, match=key):
        qr.Report.from_json(json.dumps(about))


def test_comparison_of_shares_is_json():
    a = qr.Report("a", 1, 1, agreement=np.float64(0.5))
    both = json.loads(qr.compare(a, replace(a, agreement=None)).to_json())
    assert (both["a"]["agreement"], both["b"]["agreement"]) == (0.5, None)


# Verification and sensitivity


def whole_page():
    return qr.Report(
        "a", 1, 1, verification=example_verification(differing=3), sensitivity=example_sensitivity(), mix=example_mix()
    )


def test_verification_and_sensitivity_survive_json():
    page = qr.Report.from_json(whole_page().to_json())
    assert page == whole_page()
    assert str(page.verification) == str(whole_page().verification)
    assert page.sensitivity.choose(400) == whole_page().sensitivity.choose(400)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verification", "first_difference", "index"), ["0"]),
        (("verification", "first_difference", "got"), [1]),
        (("verification", "first_difference"), {"node": "a"}),
        (("verification", "kernels"), [["a", "b", 1, 2, 3]]),
        (("verification", "kernels"), [["a", "b", 1, 2, 3, 0]]),
        (("sensitivity", "layers"), []),
        (("mix", "recipe"), {"rules": 3}),
        (("mix", "options"), {}),
    ],
    ids=lambda each: ".".join(each) if isinstance(each, tuple) else "",
)
def test_hostile_verification_and_sensitivity(path, value):
    document = json.loads(whole_page().to_json())
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(FileFormatError):
        qr.Report.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("version", "advice"), [(1, "build the report again"), (99, "update detent, or build the report again")]
)
def test_other_versions_are_rejected(version, advice):
    document = {**json.loads(qr.Report("a", 1, 1).to_json()), "version": version}
    with pytest.raises(FileFormatError, match=f"has version {version}, but this detent reads version 4: {advice}"):
        qr.Report.from_json(json.dumps(document))
