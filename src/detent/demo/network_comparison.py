"""Comparison of a float network with its quantized versions, all trained for the same number of epochs.

::

    float  ------ epochs ------+------ more epochs ------+--> float
                               |                         +--> PTQ   calibrated, not trained
                               +-- more epochs, quantized --> QAT   scales learned with the weights

Each quantized network is exported, run in ONNX Runtime and verified. The float network is exported with its batch norms
folded, so that its file has the same tensor names as the quantized files. Output files are written at the end.
"""

import copy
import io
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import detent.report as qr
import detent.torch as qt
from detent.demo.network import Pictures, TrainingRun, calibrated, logits_of, make_network, read_digits, repeatable
from detent.demo.result import COLUMNS, DemoResult, DemoRow
from detent.metrics import sqnr_db
from detent.onnx_model import load, make_session, save
from detent.onnx_model.sessions import ort_errors
from detent.recipe import Recipe
from detent.scale_mode import Fixed, Learned
from detent.storage import write_atomic
from detent.torch import export_graph
from detent.torch.onnx_export import run_exporter
from detent.verification import VerifyReport, verify

__all__ = ["Budget", "DemoFiles", "export_float", "run_comparison", "without_norms", "write_files"]

OPSET = 21
REPORT, CALIBRATION = "demo-report.html", "demo-calibration.npz"
REPORT_BATCH = 100  # images per batch for the report's metrics
ABOUT_SQNR = "logits compared with the float network; QAT changes the weights, so compare QAT by accuracy, not by SQNR"
NO_BREAK_SPACE = "\u00a0"
CALIBRATION_IMAGES = 256  # number of training images that are written for use after the demo
FIRST_LEARNING_RATE, LAST_LEARNING_RATE = 3e-3, 1e-3
VERIFY_BATCH = 100  # images per batch for verification
REPORTED = "W4 QAT"  # the row whose file is written and whose layers are in the report
FULLY_VERIFIED = (REPORTED, "W8 QAT")  # the rows that are verified at all levels
STEPS_AFTER_TRAINING = 3  # steps of the progress bar: export, verify, run

Say = Callable[[str], object]
Progress = Callable[[str, int, int], object]
Logits = NDArray[np.float32]


def without_norms(model: nn.Sequential) -> nn.Sequential:
    """Return a copy of the model in evaluation mode, with batch norms folded into the convolutions before them."""
    layers: dict[str, nn.Module] = {}
    last = ""
    for name, each in copy.deepcopy(model).eval().named_children():
        before = layers.get(last)
        if isinstance(each, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
            layers[last] = fuse_conv_bn_eval(before, each)
            continue
        layers[name], last = each, name
    return nn.Sequential(OrderedDict(layers)).eval()


def export_float(model: nn.Sequential, example: Tensor, path: Path) -> Path:
    """Export a float model to ONNX without debug metadata, so that its size is comparable with quantized files."""
    shapes = ({0: torch.export.Dim.AUTO},)
    proto, _ = run_exporter(without_norms(model), ((example,), {}), OPSET, shapes, ["output"])
    version: str = import_module("detent").__version__
    save(load(export_graph.finalize(export_graph.clean(proto), version)), path)
    return path


@dataclass(frozen=True)
class DemoFiles:
    """Inputs of ``write_files``."""

    scratch: Path  # temporary directory with the exported files
    directory: Path  # output directory
    train: Pictures
    test: Pictures
    label: str  # label of the network to write
    facts: Mapping[str, str]  # for the summary of the report

    @property
    def names(self) -> tuple[str, str]:
        """File names of the float and of the quantized model."""
        return _file_name("float"), _file_name(self.label)


def write_files(
    files: DemoFiles, rows: tuple[DemoRow, ...], verifications: Mapping[str, VerifyReport], *, seed: int, quick: bool
) -> DemoResult:
    """Write the report, the float model, the quantized model and calibration images."""
    report_path, data = files.directory / REPORT, files.directory / CALIBRATION
    models = tuple(files.directory / name for name in files.names)
    paths = (report_path, *models, data)
    result = DemoResult(rows, verifications, report_path, paths, files.label, seed, quick, files.facts)
    report = _build_report(files, result)
    for path in models:
        write_atomic(path, (files.scratch / path.name).read_bytes())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, input=files.train.first(CALIBRATION_IMAGES).images)
    write_atomic(data, buffer.getvalue())
    report.save(report_path)
    return result


def _build_report(files: DemoFiles, result: DemoResult) -> qr.Report:
    artifact = files.scratch / files.names[1]
    source = artifact.with_name(f"{artifact.stem}-in-float.onnx")
    table = qr.Table(
        "Accuracy, size and verification: float, quantized after training (PTQ), trained with quantization (QAT)",
        ("network", *COLUMNS[1:]),
        tuple(tuple(cell.replace(" ", NO_BREAK_SPACE) for cell in row.cells()) for row in result.rows),
    )
    return qr.build(
        artifact,
        files.test.batches(REPORT_BATCH),
        source=source if source.exists() else None,
        verification=result.verification,
        title=f"detent demo: handwritten digits, {files.label}",
        facts={**files.facts, "all files": result.codes_line(), "SQNR": ABOUT_SQNR},
        tables=(table,),
        command="detent demo" if not result.seed else f"detent demo --seed {result.seed}",
    )


def _file_name(label: str) -> str:
    return f"demo-{label.lower().replace(' ', '-')}.onnx"


@dataclass(frozen=True)
class Budget:
    """Bit widths, training epochs, and the numbers of training and test images (None for all images)."""

    epochs: int = 25
    more_epochs: int = 10
    bits: tuple[int, ...] = (8, 4, 2)
    train: int | None = None
    test: int | None = None

    @classmethod
    def quick(cls) -> "Budget":
        """Return the budget of a run that takes seconds, for tests."""
        return cls(epochs=3, more_epochs=1, bits=(4,), train=640, test=200)


@dataclass(frozen=True)
class _Setup:
    train: Pictures
    test: Pictures
    budget: Budget
    seed: int
    quick: bool

    @property
    def first_epochs(self) -> TrainingRun:
        return TrainingRun(self.train, self.budget.epochs, FIRST_LEARNING_RATE, 2 * self.seed)

    @property
    def last_epochs(self) -> TrainingRun:
        """The last epochs, which train in float or with quantization."""
        return TrainingRun(self.train, self.budget.more_epochs, LAST_LEARNING_RATE, 2 * self.seed + 1)

    def levels(self, label: str) -> tuple[int, ...]:
        return (1, 2, 3) if label in FULLY_VERIFIED and not self.quick else (1,)

    def facts(self, parameters: int) -> dict[str, str]:
        return {
            "network": f"{parameters:,} parameters: convolutions, depthwise blocks, two linear layers",
            "data": f"handwritten digits, {len(self.train):,} training and {len(self.test):,} test images",
            "training": f"{self.budget.epochs} epochs in float, then {self.budget.more_epochs} in float or with QAT",
            "seed": str(self.seed),
        }


def run_comparison(
    directory: Path, seed: int, *, quick: bool, say: Say | None, progress: Progress | None
) -> DemoResult:
    """Run the demo with arguments that are already checked."""
    budget = Budget.quick() if quick else Budget()
    train, test = read_digits()
    setup = _Setup(train.first(budget.train or len(train)), test.first(budget.test or len(test)), budget, seed, quick)
    with repeatable(seed), tempfile.TemporaryDirectory(prefix="detent-demo-") as scratch:
        return _Comparison(setup, Path(scratch), say, progress).run(directory)


class _ProgressBar:
    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self.progress, self.label, self.total, self.done = progress, label, total, 0
        progress(label, 0, total)

    def step(self) -> None:
        self.done += 1
        self.progress(self.label, self.done, self.total)


class _Comparison:
    """The state of one run of the demo."""

    def __init__(self, setup: _Setup, scratch: Path, say: Say | None, progress: Progress | None) -> None:
        self.setup, self.train, self.test, self.scratch = setup, setup.train, setup.test, scratch
        self.say, self.progress = say or (lambda *_: None), progress or (lambda *_: None)
        self.example = torch.from_numpy(self.test.images[:2])
        self.rows: list[DemoRow] = []
        self.verifications: dict[str, VerifyReport] = {}
        self.float_logits: Logits = np.zeros((0, 0), np.float32)

    def run(self, directory: Path) -> DemoResult:
        network = make_network()
        facts = self.setup.facts(sum(each.numel() for each in network.parameters()))
        self.say(f"{facts['data']}; a network with {facts['network']}")
        base, trained = self._train_float(network)
        for bits in self.setup.budget.bits:
            self._quantize_after(trained, bits)
            self._quantize_aware(base, bits)
        bar = _ProgressBar(self.progress, "report", 1)
        files = DemoFiles(self.scratch, directory, self.train, self.test, REPORTED, facts)
        result = write_files(files, tuple(self.rows), self.verifications, seed=self.setup.seed, quick=self.setup.quick)
        bar.step()
        self.say(f"written to {directory}: {', '.join(path.name for path in result.files)}")
        return result

    def _train_float(self, network: nn.Sequential) -> tuple[nn.Sequential, nn.Sequential]:
        """Return the network that QAT starts from, and the network after the last epochs in float."""
        steps = self.setup.first_epochs.steps + self.setup.last_epochs.steps + STEPS_AFTER_TRAINING - 1
        bar = _ProgressBar(self.progress, "float", steps)
        base = self.setup.first_epochs.train(network, bar.step)
        trained = self.setup.last_epochs.train(copy.deepcopy(base), bar.step)
        path = export_float(trained, self.example, self.scratch / _file_name("float"))
        bar.step()
        self.float_logits = logits_of(trained, self.test).numpy()
        self._add("float", None, path, self.float_logits)
        bar.step()
        return base, trained

    def _quantize_after(self, trained: nn.Sequential, bits: int) -> None:
        label = f"W{bits} PTQ"
        bar = _ProgressBar(self.progress, label, 1 + STEPS_AFTER_TRAINING)
        model = calibrated(copy.deepcopy(trained), Recipe.preset(f"w{bits}a8", mode=Fixed()), self.train)
        bar.step()
        self._export(label, f"w{bits}a8", model, bar, levels=(1,))

    def _quantize_aware(self, base: nn.Sequential, bits: int) -> None:
        label = f"W{bits} QAT"
        bar = _ProgressBar(self.progress, label, self.setup.last_epochs.steps + STEPS_AFTER_TRAINING)
        model = calibrated(copy.deepcopy(base), Recipe.preset(f"w{bits}a8", mode=Learned()), self.train)
        self.setup.last_epochs.train(model, bar.step)
        if label == REPORTED and not self.setup.quick:
            # the report compares layers with the layers of a float model that has the QAT weights
            in_float = copy.deepcopy(model)
            qt.unprepare(in_float)
            export_float(in_float, self.example, self.scratch / _file_name(f"{label}-in-float"))
        self._export(label, f"w{bits}a8", model, bar, levels=self.setup.levels(label))

    def _export(
        self, label: str, recipe: str, model: nn.Sequential, bar: _ProgressBar, levels: tuple[int, ...]
    ) -> None:
        """Export, run and verify a quantized network."""
        qt.freeze(model)
        path = qt.export_onnx(model, self.example, self.scratch / _file_name(label))
        bar.step()
        report = self.verifications[label] = verify(model, path, self.test.batches(VERIFY_BATCH), levels=levels)
        bar.step()
        self._add(label, recipe, path, logits_of(model, self.test).numpy(), report)
        bar.step()

    def _add(
        self, label: str, recipe: str | None, path: Path, logits: Logits, report: VerifyReport | None = None
    ) -> None:
        session = make_session(path, threads=1)
        with ort_errors():
            outputs: Logits = session.run(None, {session.get_inputs()[0].name: self.test.images})[0]
        nbytes, labels = path.stat().st_size, self.test.labels
        row = DemoRow(
            label=label,
            recipe=recipe,
            accuracy_torch=float((logits.argmax(1) == labels).mean()),
            accuracy_onnxruntime=float((outputs.argmax(1) == labels).mean()),
            samples=len(labels),
            equal_predictions=int((outputs.argmax(1) == logits.argmax(1)).sum()),
            nbytes=nbytes,
            nbytes_float=self.rows[0].nbytes if self.rows else nbytes,
            sqnr_db=None if recipe is None else sqnr_db(self.float_logits, outputs),
            compared_codes=0 if report is None else report.compared_codes,
            differing_codes=0 if report is None else report.differing_codes,
        )
        self.rows.append(row)
        line = f"{label}: {100 * row.accuracy_onnxruntime:.1f} % accuracy in ONNX Runtime, {nbytes:,} bytes"
        self.say(line if report is None else f"{line}, {row.differing_codes} of {row.compared_codes} codes differ")
