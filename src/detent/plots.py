"""Plots: Axes for horizontal bars, one row per layer or quantizer.

Matplotlib is optional. It is imported only if a plot needs new Axes; if the caller passes Axes, those are used.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from detent.errors import UnsupportedError, install_hint
from detent.tables import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bar_axes"]

WIDTH_INCHES = 8.0
ROW_INCHES = 0.25
MARGIN_INCHES = 1.0  # title and axis labels


def bar_axes(ax: "Axes | None", names: Sequence[str]) -> "Axes":
    """Return ``ax``, or new Axes if ``ax`` is None, with one labeled row per name, the first row on top.

    Raises:
        UnsupportedError: Axes are needed, and matplotlib is not installed.
    """
    if ax is None:
        try:
            from matplotlib import pyplot  # noqa: PLC0415 - optional
        except ImportError as error:
            hint = f"pass ax, or install matplotlib: {install_hint('report')}"
            raise UnsupportedError(f"plot() needs Axes: {hint}") from error
        size = (WIDTH_INCHES, MARGIN_INCHES + ROW_INCHES * len(names))
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    ax.set_yticks(range(len(names)), [short_name(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    return ax
