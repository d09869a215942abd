"""Output of commands: results go to stdout; notes, warnings, progress and the log go to stderr.

With --json, stdout has one JSON document and nothing else.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Literal, Protocol

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from detent.codec import encode

__all__ = ["Screen", "hide_log", "show_log", "visible"]

MIN_NAME_COLUMNS, MIN_TEXT_COLUMNS = 20, 12  # minimum widths if wrapped: of the first column, and of other columns
GAP_COLUMNS = 2
MIN_SECONDS_SHOWN = 5.0  # shorter passes get no line when they end, only one in the list of all passes
MIN_SHARE = 0.01  # on a terminal, passes with a smaller share of the time share one line
# Control characters C0, DEL and C1, which a terminal would interpret. Line ends are not escaped.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}
_CONTROL_IN_CELLS = {**_CONTROL, ord("\n"): "\\n"}


def _console(stream: IO[str], width: int | None = None) -> Console:
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


class Workers(Protocol):
    """Workers of an executor, as a text for the progress bar."""

    on_change: Callable[[], object] | None

    @property
    def label(self) -> str:
        """Workers alive, items done, and items per second."""


class Screen:
    """Output of a command.

    Attributes:
        as_json: print no text on stdout, only one JSON document.
        quiet: print only errors, and the document if ``as_json`` is set.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._out, self._err = _console(sys.stdout), _console(sys.stderr)
        if verbose:
            show_log()

    @property
    def _prints_text(self) -> bool:
        return not (self.as_json or self.quiet)

    def say(self, text: str = "", style: str | None = None) -> None:
        """Print a line of the result."""
        if self._prints_text:
            self._out.print(visible(text), style=style, soft_wrap=True)

    def note(self, *texts: str) -> None:
        """Print on stderr what the command is doing, one line per text."""
        if not self.quiet:
            for text in texts:
                self._err.print(visible(text), style="dim", soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        if not self.quiet:
            self._err.print(f"warning: {visible(text)}", style="yellow", soft_wrap=True)

    def passed(self, name: str, seconds: float) -> None:
        """Print a line when a long pass has ended, unless a terminal shows a progress bar."""
        if not self._err.is_terminal and seconds >= MIN_SECONDS_SHOWN:
            self.note(f"{name} took {seconds:.1f} s")

    def passes(self, seconds: Mapping[str, float]) -> None:
        """Print the total time of all passes, and one line per pass with its time and share, longest pass first.

        On a terminal, passes with a small share are joined into one line.
        """
        total = max(sum(seconds.values()), 1e-9)
        ranked = sorted(seconds, key=lambda name: -seconds[name])
        short = [name for name in ranked if seconds[name] < MIN_SHARE * total] if self._err.is_terminal else []
        rows = {name: seconds[name] for name in ranked if len(short) < 2 or name not in short}
        if len(short) > 1:
            rows[f"{len(short)} shorter passes"] = sum(seconds[name] for name in short)
        self.note(f"quantized in {total:.1f} s")
        self.note(*(f"  {name}: {_seconds_text(each)}, {_share_text(each / total)}" for name, each in rows.items()))

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[int] = (),
        fold: Sequence[int] = (0,),
    ) -> None:
        """Print a table of the result; no cell is ever cut off.

        On a terminal that is too narrow, the columns in ``fold`` are wrapped. In files and pipes, each row is one line.
        """
        if not self._prints_text:
            return
        rows = [[cell.translate(_CONTROL_IN_CELLS) for cell in row] for row in rows]
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
        min_widths = [
            min(width, MIN_TEXT_COLUMNS if i else MIN_NAME_COLUMNS) if i in fold else width
            for i, width in enumerate(widths)
        ]
        for i, name in enumerate(columns):
            justify: Literal["left", "right"] = "right" if i in right else "left"
            table.add_column(name, justify=justify, overflow="fold", no_wrap=i not in fold, min_width=min_widths[i])
        for row in rows:
            table.add_row(*map(Text, row))
        gaps = GAP_COLUMNS * len(widths)
        width = self._out.width if self._out.is_terminal else sum(widths) + gaps
        _console(self._out.file, max(width, sum(min_widths) + gaps)).print(table, crop=False)

    def emit(self, document: Mapping[str, Any]) -> None:
        """Print the result as JSON if --json is set."""
        if self.as_json:
            sys.stdout.write(json.dumps(encode(document), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int | None], None]]:
        """Show a progress bar on terminals for a job with several stages; yield a callback f(stage, done, total)."""
        with self._bar() as step:
            yield step

    @contextmanager
    def progress(self, label: str, workers: Workers | None = None) -> Iterator[Callable[[int, int | None], None]]:
        """Show a progress bar on terminals; yield a callback f(done, total).

        With ``workers``, the bar also shows how many of them are alive, and how many items they have done.
        """
        with self._bar() as step:
            last: tuple[int, int | None] = (0, None)

            def show() -> None:
                step(label if workers is None else f"{label} ({workers.label})", *last)

            def advance(done: int, total: int | None) -> None:
                nonlocal last
                last = done, total
                show()

            if workers is not None:
                workers.on_change = show
            show()
            try:
                yield advance
            finally:
                if workers is not None:
                    workers.on_change = None  # the bar is closed

    @contextmanager
    def _bar(self) -> Iterator[Callable[[str, int, int | None], None]]:
        if self.quiet or not self._err.is_terminal:
            yield lambda label, done, total: None  # noqa: ARG005 - no bar
            return
        fields = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*fields, console=self._err, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total)


def _seconds_text(seconds: float) -> str:
    """Format a duration.

    >>> _seconds_text(2.04), _seconds_text(0.031)
    ('2.0 s', '31 ms')
    """
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def _share_text(share: float) -> str:
    """Format a share of the time.

    >>> _share_text(0.256), _share_text(0.001)
    ('26 %', '<1 %')
    """
    return "<1 %" if share < MIN_SHARE else f"{100 * share:.0f} %"


def visible(text: str) -> str:
    """Escape control characters: names come from untrusted files."""
    return text.translate(_CONTROL)


class _LogHandler(logging.StreamHandler[IO[str]]):
    """Log handler for ``--verbose``: it prints each record on stderr, with control characters escaped."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return visible(super().format(record))


def show_log() -> None:
    """Print the log of the library on stderr until ``hide_log`` is called."""
    hide_log()
    logger = logging.getLogger("detent")
    logger.addHandler(_LogHandler())
    logger.setLevel(logging.DEBUG)


def hide_log() -> None:
    """Stop printing the log, as before ``show_log``."""
    logger = logging.getLogger("detent")
    for handler in [each for each in logger.handlers if isinstance(each, _LogHandler)]:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
