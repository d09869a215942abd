"""Rehearsal: how large, how much memory and how long, found out by doing it with a few batches in another process.

Every decision of ``qo.quantize`` looks at the first eight batches at most, and its memory does not grow with further
ones, which only widen ranges. So a rehearsal with eight batches, whose result is thrown away, writes a file of the same
size but for the numbers in it, and its memory is that of the whole:

    size    = that of the file it wrote
    memory <= 1.4 g + 4 MiB,  g the growth of its resident memory while it quantized
    time    = t + (n - 8) b,  t the time it took, b that of one more batch, n the batches in all

The margin is for what differs between two runs, by up to a fifth: how allocators round, when threads start. Formulas
of sizes alone do worse: what ONNX Runtime takes of a model depends on its version, on threads and on the CPU.
A process of its own has not yet allocated what it could use again, and if memory does not suffice, it alone is killed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from detent.errors import DetentError, SpecError, UnsupportedError

__all__ = ["MARGIN", "SLACK", "Rehearsal", "rehearse"]

MARGIN, SLACK = 1.4, 4 << 20
BATCHES = 8
_STATUS = Path("/proc/self/status")
_CODE = "from detent.evaluate.dry_run import _perform; _perform()"


@dataclass(frozen=True)
class Rehearsal:
    """What was found out.

    Attributes:
        nbytes_before, nbytes_after: of both files.
        growth: bytes of memory that it took; None where the system does not tell.
        seconds: that it took.
        batches: that it saw, of those in all.
        batches_in_all: that there are.
        seconds_per_batch: of calibration.
        layers: what would become of each: name, type, weight, input, why it is left alone, bytes before and after.
        steps: what would be done to keep the accuracy.

    >>> found = Rehearsal(8, 2, 100 << 20, 3.0, 8, 18, 0.5, (), ())
    >>> found.memory_bound == 144 << 20, found.seconds_in_all
    (True, 8.0)
    """

    nbytes_before: int
    nbytes_after: int
    growth: int | None
    seconds: float
    batches: int
    batches_in_all: int
    seconds_per_batch: float
    layers: tuple[Mapping[str, Any], ...]
    steps: tuple[str, ...]

    @property
    def memory_bound(self) -> int | None:
        """Bytes of memory beyond those of a started program that quantizing will not exceed."""
        return None if self.growth is None else int(MARGIN * self.growth) + SLACK

    @property
    def seconds_in_all(self) -> float:
        """About how long quantizing will take."""
        return self.seconds + (self.batches_in_all - self.batches) * self.seconds_per_batch


def rehearse(
    model: str, data: str | None, chosen: Sequence[int], batch_size: int | None, options: Mapping[str, Any]
) -> Rehearsal:
    """Quantize with a few batches in a process of its own.

    Args:
        model: its file.
        data: a file or folder, None for weight-only recipes.
        chosen: the numbers of the batches that would calibrate.
        batch_size: see ``open_batches``.
        options: of ``qo.quantize``, plain values.

    Raises:
        DetentError: whatever quantizing would have raised; UnsupportedError where the process was killed.

    >>> import tempfile
    >>> from onnx import parser
    >>> from detent.onnx_model import save
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(made, f"{folder}/a.onnx")
    ...     rehearse(f"{folder}/a.onnx", None, [], None, {"recipe": "w8a16"}).layers[0]["weight"]
    'int8/axis1/symmetric/onnx'
    """
    few = list(chosen[:BATCHES])
    asked = {"model": model, "data": data, "chosen": few, "batch_size": batch_size, "options": dict(options)}
    with tempfile.TemporaryDirectory(prefix="detent-") as folder:  # here, for the other process may be killed
        code, told, complaint = _converse({**asked, "folder": folder})
    try:
        found = json.loads(told.splitlines()[-1])
    except (ValueError, IndexError):
        found = None
    if code < 0 or found is None:
        why = f"killed by signal {-code}" if code < 0 else complaint.strip()[-500:] or f"exit code {code}"
        raise UnsupportedError(
            f"the rehearsal with {len(few)} batches did not come to its end ({why}): if memory was short, give "
            "--memory-budget or a smaller --batch-size"
        )
    if "error" in found:
        raise SpecError(found["error"])
    return Rehearsal(
        **{**found, "layers": tuple(found["layers"]), "steps": tuple(found["steps"])}, batches_in_all=len(chosen)
    )


def _converse(asked: Mapping[str, Any]) -> tuple[int, str, str]:
    """The other process's exit code, stdout and stderr; it has ended when this does, whatever happens."""
    # Without -P the current folder comes first on its path, and any tempfile.py there would be run.
    command = [sys.executable, "-P", "-c", _CODE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:  # noqa: S603 - ours
        try:
            told, complaint = process.communicate(json.dumps(asked))
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process.returncode, told, complaint


def _perform() -> None:
    """What the other process does: a request on stdin, an answer on stdout."""
    asked = json.loads(sys.stdin.read())
    try:
        answer = _quantize(asked)
    except (DetentError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


class _Later:
    """Batches that are not looked for before the first is asked for, so that memory is measured from the start."""

    def __init__(self, open_part: Callable[[], Any], count: int) -> None:
        self._open, self._count = open_part, count
        self._part: Any = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:  # noqa: ANN401 - an iterator of feeds, whose type is not loaded yet
        if self._part is None:
            self._part = self._open()
        return iter(self._part)


def _quantize(asked: Mapping[str, Any]) -> dict[str, Any]:
    import detent.onnx as qo  # noqa: PLC0415 - the process that asks may not need it
    from detent.evaluate.accuracy import Part  # noqa: PLC0415
    from detent.onnx_model import load  # noqa: PLC0415
    from detent.onnx_model.batches import inputs_of, open_batches  # noqa: PLC0415

    model, chosen = asked["model"], asked["chosen"]
    times: list[float] = []

    def open_part() -> Part:
        return Part(open_batches(asked["data"], inputs_of(load(model)), asked["batch_size"]), chosen)

    data = None if asked["data"] is None else _Later(open_part, len(chosen))
    start, before = time.perf_counter(), _memory("VmRSS")
    made = qo.quantize(
        model,
        Path(asked["folder"], "rehearsed.onnx"),
        data,
        progress=lambda done, total: times.append(time.perf_counter()),  # noqa: ARG005
        **asked["options"],
    )
    seconds, after = time.perf_counter() - start, _memory("VmHWM")
    passes = len(times) / max(1, len(chosen))
    between = sorted(b - a for a, b in pairwise(times))
    return {
        "nbytes_before": made.nbytes_before,
        "nbytes_after": made.nbytes_after,
        "growth": None if before is None or after is None else max(0, after - before),
        "seconds": seconds,
        "batches": len(chosen),
        "seconds_per_batch": between[len(between) // 2] * max(1.0, passes) if between else 0.0,
        "layers": [
            {**asdict(layer), "nbytes_before": line.nbytes_before, "nbytes_after": line.nbytes_after}
            for layer, line in zip(made.layers, made.plan.layers, strict=True)
        ],
        "steps": list(made.steps),
    }


def _memory(name: str) -> int | None:
    """Resident memory in bytes, now ("VmRSS") or at its largest ("VmHWM"), as Linux tells it."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
