"""Goals for detent's files of unseen models, and the reasons why a file does not meet them.

Files are compared with those of other tools from the same run. The default target is compared with tools that use the
reduced range of weights, and the target for VNNI with tools that use the full range.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

OURS = ("detent", "detent, vnni")
OTHERS: Mapping[str, tuple[str, ...]] = {
    "detent": ("ORT MinMax, reduced", "ORT Percentile, reduced", "NNCF, reduced"),
    "detent, vnni": ("ORT MinMax", "ORT Percentile", "NNCF"),
}
FAST = "detent, fast"
MAX_DB_BELOW, MAX_POINTS_BELOW = 0.3, 0.5  # how far detent may be below the best other tool
MAX_TIME_RATIO = 0.95  # time / float time, if that of ONNX Runtime's file is below CLEARLY_FASTER
CLEARLY_FASTER = 0.9
MAX_TIME_EXCESS = 1.05  # time / time of ONNX Runtime's file
MAX_SIZE_EXCESS = 1.03  # size / size of the smallest file
# CPU time of a process that imports the tool and quantizes / the same of ONNX Runtime's MinMax.
MAX_COST, MAX_FAST_COST = 4.0, 2.0
MIN_COST_SECONDS = 1.0  # shorter CPU times are not compared
SAME_TIME = 1.05  # time / float time; detent warns only about slower files
SLOWER = "slower"  # a word of the warning about a file that is slower than float


@dataclass(frozen=True)
class Comparison:
    """Row of the table: one of detent's files, the best values of other tools, and the goals that are not met.

    Attributes:
        row: results of detent's file.
        best: best values of the other tools: sqnr_db, agreement, size_ratio, time (ONNX Runtime), cpu_seconds; and
            has_imports, whether cpu_seconds includes all imports.
        failures: a short reason for each goal that is not met.
    """

    row: dict
    best: dict
    failures: tuple[str, ...]


def total_cpu_seconds(row: dict) -> float:
    """Return the CPU time of a process that imports the tool and quantizes.

    In older results, imports count only if the tool makes them while it runs, as ONNX Runtime does.
    """
    return row["cpu_seconds"] + row.get("import_cpu_seconds", 0.0)


def compare(rows: Mapping[str, dict]) -> list[Comparison]:
    """Compare detent's files of one model with those of other tools; ``rows`` has the results by tool."""
    return [_compare(rows[ours], rows, OTHERS[ours]) for ours in OURS if ours in rows]


def _compare(row: dict, rows: Mapping[str, dict], others: Iterable[str]) -> Comparison:
    working = {name: rows[name] for name in others if name in rows and "cpu_1" in rows[name]}
    runtime = [each for name, each in working.items() if name.startswith("ORT")]
    best = {
        "sqnr_db": max((each["sqnr_db"] for each in working.values() if each["sqnr_db"] is not None), default=None),
        "agreement": max((each["agreement"] for each in working.values() if "agreement" in each), default=None),
        "size_ratio": min((each["size_ratio"] for each in working.values()), default=None),
        "time": min((each["cpu_1"]["ratio"] for each in runtime), default=None),
        "cpu_seconds": next((total_cpu_seconds(each) for name, each in working.items() if "MinMax" in name), None),
        "has_imports": any("import_cpu_seconds" in each for name, each in working.items() if "MinMax" in name),
    }
    if "cpu_1" not in row:
        return Comparison(row, best, (f"failed: {row.get('failed', 'not evaluated')}",))
    failures = [*_quality(row, best), *_speed(row, best), *_costs(row, best)]
    if FAST in rows and row["tool"] == OURS[0]:
        failures += _cost(rows[FAST], best, MAX_FAST_COST, "to quantize with effort fast")
    if not row.get("verify_ok"):
        failures.append(f"verify: {row.get('verify_error', 'not ok')}")
    return Comparison(row, best, tuple(failures))


def _quality(row: dict, best: dict) -> list[str]:
    failures = []
    if row["sqnr_db"] is not None and best["sqnr_db"] is not None:
        margin = row["sqnr_db"] - best["sqnr_db"]
        failures += [f"SQNR {margin:+.1f} dB"] if margin < -MAX_DB_BELOW else []
    if row.get("agreement") is not None and best["agreement"] is not None:
        points = 100 * (row["agreement"] - best["agreement"])
        failures += [f"agreement {points:+.1f} points"] if points < -MAX_POINTS_BELOW else []
    return failures


def _speed(row: dict, best: dict) -> list[str]:
    ratio, other, failures = row["cpu_1"]["ratio"], best["time"], []
    if other is not None and other < CLEARLY_FASTER and ratio > MAX_TIME_RATIO:
        failures.append(f"time {ratio:.2f} of float, ONNX Runtime's {other:.2f}")
    elif other is not None and ratio > MAX_TIME_EXCESS * other:
        failures.append(f"time {ratio / other:.2f}x of ONNX Runtime's file")
    if ratio > SAME_TIME and not any(SLOWER in warning for warning in row.get("warnings", ())):
        failures.append("slower than float without a warning")
    return failures


def _costs(row: dict, best: dict) -> list[str]:
    failures = _cost(row, best, MAX_COST, "to quantize")
    if best["size_ratio"] is not None and row["size_ratio"] > MAX_SIZE_EXCESS * best["size_ratio"]:
        failures.append(f"size {row['size_ratio'] / best['size_ratio']:.2f}x of the smallest")
    return failures


def _cost(row: dict, best: dict, limit: float, what: str) -> list[str]:
    is_comparable = best["has_imports"] == ("import_cpu_seconds" in row)
    if best["cpu_seconds"] is None or not is_comparable or row.get("cpu_seconds", 0) < MIN_COST_SECONDS:
        return []
    cost = total_cpu_seconds(row) / best["cpu_seconds"]
    return [f"{cost:.1f}x the CPU time {what}"] if cost > limit else []


Results = Mapping[str, Mapping[str, dict]]  # rows by model and tool


def table(results: Results) -> str:
    """Format all comparisons for the terminal."""
    head = f"{'model':<20}{'tool':<14}{'SQNR':>7}{'best':>7}{'agree':>8}{'best':>8}{'time':>7}{'2 thr.':>7}{'ORT':>6}"
    lines = [f"{head}{'size':>7}{'best':>7}{'CPU s':>7}{'ORT':>6}  goals"]
    for model, rows in results.items():
        lines += [_line(model, each) for each in compare(rows)]
    return "\n".join(lines)


def _line(model: str, each: Comparison) -> str:
    row, best = each.row, each.best
    goals = "; ".join(each.failures) or "ok"
    start = f"{model:<20}{row['tool']:<14}"
    if "cpu_1" not in row:
        return f"{start}{goals}"
    return (
        f"{start}{_number(row['sqnr_db'], 7, 1)}{_number(best['sqnr_db'], 7, 1)}{_number(row.get('agreement'), 8, 4)}"
        f"{_number(best['agreement'], 8, 4)}{row['cpu_1']['ratio']:>7.2f}{row['cpu_2']['ratio']:>7.2f}"
        f"{_number(best['time'], 6, 2)}{row['size_ratio']:>7.3f}{_number(best['size_ratio'], 7, 3)}"
        f"{total_cpu_seconds(row):>7.1f}{_number(best['cpu_seconds'], 6, 1)}  {goals}"
    )


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def summary(results: Results) -> str:
    """Count goals that are met, and models on which detent has the highest SQNR."""
    lines = []
    comparisons = [each for rows in results.values() for each in compare(rows)]
    for tool in OURS:
        chosen = [each for each in comparisons if each.row["tool"] == tool]
        compared = [each for each in chosen if each.row.get("sqnr_db") is not None and each.best["sqnr_db"] is not None]
        wins = sum(each.row["sqnr_db"] > each.best["sqnr_db"] for each in compared)
        passed = sum(not each.failures for each in chosen)
        lines.append(
            f"{tool}: {passed} of {len(chosen)} models meet all goals; highest SQNR on {wins} of {len(compared)}"
        )
    return "\n".join(lines)
