"""What quantization-aware training costs: the time of a step and the bytes kept for backward, over the float model's.

::

    python benchmarks/qat_cost.py [--quick] [--only MODEL] [--output FILE]

A step is forward, cross entropy, backward and SGD with momentum. Contestants take turns in one process, and a float
step stands before and after each of theirs: a ratio is their time over the mean of these two, and the table has the
median of the ratios. Everything runs once with one thread and once with two (or as many as there are).

Bytes saved are those of the storages that autograd packs for backward, each counted once, parameters left out. What a
layer keeps by other means escapes that count, so the C library is asked too: the bytes alive after a forward pass less
those before it, plus what a contestant keeps between steps beyond the float model.

Peers come from ``make peers``; who is missing is named and skipped.
"""

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch
from case import SkippedError
from qat_models import MODELS, Workload
from qat_peers import PREPARERS, quieten, versions
from run import surroundings
from timing import await_quiet
from torch import Tensor, nn

import detent as dt

FLOAT = "float"
WARM_UP = 4
REST = 2e-3
RATE, MOMENTUM = 1e-3, 0.9


@dataclass
class Contestant:
    """A model that trains.

    Attributes:
        name: who.
        model: prepared, in training mode.
        batch: inputs and targets.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)

    def loss(self) -> Tensor:
        """The forward pass."""
        inputs, targets = self.batch
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def timed(self) -> float:
        """The seconds of a step, after a moment in which the threads of whoever ran before go to sleep."""
        time.sleep(REST)
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def enter(name: str, workload: Workload) -> Contestant:
    """A contestant, warmed up."""
    model, batch = workload.model(), workload.batch()
    if name != FLOAT:
        model = PREPARERS[name](model, batch[0], 8).train()
    one = Contestant(name, model, batch)
    for _ in range(WARM_UP):
        one.step()
    return one


def race(contestants: list[Contestant], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Pairs of seconds, of the contestant and of the float steps beside it."""
    plain, *others = contestants
    for one in contestants:
        one.step()
    found: dict[str, list[tuple[float, float]]] = {one.name: [] for one in others}
    before = plain.timed()
    for turn in range(rounds):
        shift = turn % len(others)
        for one in others[shift:] + others[:shift]:
            taken, after = one.timed(), plain.timed()
            found[one.name].append((taken, (before + after) / 2))
            before = after
    return found


def use_threads(count: int) -> None:
    """As many for torch as for detent."""
    torch.set_num_threads(count)
    dt.set_num_threads(count)


def time_rows(model: str, threads: int, pairs: dict[str, list[tuple[float, float]]]) -> list[dict]:
    """One row per contestant."""
    rows = []
    for name, taken in pairs.items():
        ratios = [theirs / plain for theirs, plain in taken]
        lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
        theirs, plain = zip(*taken, strict=True)
        row = {"model": model, "threads": threads, "contestant": name, "rounds": len(taken)}
        row |= {"float_ms": round(median(plain) * 1e3, 2), "step_ms": round(median(theirs) * 1e3, 2)}
        row |= {"float_best_ms": round(min(plain) * 1e3, 2), "step_best_ms": round(min(theirs) * 1e3, 2)}
        row |= {"ratio": round(middle, 3), "lower_quartile": round(lower, 3), "upper_quartile": round(upper, 3)}
        rows.append(row)
    return rows


def saved_bytes(one: Contestant) -> int:
    """The bytes of the storages that autograd keeps for backward, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in one.model.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # alive until counted, so that no address is used twice
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
    """What tells the bytes that are allocated in this process; None where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo

    def alive() -> int:
        gc.collect()
        info = ask()
        return info.uordblks + info.hblkhd

    return alive


def memory(name: str, workload: Workload) -> dict[str, int | None]:
    """The bytes saved for backward, alive after forward, and kept between steps."""
    alive = allocator()
    if alive is None:
        return {"saved": saved_bytes(enter(name, workload)), "held": None, "between": None}
    nothing = alive()
    one = enter(name, workload)
    one.optimizer.zero_grad()
    between = alive()
    loss = one.loss()
    held = alive() - between
    loss.backward()
    return {"saved": saved_bytes(one), "held": held, "between": between - nothing}


def memory_rows(model: str, workload: Workload, names: list[str]) -> list[dict]:
    """One row per contestant; all of them have run before, so that libraries already have what they keep for good."""
    found = {name: memory(name, workload) for name in names}
    plain = found[FLOAT]
    rows = []
    for name, taken in found.items():
        row = {"model": model, "contestant": name, "saved_bytes": taken["saved"]}
        row |= {"held_bytes": taken["held"], "between_steps_bytes": taken["between"]}
        row["saved_ratio"] = round(taken["saved"] / plain["saved"], 3)
        if taken["held"] is not None:
            extra = max(0, taken["between"] - plain["between"])
            row["held_ratio"] = round((taken["held"] + extra) / plain["held"], 3)
        rows.append(row)
    return rows


def entrants(workload: Workload) -> tuple[list[Contestant], list[str]]:
    """Who takes part, the float model first; and who does not and why."""
    found, skipped = [enter(FLOAT, workload)], []
    for name in PREPARERS:
        try:
            found.append(enter(name, workload))
        except SkippedError as why:
            skipped.append(str(why))
    return found, skipped


def table(result: dict) -> str:
    """What was found, for a terminal."""
    lines = [f"{'model':<14}{'threads':>8}  {'contestant':<26}{'float ms':>9}{'step ms':>9}{'x float':>9}  quartiles"]
    for row in result["rows"]:
        times = f"{row['float_ms']:>9.1f}{row['step_ms']:>9.1f}{row['ratio']:>9.2f}"
        spread = f"{row['lower_quartile']:.2f}..{row['upper_quartile']:.2f}"
        lines.append(f"{row['model']:<14}{row['threads']:>8}  {row['contestant']:<26}{times}  {spread}")
    lines += ["", f"{'model':<14}{'contestant':<26}{'saved MB':>9}{'x float':>9}{'alive MB':>9}{'x float':>9}"]
    for row in result["memory"]:
        held = "" if row["held_bytes"] is None else f"{row['held_bytes'] / 1e6:>9.1f}{row['held_ratio']:>9.2f}"
        saved = f"{row['saved_bytes'] / 1e6:>9.1f}{row['saved_ratio']:>9.2f}"
        lines.append(f"{row['model']:<14}{row['contestant']:<26}{saved}{held}")
    return "\n".join(lines + [f"skipped: {why}" for why in result["skipped"]])


def main() -> None:
    """Measure everything and write the file."""
    parser = argparse.ArgumentParser(description="The cost of quantization-aware training.")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", default="", choices=["", *MODELS], help="one model")
    parser.add_argument("--threads", type=int, nargs="+", help="how many threads; one and all there are, if not said")
    parser.add_argument("--rounds", type=int, help="how often everybody takes a turn")
    parser.add_argument("--patience", type=float, default=0.0, help="how long to wait, in all, for a quiet machine")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    quieten()
    patience, counts = given.patience, given.threads or sorted({1, dt.get_num_threads()})
    result = surroundings() | {"quick": given.quick, "titles": {}, "skipped": [], "rows": [], "memory": []}
    result["versions"] |= versions()
    for key, workload in MODELS.items():
        if given.only not in {"", key}:
            continue
        result["titles"][key] = workload.title
        use_threads(1)
        contestants, skipped = entrants(workload)
        names = [one.name for one in contestants]
        result["skipped"] += [f"{key}: {why}" for why in skipped]
        for threads in counts:
            print(f"{key}, {threads} threads: {', '.join(names)}", file=sys.stderr, flush=True)
            patience = await_quiet(patience)
            use_threads(threads)
            pairs = race(contestants, given.rounds or (3 if given.quick else 25))
            result["rows"] += time_rows(key, threads, pairs)
        use_threads(1)
        del contestants
        result["memory"] += memory_rows(key, workload, names)
    print(table(result))
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
