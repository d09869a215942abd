"""QuantizeReport: what was done to a model, and what it costs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from detent.onnx.integers import INTEGER
from detent.onnx.planning import GraphPlan
from detent.tables import table_lines

__all__ = ["LayerReport", "QuantizeReport"]


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer.

    Attributes:
        name, type: of its node.
        weight, input: its specs, "" for what stays float.
        reason: why it was left alone.
        kernel: the operator that computes it in ONNX Runtime on this machine.
        note: what else there is to know.

    >>> LayerReport("fc", "MatMul", "int8", "uint8", kernel="MatMulIntegerToFloat").in_integers
    True
    """

    name: str
    type: str
    weight: str = ""
    input: str = ""
    reason: str = ""
    kernel: str = ""
    note: str = ""

    @property
    def in_integers(self) -> bool:
        """Whether it is computed in integers."""
        return self.kernel in INTEGER


@dataclass(frozen=True)
class QuantizeReport:
    """What ``qo.quantize`` did; ``str`` is a table.

    Attributes:
        output: the file.
        plan: as it was carried out.
        nbytes_before, nbytes_after: of both files.
        layers: what became of each.
        output_sqnr_db: of the first output, on the first batches; None without data.
        outputs_sqnr_db: of all outputs.
        seconds: that it took.
        steps: what was tried to keep the accuracy, and what came of it.
        hints: what a user should know.

    >>> from detent.qdq import get_target
    >>> from detent.recipe import Recipe
    >>> plan = GraphPlan(Recipe([]), get_target("openvino"), (), None)
    >>> made = QuantizeReport(Path("a.onnx"), plan, 8, 2, (), None, {}, 1.0)
    >>> print(made)
    a.onnx: 8 -> 2 bytes (0.250), 0 of 0 layers quantized, 0 in integers, 1.0 s
    >>> json.loads(made.to_json())["nbytes_after"]
    2
    """

    output: Path
    plan: GraphPlan
    nbytes_before: int
    nbytes_after: int
    layers: tuple[LayerReport, ...]
    output_sqnr_db: float | None
    outputs_sqnr_db: Mapping[str, float]
    seconds: float
    steps: tuple[str, ...] = ()
    hints: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """The same as JSON."""
        plain: dict[str, Any] = {
            "output": str(self.output),
            "recipe": json.loads(self.plan.recipe.to_json()),
            "target": self.plan.target.name,
            "layers": [{**asdict(layer), "in_integers": layer.in_integers} for layer in self.layers],
            "outputs_sqnr_db": dict(self.outputs_sqnr_db),
            "steps": list(self.steps),
            "hints": list(self.hints),
        }
        names = ("nbytes_before", "nbytes_after", "output_sqnr_db", "seconds")
        return json.dumps(plain | {name: getattr(self, name) for name in names}, indent=2)

    def __str__(self) -> str:
        rows = [
            (
                each.name,
                each.type,
                each.weight or "-",
                each.input or "-",
                each.kernel or "float",
                each.reason or each.note,
            )
            for each in self.layers
        ]
        head = ("layer", "type", "weight", "input", "in ONNX Runtime", "")
        lines = table_lines([head, *rows]) if rows else []
        quantized = sum(not layer.reason for layer in self.layers)
        integers = sum(layer.in_integers for layer in self.layers)
        sqnr = "" if self.output_sqnr_db is None else f", {self.output_sqnr_db:.1f} dB"
        lines += self.steps
        lines.append(
            f"{self.output}: {self.nbytes_before:,} -> {self.nbytes_after:,} bytes "
            f"({self.nbytes_after / max(1, self.nbytes_before):.3f}), {quantized} of {len(self.layers)} layers "
            f"quantized, {integers} in integers{sqnr}, {self.seconds:.1f} s"
        )
        return "\n".join([*lines, *self.hints])
