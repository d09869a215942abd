"""A small classifier with data, and the command line run as users run it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save
from PIL import Image

TIMEOUT = 120


def weights(*shape, seed):
    return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def write_model(path, channels=16, hidden=0):
    """Two convolutions, two optional hidden layers, and a classifier of ten classes, for any batch."""
    last = hidden or channels
    tensors = {
        "w1": weights(channels, 8, 3, 3, seed=1),
        "b1": weights(channels, 1, seed=2).ravel(),
        "w2": weights(channels, channels, 3, 3, seed=3),
        "b2": weights(channels, 1, seed=4).ravel(),
        "w3": weights(last, 10, seed=5),
        "b3": weights(10, 1, seed=6).ravel(),
    }
    if hidden:
        tensors |= {"w4": weights(channels, hidden, seed=7), "w5": weights(hidden, hidden, seed=8)}
    between = [
        helper.make_node("MatMul", ["t6", "w4"], ["t7"], name="wide"),
        helper.make_node("Relu", ["t7"], ["t8"], name="relu3"),
        helper.make_node("MatMul", ["t8", "w5"], ["t9"], name="deep"),
        helper.make_node("Relu", ["t9"], ["t10"], name="relu4"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["t1"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["t1"], ["t2"], name="relu1"),
        helper.make_node("Conv", ["t2", "w2", "b2"], ["t3"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["t3"], ["t4"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["t4"], ["t5"], name="pool"),
        helper.make_node("Flatten", ["t5"], ["t6"], name="flat"),
        *(between if hidden else []),
        helper.make_node("Gemm", ["t10" if hidden else "t6", "w3", "b3"], ["y"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return Path(path)


def write_data(path, samples=24, seed=0):
    np.savez(path, x=np.random.default_rng(seed).normal(size=(samples, 8, 8, 8)).astype(np.float32))
    return Path(path)


def write_classifier(path, size=None):
    """Write a model of RGB images with three classes; None accepts any size."""
    tensors = {"w1": weights(16, 3, 3, 3, seed=1), "w2": weights(16, 16, 3, 3, seed=2), "w3": weights(16, 3, seed=3)}
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second"),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], name="pool"),
        helper.make_node("Flatten", ["d"], ["e"], name="flat"),
        helper.make_node("MatMul", ["e", "w3"], ["y"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, size or "h", size or "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_photos(folder, per_class=12):
    """Write random images of two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        Path(folder, name).mkdir(parents=True)
        for i in range(per_class):
            array = rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(array).save(Path(folder, name, f"{i:02}.png"))


def environment(path=None, **more):
    """Return the environment without settings for colors and columns; `path` comes first in the module search path."""
    environ = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "COLUMNS", "NO_COLOR"}}
    if path is not None:
        environ["PYTHONPATH"] = os.pathsep.join([str(path), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return environ | more


def detent(*arguments, cwd=None, path=None, timeout=TIMEOUT, **more):
    """Run `python -m detent` to its end."""
    command = [sys.executable, "-W", "error", "-m", "detent", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(path, **more), capture_output=True, text=True, check=False, timeout=timeout
    )


def started(*arguments, cwd=None, **more):
    """Start `python -m detent` and return the running process."""
    command = [sys.executable, "-m", "detent", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_interrupts,  # noqa: PLW1509 - it sets a signal and takes no lock
    )


def take_interrupts():
    """Turn on Ctrl-C again: shells turn it off for background jobs, and child processes inherit this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
