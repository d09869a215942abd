"""The table for the terminal: every row of detent with its bars beside the ratios."""

from budget import CALL_MICROSECONDS, copy_bar, torch_bar


def verdict(ratio: float, bar: float | None, at_least: bool = False) -> str:
    """A bar and whether the ratio clears it; nothing where there is none."""
    if bar is None:
        return ""
    passed = ratio >= bar if at_least else ratio <= bar
    return f"{'>=' if at_least else '<='} {bar:g} {'PASS' if passed else 'MISS'}"


def table(result: dict) -> str:
    """The table of a whole run."""
    lines = [
        f"{result['machine']['cpu']}, {result['machine']['level']}, {result['machine']['threads']} threads, "
        f"load {result['machine']['load_average']}",
        "",
        f"{'operation':<24}{'sets':<10}{'dtype':<10}{'size':>9}  {'contestant':<22}{'median us':>11}"
        f"{'quartiles':>22}{'GB/s':>8}  {'x copy':>7} {'(best)':>8}  {'bar':<13}{'torch/this':>11}  bar",
    ]
    lines += [_line(row) for row in result["rows"]]
    lines += ["", f"{'call, 1,000 elements':<24}{'median us':>11}{'best':>9}  bar"]
    for row in result["calls"]:
        bar = verdict(row["median_us"], CALL_MICROSECONDS[row["call"]])
        lines.append(f"{row['call']:<24}{row['median_us']:>11.2f}{row['best_us']:>9.2f}  {bar}")
    return "\n".join(lines)


def _line(row: dict) -> str:
    which = (row["operation"], row["size"], row["dtype"])
    ours = row["contestant"] == "detent"
    quartiles = f"{row['lower_quartile_us']:.1f}..{row['upper_quartile_us']:.1f}"
    torch = row["torch_eager_times_this"]
    line = (
        f"{row['operation']:<24}{row['granularity']:<10}{row['dtype']:<10}{row['size']:>9}  {row['contestant']:<22}"
        f"{row['median_us']:>11.1f}{quartiles:>22}{row['gb_per_s']:>8.1f}  {row['times_copy']:>7.2f} "
        f"{row['times_copy_best']:>8.2f}  {verdict(row['times_copy'], copy_bar(*which)) if ours else '':<13}"
    )
    if torch is None:
        return line.rstrip()
    line += f"{torch:>11.1f}  {verdict(torch, torch_bar(*which), at_least=True) if ours else ''}"
    return line.rstrip()
