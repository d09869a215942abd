"""Entry point of ``python -m detent``, equal to the command ``detent``."""

import sys

from detent.cli import main

if __name__ == "__main__":
    sys.exit(main())
