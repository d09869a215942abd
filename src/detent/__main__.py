"""``python -m detent``: the same as the command ``detent``."""

import sys

from detent.cli import main

if __name__ == "__main__":
    sys.exit(main())
