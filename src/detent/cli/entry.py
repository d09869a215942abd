"""Entry: where the ``detent`` command starts. It runs, as far as one line, without the libraries it is built with."""

import sys
from collections.abc import Sequence

__all__ = ["main"]

MISSING, INTERRUPTED = 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; without arguments it shows its help.

    Codes: 0 done, 1 a difference or a limit missed, 2 bad input or usage, 3 a missing extra, 130 interrupted.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    detent ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from detent.cli.app import make_app  # noqa: PLC0415 - it needs typer and rich

        make_app()(given or ["--help"], prog_name="detent")
    except ImportError as error:
        if (error.name or "typer").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        return _leave("the detent command needs typer and rich: pip install 'detent[cli]'", MISSING)
    except KeyboardInterrupt:  # before a command began
        return _leave("interrupted", INTERRUPTED)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _leave(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code
