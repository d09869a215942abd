"""Dry run: estimates of the quantized file's size, and of the memory and time that quantization takes.

A dry run quantizes with the first 32 batches in another process, and discards the result. ``qo.quantize`` uses all
batches for ranges, but at most 32 samples for any other decision, and memory does not grow with the number of batches.
So the file of the dry run has the final size, and the dry run needs as much memory as the full run:

    size    = size of the dry run's file
    memory <= 1.4 g + 4 MiB,  g: growth of the dry run's resident memory
    time    = t + (n - 32) b,  t: wall time of the dry run, b: time per batch, n: number of batches

The factor 1.4 covers differences of up to a fifth between two runs, caused by allocators and the start of threads. A
formula based on tensor sizes would be less accurate: the memory of ONNX Runtime depends on its version, on threads and
on the CPU. Another process is used for two reasons. The caller's process may already have free memory, which
quantization would reuse, so the measured growth would be too small. And if memory runs out, only the other process is
killed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detent.errors import DetentError, SpecError, UnsupportedError
from detent.onnx.quality_warnings import QuantizeWarning

if TYPE_CHECKING:
    from detent.onnx_model import DataFiles

__all__ = ["MARGIN", "SLACK_BYTES", "DryRun", "dry_run"]

MARGIN, SLACK_BYTES = 1.4, 4 << 20  # factor and constant in the formula for memory, see the module docstring
MAX_BATCHES = 32  # qo.quantize uses further samples only for ranges
OF_ACCURACY = ("low-sqnr", "low-agreement")  # codes of warnings that need an evaluation
MAX_ERROR_CHARS = 500  # a message quotes at most this much of the other process's stderr
_STATUS = Path("/proc/self/status")
_CODE = "from detent.evaluate.dry_run_estimate import _worker_main; _worker_main()"


@dataclass(frozen=True)
class DryRun:
    """Estimates of size, memory and time, from quantizing with the first batches.

    Attributes:
        nbytes_before: size of the float model in bytes.
        nbytes_after: size of the quantized model in bytes.
        memory_growth: growth of the dry run's resident memory in bytes; None if the system does not report it.
        seconds: wall time of the dry run.
        batches: number of calibration batches that the dry run used.
        total_batches: number of calibration batches of the full run.
        seconds_per_batch: estimated seconds for each batch that the dry run did not use.
        layers: one dict per layer, with the fields of ``qo.LayerReport``, nbytes_before and nbytes_after.
        steps: what the accuracy passes changed.
        warnings: warnings of ``qo.quantize``, except those about accuracy.

    >>> run = DryRun(8, 2, 100 << 20, 3.0, 8, 18, 0.5, (), ())
    >>> run.memory_bound == 144 << 20, run.total_seconds
    (True, 8.0)
    """

    nbytes_before: int
    nbytes_after: int
    memory_growth: int | None
    seconds: float
    batches: int
    total_batches: int
    seconds_per_batch: float
    layers: tuple[Mapping[str, Any], ...]
    steps: tuple[str, ...]
    warnings: tuple[QuantizeWarning, ...] = ()

    @property
    def memory_bound(self) -> int | None:
        """Upper bound on the memory that quantization adds to this process, in bytes, or None if unknown."""
        return None if self.memory_growth is None else int(MARGIN * self.memory_growth) + SLACK_BYTES

    @property
    def total_seconds(self) -> float:
        """Estimated wall time of quantization with all batches."""
        return self.seconds + (self.total_batches - self.batches) * self.seconds_per_batch


def dry_run(
    model: str | PathLike[str],
    data: "DataFiles | str | PathLike[str] | None" = None,
    *,
    batch_size: int | None = None,
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> DryRun:
    """Estimate size, memory and time: quantize with a few batches in another process, and discard the result.

    Args:
        model: path of the float model.
        data: a file or directory, also as a ``detent.onnx_model.DataFiles``; None for weight-only recipes.
        batch_size: samples per batch of files; see ``split_batches``.
        numbers: indices of the calibration batches, such as ``Split.calibration.numbers``; None for all batches.
        options: further arguments of ``qo.quantize``, such as ``recipe``; the values must be JSON-serializable.

    Raises:
        SpecError: quantization would fail; the message says why.
        UnsupportedError: the other process was killed, for example because memory ran out.

    >>> import tempfile
    >>> from onnx import parser
    >>> from detent.onnx_model import save
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = save(model, f"{directory}/a.onnx")
    ...     dry_run(f"{directory}/a.onnx", recipe="w8a16").layers[0]["weight"]
    'int8/axis1/symmetric/onnx'
    """
    request = {
        "model": fspath(model),
        "data": None if data is None else _encoded(data, batch_size),
        "numbers": None if numbers is None else list(numbers[:MAX_BATCHES]),
        "options": options,
    }
    # This process creates the directory: the other process may be killed before it can clean up.
    with tempfile.TemporaryDirectory(prefix="detent-") as directory:
        code, stdout, stderr = _run_worker({**request, "directory": directory})
    try:
        answer = json.loads(stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if code < 0 or answer is None:
        cause = f"killed by signal {-code}" if code < 0 else stderr.strip()[-MAX_ERROR_CHARS:] or f"exit code {code}"
        raise UnsupportedError(
            f"dry run failed ({cause}): if it ran out of memory, set memory_budget (--memory-budget) or a smaller "
            "batch_size (--batch-size)"
        )
    if "error" in answer:
        raise SpecError(answer["error"])
    total = answer.pop("total_batches") if numbers is None else len(numbers)
    unknown = (*OF_ACCURACY, *(["few-samples"] if answer["batches"] < total else []))
    warnings = (QuantizeWarning(**each) for each in answer["warnings"])
    lists = {
        "layers": tuple(answer["layers"]),
        "steps": tuple(answer["steps"]),
        "warnings": tuple(each for each in warnings if each.code not in unknown),
    }
    return DryRun(**{**answer, **lists, "total_batches": total})


def _encoded(data: "DataFiles | str | PathLike[str]", batch_size: int | None) -> dict[str, Any]:
    """Return the fields of ``DataFiles`` as JSON values."""
    if isinstance(data, str | PathLike):
        return {"path": fspath(data), "batch_size": batch_size}
    return {
        "path": fspath(data.path),
        "batch_size": data.batch_size if batch_size is None else batch_size,
        "preprocess": str(data.preprocessing),
        "tokenizer": None if data.tokenizer is None else fspath(data.tokenizer),
    }


def _run_worker(request: Mapping[str, Any]) -> tuple[int, str, str]:
    """Run the other process, and return its exit code, stdout and stderr.

    If an exception is raised here, such as KeyboardInterrupt, the other process is killed.
    """
    # Without -P, Python would import modules such as tempfile.py from the current directory.
    command = [sys.executable, "-P", "-c", _CODE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:  # noqa: S603 - a fixed command
        try:
            stdout, stderr = process.communicate(json.dumps(request))
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process.returncode, stdout, stderr


def _worker_main() -> None:
    """Read a request from stdin, quantize, and write an answer to stdout, in the other process."""
    request = json.loads(sys.stdin.read())
    try:
        answer = _quantize(request)
    except (DetentError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _quantize(request: Mapping[str, Any]) -> dict[str, Any]:
    import detent.onnx as qo  # noqa: PLC0415 - only the worker needs it
    from detent.onnx_model import DataFiles  # noqa: PLC0415
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415
    from detent.onnx_model.files import load_model  # noqa: PLC0415

    start, before = time.perf_counter(), _memory("VmRSS")
    model, data, total = load_model(request["model"]), None, 0
    if request["data"] is not None:
        batches = open_batches(DataFiles(**request["data"]), model.inputs)
        numbers, total = request["numbers"], batches.count or 0
        data = batches.first(MAX_BATCHES) if numbers is None else batches.subset(numbers)
    times: list[float] = []
    result = qo.quantize(
        model,
        Path(request["directory"], "dry_run.onnx"),
        data,
        progress=lambda done, total: times.append(time.perf_counter()),  # noqa: ARG005
        **request["options"],
    )
    seconds, after = time.perf_counter() - start, _memory("VmHWM")
    count = 0 if data is None else data.count or 0
    passes = len(times) / max(1, count)
    between = sorted(b - a for a, b in pairwise(times))
    return {
        "nbytes_before": result.nbytes_before,
        "nbytes_after": result.nbytes_after,
        "memory_growth": None if before is None or after is None else max(0, after - before),
        "seconds": seconds,
        "batches": count,
        "total_batches": total,
        "seconds_per_batch": between[len(between) // 2] * max(1.0, passes) if between else 0.0,
        "layers": [
            {**asdict(layer), "nbytes_before": line.nbytes_before, "nbytes_after": line.nbytes_after}
            for layer, line in zip(result.layers, result.plan.layers, strict=True)
        ],
        "steps": list(result.steps),
        "warnings": [each._asdict() for each in result.warnings],
    }


def _memory(name: str) -> int | None:
    """Return this process's resident memory in bytes: the current value for ``name`` "VmRSS", the peak for "VmHWM".

    The result is None on systems other than Linux, because only Linux has the file that this function reads.
    """
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
