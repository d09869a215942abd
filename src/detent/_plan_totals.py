"""PlanTotals: what the plans of all frontends have in common, which are a recipe and a line per layer."""

from typing import Generic, Protocol, TypeVar

from detent.recipe import Recipe

__all__ = ["PlanTotals"]


class PlanLine(Protocol):
    """What totals need of a line."""

    @property
    def is_quantized(self) -> bool: ...

    @property
    def nbytes_before(self) -> int: ...

    @property
    def nbytes_after(self) -> int: ...


Line = TypeVar("Line", bound=PlanLine)


class PlanTotals(Generic[Line]):
    """The sums over the lines of a plan."""

    recipe: Recipe
    layers: tuple[Line, ...]

    @property
    def quantized(self) -> tuple[Line, ...]:
        """The layers that something happens to."""
        return tuple(layer for layer in self.layers if layer.is_quantized)

    @property
    def nbytes_before(self) -> int:
        """The bytes of all weights in the table."""
        return sum(layer.nbytes_before for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        """The same when quantized, with their scales."""
        return sum(layer.nbytes_after for layer in self.layers)

    def _summary(self, target: str = "") -> str:
        """The last line of the table."""
        recipe = self.recipe
        name = f"recipe {recipe.name!r}" if recipe.name else f"a recipe of {len(recipe.rules)} rules"
        return (
            f"{len(self.quantized)} of {len(self.layers)} layers quantized by {name}{target}; weights "
            f"{self.nbytes_before:,} -> {self.nbytes_after:,} bytes"
        )
