"""Post-training quantization of ONNX files beside peers: what the files are worth, and what making them costs.

::

    python benchmarks/onnx_ptq.py [--quick] [--models A B] [--contestants A B] [--output FILE]

Models and batches are those of the zoo: 16 batches to calibrate with, and others to test with. Every contestant
quantizes every model in a process of its own (``onnx_worker``), then the files that came out are judged in this one
(``onnx_judge``). Who fails gets a row with the reason. Progress goes to stderr.

Peers come from ``make peers``.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onnx_errors import first_line, shortened
from onnx_judge import in_openvino, judged, outputs, race
from onnx_worker import CALIBRATION, FOLDER, TOO_MUCH, Feed
from peers.file_quantizers import CONTESTANTS
from run import surroundings
from timing import await_quiet

from zoo import ZOO, ZooModel

WORKER = Path(__file__).with_name("onnx_worker.py")
FILES = Path(__file__).parent / ".cache" / "onnx"
MODELS = tuple(name for name in ZOO if name != "smart-turn")  # that one is quantized already
PACKAGES = ("nncf", "openvino", "onnxscript")
# One decision or four per batch: only many of them tell a share of decisions to a point or so.
TESTS = {"magika": 128, "silero-vad": 64, "minilm": 16}
USUAL_TESTS = 8
ROUNDS, FEW_ROUNDS = 25, 5
LONG, LONG_MODEL = 256, "layout"
TOO_LONG = "not done after"
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")


def say(start: float, text: str) -> None:
    """A line of progress."""
    print(f"{time.monotonic() - start:6.0f} s  {text}", file=sys.stderr, flush=True)


def quantized(model: str, contestant: str, output: Path, limit: float, batches: int = CALIBRATION) -> dict:
    """What making the file costs by the first way that works, each in a process of its own; else why none does."""
    reasons = []
    for way in range(len(CONTESTANTS[contestant].ways)):
        found = _one_way([model, contestant, str(output), "--way", str(way), "--batches", str(batches)], output, limit)
        if "failed" not in found:
            return found | {"avoided": reasons}
        reasons.append(found["failed"])
        if TOO_MUCH in reasons[-1] or TOO_LONG in reasons[-1]:
            break
    return {"failed": reasons[0]}


def _one_way(arguments: list[str], output: Path, limit: float) -> dict:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    try:
        command = [sys.executable, str(WORKER), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"{TOO_LONG} {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"failed": shortened(f"its process ended with {done.returncode}: {last}")}
    return json.loads(done.stdout.splitlines()[-1])


def judge_model(name: str, rows: dict[str, dict], files: dict[str, Path], rounds: int) -> dict:
    """Add to every row what its file is worth; gives what OpenVINO makes of the float model."""
    model = ZOO[name]
    source, feeds = model.write(FOLDER), fresh_feeds(name, model)
    plain = outputs(source, feeds)
    made = {who: files[who] for who, row in rows.items() if "failed" not in row}
    for who, path in list(made.items()):
        try:
            found = outputs(path, feeds)
            worth = judged(model, plain, found)
        except Exception as error:  # noqa: BLE001 - a file that fails on some batch is a row of the table
            rows[who]["failed"] = first_line(error)
            del made[who]
            continue
        rows[who] |= {"bytes": path.stat().st_size, "size_ratio": round(path.stat().st_size / source.stat().st_size, 4)}
        rows[who] |= worth
        rows[who]["openvino"] = in_openvino(path, feeds[:USUAL_TESTS], plain[:USUAL_TESTS], found[:USUAL_TESTS])
    for who, times in race(source, made, feeds[:USUAL_TESTS], rounds).items():
        rows[who] |= times
    return in_openvino(source, feeds[:2], plain[:2], plain[:2])


def fresh_feeds(name: str, model: ZooModel) -> list[Feed]:
    """Those after the ones that calibration takes."""
    return list(model.feeds(CALIBRATION + TESTS.get(name, USUAL_TESTS)))[CALIBRATION:]


def memory_rows(limit: float, start: float) -> list[dict]:
    """The growth of detent's process with few batches and with many."""
    rows = []
    for batches in (CALIBRATION, LONG):
        say(start, f"{LONG_MODEL}, detent, memory with {batches} batches")
        found = quantized(LONG_MODEL, "detent", FILES / "memory.onnx", limit, batches)
        rows.append({"model": LONG_MODEL, "contestant": "detent", "batches": batches} | found)
    return rows


def entrants(model: str, chosen: Sequence[str]) -> list[str]:
    """The contestants that are for models of its kind."""
    kinds = {name: CONTESTANTS[name].kinds for name in chosen}
    return [name for name in chosen if not kinds[name] or ZOO[model].kind in kinds[name]]


def measured(given: argparse.Namespace) -> dict:
    """Everything."""
    start, patience = time.monotonic(), given.patience
    result = surroundings() | {"quick": given.quick, "calibration_batches": CALIBRATION, "models": {}, "rows": []}
    result["versions"] |= {package: installed(package) for package in PACKAGES}
    result["machine"]["instructions"] = instructions()
    for name in given.models:
        source = ZOO[name].write(FOLDER)
        tests = TESTS.get(name, USUAL_TESTS)
        result["models"][name] = {"kind": ZOO[name].kind, "bytes": source.stat().st_size, "test_batches": tests}
        rows, files = {}, {}
        for who in entrants(name, given.contestants):
            say(start, f"{name}, {who}")
            patience = await_quiet(patience)
            files[who] = FILES / f"{name}.{who.replace(', ', '-').replace(' ', '-')}.onnx"
            rows[who] = {"model": name, "contestant": who} | quantized(name, who, files[who], given.limit)
        say(start, f"{name}, judging {len(files)} files")
        patience = await_quiet(patience)
        result["models"][name]["openvino"] = judge_model(name, rows, files, FEW_ROUNDS if given.quick else ROUNDS)
        result["rows"] += rows.values()
        print(table(rows.values()), flush=True)
    with_memory = not given.quick and LONG_MODEL in given.models and "detent" in given.contestants
    result["memory"] = memory_rows(given.limit, start) if with_memory else []
    return result


def installed(package: str) -> str | None:
    """Its version, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def instructions() -> list[str]:
    """What the processor has for products of integers; how fast and how right int8 weights are depends on it."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return [word for word in INSTRUCTIONS if word in words]


def table(rows: Sequence[dict]) -> str:
    """What was found, for a terminal."""
    lines = []
    for row in rows:
        head = f"{row['model']:<15}{row['contestant']:<20}"
        if "failed" in row:
            lines.append(f"{head}failed: {row['failed']}")
            continue
        openvino = row["openvino"].get("failed") or f"OpenVINO {row['openvino']['mean_sqnr_db']:.1f} dB"
        lines.append(
            f"{head}{row['sqnr_db']:>7.2f} dB{row['mean_sqnr_db']:>7.2f} mean{row['agreement']:>8.3f}"
            f"{row['ratio']:>7.2f} x time{row['size_ratio']:>7.3f} x size{row['seconds']:>8.1f} s"
            f"{row['growth'] / 1e6:>7.0f} MB  {openvino}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description="Quantization of ONNX files beside peers.")
    parser.add_argument("--quick", action="store_true", help="few rounds, no long calibration")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a contestant has for a model")
    parser.add_argument("--patience", type=float, default=0.0, help="how long to wait, in all, for a quiet machine")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    result = measured(given)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
