"""Program files: a .pt2 file of ``torch.export.save`` as the model of ``detent quantize``.

The program becomes a float ONNX model in memory. If quantizing succeeds, this model is written next to the program:
``detent verify`` needs it. So an error leaves no file behind.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from detent.cli.exits import check_can_write, check_distinct, require
from detent.cli.screen import Screen
from detent.errors import SpecError

if TYPE_CHECKING:
    from detent.onnx.quality_warnings import QuantizeWarning
    from detent.onnx_model.files import LoadedModel

__all__ = ["Program", "load_source", "onnx_file"]

SUFFIX = ".pt2"
FIXED_BATCH = "is fixed to"  # in the warning of ``program_to_onnx`` about a fixed batch axis


@dataclass(frozen=True)
class Program:
    """A .pt2 file that the user trusts.

    Attributes:
        path: the .pt2 file.
        onnx_path: the float ONNX model to write.
    """

    path: Path
    onnx_path: Path

    @classmethod
    def at(cls, path: Path, *, trusted: bool) -> "Program | None":
        """Return the program at this path, or None if the path is not that of a program.

        Raises:
            SpecError: the path is that of a program, and the user does not trust it.
        """
        if path.suffix.lower() != SUFFIX:
            return None
        if not trusted:
            raise SpecError(
                f"{path}: loading a {SUFFIX} file can execute code from it: pass --trust-model if you trust its "
                "author, or export the model to ONNX where it was made"
            )
        require("torch", "onnxscript")
        return cls(path, path.with_suffix(".float.onnx"))  # not .onnx: users often export this name themselves

    def check_can_write(self, output: Path, *, force: bool, dry_run: bool) -> None:
        """Reject an ONNX path that cannot be written, or that is also the output."""
        check_distinct({"--output": output, "the float ONNX model": self.onnx_path}, {})
        check_can_write(self.onnx_path, force=force or dry_run, is_written=not dry_run)

    def write(self, screen: Screen, model: "LoadedModel") -> "LoadedModel":
        """Write the float ONNX model, and return it as read from its file."""
        from detent.onnx_model.files import load_model, save  # noqa: PLC0415 - already loaded

        save(model.proto, self.onnx_path)
        screen.note(f"wrote {self.onnx_path}, the float model")
        return load_model(self.onnx_path)


def load_source(screen: Screen, path: Path, program: Program | None) -> "tuple[LoadedModel, list[QuantizeWarning]]":
    """Load an ONNX file, or convert a program to ONNX in memory; also return warnings about the program."""
    from detent.onnx.quality_warnings import QuantizeWarning  # noqa: PLC0415 - already loaded
    from detent.onnx_model.files import load_model  # noqa: PLC0415 - already loaded

    if program is None:
        return load_model(path), []
    from detent.torch import program_to_onnx  # noqa: PLC0415 - loads torch

    screen.note(f"converting {path} to ONNX")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = program_to_onnx(path, trust=True)
    texts = [str(each.message) for each in caught if each.category is UserWarning]
    for text in texts:
        screen.warn(text)
    return load_model(model), [QuantizeWarning("fixed-batch", text) for text in texts if FIXED_BATCH in text]


@contextmanager
def onnx_file(source: "LoadedModel", path: Path) -> Iterator[Path]:
    """Yield the path of the model's ONNX file: a temporary file for a model in memory."""
    from detent.onnx_model.files import save  # noqa: PLC0415 - already loaded

    if source.path is not None:
        yield source.path
        return
    with tempfile.TemporaryDirectory() as directory:
        temporary = Path(directory, path.stem).with_suffix(".onnx")
        save(source.proto, temporary)
        yield temporary
