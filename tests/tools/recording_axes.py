"""RecordingAxes: stands in for matplotlib's Axes, which tests do without."""

from collections.abc import Callable
from typing import Any

__all__ = ["RecordingAxes"]


class RecordingAxes:
    """Records calls: ``axes.calls`` has (method, positional arguments, keyword arguments) of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((method, args, kwargs))

    def calls_of(self, method: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Positional and keyword arguments of all calls of a method."""
        return [(args, kwargs) for name, args, kwargs in self.calls if name == method]
