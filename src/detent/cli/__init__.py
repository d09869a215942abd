"""The command line, ``detent`` or ``python -m detent``. Each command is a module, which loads packages when it runs."""

from detent.cli.entry import main

__all__ = ["main"]
