"""Ranges are clipped only if that lowers the noise at the outputs."""

from unittest.mock import Mock

import numpy as np
import pytest
from onnx_graphs import Maker, images, weights

import detent as dt
import detent.onnx as qo
from detent.onnx.calibration import choose_params
from detent.onnx.clipped_ranges import unclip
from detent.onnx.float_fallback import NoiseByLayer
from detent.onnx.pipeline import output_sqnr


def peaks(pooled):
    """A layer with rare large outputs, which a global maximum or a global mean passes on."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, 1, weight=weights(16, 8, 1, 1), name="first")])
    t = m.add("Relu", [m.conv(t, 16, 16, 1, name="second")])
    t = m.add(f"Global{pooled}Pool", [t])
    return m.model([("x", [1, 8, 16, 16])], [m.conv(t, 16, 16, 1, name="last")])


def rare(count):
    feeds = images(count, side=16, batch=1, scale=0.05)
    for i, feed in enumerate(feeds):
        feed["x"][0, :, i % 16, 3] = np.random.default_rng(i).normal(size=8) * 4
    return feeds


@pytest.mark.parametrize("pooled", ["Max", "Average"])
def test_the_default_is_close_to_the_better_range(pooled):
    model, feeds = peaks(pooled), rare(12)
    sqnr = {}
    for observer in (None, "minmax", "mse"):
        decisions = qo.decide(model, feeds[:8], observer=observer, keep_float="none", progress=False)
        file = qo.rewrite(model, decisions)
        assert dt.verify(model, file, feeds[:1]).ok
        sqnr[observer] = min(output_sqnr(model, file, feeds[8:]).values())
    assert sqnr[None] > max(sqnr["minmax"], sqnr["mse"]) - 1


def test_a_maximum_keeps_the_min_max_range():
    model, feeds = peaks("Max"), rare(8)
    decisions = qo.decide(model, feeds, keep_float="none", progress=False)
    assert not any(each.clipped for tensor, each in decisions.ranges.items() if tensor != "x")


def test_noise_that_is_not_a_number_allows_no_clipping():
    plan = qo.plan(qo.prepare(peaks("Average")))
    seen = qo.calibrate(plan, rare(4))
    placements = plan.placements(seen.ranges)
    noise = Mock(spec=NoiseByLayer)
    noise.noise_with.return_value = np.nan
    full, clipped = (choose_params(placements, seen, groups) for groups in ((), None))
    changed = {group for group in full if full[group] != clipped[group]}
    assert changed
    assert set(unclip(noise, placements, seen, set(full))) == changed
