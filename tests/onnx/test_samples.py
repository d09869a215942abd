"""Samples for accuracy passes do not depend on the order of the data or on the batch size."""

from dataclasses import replace

import numpy as np
import pytest
from onnx_graphs import Maker, conv_chain, images

import detent as dt
import detent.onnx as qo
from detent.onnx import samples
from detent.onnx.samples import SampleChooser, Samples, choose_samples
from detent.onnx_model.batches import open_batches
from detent.onnx_model.model_inputs import inputs_of


def chosen(model, feeds):
    return choose_samples(model, open_batches(feeds, inputs_of(model)))


def rebatched(feeds, size):
    """The same samples in batches of another size."""
    arrays = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    length = len(next(iter(arrays.values())))
    return [{name: array[i : i + size] for name, array in arrays.items()} for i in range(0, length, size)]


def equal(first, second):
    return len(first) == len(second) and all(
        np.array_equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a
    )


def test_order_and_batch_size_do_not_matter():
    model, feeds = conv_chain(), images(40, batch=1)
    expected = chosen(model, feeds)
    assert len(expected) == samples.MAX_SAMPLES
    rng = np.random.default_rng(0)
    for size in (1, 5, 8, 40):
        shuffled = [feeds[i] for i in rng.permutation(len(feeds))]
        assert equal(chosen(model, rebatched(shuffled, size)), expected)


def test_decisions_do_not_depend_on_the_order_of_the_data():
    model, feeds = conv_chain(), images(12, batch=1)
    files = [
        qo.rewrite(model, replace(qo.decide(model, data, progress=False), data=""))  # data is a hash in their order
        for data in (feeds, feeds[::-1], rebatched(feeds, 4), rebatched(feeds[::-1], 12))
    ]
    assert len({file.graph.SerializeToString(deterministic=True) for file in files}) == 1


def test_duplicates_are_kept_once():
    model, feeds = conv_chain(), images(3, batch=1)
    assert len(chosen(model, feeds + feeds[:2])) == 3


def test_samples_stay_within_the_limit_of_bytes(monkeypatch):
    model, feeds = conv_chain(), images(10, batch=1)
    size = feeds[0]["x"].nbytes
    monkeypatch.setattr(samples, "MAX_SAMPLE_BYTES", 3 * size)
    kept = chosen(model, feeds)
    assert len(kept) == 3
    monkeypatch.setattr(samples, "MAX_SAMPLE_BYTES", size // 2)
    assert equal(chosen(model, feeds), kept[:1])


def test_batches_stay_whole_if_samples_depend_on_each_other():
    m = Maker()
    mean = m.add("ReduceMean", ["x"], axes=[0], keepdims=1)
    model = m.model([("x", ["n", 4])], [m.matmul(m.add("Sub", ["x", mean]), 4, 4)])
    feeds = [{"x": np.random.default_rng(i).normal(size=(6, 4)).astype(np.float32)} for i in range(20)]
    kept = chosen(model, feeds)
    assert len(kept) == samples.MAX_BATCHES
    assert {len(feed["x"]) for feed in kept} == {6}


def test_batches_stay_whole_if_the_model_fixes_their_size():
    model, feeds = conv_chain(), images(4, batch=2)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    assert {len(feed["x"]) for feed in chosen(model, feeds)} == {2}


def test_an_iterator_gives_its_first_samples_and_is_read_once():
    model, feeds = conv_chain(), images(40, batch=1)
    batches = open_batches(iter(feeds), inputs_of(model))
    kept = choose_samples(model, batches)
    assert equal(kept, chosen(model, feeds[: samples.MAX_SAMPLES]))
    assert len(list(batches)) == 40


@pytest.mark.parametrize(
    ("count", "fitted", "evaluated"), [(1, 1, 1), (2, 1, 1), (5, 3, 2), (20, 10, 10), (32, 16, 16)]
)
def test_fitted_and_evaluated_samples_do_not_overlap(count, fitted, evaluated):
    feeds = images(count, batch=1)
    split = Samples.of(feeds, max_samples=32, num_compared=16)
    assert (len(split.fitted), len(split.evaluated)) == (fitted, evaluated)
    assert count == 1 or equal([*split.fitted, *split.evaluated], feeds)
    assert equal(split.compared, feeds[-16:])


def test_samples_of_one_batch_are_chosen_while_it_is_read():
    model, feeds = conv_chain(), images(6, batch=1)
    chooser = SampleChooser(model, inputs_of(model))
    for feed in rebatched(feeds, 3):
        chooser.add(feed)
    assert equal(chooser.samples, chosen(model, feeds))
    assert equal(qo.calibrate(qo.plan(qo.prepare(model)), feeds).samples, chosen(model, feeds))


@pytest.mark.parametrize("effort", ["fast", "balanced", "best"])
def test_every_effort_gives_a_verified_file(effort):
    model, feeds = conv_chain(), images(6)
    decisions = qo.decide(model, feeds, effort=effort, progress=False)
    assert dt.verify(model, qo.rewrite(model, decisions), feeds[:1]).ok


def test_an_unknown_effort_is_rejected():
    with pytest.raises(dt.SpecError, match="got effort='low', expected one of fast, balanced, best"):
        qo.decide(conv_chain(), images(2), effort="low")


def test_batches_stay_whole_if_the_model_fails_on_one_sample():
    m = Maker()
    rows = m.add("Reshape", ["x", m.constant(np.array([4, 6]))])
    model = m.model([("x", ["n", 6])], [m.matmul(rows, 6, 4)])
    feeds = [{"x": np.random.default_rng(i).normal(size=(4, 6)).astype(np.float32)} for i in range(3)]
    assert {len(feed["x"]) for feed in chosen(model, feeds)} == {4}
    assert qo.decide(model, feeds, progress=False).layers


def test_batches_are_cut_although_an_output_is_not_finite():
    m = Maker()
    model = m.model([("x", ["n", 4])], [m.add("Log", [m.matmul("x", 4, 4)])])
    feeds = [{"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}]
    assert {len(feed["x"]) for feed in chosen(model, feeds)} == {1}


def test_order_does_not_matter_for_samples_of_different_sizes(monkeypatch):
    m = Maker()
    model = m.model([("x", ["n", "length", 4])], [m.matmul("x", 4, 4)])
    lengths = [1, 9, 2, 7, 3, 8, 1, 6, 5, 4]
    feeds = [{"x": np.full((1, length, 4), i, np.float32)} for i, length in enumerate(lengths)]
    monkeypatch.setattr(samples, "MAX_SAMPLE_BYTES", 16 * 15)
    expected = chosen(model, feeds)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert equal(chosen(model, [feeds[i] for i in rng.permutation(len(feeds))]), expected)


def test_whole_batches_are_few_also_after_single_samples():
    model, feeds = conv_chain(), images(20, batch=1)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2  # batches are not cut
    chooser = SampleChooser(model, inputs_of(model))
    for feed in (*feeds, *images(1, batch=2)):
        chooser.add(feed)
    assert len(chooser.samples) == samples.MAX_BATCHES


def test_whole_batches_count_with_all_their_samples(monkeypatch):
    model, feeds, counts = conv_chain(), images(8, batch=2), []
    split = Samples.of
    monkeypatch.setattr(Samples, "of", lambda *arguments: counts.append(arguments[-1]) or split(*arguments))
    for fixed in (False, True):
        if fixed:
            model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
        qo.decide(model, feeds, progress=False)
    second = len(counts) // 2  # the first call of the second job; the time of each effort is estimated, too
    assert counts[second] == counts[0] // 2
