"""Goals for quantized ONNX files compared with those of other tools from the same run, and whether a result meets them.

SQNR is that of the first output and the mean over all float outputs; failed files are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import geometric_mean

OURS, FAST = "detent", "detent, avx2"
MINMAX, ENTROPY = "ORT MinMax", "ORT Entropy"
DECIBELS, POINTS = 1.0, 1.0
SIZE = 0.02
SLOWER = 1.05
LONG_SECONDS, FASTER = 10.0, 5.0
FLAT, OF_ENTROPY, OF_MINMAX = 1.05, 0.5, 1.1


@dataclass(frozen=True)
class Verdict:
    """Result of one goal.

    Attributes:
        goal: the goal in words.
        met: whether it is met; None if nothing was measured.
        values: the values that decide.
    """

    goal: str
    met: bool | None
    values: str


def verdicts(result: dict) -> list[Verdict]:
    """Evaluate all goals."""
    rows = Rows(result)
    return [
        _not_below(rows, "SQNR of the first output", "sqnr_db", DECIBELS, "dB"),
        _not_below(rows, "mean SQNR of the outputs", "mean_sqnr_db", DECIBELS, "dB"),
        _not_below(rows, "agreement with float", "agreement", POINTS, "point", factor=100),
        _above(rows),
        _sizes(rows),
        _geometric(rows),
        _each(
            rows, f"run time at most {SLOWER:g} times float's on every model", OURS, lambda row, _: row["ratio"], SLOWER
        ),
        _entropy_time(rows),
        _flat(result.get("memory", [])),
        _each(
            rows,
            f"memory to quantize at most {OF_ENTROPY:g} times {ENTROPY}'s",
            OURS,
            _growth_over(ENTROPY),
            OF_ENTROPY,
        ),
        _each(
            rows, f"memory to quantize at most {OF_MINMAX:g} times {MINMAX}'s", OURS, _growth_over(MINMAX), OF_MINMAX
        ),
        _second_runtime(rows),
    ]


class Rows:
    """Rows of a result whose files run, by model and tool."""

    def __init__(self, result: dict) -> None:
        self.models: dict[str, dict] = result["models"]
        self._found = {
            (row["model"], row["contestant"]): row for row in result["rows"] if "failed" not in row and "ratio" in row
        }

    def get(self, model: str, contestant: str) -> dict | None:
        """The row, or None."""
        return self._found.get((model, contestant))

    def peers(self, model: str) -> list[dict]:
        """Rows of the other tools."""
        return [row for (name, who), row in self._found.items() if name == model and not who.startswith(OURS)]

    def compared(self) -> Iterable[tuple[str, dict, list[dict]]]:
        """Models that detent and at least one other tool can quantize."""
        for model in self.models:
            row, peers = self.get(model, OURS), self.peers(model)
            if row is not None and peers:
                yield model, row, peers


def _not_below(rows: Rows, what: str, field: str, bar: float, unit: str, factor: float = 1) -> Verdict:
    margins = {
        model: factor * (row[field] - max(peer[field] for peer in peers)) for model, row, peers in rows.compared()
    }
    name = f"{what}: at most {bar:g} {unit} below the best other tool on every model"
    if not margins:
        return Verdict(name, None, "")
    below = {model: margin for model, margin in margins.items() if margin < -bar}
    if below:
        return Verdict(name, False, ", ".join(f"{model} {margin:+.1f}" for model, margin in below.items()))
    worst = min(margins, key=margins.__getitem__)
    return Verdict(name, True, f"worst: {worst} with {margins[worst]:+.1f} {unit}")


def _above(rows: Rows) -> Verdict:
    wins = [row["mean_sqnr_db"] > max(peer["mean_sqnr_db"] for peer in peers) for _, row, peers in rows.compared()]
    name = "mean SQNR above every other tool's on most models"
    return Verdict(name, 2 * sum(wins) > len(wins), f"{sum(wins)} of {len(wins)}") if wins else Verdict(name, None, "")


def _sizes(rows: Rows) -> Verdict:
    name = f"size ratio within {SIZE:g} of the smallest file of another tool with no lower SQNR"
    excess = {}
    for model, row, peers in rows.compared():
        rivals = [peer["size_ratio"] for peer in peers if peer["mean_sqnr_db"] >= row["mean_sqnr_db"]]
        if rivals:
            excess[model] = row["size_ratio"] - min(rivals)
    if not excess:
        return (
            Verdict(name, True, "no other tool has as high an SQNR")
            if list(rows.compared())
            else Verdict(name, None, "")
        )
    return Verdict(name, max(excess.values()) <= SIZE, ", ".join(f"{model} {e:+.3f}" for model, e in excess.items()))


def _geometric(rows: Rows) -> Verdict:
    name = f"faster than float in geometric mean over the CNNs with {FAST}"
    ratios = [
        row["ratio"]
        for model, about in rows.models.items()
        if about["kind"] == "cnn" and (row := rows.get(model, FAST))
    ]
    if not ratios:
        return Verdict(name, None, "")
    found = geometric_mean(ratios)
    return Verdict(name, found < 1, f"{found:.2f} of float's time over {len(ratios)} models")


def _each(rows: Rows, name: str, who: str, figure: Callable[[dict, Rows], float | None], bar: float) -> Verdict:
    """Check that a value of every model does not exceed the goal."""
    found = {}
    for model in rows.models:
        row = rows.get(model, who)
        value = None if row is None else figure(row, rows)
        if value is not None:
            found[model] = value
    if not found:
        return Verdict(name, None, "")
    over = {model: value for model, value in found.items() if value > bar}
    if over:
        return Verdict(name, False, ", ".join(f"{model} {value:.2f}" for model, value in over.items()))
    worst = max(found, key=found.__getitem__)
    return Verdict(name, True, f"at most {found[worst]:.2f}, {worst}")


def _growth_over(peer: str) -> Callable[[dict, Rows], float | None]:
    def figure(row: dict, rows: Rows) -> float | None:
        other = rows.get(row["model"], peer)
        return None if other is None or not other["growth"] else row["growth"] / other["growth"]

    return figure


def _entropy_time(rows: Rows) -> Verdict:
    name = f"at least {FASTER:g} times as fast as {ENTROPY} where that takes more than {LONG_SECONDS:g} s"
    found = {}
    for model in rows.models:
        row, other = rows.get(model, OURS), rows.get(model, ENTROPY)
        if row and other and other["seconds"] > LONG_SECONDS:
            found[model] = other["seconds"] / row["seconds"]
    if not found:
        return Verdict(name, None, "")
    slow = {model: value for model, value in found.items() if value < FASTER}
    return Verdict(name, not slow, ", ".join(f"{model} {value:.1f}" for model, value in (slow or found).items()))


def _flat(memory: list[dict]) -> Verdict:
    name = f"memory grows by at most {FLAT - 1:.0%} from 16 to 256 batches"
    grown = sorted((row["batches"], row["growth"]) for row in memory if "failed" not in row)
    if len(grown) < 2:
        return Verdict(name, None, "")
    (few, least), (many, most) = grown[0], grown[-1]
    figures = f"{least / 1e6:.0f} MB with {few} batches, {most / 1e6:.0f} MB with {many} ({memory[0]['model']})"
    return Verdict(name, most <= FLAT * least, figures)


def _second_runtime(rows: Rows) -> Verdict:
    name = "OpenVINO runs the file of every model whose float file it runs"
    able = [
        model for model, about in rows.models.items() if "failed" not in about["openvino"] and rows.get(model, OURS)
    ]
    if not able:
        return Verdict(name, None, "")
    unable = [model for model in able if "failed" in rows.get(model, OURS)["openvino"]]
    others = [model for model in rows.models if "failed" in rows.models[model]["openvino"]]
    values = f"{len(able) - len(unable)} of {len(able)}"
    values += f"; not {', '.join(unable)}" if unable else ""
    values += f"; it fails on the float model of {', '.join(others)}" if others else ""
    return Verdict(name, not unable, values)
