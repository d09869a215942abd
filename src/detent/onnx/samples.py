"""Samples of the calibration data on which accuracy passes run the model.

The samples do not depend on the order of the data or on the batch size. Each sample has a hash of its elements, and the
samples with the smallest hashes are kept. Batches are cut into samples if the model computes each sample by itself.
Otherwise, whole batches are samples.

Accuracy passes fit their changes to one part of the samples, and evaluate them on the other part.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent.array_store import ArrayStore
from detent.errors import UnsupportedError
from detent.metrics import has_first_rows
from detent.onnx_model.batches import Batches, can_cut, digest_of, samples_in
from detent.onnx_model.model_inputs import InputInfo, inputs_of
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors

__all__ = ["BatchFacts", "SampleChooser", "Samples", "choose_samples", "choose_surveyed"]

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


KeptT = TypeVar("KeptT")


class _SmallestHashes(Generic[KeptT]):
    """The values with the smallest hashes, within limits on their number and their bytes.

    ``on_drop`` is called with each value that is dropped.
    """

    def __init__(self, on_drop: Callable[[KeptT], object] = lambda _: None) -> None:
        self._on_drop = on_drop
        self._kept: list[tuple[bytes, int, KeptT]] = []
        self._nbytes = 0
        self._end = b"\xff" * 33  # smallest dropped hash; initially larger than any hash

    @property
    def values(self) -> tuple[KeptT, ...]:
        """The values, in the order of their hashes."""
        return tuple(value for _, _, value in self._kept)

    def accepts(self, key: bytes) -> bool:
        """Whether a value with this hash may be kept; a hash that was added before is not accepted."""
        return key < self._end and all(key != other for other, _, _ in self._kept)

    def add(self, key: bytes, nbytes: int, value: KeptT, *, is_cut: bool | None) -> None:
        """Add an accepted value, and drop the largest hashes beyond the limits."""
        insort(self._kept, (key, nbytes, value), key=itemgetter(0))
        self._nbytes += nbytes
        limit = MAX_BATCHES if is_cut is False else MAX_SAMPLES
        while len(self._kept) > limit or (self._nbytes > MAX_SAMPLE_BYTES and len(self._kept) > 1):
            self._end, dropped, value = self._kept.pop()
            self._nbytes -= dropped
            self._on_drop(value)


class SampleChooser:
    """Collection of the samples with the smallest hashes in all added batches.

    Samples above the memory budget are kept in a temporary file.
    """

    def __init__(self, model: ModelProto, inputs: Sequence[InputInfo], memory_budget: int | None = None) -> None:
        self._model, self._inputs = model, inputs
        self._stored = _StoredFeeds(memory_budget)
        self._hashes = _SmallestHashes[bytes](self._stored.drop)
        self._is_cut: bool | None = None  # None until a batch with several samples was added

    @property
    def samples(self) -> tuple[Feed, ...]:
        """The samples, in the order of their hashes."""
        return tuple(map(self._stored.feed, self._hashes.values))

    def add(self, feed: Feed) -> None:
        """Add the samples of a batch."""
        count = samples_in(feed)
        if self._is_cut is None and count > 1:
            self._is_cut = can_cut(feed, self._inputs) and _computes_each_sample(self._model, feed)
        if not self._is_cut or count == 1 or not can_cut(feed, self._inputs):
            self._add(feed)
            return
        for i in range(count):
            self._add(_sample(feed, i))

    def _add(self, sample: Feed) -> None:
        key = digest_of(sample)
        if self._hashes.accepts(key):
            self._stored.add(key, sample)
            self._hashes.add(key, _nbytes(sample), key, is_cut=self._is_cut)


class _StoredFeeds:
    """Copies of samples; those above the memory budget are in a temporary file, and are read from it as needed."""

    def __init__(self, memory_budget: int | None) -> None:
        self._arrays, self._names = ArrayStore(memory_budget), dict[Hashable, tuple[str, ...]]()

    def add(self, key: Hashable, sample: Feed) -> None:
        self._names[key] = tuple(sample)
        self._arrays[key] = [np.array(array) for array in sample.values()]

    def drop(self, key: Hashable) -> None:
        del self._names[key], self._arrays[key]

    def feed(self, key: Hashable) -> Feed:
        return dict(zip(self._names[key], self._arrays.mapped(key), strict=True))


class BatchFacts(NamedTuple):
    """Facts about a batch: its hash, its bytes, and, if it can be cut, the hashes of its samples."""

    digest: bytes
    nbytes: int
    samples: int
    sample_digests: tuple[bytes, ...] = ()  # () for a batch of one sample, or a batch that cannot be cut

    @classmethod
    def of(cls, feed: Feed, inputs: Sequence[InputInfo]) -> "BatchFacts":
        """Compute the hashes of a batch."""
        count = samples_in(feed)
        is_cut = count > 1 and can_cut(feed, inputs)
        samples = tuple(digest_of(_sample(feed, i)) for i in range(count)) if is_cut else ()
        return cls(digest_of(feed), _nbytes(feed), count, samples)


def choose_surveyed(
    model: ModelProto, batches: Batches, facts: Iterable[BatchFacts], memory_budget: int | None = None
) -> tuple[Feed, ...]:
    """Choose the samples that ``choose_samples`` would choose, from facts about all batches; read only these batches.

    ``batches`` must give access by index.
    """
    hashes, is_cut = _SmallestHashes[tuple[int, int | None]](), None
    for number, fact in enumerate(facts):
        if is_cut is None and fact.samples > 1:
            is_cut = bool(fact.sample_digests) and _computes_each_sample(model, batches.subset([number]).check_first())
        parts: list[tuple[bytes, int, int | None]] = [(fact.digest, fact.nbytes, None)]
        if is_cut and fact.sample_digests:
            parts = [(each, fact.nbytes // fact.samples, i) for i, each in enumerate(fact.sample_digests)]
        for key, nbytes, index in parts:
            if hashes.accepts(key):
                hashes.add(key, nbytes, (number, index), is_cut=is_cut)
    numbers = sorted({number for number, _ in hashes.values})
    stored = _StoredFeeds(memory_budget)
    for number, feed in zip(numbers, batches.subset(numbers), strict=True):  # one batch in memory at a time
        for place in hashes.values:
            if place[0] == number:
                stored.add(place, _sample(feed, place[1]))
    return tuple(map(stored.feed, hashes.values))


def _sample(feed: Feed, index: int | None) -> Feed:
    """Return one sample of a batch, or the whole batch for None."""
    return feed if index is None else {name: array[index : index + 1] for name, array in feed.items()}


def choose_samples(model: ModelProto, batches: Batches, memory_budget: int | None = None) -> tuple[Feed, ...]:
    """Choose samples from all batches, or from the first batches if the data can be read only once.

    The choice does not depend on the memory budget: samples above it are kept in a temporary file.
    """
    chooser = SampleChooser(model, inputs_of(model), memory_budget)
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
