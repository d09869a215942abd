"""Parameter changes: new values for parameters and buffers of a model, which can be undone."""

import torch
from torch import Tensor, nn

__all__ = ["ParameterChanges"]


class ParameterChanges:
    """New values of tensors in modules; the tensors stay the same objects.

    >>> layer, changes = nn.Linear(1, 1, bias=False), ParameterChanges()
    >>> changes.set(layer, "bias", torch.ones(1))
    >>> layer.bias.item(), changes.undo(), layer.bias
    (1.0, None, None)
    """

    def __init__(self) -> None:
        self._values: dict[tuple[nn.Module, str], Tensor | None] = {}  # before the first change

    @torch.no_grad()
    def set(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Set a tensor; a missing parameter, such as a bias that is None, is created."""
        tensor = getattr(module, name)
        if tensor is None:
            like = next(module.parameters())
            module.register_parameter(name, nn.Parameter(value.to(like), requires_grad=like.requires_grad))
            self._values.setdefault((module, name), None)
            return
        self._values.setdefault((module, name), tensor.detach().clone())
        tensor.copy_(value)

    @torch.no_grad()
    def undo(self) -> None:
        """Set all tensors to their values before the first change."""
        for (module, name), value in self._values.items():
            if value is None:
                module.register_parameter(name, None)
            else:
                getattr(module, name).copy_(value)
        self._values.clear()
