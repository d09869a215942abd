"""Training: the loop that float and quantized networks share, calibration, and what a network says of images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import detent.torch as qt
from detent.demo.pictures import Pictures
from detent.recipe import Recipe

__all__ = ["Course", "calibrated", "logits_of"]

BATCH = 64
CONTRAST, NOISE = 0.5, 0.2  # how much a training image is varied
DECAY, SMOOTHING = 0.05, 0.1  # of weights and of labels: 1,297 images are few


@dataclass(frozen=True)
class Course:
    """How long to train, on what; AdamW with a cosine to zero.

    Attributes:
        pictures: to train on.
        epochs: how often each of them is seen.
        rate: of AdamW.
        seed: of their order and of how they are varied.

    >>> from detent.demo.pictures import read_digits
    >>> course = Course(read_digits()[0].first(128), 2, 1e-3, 0)
    >>> steps = []
    >>> _ = course.train(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), lambda: steps.append(1))
    >>> len(steps) == course.steps == 4
    True
    """

    pictures: Pictures
    epochs: int
    rate: float
    seed: int

    @property
    def steps(self) -> int:
        """How many there are in all; the incomplete batch of an epoch is left out."""
        return self.epochs * (len(self.pictures) // BATCH)

    def train(self, model: nn.Sequential, after_step: Callable[[], object]) -> nn.Sequential:
        """The model, trained in place and left in evaluation mode."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.steps, 1))
        model.train()
        for images, labels in self._batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
            schedule.step()
            after_step()
        return model.eval()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images of another contrast each time, with noise: the same ones for everybody."""
        numbers = torch.Generator().manual_seed(self.seed)
        images, labels = torch.from_numpy(self.pictures.images), torch.from_numpy(self.pictures.labels)
        for _ in range(self.epochs):
            order = torch.randperm(len(labels), generator=numbers)
            for i in range(len(labels) // BATCH):
                chosen = order[i * BATCH : (i + 1) * BATCH]
                contrast = 1 + CONTRAST * (torch.rand(len(chosen), 1, 1, 1, generator=numbers) - 0.5)
                noise = NOISE * torch.randn(images[chosen].shape, generator=numbers)
                yield contrast * images[chosen] + noise, labels[chosen]


def calibrated(model: nn.Sequential, recipe: Recipe, pictures: Pictures) -> nn.Sequential:
    """The model prepared in place, with ranges from all pictures.

    >>> from detent.demo.pictures import read_digits
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> ready = calibrated(model, Recipe.preset("w8a8"), read_digits()[0].first(64))
    >>> bool(ready[1].input_quantizer.is_initialized)
    True
    """
    qt.prepare(model, recipe)
    with qt.calibrating(model):
        for images in pictures.batches(BATCH):
            model(torch.from_numpy(images))
    return model.eval()


def logits_of(model: nn.Sequential, pictures: Pictures) -> Tensor:
    """What the model says of the pictures.

    >>> from detent.demo.pictures import read_digits
    >>> logits_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), read_digits()[1]).shape
    torch.Size([500, 10])
    """
    model.eval()
    with torch.no_grad():
        said: Tensor = model(torch.from_numpy(pictures.images))
    return said
