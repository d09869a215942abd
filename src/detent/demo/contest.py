"""The contest: one float network, and what quantization makes of it, all with the same epochs on the same images.

::

    float  ------ epochs ------+------ more epochs ------+--> float
                               |                         +--> PTQ   calibrated, not trained
                               +-- more epochs, quantized --> QAT   scales learned with the weights

Each goes the same way: export, run in ONNX Runtime, verify.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import detent.torch as qt
from detent.demo.float_export import export_float
from detent.demo.network import make_network
from detent.demo.pages import Kept, keep
from detent.demo.pictures import Pictures, read_digits
from detent.demo.repeatable import repeatable
from detent.demo.result import DemoResult, DemoRow
from detent.demo.training import Course, calibrated, logits_of
from detent.metrics import sqnr_db
from detent.onnx_model import make_session
from detent.proof import VerifyReport, verify
from detent.recipe import Recipe
from detent.scale_mode import Fixed, Learned

__all__ = ["Budget", "hold"]

Say = Callable[[str], object]
Progress = Callable[[str, int, int], object]
Logits = NDArray[np.float32]
FIRST_RATE, RATE = 3e-3, 1e-3
VERIFIED = 100  # images per batch
SHOWN = "W4 QAT"  # the row whose file is kept and whose layers are on the page
THOROUGH = (SHOWN, "W8 QAT")  # the rows that are verified at all levels
EXPORTED = 3  # steps of a bar after training: export, run, verify


@dataclass(frozen=True)
class Budget:
    """How long to train, on how much, and at which widths.

    >>> Budget.quick().widths
    (4,)
    """

    epochs: int = 25
    more_epochs: int = 10
    widths: tuple[int, ...] = (8, 4, 2)
    train: int | None = None
    test: int | None = None

    @classmethod
    def quick(cls) -> "Budget":
        """Seconds, for tests."""
        return cls(epochs=3, more_epochs=1, widths=(4,), train=640, test=200)


@dataclass(frozen=True)
class _Setup:
    """What a run is about."""

    train: Pictures
    test: Pictures
    budget: Budget
    seed: int
    quick: bool

    @property
    def course(self) -> Course:
        return Course(self.train, self.budget.epochs, FIRST_RATE, 2 * self.seed)

    @property
    def more(self) -> Course:
        """The epochs that everybody gets."""
        return Course(self.train, self.budget.more_epochs, RATE, 2 * self.seed + 1)

    def levels(self, label: str) -> tuple[int, ...]:
        """How thoroughly a row is verified."""
        return (1, 2, 3) if label in THOROUGH and not self.quick else (1,)

    def facts(self, parameters: int) -> dict[str, str]:
        return {
            "network": f"{parameters:,} parameters: convolutions, depthwise blocks, two linear layers",
            "data": f"handwritten digits, {len(self.train):,} images to train on, {len(self.test):,} to test on",
            "training": f"{self.budget.epochs} epochs in float, {self.budget.more_epochs} more in float or quantized",
            "seed": str(self.seed),
        }


def hold(folder: Path, seed: int, *, quick: bool, say: Say | None, progress: Progress | None) -> DemoResult:
    """What ``run`` does once its arguments are checked.

    >>> hold.__name__
    'hold'
    """
    budget = Budget.quick() if quick else Budget()
    train, test = read_digits()
    setup = _Setup(train.first(budget.train or len(train)), test.first(budget.test or len(test)), budget, seed, quick)
    with repeatable(seed), tempfile.TemporaryDirectory(prefix="detent-demo-") as scratch:
        return _Contest(setup, Path(scratch), say, progress).run(folder)


class _Stage:
    """A bar of progress."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self.progress, self.label, self.total, self.done = progress, label, total, 0
        progress(label, 0, total)

    def step(self) -> None:
        self.done += 1
        self.progress(self.label, self.done, self.total)


class _Contest:
    """The state of one run."""

    def __init__(self, setup: _Setup, scratch: Path, say: Say | None, progress: Progress | None) -> None:
        self.setup, self.train, self.test, self.scratch = setup, setup.train, setup.test, scratch
        self.say, self.progress = say or _silent, progress or _silent
        self.example = torch.from_numpy(self.test.images[:2])
        self.rows: list[DemoRow] = []
        self.verifications: dict[str, VerifyReport] = {}
        self.float_logits: Logits = np.zeros((0, 0), np.float32)

    def run(self, folder: Path) -> DemoResult:
        network = make_network()
        facts = self.setup.facts(sum(each.numel() for each in network.parameters()))
        self.say(f"{facts['data']}; a network of {facts['network']}")
        checkpoint, trained = self._train_float(network)
        for bits in self.setup.budget.widths:
            self._quantize_after(trained, bits)
            self._quantize_aware(checkpoint, bits)
        stage = _Stage(self.progress, "report", 1)
        kept = Kept(self.scratch, folder, self.train, self.test, SHOWN, facts)
        result = keep(kept, tuple(self.rows), self.verifications, seed=self.setup.seed, quick=self.setup.quick)
        stage.step()
        self.say(f"written to {folder}: {', '.join(path.name for path in result.files)}")
        return result

    def _train_float(self, network: nn.Sequential) -> tuple[nn.Sequential, nn.Sequential]:
        """The network where QAT starts, and the same after the epochs that everybody gets."""
        stage = _Stage(self.progress, "float", self.setup.course.steps + self.setup.more.steps + EXPORTED - 1)
        checkpoint = self.setup.course.train(network, stage.step)
        trained = self.setup.more.train(copy.deepcopy(checkpoint), stage.step)
        path = export_float(trained, self.example, self._path("float"))
        stage.step()
        self.float_logits = logits_of(trained, self.test).numpy()
        self._add("float", None, path, self.float_logits)
        stage.step()
        return checkpoint, trained

    def _quantize_after(self, trained: nn.Sequential, bits: int) -> None:
        label = f"W{bits} PTQ"
        stage = _Stage(self.progress, label, 1 + EXPORTED)
        model = calibrated(copy.deepcopy(trained), Recipe.preset(f"w{bits}a8", mode=Fixed()), self.train)
        stage.step()
        self._export(label, f"w{bits}a8", model, stage, levels=(1,))

    def _quantize_aware(self, checkpoint: nn.Sequential, bits: int) -> None:
        label = f"W{bits} QAT"
        stage = _Stage(self.progress, label, self.setup.more.steps + EXPORTED)
        model = calibrated(copy.deepcopy(checkpoint), Recipe.preset(f"w{bits}a8", mode=Learned()), self.train)
        self.setup.more.train(model, stage.step)
        if (
            label == SHOWN and not self.setup.quick
        ):  # its own weights in float, so that the page can say what each layer loses
            bare = copy.deepcopy(model)
            qt.unprepare(bare)
            export_float(bare, self.example, self._path(f"{_slug(label)}-in-float"))
        self._export(label, f"w{bits}a8", model, stage, levels=self.setup.levels(label))

    def _export(self, label: str, recipe: str, model: nn.Sequential, stage: _Stage, levels: tuple[int, ...]) -> None:
        """Export, run and verify a quantized network."""
        qt.freeze(model)
        path = qt.export_onnx(model, self.example, self._path(_slug(label)))
        stage.step()
        report = self.verifications[label] = verify(model, path, self.test.batches(VERIFIED), levels=levels)
        stage.step()
        self._add(label, recipe, path, logits_of(model, self.test).numpy(), report)
        stage.step()

    def _path(self, name: str) -> Path:
        return self.scratch / f"demo-{name}.onnx"

    def _add(
        self, label: str, recipe: str | None, path: Path, logits: Logits, report: VerifyReport | None = None
    ) -> None:
        session = make_session(path, threads=1)
        said: Logits = session.run(None, {session.get_inputs()[0].name: self.test.images})[0]
        nbytes, labels = path.stat().st_size, self.test.labels
        row = DemoRow(
            label=label,
            recipe=recipe,
            accuracy_torch=_share(logits.argmax(1) == labels),
            accuracy_onnxruntime=_share(said.argmax(1) == labels),
            samples=len(labels),
            equal_predictions=int((said.argmax(1) == logits.argmax(1)).sum()),
            nbytes=nbytes,
            nbytes_float=self.rows[0].nbytes if self.rows else nbytes,
            sqnr_db=None if recipe is None else sqnr_db(self.float_logits, said),
            compared_codes=0 if report is None else report.compared_codes,
            differing_codes=0 if report is None else report.differing_codes,
        )
        self.rows.append(row)
        self.say(_line(row))


def _silent(*_: object) -> None:
    pass


def _slug(label: str) -> str:
    return label.lower().replace(" ", "-")


def _share(right: NDArray[np.bool_]) -> float:
    return float(right.mean())


def _line(row: DemoRow) -> str:
    said = f"{row.label}: {100 * row.accuracy_onnxruntime:.1f} % right in ONNX Runtime, {row.nbytes:,} bytes"
    if row.recipe is None:
        return said
    return f"{said}, {row.differing_codes} of {row.compared_codes} codes differ"
