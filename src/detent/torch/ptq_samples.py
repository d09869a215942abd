"""Samples for ``qt.quantize``: batches that are read once, checked, and split into a fitted and a held-out part.

Every fourth batch is held out, until 32 samples are held out, or fewer of a large model. They are spread over all data
if the number of batches is known. Ranges, factors and biases are fitted to the other batches; what is kept is decided
on the held-out batches. With fewer than eight batches, each batch is cut into parts, if the model computes each sample
by itself.

A few samples stay in memory, so that the model can run on them again. All other batches are needed only once, so data
can be an iterator.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from detent.checks import known_length, refuse_nan
from detent.errors import DetentError, SpecError, UnsupportedError
from detent.metrics import has_first_rows
from detent.tables import counted
from detent.torch.arrays import Arguments, arguments_of, float_outputs, on_cpu, to_array
from detent.torch.layers import float_class_of, runs_as_matmul

__all__ = ["BatchRunner", "Forward", "Sample", "join", "read_samples"]

Array = NDArray[Any]
Forward = Callable[[nn.Module, Any], object]

MIN_BATCHES = 8  # fewer batches are cut into parts
HELD_OUT_EVERY = 4  # a quarter of the data is held out, until MAX_SAMPLES samples are held out
MAX_SAMPLES, MIN_SAMPLES = 32, 4  # samples of each part that stay in memory, of a small and of a large model
MAX_MULTIPLICATIONS = 2e10  # of one run on the samples of a part, which limits their number
MAX_JOINED_BYTES = 16 << 20  # larger samples are not joined into one batch
MIN_CUT = 4  # samples of a large batch that stay in memory; then there are up to 8 such batches of each part


class Sample(NamedTuple):
    """A batch or a part of a batch.

    Attributes:
        label: position in the data, for messages.
        batch: what the model is called with.
        is_held_out: whether nothing is fitted to it.
        kept: the samples that stay in memory, or None if the batch is needed only once.
    """

    label: str
    batch: object
    is_held_out: bool
    kept: object | None


class BatchRunner:
    """Calls a model on batches in evaluation mode, and returns its float outputs.

    Without ``forward``, a batch is a tensor, a tuple or list of positional arguments, or a dict of arguments by name.
    Arguments that the model's forward does not accept are dropped, such as the labels of a data set; ``dropped``
    describes them.
    """

    def __init__(self, model: nn.Module, forward: Forward | None = None) -> None:
        if forward is not None and not callable(forward):
            raise SpecError(f"got {forward!r} for forward, expected a function of the model and a batch")
        self._model, self._forward = model, forward
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {each.kind for each in parameters}
        positional = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
        self._max_args = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional)
        self._names = None if inspect.Parameter.VAR_KEYWORD in kinds else {each.name for each in parameters}
        self.dropped = ""

    @torch.no_grad()
    def run(self, batch: object, label: str) -> list[Array]:
        """Call the model, and return its float outputs; errors of the model name the batch."""
        try:
            if self._forward is not None:
                return float_outputs(self._forward(self._model, batch))
            args, kwargs = self._accepted(arguments_of(batch, label))
            return float_outputs(self._model(*args, **kwargs))
        except DetentError:
            raise
        except Exception as error:
            repair = "check its shapes and types, or pass forward= to choose the arguments of the model"
            raise UnsupportedError(f"the model fails on {label} of data: {error}: {repair}") from error

    def _accepted(self, call: Arguments) -> Arguments:
        """Drop the arguments that forward does not accept."""
        args, kwargs = call
        if self._max_args is not None and len(args) > self._max_args:
            self.dropped = (
                f"used the first {counted(self._max_args, 'element')} of each batch of {len(args)}: forward accepts "
                "no more arguments"
            )
            args = args[: self._max_args]
        unknown = [] if self._names is None else [name for name in kwargs if name not in self._names]
        if unknown:
            self.dropped = f"left out {', '.join(map(repr, unknown))} of each batch: forward has no such arguments"
        return Arguments(args, {name: value for name, value in kwargs.items() if name not in unknown})

    def computes_each_sample(self, batch: object, rows: int, label: str) -> bool:
        """Return whether the outputs of the first rows of a batch do not depend on its other rows."""
        count = sample_count(batch)
        if count <= rows:
            return False
        try:
            whole, first = self.run(batch, label), self.run(cut(batch, 0, rows), label)
        except DetentError:  # for example, a view of a fixed batch size
            return False
        pairs = zip(whole, first, strict=False)
        return len(first) == len(whole) > 0 and all(has_first_rows(a, b, rows, count) for a, b in pairs)

    def multiplications(self, batch: object, label: str) -> int:
        """Run the model on a batch, and count the multiplications of its matmuls and convolutions."""
        total = 0

        def count(layer: nn.Module, _: object, output: Tensor) -> None:
            nonlocal total
            weight = layer._parameters.get("weight")
            total += 0 if weight is None else output.numel() * weight[0].numel()

        layers = [each for each in self._model.modules() if runs_as_matmul(float_class_of(each))]
        handles = [layer.register_forward_hook(count) for layer in layers]
        try:
            self.run(batch, label)
        finally:
            for handle in handles:
                handle.remove()
        return total


def sample_count(batch: object) -> int:
    """Return the number of samples of a batch: the size of axis 0 of all its tensors, or 1 if the sizes differ."""
    sizes = {len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else 1


def cut(batch: object, start: int, stop: int) -> object:
    """Return some samples of a batch."""

    def part(leaf: object) -> object:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return pytree.tree_map(part, batch)


def read_samples(data: object, runner: BatchRunner) -> Iterator[Sample]:
    """Yield the batches of data, or parts of them, checked for NaN.

    Raises:
        SpecError: data is not an iterable of batches, or is empty.
        NaNError: a tensor of a batch contains NaN.
    """
    if isinstance(data, str | bytes | Mapping | Tensor) or not isinstance(data, Iterable):
        raise SpecError(
            f"got data of type {type(data).__name__}, expected an iterable of batches: pass [data] for one batch"
        )
    batches = _labeled(data)
    head = list(islice(batches, MIN_BATCHES))
    if not head:
        raise SpecError(
            "got no batches as data, expected at least one: if data is an iterator that was used before, pass a list"
        )
    label, first = head[0]
    batch_size = sample_count(first)
    per_sample = runner.multiplications(first, label) / max(1, batch_size)
    max_samples = min(MAX_SAMPLES, max(MIN_SAMPLES, int(MAX_MULTIPLICATIONS / max(per_sample, 1.0))))
    can_cut = batch_size > 1 and runner.computes_each_sample(first, 1, label)
    count = known_length(data)
    if len(head) < MIN_BATCHES:
        head = list(_parts(head)) if can_cut else head
        count, batch_size = len(head), sample_count(head[0][1])
    return _split(chain(head, batches), _Split.of(count, batch_size, max_samples, can_cut=can_cut), can_cut=can_cut)


def join(samples: Sequence[Sample], runner: BatchRunner) -> list[Sample]:
    """Join the kept samples into one batch, on which the model runs faster, if it computes each sample by itself."""
    batches = [sample.kept for sample in samples]
    leaves = [pytree.tree_leaves(batch) for batch in batches]
    tensors = [each for each in leaves[0] if isinstance(each, Tensor)] if samples else []
    nbytes = sum(each.nbytes for part in leaves for each in part if isinstance(each, Tensor))
    if len(samples) < 2 or nbytes > MAX_JOINED_BYTES or len(tensors) < len(leaves[0]):
        return list(samples)
    label = f"{samples[0].label} and others"
    try:
        joined = pytree.tree_map(lambda *parts: torch.cat(parts), *batches)
        if runner.computes_each_sample(joined, sample_count(batches[0]), label):
            return [samples[0]._replace(label=label, kept=joined)]
    except (RuntimeError, TypeError, ValueError):  # batches of different structures or shapes
        pass
    return list(samples)


def _labeled(data: Iterable[Any]) -> Iterator[tuple[str, object]]:
    for number, batch in enumerate(data):
        label = f"batch {number}"
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.isnan(leaf).any():
                refuse_nan(f"{label} of data", to_array(on_cpu(leaf)), "replace or drop it")
        yield label, batch


def _parts(batches: Sequence[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Cut each batch, so that there are about ``MIN_BATCHES`` parts in all."""
    parts_per_batch = -(-MIN_BATCHES // len(batches))
    for label, batch in batches:
        count = sample_count(batch)
        size = -(-count // parts_per_batch)
        for start in range(0, count, size):
            yield label, cut(batch, start, start + size)


class _Split(NamedTuple):
    """Split of the batches: every n-th batch is held out, and some samples of some batches stay in memory."""

    every: int
    keep_every: int  # every n-th batch of the fitted part stays in memory
    max_kept: int  # batches of each part that stay in memory
    samples: int  # samples of such a batch that stay in memory

    @classmethod
    def of(cls, count: int | None, batch_size: int, max_samples: int, *, can_cut: bool) -> "_Split":
        """Choose the split for ``count`` batches, or None if their number is not known."""
        size = min(batch_size, MIN_CUT) if can_cut else batch_size
        max_kept = max(1, max_samples // max(1, size))
        if count is None:
            return cls(HELD_OUT_EVERY, 1, max_kept, -(-max_samples // max_kept))
        keep_every = -(-count // max_kept)
        every = min(count, max(HELD_OUT_EVERY, keep_every))
        return cls(every, keep_every, max_kept, -(-max_samples // max(1, min(max_kept, count // every))))


def _split(batches: Iterable[tuple[str, object]], split: _Split, *, can_cut: bool) -> Iterator[Sample]:
    """Split batches into a fitted and a held-out part."""
    stays = {True: 0, False: 0}  # number of kept batches, held-out and fitted
    for number, (label, batch) in enumerate(batches):
        # With a single batch, the fitted batch is evaluated, too.
        is_last = number % split.every == split.every - 1
        is_held_out = split.every > 1 and is_last and stays[True] < split.max_kept
        kept = None
        if is_held_out or (number % split.keep_every == 0 and stays[False] < split.max_kept):
            stays[is_held_out] += 1
            kept = cut(batch, 0, split.samples) if can_cut else batch
        yield Sample(label, batch, is_held_out, kept)
