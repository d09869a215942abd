"""llama.cpp as referee: quantizes GGUF files, runs them and tokenizes texts.

It runs in ``.venv-llama`` (``make test-llama``), because the package needs another Python than detent's environment.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

PYTHON = Path(__file__).resolve().parents[2] / ".venv-llama" / "bin" / "python"
WORKER = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCpp:
    """A process that runs llama.cpp."""

    def __init__(self):
        self.process = subprocess.Popen(
            [PYTHON, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if "\x1e" in line:
                answer = json.loads(line.partition("\x1e")[2])
                assert "error" not in answer, answer["error"]
                return answer
        raise AssertionError(f"llama.cpp died with exit code {self.process.wait()} on {request}")

    def quantize(self, source, target, file_type, importance=None):
        """Quantize a file; ``importance`` is a mapping of tensor names to weights."""
        with TemporaryDirectory() as directory:
            path = Path(directory, "importance.npz") if importance is not None else ""
            if importance is not None:
                np.savez(path, **importance)
            self.ask(do="quantize", source=str(source), target=str(target), file_type=file_type, importance=str(path))

    def logits(self, path, tokens):
        with TemporaryDirectory() as directory:
            output = Path(directory, "logits.npy")
            self.ask(do="logits", path=str(path), tokens=[int(token) for token in tokens], output=str(output))
            return np.load(output)

    def tokenize(self, path, texts):
        return self.ask(do="tokenize", path=str(path), texts=list(texts))["tokens"]

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
