"""Graph: the index of names follows changes; tensors keep their values."""

import numpy as np
import pytest
from onnx import GraphProto, NodeProto, TensorProto, parser

import detent as dt
from detent.onnx_model.graph import (
    MOVING,
    Graph,
    array_of,
    describe,
    element_range,
    make_tensor,
    node_name,
    sort_nodes,
    trace_back,
)


def relu_abs():
    return Graph(
        parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { t = Relu(x) y = Abs(t) }'
        )
    )


def operators(graph):
    return [node.op_type for node in graph.nodes]


def test_changes():
    graph = relu_abs()
    one = graph.add_constant("one", np.ones(1, np.float32))
    assert (graph.array(one), graph.shape("x"), graph.kind("x"), graph.opset) == (1, (1,), TensorProto.FLOAT, 17)
    graph.insert([NodeProto(op_type="Neg", input=["t"], output=["n"])])
    graph.redirect("t", "n", [graph.producer("y")])
    graph.finish()
    assert operators(graph) == ["Relu", "Neg", "Abs"]
    assert [node.op_type for node in graph.consumers("t")] == ["Neg"]
    graph.remove([graph.producer("y")])
    assert (operators(graph), graph.consumers("n"), graph.drop_unread()) == (["Relu", "Neg"], [], ["one"])
    graph.rename("n", "m")
    assert graph.producer("n") is None
    assert graph.producer("m").op_type == "Neg"


def test_names():
    assert node_name(relu_abs().nodes[0]) == "Relu_t"
    assert describe(NodeProto(op_type="Add", output=["y", "z"])) == "Add y, z"
    assert [relu_abs().fresh(name) for name in ("t", "new")] == ["t_1", "new"]


def test_nodes_are_sorted():
    nodes = [NodeProto(input=["y"], output=["z"], op_type="Abs"), NodeProto(input=["x"], output=["y"], op_type="Relu")]
    graph = GraphProto(node=nodes)
    sort_nodes(graph)
    assert [node.op_type for node in graph.node] == ["Relu", "Abs"]


def test_a_tensor_is_traced_back():
    nodes = {"b": NodeProto(op_type="Reshape", input=["a"]), "a": NodeProto(op_type="Relu", input=["x"])}
    assert trace_back("b", nodes.get, MOVING) == "a"


@pytest.mark.parametrize(
    ("kind", "bounds"), [("INT4", (-8, 7)), ("UINT4", (0, 15)), ("INT16", (-(1 << 15), (1 << 15) - 1))]
)
def test_integers_fit(kind, bounds):
    kind = TensorProto.DataType.Value(kind)
    assert element_range(kind) == bounds
    assert array_of(make_tensor("w", np.array(bounds), kind)).tolist() == list(bounds)
    for bad in (bounds[0] - 1, bounds[1] + 1):
        with pytest.raises(dt.FileFormatError, match="do not fit"):
            make_tensor("w", np.array([bad]), kind)
