"""Entry point of the ``detent`` command. If typer or rich is missing, it prints how to install both."""

import json
import shlex
import sys
from collections.abc import Sequence

from detent.errors import install_hint

__all__ = ["failure", "main"]

BAD_INPUT, MISSING, INTERRUPTED = 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Without arguments, print the help.

    Exit codes: 0 done; 1 mismatch, limit not met, warning with --strict, nothing quantized, or a file that is neither
    smaller nor faster; 2 bad input; 3 optional package missing; 130 interrupted.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    detent ...
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        from detent.cli.app import make_app  # noqa: PLC0415 - it needs typer and rich

        make_app()(words or ["--help"], prog_name="detent", obj=shlex.join(["detent", *words]))
    except ImportError as error:
        if (error.name or "typer").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        return _leave(f"the detent command needs typer and rich: {install_hint('typer')}", MISSING, as_json=as_json)
    except KeyboardInterrupt:  # an interrupt before a command started; commands handle their own interrupts
        return _leave("interrupted", INTERRUPTED, as_json=as_json)
    except SystemExit as done:
        # Typer itself prints usage errors on stderr, before any command runs.
        usage = getattr(done.__context__, "format_message", None)
        if as_json and usage is not None:
            sys.stdout.write(failure(usage(), BAD_INPUT))
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    finally:
        _hide_log()
    return 0


def _hide_log() -> None:
    """Remove the log handler of --verbose, because main() may run again in this process."""
    screen = sys.modules.get("detent.cli.screen")
    if screen is not None:
        screen.hide_log()


def _leave(message: str, code: int, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(failure(message, code))
    sys.stderr.write(f"error: {message}\n")
    return code


def failure(message: str, code: int) -> str:
    """Return the document that --json prints after an error."""
    return json.dumps({"ok": False, "error": message, "exit_code": code}, indent=2) + "\n"
