"""Axes for bar plots; matplotlib is optional, so these tests replace it by a stand-in."""

import sys
from types import ModuleType

import pytest

from detent.errors import UnsupportedError
from detent.plots import bar_axes
from tests.tools.recording_axes import RecordingAxes


def test_given_axes_get_a_labeled_row_for_each_name():
    ax = RecordingAxes()
    assert bar_axes(ax, ["first", "x" * 90]) is ax
    assert ax.calls_of("set_yticks") == [((range(2), ["first", "x" * 20 + "..." + "x" * 37]), {})]
    assert ax.calls_of("set_ylim") == [((1.5, -0.5), {})]


def test_new_axes_grow_with_the_number_of_names(monkeypatch):
    ax, heights = RecordingAxes(), []
    pyplot = ModuleType("pyplot")
    pyplot.subplots = lambda figsize, layout: (heights.append(figsize[1]), ax)
    matplotlib = ModuleType("matplotlib")
    matplotlib.pyplot = pyplot
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    assert bar_axes(None, ["a"]) is ax
    bar_axes(None, ["a"] * 41)
    assert heights == [1.25, 11.25]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"install matplotlib: pip install 'detent\[report\]'"):
        bar_axes(None, ["a"])
