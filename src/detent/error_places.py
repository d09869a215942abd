"""Places of errors: the layer or tensor that a step of a loop works on, for the messages about its errors.

``at`` names it around the step. The innermost name is stored in the exception itself, so it also reaches the driver of
a job whose workers fail. Nothing happens unless there is an error.
"""

from typing import Literal

__all__ = ["at", "place_of"]

_KEY = "detent_place"  # in the exception's attributes, which are pickled with the exception


class at:  # noqa: N801 - used as a context manager function
    """Context that stores the name of a layer or tensor in exceptions, unless an inner context has stored one.

    >>> try:
    ...     with at("layer", "conv1"):
    ...         {}["t1"]
    ... except KeyError as error:
    ...     print(place_of(error))
    layer 'conv1'
    """

    __slots__ = ("_kind", "_name")

    def __init__(self, kind: Literal["layer", "tensor"], name: str) -> None:
        self._kind, self._name = kind, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            vars(error).setdefault(_KEY, f"{self._kind} {self._name!r}")


def place_of(error: BaseException) -> str:
    """Return the layer or tensor that is stored in an exception, or an empty text."""
    return str(vars(error).get(_KEY, ""))
