"""Cost of QAT: step time, and bytes kept for backward, relative to the float model.

::

    python benchmarks/qat_cost.py [--quick] [--only MODEL ...] [--channels-last] [--clock cpu] [--output FILE] [--merge]

A step is forward, cross entropy, backward and SGD with momentum. Tools take turns in one process, and a float step runs
before and after each step of a tool. A ratio is the time of a step divided by the mean time of these two float steps;
the table shows the median ratio. Everything runs with one thread, and then with all threads. With ``--clock cpu``, a
step's time is the CPU time of all threads, for machines that run other work, too. With ``--channels-last``, models and
images are in this memory format, the float model included; models without images are left out. With ``--merge``, rows
of the same models, layout and threads in the output file are replaced, and the others stay, so that a run can be done
in parts.

Saved bytes are the storages that autograd keeps for backward, each counted once, without parameters. Memory that a
layer keeps in other ways is not counted. So a second value is measured with the C library's allocator: the bytes
allocated after the forward pass minus those before it, plus what a tool keeps between steps beyond the float model.

``make bench-tools`` installs the other tools; missing tools are listed and skipped.
"""

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch
from case import SkippedError
from qat_models import MODELS, Workload
from qat_tools import INTEGER_PREPARERS, PREPARERS, silence_warnings, versions
from run import environment
from timing import await_quiet
from torch import Tensor, nn

import detent as dt

FLOAT = "float"
WARM_UP_STEPS = 4
SLEEP_SECONDS = 2e-3  # enough for idle threads to stop spinning
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
TOOLS = PREPARERS | INTEGER_PREPARERS
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
PICTURES = 4  # axes


@dataclass
class TrainingRun:
    """A model in training.

    Attributes:
        name: name of the tool.
        model: prepared model, in training mode.
        batch: inputs and targets.
        clock: returns seconds.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    clock: Callable[[], float] = time.perf_counter
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def loss(self) -> Tensor:
        """Run the forward pass; return the loss."""
        inputs, targets = self.batch
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def timed(self) -> float:
        """Return the seconds of one step, after a short sleep in which the threads of the previous tool become idle."""
        time.sleep(SLEEP_SECONDS)
        start = self.clock()
        self.step()
        return self.clock() - start


@dataclass(frozen=True)
class Settings:
    """Settings of timed runs.

    Attributes:
        clock: key of ``CLOCKS``.
        channels_last: whether models and images are in this memory format.
    """

    clock: str = "wall"
    channels_last: bool = False

    def facts(self) -> dict[str, str]:
        """Return what rows say about the settings."""
        return {"layout": "channels last" if self.channels_last else "NCHW", "clock": self.clock}


def settle_norms(model: nn.Module, inputs: Tensor) -> None:
    """Give batch norms the statistics of the batch, as in a trained model; calibration in evaluation mode uses them."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def start_run(name: str, workload: Workload, settings: Settings) -> TrainingRun:
    """Prepare a model and run the warm-up steps."""
    model, (inputs, targets) = workload.model(), workload.batch()
    if settings.channels_last and inputs.ndim == PICTURES:
        model, inputs = (
            model.to(memory_format=torch.channels_last),
            inputs.contiguous(memory_format=torch.channels_last),
        )
    settle_norms(model, inputs)
    if name != FLOAT:
        model = TOOLS[name](model, inputs, 8).train()
    one = TrainingRun(name, model, (inputs, targets), CLOCKS[settings.clock])
    for _ in range(WARM_UP_STEPS):
        one.step()
    return one


def time_in_turns(runs: list[TrainingRun], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Time the runs in turns; return, for each step, its seconds and the mean seconds of the float steps next to it."""
    plain, *others = runs
    for one in runs:
        one.step()
    pairs: dict[str, list[tuple[float, float]]] = {one.name: [] for one in others}
    before = plain.timed()
    for turn in range(rounds):
        shift = turn % len(others)
        for one in others[shift:] + others[:shift]:
            taken, after = one.timed(), plain.timed()
            pairs[one.name].append((taken, (before + after) / 2))
            before = after
    return pairs


def use_threads(count: int) -> None:
    """Set the number of threads of torch and detent."""
    torch.set_num_threads(count)
    dt.set_num_threads(count)


def time_rows(model: str, threads: int, pairs: dict[str, list[tuple[float, float]]]) -> list[dict]:
    """Time all runs, and return one row per tool."""
    rows = []
    for name, taken in pairs.items():
        ratios = [theirs / plain for theirs, plain in taken]
        lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
        theirs, plain = zip(*taken, strict=True)
        row = {"model": model, "threads": threads, "tool": name, "rounds": len(taken)}
        row |= {"float_ms": round(median(plain) * 1e3, 2), "step_ms": round(median(theirs) * 1e3, 2)}
        row |= {"float_best_ms": round(min(plain) * 1e3, 2), "step_best_ms": round(min(theirs) * 1e3, 2)}
        row |= {"ratio": round(middle, 3), "lower_quartile": round(lower, 3), "upper_quartile": round(upper, 3)}
        rows.append(row)
    return rows


def saved_bytes(one: TrainingRun) -> int:
    """Return the bytes of the storages that autograd keeps for backward, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in one.model.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # keep the storage alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = one.loss()
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    del loss
    return sum(size for address, size in sizes.items() if address not in parameters)


class _Mallinfo(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple(zip(names, (ctypes.c_size_t,) * len(names), strict=True))


def allocator() -> Callable[[], int] | None:
    """Return a function that gets the allocated bytes of this process; None if the C library does not report them."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo

    def alive() -> int:
        gc.collect()
        info = mallinfo()
        return info.uordblks + info.hblkhd

    return alive


def memory(name: str, workload: Workload, settings: Settings) -> dict[str, int | None]:
    """Return the bytes kept for backward, allocated by the forward pass, and kept between steps."""
    alive = allocator()
    if alive is None:
        return {"saved": saved_bytes(start_run(name, workload, settings)), "held": None, "between": None}
    nothing = alive()
    one = start_run(name, workload, settings)
    one.optimizer.zero_grad()
    between = alive()
    loss = one.loss()
    held = alive() - between
    loss.backward()
    return {"saved": saved_bytes(one), "held": held, "between": between - nothing}


def memory_rows(model: str, workload: Workload, names: list[str], settings: Settings) -> list[dict]:
    """Return one row per tool. All tools must have run before, so permanent allocations of libraries do not count."""
    sizes = {name: memory(name, workload, settings) for name in names}
    plain = sizes[FLOAT]
    rows = []
    for name, taken in sizes.items():
        row = {"model": model, "tool": name, "saved_bytes": taken["saved"]}
        row |= {"held_bytes": taken["held"], "between_steps_bytes": taken["between"]}
        row["saved_ratio"] = round(taken["saved"] / plain["saved"], 3)
        if taken["held"] is not None:
            extra = max(0, taken["between"] - plain["between"])
            row["held_ratio"] = round((taken["held"] + extra) / plain["held"], 3)
        rows.append(row)
    return rows


def start_runs(workload: Workload, settings: Settings, tools: Iterable[str]) -> tuple[list[TrainingRun], list[str]]:
    """Start the float model and the tools; return the runs, and the reasons why tools were skipped."""
    runs, skipped = [start_run(FLOAT, workload, settings)], []
    for name in tools:
        try:
            runs.append(start_run(name, workload, settings))
        except SkippedError as reason:
            skipped.append(str(reason))
    return runs, skipped


def table(result: dict) -> str:
    """Format the results for the terminal."""
    lines = [f"{'model':<14}{'threads':>8}  {'tool':<26}{'float ms':>9}{'step ms':>9}{'x float':>9}  quartiles"]
    for row in result["rows"]:
        times = f"{row['float_ms']:>9.1f}{row['step_ms']:>9.1f}{row['ratio']:>9.2f}"
        spread = f"{row['lower_quartile']:.2f}..{row['upper_quartile']:.2f}"
        lines.append(f"{row['model']:<14}{row['threads']:>8}  {row['tool']:<26}{times}  {spread}")
    lines += ["", f"{'model':<14}{'tool':<26}{'saved MB':>9}{'x float':>9}{'alive MB':>9}{'x float':>9}"]
    for row in result["memory"]:
        held = "" if row["held_bytes"] is None else f"{row['held_bytes'] / 1e6:>9.1f}{row['held_ratio']:>9.2f}"
        saved = f"{row['saved_bytes'] / 1e6:>9.1f}{row['saved_ratio']:>9.2f}"
        lines.append(f"{row['model']:<14}{row['tool']:<26}{saved}{held}")
    return "\n".join(lines + [f"skipped: {reason}" for reason in result["skipped"]])


def merged(old: dict, new: dict) -> dict:
    """Return the new results, and those rows of the old ones that were not measured again."""
    result = dict(new)
    for part, keys in (("rows", ("model", "layout", "threads")), ("memory", ("model", "layout"))):
        measured = {tuple(row[key] for key in keys) for row in new[part]}
        kept = [row for row in old[part] if tuple(row[key] for key in keys) not in measured]
        order = list(MODELS)
        rows = sorted(
            kept + new[part], key=lambda row: (order.index(row["model"]), row["layout"], row.get("threads", 0))
        )
        result[part] = rows
    result["titles"] = {key: MODELS[key].title for key in MODELS if key in {**old["titles"], **new["titles"]}}
    result["skipped"] = sorted({*old["skipped"], *new["skipped"]})
    result["quick"] = old["quick"] or new["quick"]
    return result


def parsed_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Cost of quantization-aware training.")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", nargs="+", choices=MODELS, help="models to measure; default: all")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, help="tools to measure; default: all")
    parser.add_argument("--merge", action="store_true", help="keep the output file's rows of other models and layouts")
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads; default: 1 and all")
    parser.add_argument("--rounds", type=int, help="timed steps per tool")
    parser.add_argument("--patience", type=float, default=0.0, help="total seconds to wait for an idle machine")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="wall time, or CPU time of all threads")
    parser.add_argument("--channels-last", action="store_true", help="memory format of models and images")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and write the results."""
    arguments = parsed_arguments()
    silence_warnings()
    patience, counts = arguments.patience, arguments.threads or sorted({1, dt.get_num_threads()})
    result = environment() | {"quick": arguments.quick, "titles": {}, "skipped": [], "rows": [], "memory": []}
    settings = Settings(arguments.clock, arguments.channels_last)
    result["versions"] |= versions()
    for key, workload in MODELS.items():
        if arguments.only and key not in arguments.only:
            continue
        if settings.channels_last and workload.batch()[0].ndim != PICTURES:
            continue
        result["titles"][key] = workload.title
        use_threads(1)
        runs, skipped = start_runs(workload, settings, arguments.tools or TOOLS)
        names = [one.name for one in runs]
        result["skipped"] += [f"{key}: {reason}" for reason in skipped]
        for threads in counts:
            print(f"{key}, {threads} threads: {', '.join(names)}", file=sys.stderr, flush=True)
            patience = await_quiet(patience)
            use_threads(threads)
            pairs = time_in_turns(runs, arguments.rounds or (3 if arguments.quick else 25))
            result["rows"] += [row | settings.facts() for row in time_rows(key, threads, pairs)]
        use_threads(1)
        del runs
        result["memory"] += [row | settings.facts() for row in memory_rows(key, workload, names, settings)]
    print(table(result))
    if arguments.output:
        if arguments.merge and arguments.output.exists():
            result = merged(json.loads(arguments.output.read_text(encoding="utf-8")), result)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
