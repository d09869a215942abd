"""Entry point of the demo: ``run``, which imports PyTorch and ONNX when it is called."""

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
    directory: str | PathLike[str] = ".",
    *,
    seed: int = 0,
    quick: bool = False,
    say: Callable[[str], object] | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> DemoResult:
    """Train a small network, quantize it in six ways, export and verify each version, and write a report.

    The network classifies handwritten digits. It is trained in float. Then it is quantized in two ways: after training
    (PTQ), and by further training with quantization (QAT). Both ways are run with weights of 8, 4 and 2 bits. Each
    version is exported to ONNX, run in ONNX Runtime, and compared code by code with PyTorch. The demo runs on one
    thread with a fixed seed, so results on one machine are the same each time. PyTorch's random state, number of
    threads and settings are restored at the end. The demo takes about a minute.

    Args:
        directory: the output directory. Existing files named ``demo-report.html``, ``demo-float.onnx``,
            ``demo-w4-qat.onnx`` and ``demo-calibration.npz`` are replaced at the end. As a next step, run
            ``detent quantize demo-float.onnx --data demo-calibration.npz``.
        seed: seed for weight initialization and image order.
        quick: if True, the demo uses only 4 bits and few epochs and takes seconds; for tests.
        say: function called with each line of progress text.
        progress: function called with the name of a stage, the number of steps done, and the total number of steps.

    Raises:
        UnsupportedError: a package is missing; the message has the command that installs it.
        FileFormatError: the directory does not exist or cannot be written to.
        SpecError: the seed is not an integer from 0 to 2**31-1.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = run(directory, quick=True)
    ...     [path.name for path in result.files]
    ['demo-report.html', 'demo-float.onnx', 'demo-w4-qat.onnx', 'demo-calibration.npz']
    >>> result.differing_codes, result["W4 QAT"].ratio > 4
    (0, True)
    """
    seed = as_integer("seed", seed, at_least=0, at_most=LARGEST_SEED)
    output_directory = check_directory(directory)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"the demo needs {', '.join(missing)}: {install_hint('all')}")
    from detent.demo.network_comparison import run_comparison  # noqa: PLC0415 - imports PyTorch and ONNX Runtime

    return run_comparison(output_directory, seed, quick=bool(quick), say=say, progress=progress)
