"""Screen: what commands say, and where. Results go to stdout, all else to stderr; with --json they are one document."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from detent.codec import encode

__all__ = ["Screen", "visible"]

MIN_NAME_WIDTH, MIN_PROSE_WIDTH = 20, 12  # characters of a cell that are not folded
GAP = 2
# All that a terminal obeys instead of showing it, but for the ends of lines: C0, DEL and C1.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}
_CONTROL_IN_CELLS = {**_CONTROL, ord("\n"): "\\n"}


def _console(stream: IO[str], width: int | None = None) -> Console:
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


class Screen:
    """Results on stdout, notes on stderr; ``as_json`` leaves stdout to one document, ``quiet`` leaves only errors."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._out, self._err = _console(sys.stdout), _console(sys.stderr)

    @property
    def _speaks(self) -> bool:
        return not (self.as_json or self.quiet)

    def say(self, text: str = "", style: str | None = None) -> None:
        """A line of the result."""
        if self._speaks:
            self._out.print(visible(text), style=style, soft_wrap=True)

    def note(self, text: str) -> None:
        """What goes on, for those who watch."""
        if not self.quiet:
            self._err.print(visible(text), style="dim", soft_wrap=True)

    def warn(self, text: str) -> None:
        """What should be known."""
        if not self.quiet:
            self._err.print(f"warning: {visible(text)}", style="yellow", soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[int] = (),
        fold: Sequence[int] = (0,),
    ) -> None:
        """Print a table of the result; no cell is ever cut.

        On a terminal too narrow for it, columns in ``fold`` are folded; elsewhere programs find one row per line.
        """
        if not self._speaks:
            return
        rows = [[cell.translate(_CONTROL_IN_CELLS) for cell in row] for row in rows]
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        longest = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
        least = [
            min(width, MIN_PROSE_WIDTH if i else MIN_NAME_WIDTH) if i in fold else width
            for i, width in enumerate(longest)
        ]
        for i, name in enumerate(columns):
            justify: Literal["left", "right"] = "right" if i in right else "left"
            table.add_column(name, justify=justify, overflow="fold", no_wrap=i not in fold, min_width=least[i])
        for row in rows:
            table.add_row(*map(Text, row))
        room = self._out.width if self._out.is_terminal else sum(longest) + GAP * len(longest)
        _console(self._out.file, max(room, sum(least) + GAP * len(least))).print(table, crop=False)

    def emit(self, document: Mapping[str, Any]) -> None:
        """The result for machines."""
        if self.as_json:
            sys.stdout.write(json.dumps(encode(document), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int | None], None]]:
        """A progress bar for a job of several parts; the function takes the part's name first."""
        with self._bar() as step:
            yield step

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int | None], None]]:
        """A bar on stderr, on terminals only; gives a function of what is done and what there is in all."""
        with self._bar() as step:
            step(label, 0, None)
            yield lambda done, total: step(label, done, total)

    @contextmanager
    def _bar(self) -> Iterator[Callable[[str, int, int | None], None]]:
        if self.quiet or not self._err.is_terminal:
            yield lambda label, done, total: None  # noqa: ARG005 - nobody watches
            return
        parts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*parts, console=self._err, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total)


def visible(text: str) -> str:
    """Escape control characters: names come from untrusted files."""
    return text.translate(_CONTROL)
