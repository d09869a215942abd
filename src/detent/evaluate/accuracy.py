"""Accuracy of a quantized model relative to its float model, on held-out batches.

With 20 or more batches, every tenth batch is held out from calibration and used for evaluation. With fewer batches,
nothing is held out: evaluation uses the first eight calibration batches, and ``Split.is_held_out`` is False.

SQNR = 10 log10(sum x^2 / sum (x - y)^2) in dB, over all batches. x is an output of the float model, and y is the same
output of the quantized model. Only outputs of a float type have an SQNR. Top-1 agreement is the share of samples for
which both models predict the same class. It needs a first output with one row of class scores, or one label, per
sample. For outputs of integers or booleans, the share of equal elements is measured instead of an SQNR. An output is
not compared on batches for which the two models return different shapes; ``Accuracy.not_compared`` lists such outputs.
True labels are not used: all metrics compare the quantized model with the float model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from detent.errors import SpecError
from detent.metrics import OutputComparison, worst_output
from detent.onnx.pipeline import compare_outputs
from detent.onnx.quality_warnings import QuantizeWarning, accuracy_warnings
from detent.onnx_model.batches import Batches, BatchSource, open_batches
from detent.onnx_model.files import ModelSource, load_model
from detent.onnx_model.model_inputs import Feed
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors
from detent.tables import counted

__all__ = ["Accuracy", "Split", "check_supports_agreement", "measure_accuracy", "split_batches"]

MIN_BATCHES_TO_HOLD_OUT = 20  # with fewer batches, calibration needs all of them
HELD_OUT_EVERY = 10
EVALUATION_BATCHES = 8  # calibration batches to evaluate on if nothing is held out


@dataclass(frozen=True)
class Split:
    """Batches for calibration and batches for evaluation, from ``split_batches``."""

    calibration: Batches
    evaluation: Batches
    is_held_out: bool  # True if no evaluation batch is used for calibration

    def check(self) -> Feed:
        """Read the held-out batches and the first calibration batch, and return this one.

        A damaged file among the held-out batches is then an error before anything is written.
        """
        if self.is_held_out:
            for _ in self.evaluation:
                pass
        return self.calibration.check_first()

    def __str__(self) -> str:
        if self.is_held_out:
            return f"{self.evaluation.count:,} held-out batches"
        return f"{counted(self.evaluation.count or 0, 'calibration batch', ',')} (nothing held out)"


def split_batches(model: ModelSource, data: BatchSource, batch_size: int | None = None) -> Split:
    """Split data into calibration and held-out batches, without reading the data.

    Only data without a length, such as a callable, are read once to count the batches.

    Args:
        model: the model that will run on the data.
        data: batches, a file or a directory; see ``qo.quantize``. An iterator cannot be split.
        batch_size: samples per batch of files; None uses the model's fixed batch size, or 1 if the batch axis is
            dynamic.

    Raises:
        SpecError: the data can be read only once.
        FileFormatError, ShapeError, DtypeError: the data are malformed, or do not fit the model.

    >>> import numpy as np
    >>> from onnx import parser
    >>> model = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] y) { y = Abs(x) }')
    >>> split = split_batches(model, [np.zeros((1, 2), np.float32)] * 30)
    >>> split.calibration.count, list(split.evaluation.numbers), str(split)
    (27, [9, 19, 29], '3 held-out batches')
    """
    batches = open_batches(data, load_model(model).inputs, batch_size).with_count()
    numbers = range(batches.count or 0)
    if len(numbers) < MIN_BATCHES_TO_HOLD_OUT:
        return Split(batches, batches.first(EVALUATION_BATCHES), is_held_out=False)
    held_out = numbers[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    rest = [number for number in numbers if number not in held_out]
    return Split(batches.subset(rest), batches.subset(held_out), is_held_out=True)


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a quantized model relative to its float model.

    Attributes:
        outputs_sqnr_db: maps the name of each float output to its SQNR over all batches.
        agreement: top-1 agreement, from 0 to 1; None if the first output has neither class scores nor labels.
        batches: number of batches that were compared.
        outputs_equal: maps the name of each output of integers or booleans to its share of equal elements.
        not_compared: maps the name of each output that was not compared on some batches to the reason.
        samples: number of samples that were compared.
        sqnr_interval_db: 95 % confidence interval of the lowest SQNR, from the standard error over samples; None with
            fewer than two samples.
        agreement_interval: 95 % confidence interval (Wilson) of the top-1 agreement; None if ``agreement`` is None.
        warnings: warnings about a low SQNR or a low top-1 agreement.

    >>> accuracy = Accuracy({"y": 41.0, "z": 30.5}, 1.0, 3)
    >>> accuracy.worst_output, accuracy.sqnr_db
    ('z', 30.5)
    """

    outputs_sqnr_db: Mapping[str, float]
    agreement: float | None
    batches: int
    outputs_equal: Mapping[str, float] = field(default_factory=dict)
    not_compared: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    sqnr_interval_db: tuple[float, float] | None = None
    agreement_interval: tuple[float, float] | None = None
    warnings: tuple[QuantizeWarning, ...] = ()

    @property
    def worst_output(self) -> str:
        """Name of the output with the lowest SQNR, or "" if no output has a float type."""
        return worst_output(self.outputs_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """Lowest SQNR of all outputs, or None if no output has a float type."""
        return self.outputs_sqnr_db.get(self.worst_output)


def measure_accuracy(source: ModelSource, artifact: ModelSource, data: BatchSource) -> Accuracy:
    """Run a float model and its quantized model on the same batches, and compare their outputs.

    Raises:
        UnsupportedError: ONNX Runtime cannot run one of the models.
        SpecError, ShapeError, DtypeError: the data do not fit the model.

    >>> import numpy as np
    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x) => (float[1,2] y) { y = OP(x) }'
    >>> models = [parser.parse_model(text.replace("OP", name)) for name in ("Identity", "Round")]
    >>> accuracy = measure_accuracy(*models, [np.float32([[1.1, 2.0]])])
    >>> round(accuracy.sqnr_db, 1), accuracy.agreement
    (27.2, 1.0)
    """
    float_model, quantized = load_model(source), load_model(artifact)
    names = array_outputs(quantized.proto)
    comparison = compare_outputs(float_model, quantized, names, open_batches(data, float_model.inputs))
    return Accuracy(
        comparison.sqnr_db,
        comparison.agreement,
        comparison.batches,
        comparison.equal_shares,
        comparison.not_compared,
        comparison.samples,
        comparison.sqnr_interval_db(worst_output(comparison.sqnr_db)),
        comparison.agreement_interval,
        tuple(accuracy_warnings(comparison)),
    )


def check_supports_agreement(source: ModelSource, feed: Feed) -> None:
    """Run the float model on one batch, and check that top-1 agreement can be computed from the first output.

    The check runs before quantization. So a command with a limit on the agreement fails early if there is no agreement.

    Raises:
        SpecError: the first output has neither one row of class scores nor one label per sample.
    """
    model = load_model(source)
    names = array_outputs(model.proto)[:1]
    session, comparison = make_session(model), OutputComparison(names)
    with ort_errors():
        outputs = session.run(names, feed) if names else []
    comparison.add(outputs, outputs)
    if comparison.agreement is None:
        problem = f"the first output has shape {outputs[0].shape}" if outputs else "no output is an array"
        raise SpecError(
            f"{problem}, but top-1 agreement needs class scores or a label per sample: set a limit for the SQNR instead"
        )
