"""Metadata of quantized files: decisions are compressed, and every malformed text is rejected."""

import bz2
import json
import sys
from base64 import b85encode

import pytest
from onnx import ModelProto

import detent as dt
from detent.onnx_model.provenance import MAX_EXPANSION, MIN_LIMIT, VERSION, Provenance, fields_of, packed, unpacked

LONG = {"layers": [{"name": f"layer{i}", "weight": i % 2} for i in range(100)], "text": "\u00e4"}


def text_of(model):
    return next(each.value for each in model.metadata_props if each.key == "detent")


def model_with(**changes):
    """Make a model whose metadata have the changed fields, with decisions."""
    model = ModelProto()
    Provenance(target="onnxruntime", made_by="1.0", decisions=LONG).write(model)
    fields = {**json.loads(text_of(model)), **changes}
    model.metadata_props[0].value = json.dumps({name: each for name, each in fields.items() if each is not ...})
    return model


def compressed(content):
    return b85encode(bz2.compress(content)).decode()


def test_long_decisions_are_compressed():
    text = text_of(model_with())
    fields = json.loads(text)
    assert fields["decisions"] == packed(LONG)
    assert len(text) < len(json.dumps(LONG)) / 2
    assert (fields["version"], fields["target"], fields["made_by"]) == (VERSION, "onnxruntime", "1.0")
    assert Provenance.read(model_with()).decisions == unpacked(packed(LONG)) == fields_of(text)["decisions"] == LONG


def test_short_decisions_are_an_object():
    model = ModelProto()
    Provenance(decisions={"opset": 17}).write(model)
    assert '"decisions":{"opset":17}' in text_of(model)
    assert Provenance.read(model).decisions == {"opset": 17}


def test_compressed_bytes_are_the_same_everywhere():
    assert packed({"b": 1, "a": [0.5]}) == "LRx4!F+o`-Q(1vc-ERN@2b+Kp1!52Y3NQcw3LpS60MG#uqXX1kpCBrcMNG{Xaz!{$kbzCzZv"


@pytest.mark.parametrize("version", [2, VERSION])
def test_an_object_is_read(version):
    assert Provenance.read(model_with(decisions=LONG, version=version)) == Provenance.read(model_with())


def test_decisions_may_be_missing():
    assert Provenance.read(model_with(decisions=...)).decisions is None
    assert Provenance.read(model_with(decisions=None)).decisions is None


@pytest.mark.parametrize("version", [0, VERSION + 1, 2.0, "2", None, ...])
def test_other_versions_are_rejected(version):
    with pytest.raises(dt.FileFormatError, match=f"expected version {VERSION}|reads version {VERSION}"):
        Provenance.read(model_with(version=version))


TEXT = packed(LONG)
COMPRESSED = bz2.compress(json.dumps(LONG).encode())
MALFORMED = {
    "empty": ("", "ends too early"),
    "not base85": (TEXT[:20] + '"' + TEXT[21:], "bad base85 character"),
    "not ASCII": (TEXT + "\u00e4" * 5, "ASCII"),
    "lone surrogate": ("\ud800" * 5, "expected the base85"),
    "base85 overflow": ("~" * 10, "overflow"),
    "not bzip2": (b85encode(b"plain text").decode(), "Invalid data stream"),
    "damaged": (b85encode(COMPRESSED[:40] + b"\0" + COMPRESSED[41:]).decode(), "Invalid data stream"),
    "truncated": (b85encode(COMPRESSED[:-4]).decode(), "ends too early"),
    "trailing byte": (b85encode(COMPRESSED + b"\0").decode(), "1 bytes after the compressed data"),
    "trailing stream": (b85encode(COMPRESSED * 2).decode(), "bytes after the compressed data"),
    "trailing character": (TEXT + "0" * ((1 - len(TEXT)) % 5 or 5), "characters, which base85 never has"),
    "too large": (compressed(b" " * MIN_LIMIT + b"{}"), f"more than {MIN_LIMIT} characters"),
    "not UTF-8": (compressed(b'{"a": "\xff"}'), "utf-8"),
    "not JSON": (compressed(b"{"), "is not valid JSON"),
    "no text": (compressed(b""), "not valid JSON"),
    "a list": (compressed(b"[1]"), "expected a JSON object"),
    "text within text": (compressed(json.dumps(TEXT).encode()), "expected a JSON object"),
    "nested too deep": (compressed(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), "not valid JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_decisions_are_rejected(name):
    text, problem = MALFORMED[name]
    with pytest.raises(dt.FileFormatError, match=f"(?s)metadata entry 'detent'.*({problem})"):
        Provenance.read(model_with(decisions=text))


def test_the_largest_decisions_are_read():
    text = compressed(b'{"a":1' + b" " * (MIN_LIMIT - 7) + b"}")
    assert unpacked(text) == {"a": 1}


def test_a_short_text_does_not_expand_to_a_large_object():
    content = b'{"a":[' + b"1," * (1 << 20) + b"1]}"
    text = compressed(content)
    assert len(text) * MAX_EXPANSION < len(content)
    with pytest.raises(dt.FileFormatError, match=f"expected at most .* for a text of {len(text)} characters"):
        unpacked(text)
    decisions = {"a": [1] * (1 << 20)}  # would be compressed too much, and is stored as an object
    model = ModelProto()
    Provenance(decisions=decisions).write(model)
    assert '"decisions":{"a":[1,1,' in text_of(model)


def test_a_python_without_bz2_is_named(monkeypatch):
    text = packed(LONG)
    monkeypatch.setitem(sys.modules, "bz2", None)
    with pytest.raises(dt.errors.UnsupportedError, match="this Python was built without the module bz2"):
        unpacked(text)
    model = ModelProto()
    Provenance(decisions=LONG).write(model)
    assert Provenance.read(model).decisions == LONG, "stored as an object"


@pytest.mark.parametrize("value", [1, True, [1]])
def test_decisions_of_another_kind_are_rejected(value):
    with pytest.raises(dt.FileFormatError, match="decisions must be a JSON object"):
        Provenance.read(model_with(decisions=value))


def test_an_export_is_an_object():
    with pytest.raises(dt.FileFormatError, match="export must be a JSON object"):
        Provenance.read(model_with(export=packed(LONG)))
