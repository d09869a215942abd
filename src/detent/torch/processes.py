"""Processes: how many of them train this model, and tensors of which each holds a part."""

import torch
from torch import Tensor

__all__ = ["is_distributed", "process_count", "whole"]

_AVAILABLE = torch.distributed.is_available()


def is_distributed() -> bool:
    """Whether ``torch.distributed`` runs; trainers that shard a model may then refill its weights behind our back.

    >>> is_distributed()
    False
    """
    return _AVAILABLE and torch.distributed.is_initialized()


def process_count() -> int:
    """How many processes ``torch.distributed`` knows of.

    >>> process_count()
    1
    """
    return torch.distributed.get_world_size() if is_distributed() else 1


def whole(x: Tensor) -> Tensor:
    """The tensor itself; a DTensor's parts gathered, which is a collective: every process has to ask for them.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()
