"""The table of alternatives to float fallback in the docs shows the committed results."""

import importlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_page_is_rendered_from_the_committed_results(load):
    render = load("render_rescues")
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(render.committed())) == page, "run benchmarks/render_rescues.py"


def test_a_model_without_float_layers_has_no_results(load):
    lines = load("render_rescues").rendered({"a": {"layers": []}})["rescues-table"].splitlines()
    assert lines[-1] == "| a | 0 |  |  |  |  |  |"


def test_split_channels_add_up_to_the_old_channels(load):
    rescues = load("rescues")
    peaks = np.array([8.0, 1.0, 3.0, 1.0, 5.0, 0.0])
    for growth in (0.0, 0.125, 0.5, 1.0):
        channels, factors = rescues.split_channels(peaks, growth)
        assert len(channels) == len(peaks) + int(growth * len(peaks))
        assert np.bincount(channels, factors).tolist() == [1.0] * len(peaks)
    assert (peaks[channels] * factors).max() <= peaks.max() / 3
