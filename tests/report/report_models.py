"""Shared by the tests of reports: small quantized files and reports with every part."""

from itertools import pairwise

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import detent.onnx as qo
import detent.report as qr
from detent.sensitivity import LayerNoise, Sensitivity
from detent.verification import Difference, EndToEnd, Kernel, VerifyReport

__all__ = [
    "EVIL",
    "big_report",
    "example_mix",
    "example_sensitivity",
    "example_verification",
    "feeds",
    "float_model",
    "full_report",
    "quantized",
    "sites_model",
]

EVIL = "</script><script>document.title='owned'</script>\"'<img src=x onerror=alert(1)>&amp;"


def float_model(widths=(12, 16, 16, 5), names=None, seed=0):
    """Build a model of matmuls with Relu between them."""
    rng = np.random.default_rng(seed)
    nodes, tensors, x = [], [], "x"
    for i, (before, after) in enumerate(pairwise(widths)):
        weight = rng.normal(size=(before, after)).astype(np.float32) / np.sqrt(before)
        tensors.append(numpy_helper.from_array(weight.astype(np.float32), f"w{i}"))
        name = names[i] if names else f"fc{i}"
        last = i == len(widths) - 2
        out = "y" if last else f"t{i}"
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [out], name=name))
        if not last:
            nodes.append(helper.make_node("Relu", [out], [f"r{i}"], name=f"relu{i}"))
        x = f"r{i}"
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])]
        for name, size in (("x", widths[0]), ("y", widths[-1]))
    ]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds(count=4, width=12, rows=32):
    return [{"x": np.random.default_rng(i).normal(size=(rows, width)).astype(np.float32)} for i in range(count)]


def quantized(folder, recipe="w8a8", model=None, **options):
    """Return a float model, the path of its quantized file, and the report of ``qo.quantize``."""
    model = float_model() if model is None else model
    path = folder / "small.onnx"
    result = qo.quantize(model, path, feeds(), recipe, progress=False, **options)
    return model, path, result


def sites_model(scale=0.5, zero=3, bound=None):
    """Build a model with one quantizer, and with a Clip before it if bounds are given."""
    constants = {"s": np.float32(scale), "z": np.uint8(zero)}
    nodes, x = [], "x"
    if bound is not None:
        constants |= {"a": np.float32(bound[0]), "b": np.float32(bound[1])}
        nodes.append(helper.make_node("Clip", ["x", "a", "b"], ["x_clipped"]))
        x = "x_clipped"
    nodes += [
        helper.make_node("QuantizeLinear", [x, "s", "z"], ["q"], name="Q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="DQ"),
    ]
    infos = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"])] for name in "xy"]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", *infos, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def example_verification(differing=0):
    first = None
    if differing:
        first = Difference("fc0_Q", "fc0_q", (0, 3), 17, 18, 0.35, 0.02, 0, f"another code {EVIL}")
    return VerifyReport(
        (1, 2, 3),
        2,
        12345,
        differing,
        first,
        {"optimized": EndToEnd(100, 1, 1, "fc0_Q", {"y": 41.5}, 0.96875, "sums in another order")},
        (Kernel("fc0", "QGemm", 640, 0, 0, False), Kernel("fc1", "QLinearAdd", 0, 0, 0, False)),
        None,
        (f"a note {EVIL}",),
    )


def example_sensitivity(names=("fc0", "fc1", "fc2")):
    layers = [
        LayerNoise(
            name,
            "MatMul",
            200,
            800,
            {"int4/axis0": 0.01 * 2.0**i, "int8/axis0": 1e-5 * 2.0**i},
            {"int4/axis0": 100, "int8/axis0": 200},
        )
        for i, name in enumerate(names)
    ]
    return Sensitivity(tuple(layers), ("int4/axis0", "int8/axis0"))


def example_mix(names=("fc0", "fc1", "fc2")):
    return example_sensitivity(names).mixed(dict.fromkeys(names, "int8/axis0")).with_measured(20.25)


def full_report(folder, title="small & <b>bold</b>", names=None):
    """A report in which every part is present."""
    model, path, result = quantized(folder, model=float_model(names=names))
    own = names or ("fc0", "fc1", "fc2")
    return qr.build(
        path,
        feeds(),
        source=model,
        result=result,
        verification=example_verification(),
        sensitivity=example_sensitivity(own),
        mix=example_mix(own),
        title=title,
        facts={"Accuracy": "97.1 %"},
        tables=[qr.Table("Accuracies", ("model", "top 1"), (("float", "97.3 %"), ("w8a8", "97.1 %")))],
        command="detent quantize small.onnx",
    )


def _tensor(name, rng, of):
    low, width = (-128.5, 4.0) if of == "codes" else (-3.3, 0.137)
    counts = tuple(int(count) for count in rng.integers(0, 900_000, 64 if of == "codes" else 48))
    clip = (-128.0, 127.0) if of == "codes" else (-2.9871, 3.1416)
    return qr.Tensor(
        f"{name}_{of}",
        "int8/axis0/symmetric/onnx",
        (64, 64, 3, 3),
        sum(counts),
        -3.21234,
        3.25671,
        *clip,
        float(rng.uniform(20, 50)),
        float(rng.uniform(0, 0.01)),
        250,
        256,
        64,
        qr.Histogram(low, width, counts, of),
    )


def big_report(count=200):
    """Return the report of a large model, without the model."""
    rng = np.random.default_rng(0)
    kinds = ("integer", "quantized", "float")
    layers = []
    for i in range(count):
        name = f"/model/backbone/stage{i // 20}/block{i % 20}/conv{i}/Conv"
        status = kinds[i % 7 % 3]
        is_float = status == "float"
        layers.append(
            qr.Layer(
                name,
                "Conv" if i % 2 else "MatMul",
                status,
                "" if is_float else "QLinearConv" if status == "integer" else "Conv",
                "recurrent layers are not supported" if is_float else "",
                "",
                None if is_float else _tensor(name, rng, "codes"),
                None if is_float else _tensor(name, rng, "values"),
                None if is_float else float(f"{rng.uniform(5, 50):.6g}"),
                None if is_float else float(f"{rng.uniform(0, 1 / count):.6g}"),
                147456,
                147456 if is_float else 37120 + i,
            )
        )
    return qr.Report("big.onnx", 29_000_000, 7_600_000, tuple(layers), noise_share_basis="output", batches=8)
