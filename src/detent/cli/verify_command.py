"""``detent verify``: the proof that a quantized file computes what its source computes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from detent.cli.exits import DIFFERENCE, guarded, require
from detent.cli.options import AsJson, BatchSize, Quiet
from detent.cli.screen import Screen
from detent.errors import SpecError

__all__ = ["register"]

HELP = """Prove that a quantized file computes what its source computes, code by code; exit 1 where it does not.

Level 1 compares codes, scales and zero points; level 2 both models from end to end; level 3 the integer kernels of \
this machine with exact arithmetic.

Example: [bold]detent verify model.onnx model.w8a8.onnx --data calibration.npz[/bold]"""


def register(app: typer.Typer) -> None:
    """Add the command.

    >>> app = typer.Typer()
    >>> register(app)
    >>> app.registered_commands[0].name
    'verify'
    """
    app.command("verify", help=HELP)(guarded(_verify))


def _verify(
    source: Annotated[Path, typer.Argument(help="The float model that the file was made from.", show_default=False)],
    artifact: Annotated[Path, typer.Argument(help="The quantized file.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", "-d", help="Batches of inputs, as `detent quantize` takes them.")],
    *,
    levels: Annotated[str, typer.Option("--levels", help="Some of 1, 2 and 3.")] = "1,2,3",
    batches: Annotated[
        int | None, typer.Option("--batches", min=1, help="How many to look at.", show_default="all")
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    wanted = _levels(levels)
    require("onnx")
    require("onnxruntime")
    from detent.evaluate.accuracy import first_batches  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model import load  # noqa: PLC0415
    from detent.onnx_model.batches import inputs_of  # noqa: PLC0415
    from detent.verification import verify  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    part = first_batches(data, inputs_of(load(artifact)), batch_size, batches or None)
    screen.note(f"verifying {artifact} with {len(part):,} batches")
    with screen.progress("verifying") as step:
        report = verify(source, artifact, _Watched(part, step), levels=wanted)
    screen.say(str(report))
    screen.emit(json.loads(report.to_json()))
    if not report.ok:
        raise typer.Exit(DIFFERENCE)


class _Sized(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class _Watched:
    """Batches that tell how many were taken."""

    def __init__(self, part: _Sized, step: Callable[[int, int | None], None]) -> None:
        self.part, self.step = part, step

    def __len__(self) -> int:
        return len(self.part)

    def __iter__(self) -> Iterator[Any]:
        for number, feed in enumerate(self.part, 1):
            yield feed
            self.step(number, len(self.part))


def _levels(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part in {"1", "2", "3"} for part in parts):
        raise SpecError(f"--levels {text!r}: expected some of 1, 2 and 3, such as 1,3")
    return tuple(sorted({int(part) for part in parts}))
