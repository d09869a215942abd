"""Placement of output quantizers, so that ONNX Runtime runs every convolution of an exported model on integer kernels.

ONNX Runtime multiplies codes in a Conv only if the output is quantized, too. It moves a QuantizeLinear across operators
that only select or rearrange values, and drops a ReLU before it. So the input quantizer of the next layer is enough in
``conv -> batch norm -> relu -> max pool -> conv``. Any other reader (Add, average pooling, SiLU, the model's output)
needs a quantizer right after the convolution. ``qt.prepare(arithmetic="integer")`` places it, so it is trained with.
If only ReLUs read the output, the quantizer comes after the ReLU, and its codes cover no negative values. Linear layers
need no output quantizer: their integer kernels return floats.

The readers of a layer come from a symbolic trace of the model (``torch.fx``). If the model cannot be traced, nothing is
placed.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from detent.torch.batchnorm import traced_graphs

__all__ = ["Placement", "find_placements"]

_RELU = ("relu",)
_RELU_FUNCTIONS = (torch.relu, F.relu, torch.relu_)
_MOVING_METHODS = ("flatten", "reshape", "view", "contiguous", "squeeze", "unsqueeze", "permute", "transpose")
_MOVING_FUNCTIONS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.permute, torch.transpose)
_MOVING_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_POOL_FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.dropout, F.dropout2d, F.dropout3d)


class Placement(NamedTuple):
    """The readers of a layer's output.

    Attributes:
        reader: name of the layer whose input quantizer ONNX Runtime fuses into this layer, or "".
        after_relu: whether a ReLU comes before the next quantizer; if so, the quantizer must have no negative values.
        cause: why an output quantizer is needed, or "" if a reader's input quantizer is enough.
    """

    reader: str = ""
    after_relu: bool = False
    cause: str = ""


def find_placements(
    model: nn.Module, layers: Mapping[str, nn.Module], norms: Mapping[str, str], unsigned: Mapping[str, bool]
) -> dict[str, Placement] | None:
    """Find what reads the outputs of layers; return None if the model cannot be traced.

    Args:
        model: the model before preparation.
        layers: layers whose readers are needed, by full name.
        norms: names of batch norms that are folded into these layers.
        unsigned: for each layer with a quantized input, whether the smallest code of a non-negative input is 0.
    """
    try:
        graph = traced_graphs(model)[1]
    except Exception:  # noqa: BLE001 - tracing runs the model's code, which may raise anything
        return None
    modules = dict(model.named_modules())
    search = _Search(modules, unsigned)
    nodes: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            nodes.setdefault(str(node.target), []).append(node)
    placements = {}
    for name in layers:
        calls = nodes.get(name, [])
        if len(calls) != 1:
            cause = "is called more than once" if calls else "is not called"
            placements[name] = Placement(cause=f"the layer {cause}")
            continue
        node = calls[0]
        norm = norms.get(name)
        if norm:
            node = next(iter(node.users))
        placements[name] = search.placement(node)
    return placements


class _Search:
    def __init__(self, modules: Mapping[str, nn.Module], unsigned: Mapping[str, bool]) -> None:
        self._modules, self._unsigned = modules, unsigned

    def placement(self, node: fx.Node) -> Placement:
        ends = list(self._ends(node, after_relu=False))
        relus = all(self._is_relu(user) for user in node.users) and bool(node.users)
        if len(ends) == 1 and ends[0][1]:
            _, reader, after_relu = ends[0]
            return Placement(reader, after_relu)
        causes = sorted({cause for cause, reader, _ in ends if not reader}) or ["several layers read the output"]
        return Placement(after_relu=relus, cause=", ".join(causes))

    def _ends(self, node: fx.Node, *, after_relu: bool) -> Iterator[tuple[str, str, bool]]:
        """Yield (cause, reader, after_relu) for each place where the values of a node end up."""
        for user in node.users:
            if self._is_relu(user):
                yield from self._ends(user, after_relu=True)
            elif self._moves(user):
                yield from self._ends(user, after_relu=after_relu)
            else:
                yield self._end(user, node, after_relu=after_relu)

    def _end(self, user: fx.Node, node: fx.Node, *, after_relu: bool) -> tuple[str, str, bool]:
        if user.op == "output":
            return "is an output of the model", "", after_relu
        if user.op == "call_module" and str(user.target) in self._unsigned and user.args[:1] == (node,):
            name = str(user.target)
            if after_relu and not self._unsigned[name]:
                return f"{name} has signed input codes after a ReLU", "", after_relu
            return "", name, after_relu
        return f"feeds {self._label(user)}", "", after_relu

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._modules.get(str(node.target)) if node.op == "call_module" else None

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_method":
            return str(node.target) in (*_RELU, "relu_")
        if node.op == "call_function":
            return node.target in _RELU_FUNCTIONS
        return type(self._module(node)) is nn.ReLU

    def _moves(self, node: fx.Node) -> bool:
        """Return whether a node only selects or rearranges values, so that QuantizeLinear can move across it."""
        if node.op == "call_method":
            return str(node.target) in _MOVING_METHODS
        if node.op == "call_function":
            return node.target in (*_MOVING_FUNCTIONS, *_POOL_FUNCTIONS)
        return isinstance(self._module(node), (*_MOVING_MODULES, *_POOLS))

    def _label(self, node: fx.Node) -> str:
        module = self._module(node)
        if module is not None:
            return f"{node.target} ({type(module).__name__})"
        if node.op == "call_method":
            return str(node.target)
        return str(getattr(node.target, "__name__", node.target))
