"""Train small language models against the block formats of GGUF files, with several seeds.

Runs examples/qat_language_model.py in full size: a llama trained on Wikipedia articles, quantized to q4_k and to q2_k
without training (PTQ) and with (QAT), next to a float model that is trained as long. Every file is written, and its
bytes are compared with those that were trained::

    python benchmarks/block_training.py --output benchmarks/results/block_training.json
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from results_file import write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from qat_language_model import FULL, compare  # noqa: E402 - a script outside packages


def main() -> None:
    """Train with each seed and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        print(f"seed {seed}", flush=True)
        runs.append({name: round(loss, 4) for name, loss in compare(FULL, seed).items()})
        write_result({"settings": asdict(FULL), "runs": runs}, options.output)


if __name__ == "__main__":
    main()
