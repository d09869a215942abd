"""Batch normalisation after a layer: quantize the weights that will be shipped, which have its factor in them.

The shipped layer has the weights ``w * f`` with ``f = gamma / sqrt(running_var + eps)`` per channel. In training their
quantized values over f enter the product, and the normalisation works on its result as always, with the statistics of
the batch::

    y = norm(product(x, fq(w * f) / f))          training, and evaluation
    y = product(x, fq(w * f)) + b'               after qt.freeze, as shipped

Both sides differ by rounding only. Nothing of the size of an activation is computed beside what the float model does.
"""

from collections import Counter
from copy import deepcopy
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.torch.arrays import fingerprint, full_tensor

__all__ = ["Fold", "QuantizedNorm", "find_folds"]


class Fold:
    """A layer's normalisation; no module itself, so that the model's own tree stays as it is.

    >>> fold = Fold(nn.BatchNorm1d(3, eps=0.0))
    >>> fold.norm.running_var.fill_(0.25)
    tensor([0.2500, 0.2500, 0.2500])
    >>> fold.gain().tolist(), fold.bias(torch.ones(3)).tolist()
    ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0])
    >>> fold.factor(torch.ones(3, 2)).shape, fold.shipped(torch.ones(3, 2))[0].tolist()
    (torch.Size([3, 1]), [2.0, 2.0])
    >>> fold.key() == fold.key(), fold.fuse(), fold.unfuse(), fold.is_fused
    (True, None, None, False)
    """

    def __init__(self, norm: _BatchNorm) -> None:
        self.norm = norm

    @property
    def is_fused(self) -> bool:
        """Whether the layer computes the normalisation, too."""
        return bool(getattr(self.norm, "fused", False))

    def fuse(self) -> None:
        """Let the layer compute the normalisation, which then lets data pass."""
        if isinstance(self.norm, QuantizedNorm):
            self.norm.fused = True

    def unfuse(self) -> None:
        """Leave the normalisation to itself again."""
        if isinstance(self.norm, QuantizedNorm):
            self.norm.fused = False

    def gain(self) -> Tensor:
        """What each channel is multiplied by."""
        norm = self.norm
        variance = norm.running_var.detach()  # type: ignore[union-attr]  # find_folds takes none without statistics
        gain = torch.rsqrt(variance + norm.eps)
        return gain if norm.weight is None else gain * full_tensor(norm.weight.detach())

    def factor(self, weight: Tensor) -> Tensor:
        """What each output channel of the weight is multiplied by; 0 counts as 1, such a channel has no weights."""
        gain = self.gain().to(weight.dtype)
        return torch.where(gain == 0, torch.ones_like(gain), gain).reshape(-1, *(1,) * (weight.ndim - 1))

    def shipped(self, weight: Tensor) -> Tensor:
        """The weight of the folded layer, whose channels of gain 0 are 0."""
        return weight * self.gain().to(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1))

    def bias(self, bias: Tensor | None) -> Tensor:
        """The bias of the folded layer."""
        norm = self.norm
        gain, mean = self.gain(), norm.running_mean.detach()  # type: ignore[union-attr]
        shift = -mean if bias is None else full_tensor(bias.detach()) - mean
        return shift * gain if norm.bias is None else shift * gain + full_tensor(norm.bias.detach())

    def key(self) -> object:
        """Changes when the factor changes: statistics are written without any trace."""
        norm = self.norm
        parts = (norm.running_var, norm.weight)
        return fingerprint(*(part for part in parts if part is not None))


class QuantizedNorm(nn.Module):
    """What every batch normalisation of a prepared model is, beside its own class.

    Attributes:
        fused: the layer before it computes it.
        frozen: training uses the running statistics and leaves them alone.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "w8a8")
    >>> isinstance(model[1], QuantizedNorm), model[1].fused
    (True, False)
    """

    float_class: ClassVar[type[nn.Module]]
    fused: bool
    frozen: bool

    def forward(self, x: Tensor) -> Tensor:
        """The normalisation, unless the layer before has done it."""
        if self.fused:
            return x
        if self.frozen and self.training:
            norm: Any = self
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
        result: Tensor = self.float_class.forward(self, x)
        return result


def find_folds(model: nn.Module) -> dict[str, str]:
    """The names of layers and of the batch normalisations that take their output and nothing else does.

    By a symbolic trace where the model has one, else by the order in Sequentials.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    >>> find_folds(model)
    {'0': '1'}
    """
    try:
        pairs = _traced_pairs(model)
    except Exception:  # noqa: BLE001 - a trace runs the model's own code, which may raise anything
        pairs = _pairs_in_order(model)
    modules = dict(model.named_modules())
    return {layer: norm for layer, norm in pairs.items() if _fits(modules[layer], modules[norm])}


def _pairs_in_order(model: nn.Module) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    runs = [list(module) for module in model.modules() if isinstance(module, nn.Sequential)]
    uses = Counter(module for run in runs for module in run)
    pairs = (pair for run in runs for pair in pairwise(run) if all(uses[each] == 1 for each in pair))
    return {names[layer]: names[norm] for layer, norm in pairs}


def _traced_pairs(model: nn.Module) -> dict[str, str]:
    """Pairs by name that are pairs in training and in evaluation, found on a copy that shares the parameters."""
    double = deepcopy(model, {id(each): each for each in model.parameters()})
    with torch.random.fork_rng(devices=[]):
        found = [_pairs_of(fx.Tracer().trace(double.train(mode))) for mode in (True, False)]
    return dict(found[0].items() & found[1].items())


def _pairs_of(graph: fx.Graph) -> dict[str, str]:
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    pairs = {}
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        if calls[node.target] == calls[source.target] == 1:
            pairs[str(source.target)] = str(node.target)
    return pairs


def _fits(layer: nn.Module, norm: nn.Module) -> bool:
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or not isinstance(norm, _BatchNorm):
        return False
    return norm.track_running_stats and norm.num_features == layer.weight.shape[0]
