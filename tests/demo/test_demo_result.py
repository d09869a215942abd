"""Rows and results: invariants, text, JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import detent as dt
from detent.demo import DemoResult, DemoRow
from detent.verification import Difference, VerifyReport

FLOAT = DemoRow("float", None, 0.99, 0.99, 500, 500, 180_000, 180_000)
W2 = DemoRow("W2 QAT", "w2a8", 0.974, 0.972, 500, 499, 36_000, 180_000, 12.34, 1000, 0)
PROOF = VerifyReport((1,), 5, 1000, 0)
RESULT = DemoResult((FLOAT, W2), {"W2 QAT": PROOF}, Path("demo-report.html"), (Path("demo-report.html"),), "W2 QAT")


def test_table():
    head, plain, quantized, *_, line = str(RESULT).splitlines()
    assert head.split() == ["PyTorch", "ONNX", "Runtime", "same", "class", "bytes", "ratio", "SQNR", "codes", "differ"]
    assert plain.split() == ["float", "99.0", "%", "99.0", "%", "500", "of", "500", "180,000", "1.0x", "-", "-"]
    assert quantized.split()[-6:] == ["5.0x", "12.3", "dB", "0", "of", "1000"]
    assert max(map(len, str(RESULT).splitlines())) <= 80
    assert line == "codes that differ: 0 of 1000"
    assert "W2 is stored in 4 bits" in str(RESULT)
    assert "W2 is stored" not in str(
        DemoResult((FLOAT, replace(W2, label="W4 QAT")), {"W4 QAT": PROOF}, Path("p"), (), "W4 QAT")
    )


def test_a_difference_in_any_file_is_not_ok():
    first = Difference("a", "b", (0,), 1, 2, None, None, None, "another code")
    bad = VerifyReport((1,), 5, 1000, 3, first)
    rows = (FLOAT, W2, replace(W2, label="W2 PTQ", differing_codes=3))
    result = DemoResult(rows, {"W2 QAT": PROOF, "W2 PTQ": bad}, Path("p"), (), "W2 QAT")
    assert not result.ok
    assert result.codes_line() == "codes that differ: 3 of 2000"
    assert json.loads(result.to_json())["ok"] is False


def test_json_has_infinite_sqnr_as_text():
    result = replace(RESULT, rows=(FLOAT, replace(W2, sqnr_db=float("inf"))))
    assert json.loads(result.to_json())["rows"][1]["sqnr_db"] == "inf"


def test_notebooks_show_a_table():
    assert repr(RESULT) == f"<DemoResult: 2 networks, {RESULT.codes_line()}, {RESULT.report_path}>"
    text = RESULT._repr_html_()
    assert text.count("<tr>") == 3
    assert text.endswith(f"<div>{RESULT.codes_line()}</div>")


@pytest.mark.parametrize(
    "wrong",
    [{"accuracy_torch": 98.0}, {"accuracy_onnxruntime": float("nan")}, {"nbytes": 0}, {"equal_predictions": 501}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_row_that_cannot_be(wrong):
    with pytest.raises(dt.SpecError):
        replace(W2, **wrong)


def test_every_quantized_row_has_a_verification():
    with pytest.raises(dt.SpecError, match="got verifications of"):
        replace(RESULT, verifications={})


def test_an_unknown_row_is_named_with_those_that_exist():
    with pytest.raises(dt.SpecError, match="no row has the label 'W3', expected one of float, W2 QAT"):
        RESULT["W3"]
