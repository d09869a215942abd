"""Samples of the calibration data on which accuracy passes run the model.

The samples do not depend on the order of the data or on the batch size. Each sample has a hash of its elements, and the
samples with the smallest hashes are kept. Batches are cut into samples if the model computes each sample by itself.
Otherwise, whole batches are samples.

Accuracy passes fit their changes to one part of the samples, and evaluate them on the other part.
"""

import hashlib
from bisect import insort
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import UnsupportedError
from detent.metrics import has_first_rows
from detent.onnx_model.batches import Batches, can_cut, samples_in, update_digest
from detent.onnx_model.model_inputs import InputInfo, inputs_of
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors

__all__ = ["SampleChooser", "Samples", "choose_samples"]

Array = NDArray[Any]
Feed = dict[str, Array]

MAX_SAMPLES, MAX_SAMPLE_BYTES = 32, 64 << 20  # limits on the samples that are kept in memory
MAX_EVALUATED = 16  # limit on the samples on which fitted values are evaluated
MAX_BATCHES = 8  # limit if whole batches are samples


class Samples(NamedTuple):
    """Samples of the calibration data.

    Attributes:
        every: all samples.
        fitted: the first samples, to which factors and biases are fitted.
        evaluated: the other samples, on which fitted values are evaluated; a single sample serves for both.
        compared: the last samples, on which candidates that need no fit are compared.
    """

    every: Sequence[Feed]
    fitted: Sequence[Feed]
    evaluated: Sequence[Feed]
    compared: Sequence[Feed]

    @classmethod
    def of(cls, samples: Sequence[Feed], max_samples: int, num_compared: int) -> "Samples":
        """Split at most ``max_samples`` samples into fitted and evaluated ones; the last ``num_compared`` are compared.

        Fitted values are evaluated on at most ``num_compared`` samples, 16 samples, or half of all samples, but on at
        least one sample.
        """
        samples = samples[:max_samples]
        count = len(samples) - min(num_compared, MAX_EVALUATED, len(samples) // 2)
        return cls(samples, samples[:count], samples[count:] or samples[-1:], samples[-max(num_compared, 1) :])


class SampleChooser:
    """Collection of the samples with the smallest hashes in all added batches."""

    def __init__(self, model: ModelProto, inputs: Sequence[InputInfo]) -> None:
        self._model, self._inputs = model, inputs
        self._kept: list[tuple[bytes, Feed]] = []
        self._nbytes = 0
        self._end = b"\xff" * 33  # smallest dropped hash; initially larger than any hash
        self._is_cut: bool | None = None  # None until a batch with several samples was added

    @property
    def samples(self) -> tuple[Feed, ...]:
        """The samples, in the order of their hashes."""
        return tuple(feed for _, feed in self._kept)

    def add(self, feed: Feed) -> None:
        """Add the samples of a batch."""
        count = samples_in(feed)
        if self._is_cut is None and count > 1:
            self._is_cut = can_cut(feed, self._inputs) and _computes_each_sample(self._model, feed)
        if not self._is_cut or count == 1 or not can_cut(feed, self._inputs):
            self._add(feed)
            return
        for i in range(count):
            self._add({name: array[i : i + 1] for name, array in feed.items()})

    def _add(self, sample: Feed) -> None:
        digest = hashlib.sha256()
        update_digest(digest, sample)
        key = digest.digest()
        if key < self._end and all(key != other for other, _ in self._kept):
            insort(self._kept, (key, {name: np.array(array) for name, array in sample.items()}), key=itemgetter(0))
            self._nbytes += _nbytes(sample)
        limit = MAX_BATCHES if self._is_cut is False else MAX_SAMPLES
        while len(self._kept) > limit or (self._nbytes > MAX_SAMPLE_BYTES and len(self._kept) > 1):
            self._end, dropped = self._kept.pop()
            self._nbytes -= _nbytes(dropped)


def choose_samples(model: ModelProto, batches: Batches) -> tuple[Feed, ...]:
    """Choose samples from all batches, or from the first batches if the data can be read only once."""
    chooser = SampleChooser(model, inputs_of(model))
    for feed in batches if batches.is_repeatable else _first(batches):
        chooser.add(feed)
    return chooser.samples


def _first(batches: Batches) -> list[Feed]:
    """Return the first batches of an iterator, up to the limits; the next pass still begins with the first batch."""
    feeds = batches.peek(1)
    while sum(map(samples_in, feeds)) < MAX_SAMPLES and sum(map(_nbytes, feeds)) < MAX_SAMPLE_BYTES:
        more = batches.peek(len(feeds) + 1)
        if len(more) == len(feeds):
            break
        feeds = more
    return feeds


def _nbytes(feed: Feed) -> int:
    return sum(array.nbytes for array in feed.values())


def _computes_each_sample(model: ModelProto, feed: Feed) -> bool:
    """Return whether the first sample of a batch gets the same outputs if the model runs on this sample alone."""
    session, names = make_session(model), array_outputs(model)
    if not names:  # for an empty list, ONNX Runtime would compute all outputs
        return False
    with ort_errors():
        whole = session.run(names, feed)
    try:
        with ort_errors():
            one = session.run(names, {name: array[:1] for name, array in feed.items()})
    except UnsupportedError:  # for example, a Reshape to a fixed batch size
        return False
    return all(has_first_rows(b, a, 1, samples_in(feed)) for a, b in zip(one, whole, strict=True))
