"""The command line: ``detent``, or ``python -m detent``. One file per command; each loads what it needs on its run."""

from detent.cli.entry import main

__all__ = ["main"]
