"""Comparison of one float network with its quantized versions, all trained for the same epochs on the same images.

::

    float  ------ epochs ------+------ more epochs ------+--> float
                               |                         +--> PTQ   calibrated, not trained
                               +-- more epochs, quantized --> QAT   scales learned with the weights

Each is exported, run in ONNX Runtime and verified. The float network is exported too, for its size, as an input of
``detent quantize``, and to compare layers with; its batch norms are folded before, as in quantized files, so that both
have the same tensors by the same names. Files are written when all else is done.
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
from detent.demo.network import Course, Pictures, calibrated, logits_of, make_network, read_digits, repeatable
from detent.demo.result import COLUMNS, DemoResult, DemoRow
from detent.errors import UnsupportedError
from detent.metrics import sqnr_db
from detent.onnx_model import load, make_session, save
from detent.recipe import Recipe
from detent.scale_mode import Fixed, Learned
from detent.storage import write_atomic
from detent.torch import export_graph
from detent.torch.onnx_export import quiet_exporter
from detent.verification import VerifyReport, verify

__all__ = ["Budget", "Kept", "export_float", "hold", "keep", "without_norms"]

OPSET = 21


def without_norms(model: nn.Sequential) -> nn.Sequential:
    """A copy in evaluation mode, in which convolutions have taken up the batch norms that follow them.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU())
    >>> [type(each).__name__ for each in without_norms(model)]
    ['Conv2d', 'ReLU']
    """
    made: dict[str, nn.Module] = {}
    last = ""
    for name, each in copy.deepcopy(model).eval().named_children():
        before = made.get(last)
        if isinstance(each, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
            made[last] = fuse_conv_bn_eval(before, each)
            continue
        made[name], last = each, name
    return nn.Sequential(OrderedDict(made)).eval()


def export_float(model: nn.Sequential, example: Tensor, path: Path) -> Path:
    """Write a float model as an ONNX file, tidied as quantized ones are, so that sizes compare.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = export_float(nn.Sequential(nn.Linear(4, 2)), torch.ones(2, 4), Path(folder, "float.onnx"))
    ...     [node.op_type for node in load(path).graph.node]
    ['Gemm']
    """
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            without_norms(model),
            (example,),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=({0: torch.export.Dim.AUTO},),
            output_names=["output"],
            verbose=False,
        )
    if program is None:
        raise UnsupportedError("torch.onnx.export returned nothing")
    version: str = import_module("detent").__version__  # by name: the package holds what lies above this layer, too
    save(load(export_graph.finalize(export_graph.clean(program.model_proto), version)), path)
    return path


PAGE, CALIBRATION = "demo-report.html", "demo-calibration.npz"
LOOKED_AT = 100  # images per batch of the page's figures
ABOUT_SQNR = "of logits against float's; QAT has weights of its own, so judge it by its accuracy"
UNBROKEN = "\u00a0"  # a space at which no line ends
CALIBRATED = 256  # images that are kept


@dataclass(frozen=True)
class Kept:
    """Where files are, where they go, and what the page says.

    Attributes:
        scratch: the folder of the exported files.
        folder: where to.
        train, test: the images that networks were trained and tested on.
        label: the row whose file is kept.
        facts: for the page.

    >>> kept = Kept(Path("a"), Path("b"), None, None, "W4 QAT", {})
    >>> kept.names
    ('demo-float.onnx', 'demo-w4-qat.onnx')
    """

    scratch: Path
    folder: Path
    train: Pictures
    test: Pictures
    label: str
    facts: Mapping[str, str]

    @property
    def names(self) -> tuple[str, str]:
        """The models that are kept: float, and quantized."""
        return "demo-float.onnx", f"demo-{self.label.lower().replace(' ', '-')}.onnx"


def keep(
    kept: Kept, rows: tuple[DemoRow, ...], verifications: Mapping[str, VerifyReport], *, seed: int, quick: bool
) -> DemoResult:
    """Write the page, the float and the quantized model, and images to calibrate with; the result names them."""
    page, data = kept.folder / PAGE, kept.folder / CALIBRATION
    models = tuple(kept.folder / name for name in kept.names)
    result = DemoResult(rows, verifications, page, (page, *models, data), kept.label, seed, quick, kept.facts)
    built = _page(kept, result)
    for path in models:
        write_atomic(path, (kept.scratch / path.name).read_bytes())
    write_atomic(data, _npz(kept.train.first(CALIBRATED)))
    built.save(page)
    return result


def _page(kept: Kept, result: DemoResult) -> qr.Report:
    artifact = kept.scratch / kept.names[1]
    source = artifact.with_name(f"{artifact.stem}-in-float.onnx")
    table = qr.Table(
        "Accuracy, size and proof: float, quantized after training (PTQ), trained quantized (QAT)",
        ("network", *COLUMNS[1:]),
        tuple(tuple(cell.replace(" ", UNBROKEN) for cell in row.cells()) for row in result.rows),
    )
    return qr.build(
        artifact,
        kept.test.batches(LOOKED_AT),
        source=source if source.exists() else None,
        verification=result.verification,
        title=f"detent demo: handwritten digits, {kept.label}",
        facts={**kept.facts, "all files": result.codes_line(), "SQNR": ABOUT_SQNR},
        tables=(table,),
        command="detent demo" if not result.seed else f"detent demo --seed {result.seed}",
    )


def _npz(pictures: Pictures) -> bytes:
    """The images by the name of the models' input, and nothing else: what ``detent quantize --data`` reads."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, input=pictures.images)
    return buffer.getvalue()


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
    """What ``run`` does once its arguments are checked."""
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
