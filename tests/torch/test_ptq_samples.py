"""Batches for qt.quantize: how they are read, called, cut, split and joined."""

import pytest
import torch
from torch import nn

import detent as dt
from detent.torch.ptq_samples import BatchRunner, join, read_samples


class TwoInputs(nn.Module):
    def forward(self, x, scale=None):
        return x if scale is None else x * scale


class MeanOfBatch(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def samples_of(data, model=None):
    runner = BatchRunner(nn.Identity() if model is None else model)
    return list(read_samples(data, runner))


def batch(rows=1, value=0.0):
    return torch.full((rows, 2), float(value))


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (nn.Identity(), batch(), batch()),
        (nn.Identity(), (batch(), torch.tensor([7])), batch()),
        (nn.Identity(), [batch(), torch.tensor([7])], batch()),
        (nn.Identity(), {"input": batch(), "label": torch.tensor([7])}, batch()),
        (TwoInputs(), (batch(1, 2), batch(1, 3)), batch(1, 6)),
        (TwoInputs(), {"x": batch(1, 2), "scale": batch(1, 3)}, batch(1, 6)),
        (TwoInputs(), (batch(1, 2), batch(1, 3), torch.tensor([7])), batch(1, 6)),
    ],
)
def test_arguments_that_forward_does_not_accept_are_dropped(model, given, expected):
    (output,) = BatchRunner(model).run(given, "batch 0")
    assert output.tolist() == expected.tolist()


def test_dropped_arguments_are_described():
    runner = BatchRunner(nn.Identity())
    runner.run((batch(), torch.tensor([7])), "batch 0")
    assert runner.dropped == "used the first 1 element of each batch of 2: forward accepts no more arguments"
    runner.run({"input": batch(), "label": torch.tensor([7])}, "batch 0")
    assert "'label'" in runner.dropped


def test_a_function_calls_the_model():
    runner = BatchRunner(nn.Identity(), lambda model, each: model(each["pixels"][0]))
    (output,) = runner.run({"pixels": [batch(1, 5)]}, "batch 0")
    assert output.tolist() == [[5.0, 5.0]]
    assert not runner.dropped


def test_errors_of_the_model_name_the_batch():
    with pytest.raises(dt.UnsupportedError, match=r"the model fails on batch 3 of data: .*pass forward="):
        BatchRunner(nn.Linear(5, 1)).run(batch(), "batch 3")


@pytest.mark.parametrize("data", ["batches.npz", torch.ones(2, 2), {"x": torch.ones(1)}, 3])
def test_data_that_is_not_an_iterable_of_batches_is_rejected(data):
    with pytest.raises(dt.errors.SpecError, match="expected an iterable of batches"):
        samples_of(data)


def test_empty_data_is_rejected():
    with pytest.raises(dt.errors.SpecError, match="got no batches as data"):
        samples_of(iter([]))


def test_a_batch_of_the_wrong_type_is_rejected():
    with pytest.raises(dt.errors.DtypeError, match="batch 0"):
        samples_of(["text"])


def test_nan_is_found_in_its_batch():
    bad = batch(2)
    bad[1, 0] = float("nan")
    with pytest.raises(dt.errors.NaNError, match=r"batch 9 of data contains 1 NaN in 4 elements, first at \(1, 0\)"):
        samples_of([batch(2)] * 9 + [(bad, torch.tensor([1, 2]))])


@pytest.mark.parametrize(
    ("count", "is_iterator", "expected"),
    [(8, False, 2), (8, True, 2), (20, False, 5), (20, True, 5), (200, False, 28), (200, True, 32)],
)
def test_every_fourth_batch_or_fewer_are_held_out(count, is_iterator, expected):
    data = [batch(1, i) for i in range(count)]
    samples = samples_of(iter(data) if is_iterator else data)
    assert [int(each.batch[0, 0]) for each in samples] == list(range(count))
    held_out = [each for each in samples if each.is_held_out]
    assert len(held_out) == expected
    assert all(each.kept is not None for each in held_out)
    assert sum(each.kept is not None and not each.is_held_out for each in samples) <= 32


def test_held_out_batches_are_spread_over_data_of_known_length():
    samples = samples_of([batch(1, i) for i in range(640)])
    numbers = [i for i, each in enumerate(samples) if each.is_held_out]
    assert len(numbers) == 32
    assert numbers[-1] > 600


@pytest.mark.parametrize("rows", [32, 100])
def test_a_single_batch_is_cut_into_parts(rows):
    samples = samples_of([torch.arange(2.0 * rows).reshape(rows, 2)])
    assert len(samples) == 8
    assert sum(each.is_held_out for each in samples) == 2
    joined = torch.cat([each.batch for each in samples])
    assert joined.tolist() == torch.arange(2.0 * rows).reshape(rows, 2).tolist()


def test_a_batch_is_not_cut_if_its_samples_depend_on_each_other():
    samples = samples_of([torch.arange(8.0).reshape(4, 2)], MeanOfBatch())
    assert len(samples) == 1
    assert not samples[0].is_held_out
    assert samples[0].kept.shape == (4, 2)


def test_a_few_samples_of_large_batches_stay_in_memory():
    samples = samples_of([torch.randn(64, 2) for _ in range(40)])
    assert all(len(each.kept) == 4 for each in samples if each.kept is not None)
    assert sum(len(each.kept) for each in samples if each.is_held_out) == 32


def test_fewer_samples_of_a_large_model_are_kept():

    model = nn.Linear(2, 3)
    runner = BatchRunner(model)
    assert runner.multiplications(batch(5), "batch 0") == 5 * 2 * 3
    runner.multiplications = lambda *_: 5e9
    samples = list(read_samples([batch(1, i) for i in range(64)], runner))
    assert sum(each.is_held_out for each in samples) == 4


def test_samples_are_joined_if_the_model_computes_each_by_itself():
    data = [(batch(1, i), torch.tensor([i])) for i in range(8)]
    runner = BatchRunner(nn.Identity())
    samples = [each for each in read_samples(data, runner) if each.kept is not None]
    (joined,) = join(samples, runner)
    assert len(joined.kept[0]) == len(joined.kept[1]) == len(samples)


def test_samples_that_depend_on_each_other_or_differ_in_shape_are_not_joined():
    samples = [each for each in samples_of([batch(2, i) for i in range(8)], MeanOfBatch()) if each.kept is not None]
    assert join(samples, BatchRunner(MeanOfBatch())) == samples
    ragged = samples_of([torch.ones(1, 2 + i % 3) for i in range(8)])
    kept = [each for each in ragged if each.kept is not None]
    assert join(kept, BatchRunner(nn.Identity())) == kept
