"""Effect of each accuracy step of ``detent.onnx.quantize`` on the models of the zoo.

Models are quantized with all steps, and with all steps except one.

::

    python benchmarks/onnx_helpers.py [--models A B] [--output FILE]

The default settings of ``detent.onnx.quantize`` were chosen from this table. Progress goes to stderr.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from results_file import write_result
from run import environment

import detent.onnx as qo
from detent.metrics import sqnr_db
from detent.onnx_model import make_session
from zoo import ZOO, ZooModel, agreement

CALIBRATION_BATCHES, HELD_OUT_BATCHES = 16, 8
FILES = Path(__file__).parent / ".cache" / "onnx"
SETTINGS: dict[str, dict[str, object]] = {
    "all on": {},
    "no cross-layer equalization": {"equalize": False},
    "no SmoothQuant": {"smooth": False},
    "no bias correction": {"bias_correction": False},
    "no float fallback": {"keep_float": "none"},
    "min-max ranges": {"observer": "minmax"},
    "all off": {
        "equalize": False,
        "smooth": False,
        "bias_correction": False,
        "keep_float": "none",
        "observer": "minmax",
    },
}


def evaluate(model: ZooModel, path: Path, options: dict[str, object]) -> dict[str, object]:
    """Quantize a model; return the SQNR of its outputs, the agreement with float, and the seconds for quantizing."""
    feeds = list(model.feeds(CALIBRATION_BATCHES + HELD_OUT_BATCHES))
    held_out = feeds[CALIBRATION_BATCHES:]
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        report = qo.quantize(path, Path(directory, "q.onnx"), feeds[:CALIBRATION_BATCHES], progress=False, **options)
        seconds = time.perf_counter() - start
        sessions = make_session(path), make_session(report.output)
        expected, outputs = ([session.run(None, feed) for feed in held_out] for session in sessions)
    floats = [i for i, output in enumerate(expected[0]) if output.dtype == np.float32]
    db = [
        sqnr_db(*(np.concatenate([np.ravel(run[i]) for run in side]) for side in (expected, outputs))) for i in floats
    ]
    same = [agreement(model.task(a), model.task(b)) for a, b in zip(expected, outputs, strict=True)]
    return {
        "sqnr_db": [float(value) for value in db],
        "agreement": float(np.mean(same)),
        "seconds": seconds,
        "steps": list(report.steps),
    }


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[name for name in ZOO if name != "smart-turn"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    FILES.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    for name in arguments.models:
        path = ZOO[name].write(FILES)
        results[name] = {}
        for setting, options in SETTINGS.items():
            results[name][setting] = evaluation = evaluate(ZOO[name], path, options)
            mean = float(np.mean(evaluation["sqnr_db"]))
            print(
                f"{name}, {setting}: {mean:.1f} dB, agreement {evaluation['agreement']:.3f}",
                file=sys.stderr,
                flush=True,
            )
    write_result({"environment": environment(), "models": results}, arguments.output)


if __name__ == "__main__":
    main()
