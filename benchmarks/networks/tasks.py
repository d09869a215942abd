"""Losses and decisions that networks of both sets share."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, cross_entropy

from networks import dense, graphs
from networks.network import Array, Outputs

PICTURE_SIDE = 64
POSITIVE_WEIGHT = 20.0  # weight of cells with an object in the loss, because few cells have one


def log_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of probabilities."""
    return -torch.log(outputs.gather(1, labels[:, None]) + 1e-9).mean()


def step_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over all steps; a step has its own label or the label of the sequence."""
    expected = labels if labels.ndim == 2 else labels[:, None].expand(-1, outputs.shape[1])
    return cross_entropy(outputs.flatten(0, 1), expected.flatten())


def _cell_targets(boxes: Tensor) -> Tensor:
    """Mark the cells of both scales whose centers are near the center of a box; the shape is (batch, cells)."""
    masks = []
    for stride in dense.STRIDES:
        places = (torch.arange(PICTURE_SIDE // stride) + 0.5) * stride
        near = [(boxes[:, axis, None] - places).abs() < 0.75 * stride for axis in (0, 1)]
        masks.append((near[1][:, :, None] & near[0][:, None]).flatten(1))
    return torch.cat(masks, 1).float()


def detection_loss(outputs: Tensor | tuple[Tensor, Tensor], labels: Tensor, boxes: Tensor) -> Tensor:
    """Cross entropy of the class scores of all cells, and distance of the boxes of cells with an object."""
    if isinstance(outputs, tuple):
        corners, scores = outputs
        middle, size = (corners[..., 2:] + corners[..., :2]) / 2, corners[..., 2:] - corners[..., :2]
        sides = torch.cat([middle.flip(-1), size.flip(-1)], -1).transpose(1, 2)
    else:
        sides, scores = outputs[:, :4], outputs[:, 4:]
    cells = _cell_targets(boxes)
    expected = torch.zeros_like(scores)
    expected[torch.arange(len(labels)), labels // 2] = cells
    weights = 1 + POSITIVE_WEIGHT * expected
    score_loss = binary_cross_entropy(scores.clamp(1e-6, 1 - 1e-6), expected, weights)
    distance = ((sides - boxes[:, :, None]).abs() / 8 * cells[:, None]).sum() / cells.sum().clamp(min=1) / 4
    return score_loss + distance


def above(threshold: float) -> Callable[[Outputs], Array]:
    """Return a function that decides for each value of the first output whether it is above a threshold."""

    def decide(outputs: Outputs) -> Array:
        return np.asarray(outputs[0] > threshold)

    return decide


def detected(outputs: Outputs) -> Array:
    """Decide which cells contain which shape."""
    return np.asarray(outputs[0][:, 4:] > graphs.MIN_SCORE)


def brightest(outputs: Outputs) -> Array:
    """Decide on the place with the highest value of the first output."""
    return np.asarray(outputs[0].reshape(len(outputs[0]), -1).argmax(-1))


def last_classes(outputs: Outputs) -> Array:
    """Decide on the class with the highest score in the last output."""
    return np.asarray(outputs[-1].argmax(-1))
