"""Quantized files are small: nothing is stored twice, and notes of exporters are dropped."""

import json
from base64 import b85decode
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx_graphs import Maker, images

import detent as dt
import detent.onnx as qo
from detent.onnx.stored_decisions import _Reader, to_metadata
from detent.onnx_model.graph import Graph
from detent.onnx_model.provenance import Provenance, fields_of


def network():
    """Four convolutions: three ranges of activations, and zero points of 0."""
    m = Maker()
    t = "x"
    for i in range(4):
        t = m.add("Relu", [m.conv(t, 8, 8, name=f"conv{i}")])
    return m.model([("x", [2, 8, 8, 8])], [t])


def decided():
    return qo.decide(network(), images(), progress=False)


@pytest.fixture(scope="module")
def file():
    return qo.rewrite(network(), decided())


def entry_of(model):
    return fields_of(next(each.value for each in model.metadata_props if each.key == "detent"))


def test_a_spec_is_written_once(file):
    decisions = entry_of(file)["decisions"]
    texts = [json.dumps(each) for each in decisions["specs"]]
    assert len(texts) == len(set(texts))
    numbers = [each["spec"] for each in decisions["placements"]]
    numbers += [each["weight"] for each in decisions["layers"] if "weight" in each]
    assert set(numbers) <= set(range(len(texts)))
    assert len(numbers) > len(texts)


def test_a_range_is_part_of_its_placement(file):
    decisions = entry_of(file)["decisions"]
    assert "ranges" not in decisions
    ranged = {each["tensor"] for each in decisions["placements"] if "range" in each}
    assert ranged == set(decided().ranges)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.geomspace(1.0, 2.0**-7, 8), "bfloat16"),
        (-(2.0 ** np.arange(-126, 128)), "bfloat16"),
        (np.array([0.0, -0.0, np.inf, -np.inf, 1.0, 2.0, 3.0, 1e-40]), "float32"),
        (np.geomspace(1.0, 0.1, 8), "float32"),
        (np.arange(7.0), "float32"),  # too few elements
    ],
)
def test_arrays_are_stored_exactly(values, dtype):
    decisions = replace(decided(), constants={"c": np.float32(values)})
    entry = to_metadata(decisions, ModelProto())["constants"]["c"]
    assert entry.get("dtype", "float32") == dtype
    assert len(b85decode(entry["base85"])) == values.size * np.dtype(dtype).itemsize
    stored = _Reader(ModelProto()).read(entry)
    assert stored.dtype == np.float32
    assert stored.tobytes() == np.float32(values).tobytes()


def test_equal_zero_points_are_stored_once(file):
    graph = Graph(file)
    nodes = [node for node in graph.nodes if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    names = Counter(node.input[2] for node in nodes if len(node.input) > 2)
    contents = Counter((graph.kind(name), graph.array(name).tobytes()) for name in names)
    assert set(contents.values()) == {1}
    assert max(names.values()) > 2, "the four weights share their zero points"


def test_names_that_nodes_tell_are_not_stored(file):
    assert "activations" not in entry_of(file)
    quantizers = [node for node in file.graph.node if node.op_type == "QuantizeLinear"]
    activations = Provenance.read(file).activations
    assert activations == {node.name: node.input[0].removesuffix("_float") for node in quantizers}
    assert set(activations.values()) == {each.tensor for each in decided().placements}


def test_names_that_nodes_do_not_tell_are_stored(file):
    model = Graph(file).model
    activations = {**Provenance.read(model).activations, "x_codes_node": "the input"}
    copy = type(model)()
    copy.CopyFrom(model)
    Provenance(activations=activations).write(copy)
    assert Provenance.read(copy).activations == activations


def test_notes_of_exporters_are_dropped():
    model = network()
    model.graph.input[0].doc_string = "pictures, channels first"
    for part in (*model.graph.node, *model.graph.initializer):
        part.doc_string = "a trace"
        part.metadata_props.add(key="trace", value="/home/me/model.py")
    inner = helper.make_node("Identity", [model.graph.output[0].name], ["kept"], doc_string="a trace")
    body = helper.make_graph([inner], "body", [], [helper.make_empty_tensor_value_info("kept")])
    model.graph.initializer.add(name="flag", data_type=TensorProto.BOOL, raw_data=b"\1")
    model.graph.node.add(op_type="If", input=["flag"], output=["chosen"], name="choice").attribute.extend(
        [helper.make_attribute("then_branch", body), helper.make_attribute("else_branch", body)]
    )
    model.graph.output[0].name = "chosen"
    file = qo.rewrite(model, qo.decide(model, images(), progress=False))
    content = file.SerializeToString()
    assert b"a trace" not in content
    assert b"model.py" not in content
    assert file.graph.input[0].doc_string == "pictures, channels first"
    assert model.graph.node[0].doc_string == "a trace", "the source is not changed"
    assert dt.verify(model, file, images()).ok
