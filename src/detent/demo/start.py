"""Entry of the demo: ``run``. What it needs is loaded when it is called."""

from collections.abc import Callable
from importlib.util import find_spec
from os import PathLike

from detent.checks import as_integer
from detent.demo.result import DemoResult
from detent.errors import UnsupportedError, install_hint
from detent.storage import check_directory

__all__ = ["run"]

NEEDED = ("torch", "onnx", "onnxscript", "onnxruntime", "jinja2")
LARGEST_SEED = (1 << 31) - 1


def run(
    folder: str | PathLike[str] = ".",
    *,
    seed: int = 0,
    quick: bool = False,
    say: Callable[[str], object] | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> DemoResult:
    """Train a small network, quantize it in six ways, export and prove each, and write a page about it.

    The network tells handwritten digits apart. It is trained in float; quantized after training (PTQ) and trained on
    quantized (QAT), with weights of 8, 4 and 2 bits; exported to ONNX; run in ONNX Runtime; and compared code by code.
    It computes on one thread and with seeds, so that the same machine gives the same numbers each time. PyTorch's own
    random numbers, threads and settings are as before when it returns. It takes about a minute.

    Args:
        folder: where ``demo-report.html``, ``demo-float.onnx``, ``demo-w4-qat.onnx`` and ``demo-calibration.npz`` go;
            files of these names are replaced. ``detent quantize demo-float.onnx --data demo-calibration.npz`` goes on
            from there. Nothing is written before everything is done.
        seed: of the network's first weights and of the order of images.
        quick: 4 bits only and few epochs, in seconds; for tests.
        say: is called with a line of text when there is something to say.
        progress: is called with a stage, the steps done in it, and all of its steps.

    Raises:
        UnsupportedError: a package is missing; the message has the command that installs it.
        FileFormatError: the folder does not exist or cannot be written to.
        SpecError: a seed that is no integer from 0 to 2**31-1.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run(folder, quick=True)
    ...     [path.name for path in result.files]
    ['demo-report.html', 'demo-float.onnx', 'demo-w4-qat.onnx', 'demo-calibration.npz']
    >>> result.differing_codes, result["W4 QAT"].ratio > 4
    (0, True)
    """
    number = as_integer("seed", seed, at_least=0, at_most=LARGEST_SEED)
    goal = check_directory(folder)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"the demo needs {', '.join(missing)}: {install_hint('all')}")
    from detent.demo.contest import hold  # noqa: PLC0415 - it loads PyTorch, ONNX and ONNX Runtime

    return hold(goal, number, quick=bool(quick), say=say, progress=progress)
