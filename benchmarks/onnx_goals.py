"""Goals for detent's quantized ONNX files, and whether a result meets them. Other tools are measured in the same run.

SQNR is measured for the first output, and as the mean over all float outputs. Failed files are left out. The default
target is compared with tools that use the reduced range of weights, and the target for VNNI with those that use the
full range.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean

OURS, FAST, VNNI = "detent", "detent, avx2", "detent, vnni"
REDUCED = ", reduced"  # end of the names of tools that use the reduced range of weights
MINMAX, ENTROPY = "ORT MinMax", "ORT Entropy"
MAX_DB_BELOW, MAX_POINTS_BELOW = 0.3, 0.5  # how far detent may be below the best other tool
MAX_SIZE_EXCESS = 0.02  # difference of two size ratios
MAX_TIME_RATIO = 1.05  # run time relative to float
SLOW_SECONDS, MIN_SPEEDUP = 10.0, 5.0  # speedup over ENTROPY, if ENTROPY takes over SLOW_SECONDS
MAX_GROWTH_RATIO = 1.05  # memory with many batches / memory with few batches
MAX_ENTROPY_RATIO, MAX_MINMAX_RATIO = 0.5, 1.1  # memory relative to these tools


@dataclass(frozen=True)
class GoalResult:
    """Result of one goal.

    Attributes:
        goal: the goal in words.
        met: whether the goal is met; None if nothing was measured.
        values: the measured values, as text.
    """

    goal: str
    met: bool | None
    values: str


def evaluate_goals(result: dict) -> list[GoalResult]:
    """Evaluate all goals."""
    rows = Rows(result)
    return [
        *(
            goal
            for ours in (OURS, VNNI)
            for goal in (
                _not_below(rows, ours, "SQNR of the first output", "sqnr_db", MAX_DB_BELOW, "dB"),
                _not_below(rows, ours, "mean SQNR of the outputs", "mean_sqnr_db", MAX_DB_BELOW, "dB"),
                _not_below(rows, ours, "agreement with float", "agreement", MAX_POINTS_BELOW, "point", factor=100),
                _above(rows, ours),
                _sizes(rows, ours),
            )
        ),
        _geometric(rows),
        _run_time(rows),
        _entropy_time(rows),
        _flat(result.get("memory", [])),
        _memory(rows, ENTROPY, MAX_ENTROPY_RATIO),
        _memory(rows, MINMAX, MAX_MINMAX_RATIO),
        _second_runtime(rows),
    ]


class Rows:
    """Rows of a result, by model and tool, without those whose file failed."""

    def __init__(self, result: dict) -> None:
        self.models: dict[str, dict] = result["models"]
        self._rows = {
            (row["model"], row["tool"]): row for row in result["rows"] if "failed" not in row and "ratio" in row
        }

    def get(self, model: str, tool: str) -> dict | None:
        """Return the row of a model and a tool; None if there is no such row."""
        return self._rows.get((model, tool))

    def others(self, model: str, ours: str) -> list[dict]:
        """Return the rows of the tools that a file of detent is compared with, for a model."""
        return [row for (name, tool), row in self._rows.items() if name == model and is_compared(tool, ours)]

    def compared(self, ours: str) -> Iterable[tuple[str, dict, list[dict]]]:
        """Yield the models that detent and at least one other tool can quantize, with their rows."""
        for model in self.models:
            row, others = self.get(model, ours), self.others(model, ours)
            if row is not None and others:
                yield model, row, others


def is_compared(tool: str, ours: str) -> bool:
    """Whether detent's file is compared with the file of another tool, because both use the same range of weights."""
    return not tool.startswith(OURS) and tool.endswith(REDUCED) == (ours != VNNI)


def _not_below(rows: Rows, ours: str, what: str, field: str, limit: float, unit: str, factor: float = 1) -> GoalResult:
    margins = {
        model: factor * (row[field] - max(other[field] for other in others))
        for model, row, others in rows.compared(ours)
    }
    name = f"{ours}, {what}: at most {limit:g} {unit} below the best other tool on every model"
    if not margins:
        return GoalResult(name, None, "")
    below = {model: margin for model, margin in margins.items() if margin < -limit}
    if below:
        return GoalResult(name, False, ", ".join(f"{model} {margin:+.1f}" for model, margin in below.items()))
    worst = min(margins, key=margins.__getitem__)
    return GoalResult(name, True, f"worst: {worst} with {margins[worst]:+.1f} {unit}")


def _above(rows: Rows, ours: str) -> GoalResult:
    compared = rows.compared(ours)
    wins = [row["mean_sqnr_db"] > max(other["mean_sqnr_db"] for other in others) for _, row, others in compared]
    name = f"{ours}, mean SQNR of the outputs: higher than with every other tool on most models"
    return (
        GoalResult(name, 2 * sum(wins) > len(wins), f"{sum(wins)} of {len(wins)}")
        if wins
        else GoalResult(name, None, "")
    )


def _sizes(rows: Rows, ours: str) -> GoalResult:
    name = (
        f"{ours}, size ratio: at most {MAX_SIZE_EXCESS:g} above that of the smallest file among tools whose SQNR is at "
        "least detent's"
    )
    excess = {}
    for model, row, others in rows.compared(ours):
        sizes = [other["size_ratio"] for other in others if other["mean_sqnr_db"] >= row["mean_sqnr_db"]]
        if sizes:
            excess[model] = row["size_ratio"] - min(sizes)
    if not excess:
        return (
            GoalResult(name, True, "no other tool has as high an SQNR")
            if list(rows.compared(ours))
            else GoalResult(name, None, "")
        )
    return GoalResult(
        name, max(excess.values()) <= MAX_SIZE_EXCESS, ", ".join(f"{model} {e:+.3f}" for model, e in excess.items())
    )


def _geometric(rows: Rows) -> GoalResult:
    name = f"run time of {FAST} on the CNNs: below float in the geometric mean"
    ratios = [
        row["ratio"]
        for model, facts in rows.models.items()
        if facts["kind"] == "cnn" and (row := rows.get(model, FAST))
    ]
    if not ratios:
        return GoalResult(name, None, "")
    ratio = geometric_mean(ratios)
    return GoalResult(name, ratio < 1, f"{ratio:.2f} of the float time, mean of {len(ratios)} models")


def _run_time(rows: Rows) -> GoalResult:
    ratios = {model: row["ratio"] for model in rows.models if (row := rows.get(model, OURS))}
    return _at_most(f"run time: at most {MAX_TIME_RATIO:g} times that of float on every model", ratios, MAX_TIME_RATIO)


def _memory(rows: Rows, tool: str, limit: float) -> GoalResult:
    """Compare the memory growth with that of another tool, on every model that both can quantize."""
    ratios = {}
    for model in rows.models:
        row, other = rows.get(model, OURS), rows.get(model, tool)
        if row and other and other["growth"]:
            ratios[model] = row["growth"] / other["growth"]
    return _at_most(f"memory while quantizing: at most {limit:g} times that of {tool}", ratios, limit)


def _at_most(goal: str, values: dict[str, float], limit: float) -> GoalResult:
    """Check that the value of every model does not exceed the limit."""
    if not values:
        return GoalResult(goal, None, "")
    over = {model: value for model, value in values.items() if value > limit}
    if over:
        return GoalResult(goal, False, ", ".join(f"{model} {value:.2f}" for model, value in over.items()))
    worst = max(values, key=values.__getitem__)
    return GoalResult(goal, True, f"largest: {values[worst]:.2f} ({worst})")


def _entropy_time(rows: Rows) -> GoalResult:
    name = (
        f"quantizing: at least {MIN_SPEEDUP:g} times as fast as {ENTROPY}, if {ENTROPY} takes over {SLOW_SECONDS:g} s"
    )
    speedups = {}
    for model in rows.models:
        row, other = rows.get(model, OURS), rows.get(model, ENTROPY)
        if row and other and other["seconds"] > SLOW_SECONDS:
            speedups[model] = other["seconds"] / row["seconds"]
    if not speedups:
        return GoalResult(name, None, "")
    slow = {model: value for model, value in speedups.items() if value < MIN_SPEEDUP}
    return GoalResult(name, not slow, ", ".join(f"{model} {value:.1f}" for model, value in (slow or speedups).items()))


def _flat(memory: list[dict]) -> GoalResult:
    name = f"memory while quantizing: grows by at most {MAX_GROWTH_RATIO - 1:.0%} from 16 to 256 batches"
    grown = sorted((row["batches"], row["growth"]) for row in memory if "failed" not in row)
    if len(grown) < 2:
        return GoalResult(name, None, "")
    (few, lowest), (many, highest) = grown[0], grown[-1]
    figures = f"{lowest / 1e6:.0f} MB with {few} batches, {highest / 1e6:.0f} MB with {many} ({memory[0]['model']})"
    return GoalResult(name, highest <= MAX_GROWTH_RATIO * lowest, figures)


def _second_runtime(rows: Rows) -> GoalResult:
    name = "OpenVINO: runs the quantized file of every model whose float file it runs"
    able = [
        model for model, facts in rows.models.items() if "failed" not in facts["openvino"] and rows.get(model, OURS)
    ]
    if not able:
        return GoalResult(name, None, "")
    unable = [model for model in able if "failed" in rows.get(model, OURS)["openvino"]]
    others = [model for model in rows.models if "failed" in rows.models[model]["openvino"]]
    values = f"{len(able) - len(unable)} of {len(able)}"
    values += f"; not {', '.join(unable)}" if unable else ""
    values += f"; it fails on the float model of {', '.join(others)}" if others else ""
    return GoalResult(name, not unable, values)
