"""Entry: where the ``detent`` command starts. It runs, as far as one line, without the libraries it is built with."""

import json
import shlex
import sys
from collections.abc import Sequence

from detent.errors import install_hint

__all__ = ["failure", "main"]

BAD_INPUT, MISSING, INTERRUPTED = 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; without arguments it shows its help.

    Codes: 0 done, 1 a difference or a limit missed, 2 bad input or usage, 3 a missing extra, 130 interrupted.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    detent ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        from detent.cli.app import make_app  # noqa: PLC0415 - it needs typer and rich

        make_app()(given or ["--help"], prog_name="detent", obj=shlex.join(["detent", *given]))
    except ImportError as error:
        if (error.name or "typer").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        return _leave(f"the detent command needs typer and rich: {install_hint('typer')}", MISSING, as_json=as_json)
    except KeyboardInterrupt:  # before a command began
        return _leave("interrupted", INTERRUPTED, as_json=as_json)
    except SystemExit as done:
        # Bad usage never comes to a command, which would have told it itself; the message is on stderr by now.
        usage = getattr(done.__context__, "format_message", None)
        if as_json and usage is not None:
            sys.stdout.write(failure(usage(), BAD_INPUT))
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _leave(message: str, code: int, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(failure(message, code))
    sys.stderr.write(f"error: {message}\n")
    return code


def failure(message: str, code: int) -> str:
    """The document that --json prints where there is no result."""
    return json.dumps({"ok": False, "error": message, "exit_code": code}, indent=2) + "\n"
