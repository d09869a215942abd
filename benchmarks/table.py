"""Table for the terminal: all tools, and the goals for detent next to its ratios."""

from goals import CALL_MICROSECONDS, copy_goal, torch_goal


def goal_cell(ratio: float, goal: float | None, at_least: bool = False) -> str:
    """Format a goal and whether the ratio meets the goal; empty if there is no goal."""
    if goal is None:
        return ""
    met = ratio >= goal if at_least else ratio <= goal
    return f"{'>=' if at_least else '<='} {goal:g} {'met' if met else 'NOT MET'}"


def table(result: dict) -> str:
    """Format the results of a run."""
    lines = [
        f"{result['machine']['cpu']}, {result['machine']['level']}, {result['machine']['threads']} threads, "
        f"load {result['machine']['load_average']}",
        "",
        f"{'operation':<24}{'scales per':<11}{'dtype':<10}{'size':>9}  {'tool':<28}{'median us':>11}"
        f"{'quartiles':>22}{'GB/s':>8}  {'x copy':>7} {'(best)':>8}  {'goal':<15}{'torch/this':>11}  goal",
    ]
    lines += [_line(row) for row in result["rows"]]
    lines += ["", f"{'call, 1,000 elements':<24}{'median us':>11}{'best':>9}  goal"]
    for row in result["calls"]:
        goal = goal_cell(row["median_us"], CALL_MICROSECONDS[row["call"]])
        lines.append(f"{row['call']:<24}{row['median_us']:>11.2f}{row['best_us']:>9.2f}  {goal}")
    return "\n".join(lines)


def _line(row: dict) -> str:
    which = (row["operation"], row["size"], row["dtype"])
    ours = row["tool"] == "detent"
    quartiles = f"{row['lower_quartile_us']:.1f}..{row['upper_quartile_us']:.1f}"
    torch = row["torch_eager_times_this"]
    line = (
        f"{row['operation']:<24}{row['granularity']:<11}{row['dtype']:<10}{row['size']:>9}  {row['tool']:<28}"
        f"{row['median_us']:>11.1f}{quartiles:>22}{row['gb_per_s']:>8.1f}  {row['times_copy']:>7.2f} "
        f"{row['times_copy_best']:>8.2f}  {goal_cell(row['times_copy'], copy_goal(*which)) if ours else '':<15}"
    )
    if torch is None:
        return line.rstrip()
    line += f"{torch:>11.1f}  {goal_cell(torch, torch_goal(*which), at_least=True) if ours else ''}"
    return line.rstrip()
