"""The command line: ``detent``, or ``python -m detent``.

Each command is a module. ONNX, ONNX Runtime and PyTorch are imported only when a command that needs them runs.
"""

from detent.cli.entry import main

__all__ = ["main"]
