"""What each accuracy step of ``detent.onnx.quantize`` is worth, over the zoo: all on, and one step off at a time.

::

    python benchmarks/onnx_helpers.py [--models A B] [--output FILE]

The defaults of the steps follow from this table. Progress goes to stderr.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from run import surroundings

import detent.onnx as qo
from detent.metrics import sqnr_db
from detent.onnx_model import make_session
from zoo import ZOO, ZooModel, agreement

CALIBRATION, TESTS = 16, 8
FILES = Path(__file__).parent / ".cache" / "onnx"
WAYS: dict[str, dict[str, object]] = {
    "all": {},
    "no equalizing": {"equalize": False},
    "no smoothing": {"smooth": False},
    "no bias correction": {"bias_correction": False},
    "no float layers": {"keep_float": "none"},
    "min-max ranges": {"observer": "minmax"},
    "none of them": {
        "equalize": False,
        "smooth": False,
        "bias_correction": False,
        "keep_float": "none",
        "observer": "minmax",
    },
}


def judge(model: ZooModel, path: Path, options: dict[str, object]) -> dict[str, object]:
    """SQNR of the outputs, agreement of decisions, and the seconds it took."""
    feeds = list(model.feeds(CALIBRATION + TESTS))
    tests = feeds[CALIBRATION:]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        report = qo.quantize(path, Path(folder, "q.onnx"), feeds[:CALIBRATION], progress=False, **options)
        seconds = time.perf_counter() - start
        sessions = make_session(path), make_session(report.output)
        expected, found = ([session.run(None, feed) for feed in tests] for session in sessions)
    floats = [i for i, output in enumerate(expected[0]) if output.dtype == np.float32]
    db = [sqnr_db(*(np.concatenate([np.ravel(run[i]) for run in side]) for side in (expected, found))) for i in floats]
    same = [agreement(model.task(a), model.task(b)) for a, b in zip(expected, found, strict=True)]
    return {
        "sqnr_db": [float(value) for value in db],
        "agreement": float(np.mean(same)),
        "seconds": seconds,
        "steps": list(report.steps),
    }


def main() -> None:
    """Run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[name for name in ZOO if name != "smart-turn"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    FILES.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    for name in arguments.models:
        path = ZOO[name].write(FILES)
        results[name] = {}
        for way, options in WAYS.items():
            results[name][way] = found = judge(ZOO[name], path, options)
            mean = float(np.mean(found["sqnr_db"]))
            print(f"{name}, {way}: {mean:.1f} dB, agreement {found['agreement']:.3f}", file=sys.stderr, flush=True)
    text = json.dumps({"surroundings": surroundings(), "models": results}, indent=1)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
