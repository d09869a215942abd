"""``python -m detent``: what this installation can do."""

from detent import __version__
from detent.kernels import capabilities

if __name__ == "__main__":
    print(f"detent   {__version__}")  # noqa: T201 - what it is for
    print(capabilities())  # noqa: T201
