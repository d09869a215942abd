"""qt.export_onnx: the file has the codes and scales of the model, and ONNX Runtime computes the outputs of the model.

Every file is looked at in the same way (``inspect``): what it may hold, its weights bit by bit, and the codes of every
QuantizeLinear node by detent's own rules from the tensor that ONNX Runtime saw.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import onnx  # noqa: E402
from onnx import ModelProto, TensorProto, helper, parser  # noqa: E402
from torch import nn  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.onnx_model import Graph, Provenance, array_of, get_target, load, make_session, optimized  # noqa: E402
from detent.onnx_model.graph import INTEGER_KERNELS, attribute_of  # noqa: E402
from detent.torch import onnx_export  # noqa: E402
from detent.torch.export_graph import Lowering  # noqa: E402
from detent.torch.export_marks import Marked, MarkedWeight  # noqa: E402
from detent.torch.preparation import plan_of, quantizers_of, weight_layers  # noqa: E402

SIDE, CLASSES, WORDS, LENGTH, WIDTH = 10, 6, 40, 8, 32
INPUT = "uint8/tensor/affine"


def cnn() -> nn.Module:
    """Dense, depthwise and strided convolutions with batch norms."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, CLASSES))


class Block(nn.Module):
    """Attention whose matmuls have qt.Quantizer inputs, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.left, self.right = qt.Quantizer(), qt.Quantizer()

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        weights = (self.left(q) @ self.right(k).transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, *, tied: bool = False, heads: int = CLASSES) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS if tied else heads, bias=not tied)
        self.tied = tied
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.block(self.words(ids) + self.places(torch.arange(LENGTH)))
        return self.head(x if self.tied else x.mean(1))


class Two(nn.Module):
    """Two named inputs, two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, left, right):
        total = self.a(left) + self.b(right)
        return {"total": total, "both": torch.cat([left, right], 1)}


def images(count: int, seed: int = 0) -> Any:
    """Noisy images of stripes with random phase; the class is the direction of the stripes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = (classes * (torch.pi / CLASSES))[:, None, None]
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(1.2 * (row * angle.sin() + column * angle.cos()) + phase)
    return (stripes + 0.3 * torch.randn(count, SIDE, SIDE, generator=generator))[:, None], classes


def sentences(count: int, seed: int = 0) -> Any:
    """Sequences of words; the class is the most frequent group of words."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
    ids[:, ::2] = classes[:, None] * (WORDS // CLASSES) + torch.randint(6, (count, LENGTH // 2), generator=generator)
    return ids, classes


def numbers(count: int, seed: int = 0) -> Any:
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :CLASSES].argmax(1)


DATA = {cnn: images, Transformer: sentences, mlp: numbers}


def train(model: nn.Module, make: Any, steps: int, rate: float) -> nn.Module:
    optimizer = torch.optim.Adam(model.train().parameters(), rate)
    for step in range(steps):
        x, classes = make(48, seed=step)
        loss = nn.functional.cross_entropy(model(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(autouse=True)
def one_thread():
    """More threads do not speed up networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(kind: Any, recipe: Any, steps: int = 25) -> nn.Module:
    """A model that was trained in float, calibrated, and trained again with quantization."""
    torch.manual_seed(0)
    make = DATA[kind]
    model = train(kind(), make, 2 * steps, 5e-3)
    qt.prepare(model, recipe, bias="exported")
    with qt.calibrating(model):
        model(make(128, seed=10**6)[0])
    return train(model, make, steps, 1e-3)


def calibrated(model: nn.Module, recipe: Any, *args: Any) -> nn.Module:
    qt.prepare(model, recipe)
    with qt.calibrating(model):
        model(*args)
    return model


def snapshot(model: nn.Module) -> Any:
    """Everything of a model that an export must not change: bits, memory, versions, modes, classes and hooks."""
    tensors = {
        name: (each.data_ptr(), each._version, each.requires_grad, each.detach().numpy().tobytes())
        for name, each in (*model.named_parameters(), *model.named_buffers())
    }
    modules = [
        (name, type(each), each.training, len(each._forward_hooks), len(each._forward_pre_hooks), sorted(vars(each)))
        for name, each in model.named_modules()
    ]
    return tensors, modules, torch.get_rng_state().numpy().tobytes()


def run(path: Path | ModelProto, feeds: dict[str, np.ndarray], *, optimize: bool = False) -> list[np.ndarray]:
    return make_session(path, optimize=optimize, threads=1).run(None, feeds)


@torch.no_grad()
def as_shipped(model: nn.Module, *args: Any) -> np.ndarray:
    return qt.freeze(copy.deepcopy(model)).eval()(*args).numpy()


def inspect(model: nn.Module, path: Path, feeds: dict[str, np.ndarray]) -> Graph:
    """Load a file, after all checks that need no outputs."""
    model_proto = load(path)
    onnx.checker.check_model(model_proto, full_check=True)
    assert not model_proto.functions
    assert {entry.domain for entry in model_proto.opset_import} == {""}
    assert {node.domain for node in model_proto.graph.node} <= {""}
    assert model_proto.ir_version <= 10
    assert not any(part.metadata_props or part.doc_string for part in (model_proto.graph, *model_proto.graph.node))
    provenance, graph = Provenance.read(model_proto), Graph(model_proto)
    assert provenance is not None
    assert dt.Recipe.from_json(provenance.recipe) == plan_of(model).recipe
    assert provenance.made_by == dt.__version__
    check_weights(model, graph, provenance)
    check_activations(model, graph, provenance, feeds)
    return graph


def check_weights(model: nn.Module, graph: Graph, provenance: Provenance) -> None:
    """Check that codes minus zero point and scales equal the model's, and that each weight is stored once."""
    state, first = qt.quantized_state(model), {}
    for full, _, _, quantizer in weight_layers(model):
        first.setdefault(quantizer, full)
    assert sorted(provenance.weights.values()) == sorted(first.values())
    for name, full in provenance.weights.items():
        tensor = state[full]
        codes, scale, zero = graph.array(name).astype(np.int64), graph.array(f"{full}_scale"), 0
        if f"{full}_zero_point" in graph.constants:
            zero = graph.array(f"{full}_zero_point").astype(np.int64)
        expected, zeros, scales = tensor.codes.astype(np.int64), tensor.params.zero_point, tensor.params.scale
        if is_transposed(graph, name):
            expected, zeros, scales = expected.T, zeros.T, scales.T
        if np.ptp(zeros):  # zero points of groups are those of the file
            assert np.array_equal(codes, expected), full
            assert np.array_equal(zero, zeros), full
        else:
            assert np.array_equal(codes - np.unique(zero).item(), expected - int(zeros.flat[0])), full
        assert (scale.shape, scale.tobytes()) == (scales.shape, scales.tobytes()), full
    smallest = min(tensor.size for tensor in state.values())
    sizes = [np.prod(each.dims) for each in graph.constants.values() if each.data_type == TensorProto.FLOAT]
    assert max(sizes) < smallest
    assert graph.drop_unread() == []


def is_transposed(graph: Graph, name: str) -> bool:
    """Whether a matrix is stored as [in, out], so that its readers do not transpose it."""
    outs = [node.output[0] for node in graph.consumers(name) if node.op_type == "DequantizeLinear"]
    readers = [(node, out) for out in outs for node in graph.consumers(out)]
    return bool(readers) and all(
        node.op_type in {"MatMul", "Gemm"} and node.input[1] == out and not attribute_of(node, "transB", 0)
        for node, out in readers
    )


def check_activations(model: nn.Module, graph: Graph, provenance: Provenance, feeds: dict[str, np.ndarray]) -> None:
    """Check every QuantizeLinear node: its codes and values are those of the quantizer for the same input."""
    nodes = {node.name: node for node in graph.nodes if node.op_type == "QuantizeLinear"}
    assert set(nodes) == set(provenance.activations)
    probe, places = ModelProto(), {}
    probe.CopyFrom(graph.model)
    for name, node in nodes.items():
        before = graph.producer(node.input[0])
        x = before.input[0] if before is not None and before.op_type == "Clip" else node.input[0]
        (after,) = graph.consumers(node.output[0])
        places[name] = (x, node.output[0], after.output[0])
    tensors = dict.fromkeys(name for place in places.values() for name in place)
    small = {place[1] for name, place in places.items() if kind_of(graph, nodes[name]) in NARROW}
    for tensor in tensors:
        if tensor not in {*graph.outputs, *graph.inputs, *small}:
            probe.graph.output.append(onnx.ValueInfoProto(name=tensor))
    session = make_session(probe, optimize=False, threads=1)
    names = [each.name for each in session.get_outputs()]
    arrays = dict(zip(names, session.run(names, feeds), strict=True)) | feeds
    for name, (x, codes, y) in places.items():
        params = quantizers_of(model)[provenance.activations[name]].params
        scale, zero = (graph.array(each) for each in nodes[name].input[1:3])
        assert scale.tobytes() == params.scale.tobytes()
        assert arrays[y].tobytes() == dt.fake_quantize(arrays[x], params).tobytes(), name
        if codes in arrays:
            expected = dt.quantize(arrays[x], params).codes.astype(np.int64) + (
                zero.astype(np.int64) - params.zero_point
            )
            assert np.array_equal(arrays[codes].astype(np.int64), expected), name


NARROW = {TensorProto.INT4, TensorProto.UINT4}  # which Python gets no arrays of


def kind_of(graph: Graph, node: Any) -> int:
    return graph.constants[node.input[2]].data_type


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    (cnn, "w8a8"),
    (cnn, "w4a8"),
    slow(cnn, "w2a8"),
    slow(cnn, "w4a4"),
    slow(cnn, "w8a16"),
    (Transformer, "w8a8"),
    slow(Transformer, "w4a8"),
    slow(Transformer, "w2a8"),
    slow(Transformer, "w8a16"),
    (Transformer, "w4a16-g32"),
    slow(mlp, "w8a8"),
    (mlp, "w2a8"),
    (mlp, "w8a16"),
    slow(mlp, "w4a16-g32"),
]


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_trained_models_compute_the_same_in_onnx_runtime(kind, recipe, tmp_path):
    model = trained(kind, recipe)
    x, classes = DATA[kind](2000, seed=10**7)
    before = snapshot(model)
    path = qt.export_onnx(model, x[:2], tmp_path / "model.onnx")
    assert snapshot(model) == before
    assert path == tmp_path / "model.onnx"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx"]

    (name,) = (each.name for each in load(path).graph.input)
    graph = inspect(model, path, {name: x[:64].numpy()})
    reference = as_shipped(model, x)
    (got,) = run(path, {name: x.numpy()})
    assert np.mean(got.argmax(1) == reference.argmax(1)) >= 0.999
    is_rounded = kind is Transformer and any(each.data_type == TensorProto.INT32 for each in graph.constants.values())
    assert dt.metrics.sqnr_db(reference, got) > (45 if is_rounded else 80), "the biases of attention are float in torch"
    assert np.mean(reference.argmax(1) == classes.numpy()) > 0.5  # it has learned something


@pytest.fixture(scope="module")
def exported_cnn(tmp_path_factory):
    torch.manual_seed(0)
    model = calibrated(cnn(), "w8a8", images(64)[0])
    return model, qt.export_onnx(model, images(1)[0], tmp_path_factory.mktemp("cnn") / "model.onnx")


def test_dense_weights_are_unsigned_and_depthwise_ones_signed(exported_cnn):
    graph = Graph(load(exported_cnn[1]))
    kinds = [graph.constants[f"{layer}.weight_codes"].data_type for layer in (0, 3, 6, 11)]
    assert kinds == [TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT8, TensorProto.UINT8]
    assert (graph.array("0.weight_zero_point") == 128).all()
    assert not graph.array("3.weight_zero_point").any()


def test_biases_are_int32_with_the_scale_of_the_accumulator(exported_cnn):
    model, path = exported_cnn
    graph = Graph(load(path))
    layer = model[11]
    scale = layer.input_quantizer.params.scale * qt.quantized_state(model)["11.weight"].params.scale
    assert graph.array("11.bias_scale").tobytes() == scale.tobytes()
    bias = layer.bias.detach().numpy()
    assert graph.constants["11.bias_codes"].data_type == TensorProto.INT32
    assert np.abs(graph.array("11.bias_codes") * scale.astype(np.float64) - bias).max() <= scale.max() / 2 + 1e-12


def test_convolutions_run_on_integer_kernels(exported_cnn):
    kinds = [node.op_type for node in optimized(load(exported_cnn[1])).graph.node]
    assert kinds.count("QLinearConv") == 2
    assert "QGemm" in kinds


def test_an_example_of_one_sample_exports_any_batch_size(exported_cnn):
    model, path = exported_cnn
    sizes = load(path).graph.input[0].type.tensor_type.shape.dim
    assert sizes[0].dim_param == "batch"
    for count in (1, 2, 7):
        x = images(count, seed=count)[0]
        (got,) = run(path, {"input": x.numpy()}, optimize=True)
        assert np.allclose(got, as_shipped(model, x), atol=2e-3)


@pytest.mark.parametrize("target", ["onnxruntime-vnni", "openvino"])
def test_targets_choose_types_and_nothing_else(target, exported_cnn, tmp_path):
    model, other = exported_cnn
    path = qt.export_onnx(model, images(2)[0], tmp_path / "model.onnx", target=target)
    graph = inspect(model, path, {"input": images(16)[0].numpy()})
    signed = target.endswith("vnni")
    assert graph.constants["0.weight_codes"].data_type == (TensorProto.INT8 if signed else TensorProto.UINT8)
    assert Provenance.read(graph.model).target == target
    feeds = {"input": images(8)[0].numpy()}
    assert np.array_equal(run(path, feeds)[0], run(other, feeds)[0])


def test_a_target_with_a_limit_rejects_larger_codes(exported_cnn, tmp_path):
    with pytest.raises(dt.SpecError, match=r"0\.weight contains the code 127, .*at most 64.*qmax=64"):
        qt.export_onnx(exported_cnn[0], images(2)[0], tmp_path / "model.onnx", target="onnxruntime-avx2")
    narrow = dt.QuantSpec("int8", "axis0", qmin=-64, qmax=64)
    model = calibrated(
        nn.Sequential(nn.Linear(6, 4)), dt.Recipe([dt.Rule(weight=narrow, input=INPUT)]), torch.randn(4, 6)
    )
    path = qt.export_onnx(model, torch.randn(2, 6), tmp_path / "model.onnx", target="onnxruntime-avx2")
    graph = inspect(model, path, {"input": np.ones((2, 6), np.float32)})
    assert graph.constants["0.weight_codes"].data_type == TensorProto.INT8


def test_container_int8_stores_low_bits_in_bytes(tmp_path):
    torch.manual_seed(0)
    model = calibrated(mlp(), "w4a8", numbers(32)[0])
    feeds = {"input": numbers(8)[0].numpy()}
    outputs, sizes = {}, {}
    for container in (None, "int8"):
        path = qt.export_onnx(model, numbers(2)[0], tmp_path / f"{container}.onnx", container=container)
        graph = inspect(model, path, feeds)
        outputs[container], sizes[container] = run(path, feeds)[0], path.stat().st_size
        kind = graph.constants["2.weight_codes"].data_type
        assert kind == (TensorProto.INT4 if container is None else TensorProto.INT8)
        assert sum(node.op_type == "QGemm" for node in optimized(path).graph.node) == 3
    assert outputs[None].tobytes() == outputs["int8"].tobytes()
    assert sizes[None] < sizes["int8"]


LOW_BITS = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), (3, 32), "QGemm"),
    "tokens": (lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), (2, 3, 32), "MatMulIntegerToFloat"),
    "conv": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), (2, 8, 9, 9), "QLinearConv"),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1)),
        (2, 8, 9, 9),
        "QLinearConv",
    ),
}


@pytest.mark.parametrize("name", LOW_BITS)
@pytest.mark.parametrize("weight", ["int4/axis0", "int3", "uint4/axis0/affine"])
def test_weights_of_4_bits_run_on_integer_kernels(name, weight, tmp_path):
    torch.manual_seed(0)
    make, shape, kernel = LOW_BITS[name]
    x = torch.randn(shape)
    model = calibrated(make(), dt.Recipe([dt.Rule(weight=weight, input=INPUT, output=INPUT)]), x)
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    graph = inspect(model, path, {"input": x.numpy()})
    kinds = {graph.constants[f"{layer}.weight_codes"].data_type for layer in (0, len(model) - 1)}
    assert kinds == {TensorProto.UINT4 if weight.startswith("u") else TensorProto.INT4}
    expected = {"QLinearMatMul", kernel} if kernel == "MatMulIntegerToFloat" else {kernel}
    kernels = [node.op_type for node in optimized(path).graph.node if node.op_type in INTEGER_KERNELS]
    assert len(kernels) == 2
    assert set(kernels) <= expected
    assert dt.verify(model, path, [x]).ok
    changed = load(path)
    tensor = next(each for each in changed.graph.initializer if each.name == "0.weight_codes")
    tensor.raw_data = bytes([tensor.raw_data[0] ^ 1]) + tensor.raw_data[1:]
    report = dt.verify(model, changed, [x], levels=(1,))
    assert (report.ok, report.first_difference.tensor) == (False, "0.weight_codes")


def test_weight_only_matrices_are_transposed_for_their_kernel(tmp_path):
    torch.manual_seed(0)
    model = calibrated(nn.Sequential(nn.Linear(64, 32)), "w4a16-g32", torch.randn(2, 5, 64))
    path = qt.export_onnx(model, torch.randn(2, 5, 64), tmp_path / "model.onnx")
    graph = Graph(load(path))
    assert tuple(graph.constants["0.weight_codes"].dims) == (64, 32)
    assert tuple(graph.constants["0.weight_scale"].dims) == (2, 32)
    assert [node.op_type for node in optimized(path).graph.node] == ["MatMulNBits"]


def test_tied_weights_are_stored_once(tmp_path):
    torch.manual_seed(0)
    model = calibrated(Transformer(tied=True), "w8a8", sentences(16)[0])
    path = qt.export_onnx(model, sentences(2)[0], tmp_path / "model.onnx")
    ids = sentences(8, seed=5)[0]
    graph = inspect(model, path, {"ids": ids.numpy()})
    assert "head.weight" not in Provenance.read(graph.model).weights.values()
    assert len(graph.consumers("words.weight_codes")) == 2  # Gather, and the head
    (got,) = run(path, {"ids": ids.numpy()})
    assert np.allclose(got, as_shipped(model, ids), atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "operators"),
    [
        ("int8/tensor", ["Gather", "DequantizeLinear"]),
        ("int8/axis1", ["Gather", "DequantizeLinear"]),
        ("int8/axis0", ["Gather", "Cast", "Gather", "Unsqueeze", "Mul"]),
        ("uint8/axis0/affine", ["Gather", "Cast", "Gather", "Unsqueeze", "Cast", "Sub", "Gather", "Unsqueeze", "Mul"]),
        ("int4/group16", ["Gather", "Cast", "Reshape", "Gather", "Unsqueeze", "Mul", "Reshape"]),
    ],
)
def test_embeddings_gather_codes_and_then_dequantize(weight, operators, tmp_path):
    torch.manual_seed(0)
    model = calibrated(nn.Sequential(nn.Embedding(20, 32)), dt.Recipe([dt.Rule(weight=weight)]), torch.tensor([[3]]))
    ids = torch.randint(20, (3, 5))
    path = qt.export_onnx(model, ids, tmp_path / "model.onnx")
    graph = Graph(load(path))
    assert sorted(node.op_type for node in graph.nodes) == sorted(operators)
    assert graph.constants["0.weight_codes"].data_type in {TensorProto.INT8, TensorProto.UINT8}
    with torch.no_grad():
        assert run(path, {"input": ids.numpy()})[0].tobytes() == model.eval()(ids).numpy().tobytes()


def test_named_inputs_and_outputs_and_two_of_each(tmp_path):
    torch.manual_seed(0)
    example = {"right": torch.randn(3, 5), "left": torch.randn(3, 6)}
    model = qt.prepare(Two(), "w8a8")
    with qt.calibrating(model):
        model(**example)
    path = qt.export_onnx(model, example, tmp_path / "model.onnx")
    exported = load(path)
    assert {each.name for each in exported.graph.input} == {"left", "right"}
    assert [each.name for each in exported.graph.output] == ["total", "both"]
    inspect(model, path, {name: each.numpy() for name, each in example.items()})
    other = {"left": torch.randn(7, 6), "right": torch.randn(7, 5)}
    total, both = run(path, {name: each.numpy() for name, each in other.items()})
    with torch.no_grad():
        expected = model.eval()(**other)
    assert np.allclose(total, expected["total"].numpy(), atol=1e-3)
    assert np.array_equal(both, expected["both"].numpy())

    again = qt.export_onnx(model, (example["left"], example["right"]), tmp_path / "tuple.onnx")
    assert np.array_equal(run(again, {name: each.numpy() for name, each in other.items()})[0], total)


class Own(nn.Module):
    """Layers that run their own forward, one at a time."""

    def __init__(self, layer: nn.Module, arguments: int = 1) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x):
        result = self.layer(*(x,) * self.arguments)
        return result[0] if isinstance(result, tuple) else result


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(6, 6, 4)

    def forward(self, x):
        return self.product(x, x + 1)


OWN = {
    "bilinear": (Pair, 1, (3, 6)),
    "attention": (lambda: nn.MultiheadAttention(16, 2, batch_first=True), 3, (2, 5, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, (2, 5, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), 1, (2, 3, 6, 6)),
    "lstm": (lambda: nn.LSTM(6, 8, batch_first=True), 1, (2, 4, 6)),
    "gru": (lambda: nn.GRU(6, 8, batch_first=True), 1, (2, 4, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"), 1, (2, 3, 9)),
    "same": (lambda: nn.Conv2d(3, 4, 3, padding="same", bias=False), 1, (2, 3, 6, 6)),
}


@pytest.mark.parametrize("name", [*(slow(name) if name in {"lstm", "gru", "encoder"} else name for name in OWN)])
def test_layers_of_all_kinds(name, tmp_path):
    torch.manual_seed(0)
    make, arguments, shape = OWN[name]
    x = torch.randn(*shape)
    model = calibrated(Own(make(), arguments).eval(), "w8a8", x)
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    inspect(model, path, {"x": x.numpy()})
    more = torch.cat([x, x.flip(-1), x[:1]])
    for batch in (x, more, x[:1]):  # the first axis stays free
        (got,) = run(path, {"x": batch.numpy()})
        assert np.allclose(got, as_shipped(model, batch), atol=2e-4)


@pytest.mark.parametrize("layer", [nn.LSTM, slow(nn.GRU)])
def test_recurrent_layers_export_to_the_same_bytes_each_time(layer, tmp_path):
    """torch caches the kernels of recurrent operators; earlier exports do not matter."""
    torch.manual_seed(0)
    x, longer = torch.randn(3, 2, 4), torch.randn(5, 2, 4)
    model = calibrated(Own(layer(4, 4)).eval(), "w8a8", x)
    for operator in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        operator._dispatch_cache.clear()  # as in a new process
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    assert dt.verify(model, path, [x.numpy(), longer.numpy()]).ok  # exports again, and compares all bytes
    assert np.allclose(*run(path, {"x": longer.numpy()}), as_shipped(model, longer), atol=2e-4)  # any length


@pytest.mark.slow
def test_an_axis_that_a_later_step_of_the_exporter_fixes_is_fixed(monkeypatch, tmp_path):
    """Without torch's loops, the exporter unrolls a layer after it has listed the sizes that vary."""
    monkeypatch.setattr(onnx_export, "_LOOP_MODULE", "torch.export._no_such_module")
    x = torch.randn(3, 2, 4)
    model = calibrated(Own(nn.LSTM(4, 4)).eval(), "w8a8", x)
    with pytest.warns(UserWarning, match="axis 0 of x is fixed to 3, "):
        path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    assert [size.dim_value for size in load(path).graph.input[0].type.tensor_type.shape.dim] == [3, 2, 4]


class AnyArguments(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


ROOTS = {
    "bilinear": (lambda: nn.Bilinear(6, 5, 4), [(3, 6), (3, 5)], ["input1", "input2"]),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 3), [(2, 3, 6)], ["input"]),
    "any_arguments": (lambda: AnyArguments(nn.Bilinear(6, 5, 4)), [(3, 6), (3, 5)], ["args_0", "args_1"]),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", ROOTS)
def test_the_batch_axis_of_a_layer_alone_stays_free(name, by_name, tmp_path):
    """A prepared layer has the signature of the float layer; a forward may also have *args and **kwargs."""
    torch.manual_seed(0)
    make, shapes, names = ROOTS[name]
    data = [torch.randn(shape) for shape in shapes]
    model = qt.prepare(make(), "w8a8")
    with qt.calibrating(model):
        model(*data)
    model.eval()
    if by_name:
        names = ["input1", "input2"] if name == "any_arguments" else names
        path = qt.export_onnx(model, dict(zip(names, data, strict=True)), tmp_path / "model.onnx")
    else:
        path = qt.export_onnx(model, tuple(data), tmp_path / "model.onnx")
    feeds = [torch.cat([x, x.flip(-1)]) for x in data]
    (got,) = run(path, {key: x.numpy() for key, x in zip(names, feeds, strict=True)})
    with torch.no_grad():
        assert np.allclose(got, model(*feeds).numpy(), atol=2e-4)


def test_a_range_narrower_than_its_type_is_clipped_first(tmp_path):
    torch.manual_seed(0)
    narrow = dt.QuantSpec("uint8", qmin=5, qmax=100)
    rules = [dt.Rule(weight="int8/axis0", input=narrow, output="int6/tensor/symmetric")]
    model = calibrated(nn.Sequential(nn.Linear(6, 4)), dt.Recipe(rules), torch.randn(16, 6))
    path = qt.export_onnx(model, torch.randn(2, 6), tmp_path / "model.onnx")
    graph = inspect(model, path, {"input": 9 * np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)})
    assert [node.op_type for node in graph.nodes].count("Clip") == 2
    params = model[0].input_quantizer.params
    assert graph.array("0.input_lowest") == np.float32((5 - params.zero_point) * params.scale)
    zero = graph.constants["0.output_zero_point"]
    assert (zero.data_type, int(array_of(zero))) == (TensorProto.UINT8, 128)


@pytest.mark.parametrize("format", ["int8", "int12", "uint16"])
def test_other_types_of_activations(format, tmp_path):
    torch.manual_seed(0)
    rules = [dt.Rule(weight="int8/axis0", input=f"{format}/tensor")]
    model = calibrated(nn.Sequential(nn.Linear(6, 4)), dt.Recipe(rules), torch.randn(16, 6))
    path = qt.export_onnx(model, torch.randn(2, 6), tmp_path / "model.onnx")
    x = 3 * torch.randn(50, 6)
    inspect(model, path, {"input": x.numpy()})
    assert np.allclose(run(path, {"input": x.numpy()})[0], as_shipped(model, x), atol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "mode"), [("w4a4", None), slow("w8a4", None), slow("w3a3", None), slow("w2a2", "learned")]
)
def test_activations_of_few_bits_before_convolutions(recipe, mode, tmp_path):
    """They are stored in bytes after a Clip, because ONNX Runtime has no integer convolution for 4-bit types."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)), nn.Flatten(), nn.Linear(128, 2))
    x = torch.randn(4, 8, 4, 4)
    model = calibrated(net, dt.Recipe.preset(recipe, mode=mode), x)
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    graph = inspect(model, path, {"input": x.numpy()})
    assert sum(node.op_type == "Clip" for node in graph.nodes) == 3
    assert {graph.kind(node.input[2]) for node in graph.nodes if node.op_type == "QuantizeLinear"} == {
        TensorProto.UINT8
    }
    assert dt.verify(model, path, [3 * torch.randn(4, 8, 4, 4)]).ok


def test_layers_in_float_stay_in_float(tmp_path):
    torch.manual_seed(0)
    recipe = dt.Recipe([dt.Rule(weight="int8/axis0", input=INPUT), dt.Rule(match="2", skip=True)])
    model = calibrated(mlp(), recipe, numbers(8)[0])
    model[4].weight_quantizer.enabled = False
    path = qt.export_onnx(model, numbers(2)[0], tmp_path / "model.onnx")
    exported = load(path)
    assert list(Provenance.read(exported).weights.values()) == ["0.weight"]
    x = numbers(8)[0]
    assert np.allclose(run(path, {"input": x.numpy()})[0], as_shipped(model, x), atol=1e-4)


@pytest.mark.parametrize(
    "behind", [nn.MaxPool2d(2), nn.Flatten(2), nn.Dropout(), nn.ReLU()], ids=lambda m: type(m).__name__
)
def test_onnx_runtime_does_not_quantize_float_layers(behind, tmp_path):
    torch.manual_seed(0)
    third = nn.Conv1d(8, 8, 3, padding=1) if isinstance(behind, nn.Flatten) else nn.Conv2d(8, 8, 3, padding=1)
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), behind, third)
    rules = [dt.Rule(weight="int8/axis0", input=INPUT, output=INPUT), dt.Rule("1", skip=True)]
    x = torch.randn(2, 8, 6, 6)
    path = qt.export_onnx(calibrated(net, dt.Recipe(rules), x), x, tmp_path / "model.onnx")
    operators = [node.op_type for node in optimized(load(path)).graph.node]
    assert operators.count("QLinearConv") == 2, operators
    assert [name for name in operators if name in {"Conv", "FusedConv"}] != []


def test_a_disabled_weight_before_a_batch_norm_is_folded_in_float(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4))
    model(images(32)[0])
    calibrated(model, "w8a8", images(32)[0])
    model[0].weight_quantizer.enabled = False
    path = qt.export_onnx(model, images(2)[0], tmp_path / "model.onnx")
    x = images(4)[0]
    kinds = [node.op_type for node in load(path).graph.node]
    assert kinds == ["QuantizeLinear", "DequantizeLinear", "Conv"]
    assert np.allclose(run(path, {"input": x.numpy()})[0], as_shipped(model, x), atol=1e-5)


def test_older_opsets_that_suffice(tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(4, 2)), "w8a8", torch.randn(8, 4))
    path = qt.export_onnx(model, torch.randn(2, 4), tmp_path / "model.onnx", opset=18)
    assert Graph(load(path)).opset == 18
    inspect(model, path, {"input": np.ones((2, 4), np.float32)})


@pytest.mark.parametrize("opset", [22, 23])
def test_newer_opsets(opset, tmp_path):
    """Also a model that is a single layer, whose weight has no prefix."""
    model = calibrated(nn.Linear(4, 2), "w4a8", torch.randn(8, 4))
    path = qt.export_onnx(model, torch.randn(2, 4), tmp_path / "model.onnx", opset=opset)
    graph = inspect(model, path, {"input": np.ones((2, 4), np.float32)})
    assert (graph.opset, graph.model.ir_version) == (opset, 10)
    assert Provenance.read(graph.model).weights == {"weight_codes": "weight"}


@pytest.mark.parametrize("recipe", ["w4a8-first", "w4a16-g32", "uint16"])
def test_opsets_that_are_too_old(recipe, tmp_path):
    rules = {
        "w4a8-first": dt.Rule(weight="int4/axis0", input=INPUT),
        "w4a16-g32": dt.Rule(weight="int8/group32"),
        "uint16": dt.Rule(weight="int8/axis0", input="uint16/tensor"),
    }
    model = calibrated(nn.Sequential(nn.Linear(32, 2)), dt.Recipe([rules[recipe]]), torch.randn(8, 32))
    with pytest.raises(dt.UnsupportedError, match=r"got opset=20, but 0\.\w+ has spec .* needs opset 21"):
        qt.export_onnx(model, torch.randn(2, 32), tmp_path / "model.onnx", opset=20)
    assert not any(tmp_path.iterdir())


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.reshape(3, 4)) if x.shape[0] == 3 else self.layer(x)


def test_a_batch_that_the_model_computes_with_is_fixed_with_a_warning(tmp_path):
    model = calibrated(Fixed(), "w8a8", torch.randn(3, 4))
    with pytest.warns(UserWarning, match="axis 0 of x is fixed to 3.*dynamic_shapes"):
        path = qt.export_onnx(model, torch.randn(3, 4), tmp_path / "model.onnx")
    assert load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3


class Large(Fixed):
    def forward(self, x):
        return self.layer(x) * 2 if x.shape[0] > 3 else self.layer(x)


def test_a_minimum_batch_size_draws_a_warning(tmp_path):
    model = calibrated(Large(), "w8a8", torch.randn(5, 4))
    with pytest.warns(UserWarning, match="axis 0 of x is limited to sizes from 4 to "):
        qt.export_onnx(model, torch.randn(5, 4), tmp_path / "model.onnx")


def test_shapes_may_be_chosen(tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(4, 2)), "w8a16", torch.randn(2, 5, 4))
    shapes = ({1: torch.export.Dim("length")},)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = qt.export_onnx(model, torch.randn(2, 5, 4), tmp_path / "model.onnx", dynamic_shapes=shapes)
    sizes = load(path).graph.input[0].type.tensor_type.shape.dim
    assert (sizes[0].dim_value, sizes[1].dim_param) == (2, "length")


class Twice(nn.Module):
    """A model that calls its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


def test_a_layer_that_is_called_twice_stores_its_weight_once(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model = calibrated(Twice(), "w8a8", x)
    path = qt.export_onnx(model, x, tmp_path / "model.onnx")
    graph = inspect(model, path, {"x": x.numpy()})
    provenance = Provenance.read(graph.model)
    assert list(provenance.weights.values()) == ["layer.weight"]
    assert list(provenance.activations.values()) == ["layer.input_quantizer"] * 2
    assert np.allclose(run(path, {"x": x.numpy()})[0], as_shipped(model, x), atol=1e-2)


def test_a_learned_model_and_one_with_hooks_and_a_watch(tmp_path):
    torch.manual_seed(0)
    recipe = dt.Recipe.preset("w8a8", mode=dt.Learned())
    model = calibrated(mlp(), recipe, numbers(32)[0])
    train(model, numbers, 3, 1e-2)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    watched = qt.watch(model)
    before = snapshot(model)
    path = qt.export_onnx(model, numbers(2)[0], tmp_path / "model.onnx")
    assert snapshot(model) == before
    watched.stop()
    x = numbers(50)[0]
    inspect(model, path, {"input": x.numpy()})
    assert np.allclose(run(path, {"input": x.numpy()})[0], as_shipped(model, x), atol=1e-2)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2))


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (tiny, dt.StateError, "not prepared: call qt.prepare"),
        (lambda: qt.prepare(tiny(), "w8a8"), dt.NotCalibratedError, r"0\.input_quantizer has no parameters yet"),
        (
            lambda: qt.prepare(tiny(), dt.Recipe([dt.Rule(weight="int8", mode=dt.Fixed())])),
            dt.NotCalibratedError,
            r"0\.weight_quantizer has no parameters yet",
        ),
    ],
    ids=["float", "not calibrated", "weight not calibrated"],
)
def test_models_that_are_not_ready(make, error, words, tmp_path):
    with pytest.raises(error, match=words):
        qt.export_onnx(make(), X, tmp_path / "model.onnx")


def test_models_in_calibration_or_delay(tmp_path):
    model = calibrated(tiny(), "w8a8", X)
    with qt.calibrating(model), pytest.raises(dt.StateError, match=r"0\.\w+ does not quantize during qt\.calibrating"):
        qt.export_onnx(model, X, tmp_path / "model.onnx")
    model[0].input_quantizer.delayed = True
    with pytest.raises(dt.StateError, match=r"0\.input_quantizer does not quantize during the delay"):
        qt.export_onnx(model, X, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"example": [1.0]}, dt.DtypeError, r"got float for example\[0\], expected a torch.Tensor"),
        ({"example": {"input": "x"}}, dt.DtypeError, r"got str for example\['input'\], expected a torch.Tensor"),
        ({"example": ()}, dt.DtypeError, "example is an empty tuple"),
        ({"example": 3}, dt.DtypeError, "got int for example, expected a tensor, a tuple"),
        ({"example": torch.ones(2, 5)}, dt.UnsupportedError, "the model fails on the example: .*shapes"),
        ({"target": "onnxruntim"}, dt.SpecError, "unknown target 'onnxruntim'.*onnxruntime"),
        ({"container": "int4"}, dt.SpecError, "got container='int4', expected 'int8'"),
        ({"opset": 13}, dt.SpecError, "opset must be an integer .*18"),
        ({"opset": 99}, dt.SpecError, "opset must be an integer .*23"),
        ({"path": "nowhere/model.onnx"}, dt.FileFormatError, "nowhere is not a directory"),
        ({"path": "."}, dt.FileFormatError, "is a directory, expected"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_arguments(arguments, error, words, tmp_path):
    given = {"example": X, "path": tmp_path / "model.onnx"} | arguments
    with pytest.raises(error, match=words):
        qt.export_onnx(calibrated(tiny(), "w8a8", X), **given)
    assert not any(tmp_path.iterdir())


def activation(spec: Any, mode: Any = None, **options: Any) -> Any:
    """The lowering of a graph with one quantizer of that kind, without an export."""
    quantizer = qt.FakeQuantize(spec, dt.Fixed() if mode is None else mode, **options)
    if not isinstance(quantizer.mode, dt.PerBatch):
        scale = np.ones(quantizer.scale.shape or (), np.float32)
        quantizer.set_params(dt.QuantParams(quantizer.spec, scale))
    graph_proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "detent" : 1]>
        g (float[N, 4] x) => (float[N, 4] y) { y = detent.Activation <key = "a.input_quantizer", rank = 2> (x) }"""
    )
    return Lowering(
        graph_proto, Marked(nn.Identity(), {}, {"a.input_quantizer": quantizer}), get_target("onnxruntime"), min_bits=4
    )


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("uint8", {"mode": dt.PerBatch()}, "has mode PerBatch.*DynamicQuantizeLinear.*EMA"),
        ("uint8/token", {"shape": (2, 4)}, "granularity token, whose number of scales depends on the batch"),
        ("uint8/tensor/affine/torch", {}, "reciprocal, half_even, after_round.*convention 'onnx'"),
        (dt.QuantSpec("uint8", rounding="half_away"), {}, "half_away.*rounds half to even"),
        ("float8_e4m3fn", {}, "ONNX Runtime cannot run float8_e4m3fn activations"),
        (
            dt.QuantSpec("uint8", "axis1", qmax=9),
            {"shape": (2, 4)},
            "data must be clipped to the codes 0..9",
        ),
    ],
    ids=["per batch", "token", "reciprocal", "half away", "float8", "narrow channels"],
)
def test_activations_that_onnx_cannot_express(spec, options, words):
    with pytest.raises(dt.UnsupportedError, match=f"(?s)a.input.*{words}"):
        activation(spec, **options).run()


def test_channels_of_activations():
    lowered = activation("uint8/axis-1", shape=(2, 4)).run()
    assert [attribute_of(node, "axis") for node in lowered.graph.node] == [1, 1]


@pytest.mark.parametrize("spec", ["nf4", "mxfp4", "int4/block2x2"])
def test_weights_that_onnx_cannot_express(spec):
    tensor = dt.quantize(np.ones((4, 32), np.float32), dt.QuantParams.from_data(spec, np.ones((4, 32), np.float32)))
    graph_proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "detent" : 1]>
        g (float[4, 32] x) => (float[4, 32] y) { w = detent.Weight <key = "a.weight", rank = 2> () y = Add(x, w) }"""
    )
    marked = Marked(nn.Identity(), {"a.weight": MarkedWeight(tensor)}, {})
    with pytest.raises(dt.UnsupportedError, match=r"^a\.weight: ONNX"):
        Lowering(graph_proto, marked, get_target("onnxruntime"), min_bits=4).run()


def test_a_quantizer_inside_a_branch():
    body = helper.make_graph(
        [helper.make_node("Activation", ["x"], ["z"], domain="detent", key="a.input_quantizer", rank=1)],
        "body",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])],
    )
    graph_proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "detent" : 1]>
        g (bool c, float[2] x) => (float[2] y) { y = Identity(x) }"""
    )
    graph_proto.graph.node.append(helper.make_node("If", ["c"], ["w"], then_branch=body, else_branch=body))
    with pytest.raises(dt.UnsupportedError, match=r"a\.input_quantizer is used inside a loop or branch"):
        Lowering(graph_proto, Marked(nn.Identity(), {}, {}), get_target("onnxruntime"), min_bits=4).run()


def test_a_bias_that_does_not_fit_stays_float(tmp_path):
    model = calibrated(tiny(), "w8a8", X)
    with torch.no_grad():
        model[0].bias.fill_(1e8)
    path = qt.export_onnx(model, X, tmp_path / "model.onnx")
    graph = inspect(model, path, {"input": X.numpy()})
    assert not any(each.data_type == TensorProto.INT32 for each in graph.constants.values())
    assert np.allclose(run(path, {"input": X.numpy()})[0], as_shipped(model, X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_that_are_not_float32(dtype, tmp_path):
    model = calibrated(tiny().to(dtype), "w8a8", X.to(dtype))
    with pytest.raises(dt.UnsupportedError, match=r"the model is not float32, .*: use model\.float\(\)"):
        qt.export_onnx(model, X.to(dtype), tmp_path / "model.onnx")


class Untraceable(nn.Module):
    """A model that exporters cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(4, 2), nn.LSTM(2, 2)

    def forward(self, x):
        y = self.memory(self.layer(x))[0]
        return y * 2 if float(y.sum()) > 0 else y


def test_models_that_torch_does_not_export(tmp_path):
    model = calibrated(Untraceable(), "w8a8", X)
    with pytest.raises(dt.UnsupportedError, match=r"torch.onnx.export failed: .*memory \(LSTM\)"):
        qt.export_onnx(model, X, tmp_path / "model.onnx")


def test_models_that_cannot_be_copied(tmp_path):
    model = calibrated(tiny(), "w8a8", X)
    model.extra = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(dt.UnsupportedError, match="the model cannot be copied for export: "):
        qt.export_onnx(model, X, tmp_path / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        dt.UnsupportedError, match=rf"export_onnx needs {package}, which is not installed: pip install 'detent\[onnx\]'"
    ):
        qt.export_onnx(calibrated(tiny(), "w8a8", X), X, tmp_path / "model.onnx")


def test_importing_the_frontend_imports_no_onnx():
    script = "import sys, detent.torch; print(*(n for n in sys.modules if n.partition('.')[0].startswith('onnx')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_old_file_stays_where_an_export_fails(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(dt.NotCalibratedError):
        qt.export_onnx(qt.prepare(tiny(), "w8a8"), X, path)
    assert path.read_bytes() == b"old"
