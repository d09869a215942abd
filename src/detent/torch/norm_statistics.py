"""Re-estimation of batch norm statistics, at the end of training.

Running statistics are averages over the last training steps. At low bit widths, the weights behind them still jump
between codes in these steps, so the averages belong to no weights in particular, and accuracy in evaluation suffers
(Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training"). ``reestimate_norms`` measures them again
with the final weights::

    mean = average of the batch means,   var = average of the unbiased batch variances

Each batch is normalized with its own statistics, as in training. The running statistics change only after the last
batch, because with a folded batch norm the codes of the weights depend on them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.errors import RangeError, StateError
from detent.torch.arrays import call_with
from detent.torch.preparation import evaluating

__all__ = ["reestimate_norms"]

MIN_ELEMENTS = 2  # per channel; a variance needs two


def reestimate_norms(model: nn.Module, batches: Iterable[object]) -> nn.Module:
    """Measure the running statistics of all batch norms again, with the current weights; nothing else changes.

    Call it after training and before ``qt.freeze``. 20 to 50 batches of training data, of the size used in training,
    are enough. It also works for models that are not prepared.

    Args:
        model: the model; its batch norms are changed in place.
        batches: training data. Each batch is a tensor, a tuple or list of all arguments, or a dict of arguments.

    Returns:
        The model.

    Raises:
        StateError: the model is frozen, so that its batch norms are parts of other layers.
        RangeError: there is no batch, or a batch has one element per channel.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> batch = torch.randn(64, 2)
    >>> reestimate_norms(model, [batch])[1].running_mean.allclose(model[0](batch).mean(0))
    True
    """
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.running_var is not None]
    if any(getattr(norm, "fused", False) for norm in norms):
        raise StateError(
            "the model is frozen, so its batch norms are folded: call qt.reestimate_norms before qt.freeze"
        )
    statistics = {norm: _Statistics() for norm in norms}
    momenta = {norm: norm.momentum for norm in norms}
    hooks = [norm.register_forward_pre_hook(statistics[norm].observe) for norm in norms]
    count = 0
    try:
        with evaluating(model), torch.no_grad():
            for norm in norms:
                norm.training, norm.momentum = True, 0.0  # normalize with the batch, and keep the running statistics
            for batch in batches:
                call_with(model, batch)
                count += 1
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    if not count:
        raise RangeError("got no batch, expected at least one: pass training data")
    for norm, sums in statistics.items():
        sums.store(norm)
    return model


class _Statistics:
    """Sums of the means and variances of batches."""

    def __init__(self) -> None:
        self.batches = 0
        self.mean: Any = 0.0
        self.variance: Any = 0.0

    def observe(self, norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Add the statistics of the input of a batch norm; a forward pre-hook."""
        x = arguments[0].detach()
        x = x.transpose(0, 1).flatten(1) if x.ndim > 1 else x.unsqueeze(1)
        if x.shape[1] < MIN_ELEMENTS:
            raise RangeError(f"got {x.shape[1]} element per channel of a batch norm, expected more: use larger batches")
        if getattr(norm, "frozen", False):
            return  # the schedule has frozen these statistics
        variance, mean = torch.var_mean(x.double(), 1)
        self.batches, self.mean, self.variance = self.batches + 1, self.mean + mean, self.variance + variance

    def store(self, norm: _BatchNorm) -> None:
        """Set the running statistics; a batch norm that no batch has reached keeps its own."""
        if not self.batches:
            return
        with torch.no_grad():
            norm.running_mean.copy_(self.mean / self.batches)  # type: ignore[union-attr]  # has statistics
            norm.running_var.copy_(self.variance / self.batches)  # type: ignore[union-attr]
