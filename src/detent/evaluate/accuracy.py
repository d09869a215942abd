"""Accuracy of a quantized model beside its float model, on batches that did not calibrate it.

With 20 or more batches, every tenth is held out from calibration; the choice depends only on their number. With fewer,
the first calibration batches are used again, and ``Split.is_held_out`` is False.

Per float output x and its quantized twin y, over all batches: SQNR = 10 log10(sum x^2 / sum (x - y)^2) in dB. Top-1
agreement is the share of samples with the same largest class, where the first output holds one row of class scores per
sample. Labels are not used: what is measured is the distance from the float model, not from the truth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from detent.errors import SpecError
from detent.metrics import OutputComparison, worst_output
from detent.onnx_model.batches import Batches, BatchSource, Feed, open_batches
from detent.onnx_model.files import ModelSource, load_model
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors

__all__ = ["Accuracy", "Split", "check_supports_agreement", "measure_accuracy", "split_batches"]

MIN_BATCHES_TO_HOLD_OUT = 20
HELD_OUT_EVERY = 10
EVALUATION_BATCHES = 8  # when nothing is held out


@dataclass(frozen=True)
class Split:
    """Batches split into a calibration and an evaluation part; ``split_batches`` makes one."""

    calibration: Batches
    evaluation: Batches
    is_held_out: bool  # no evaluation batch is a calibration batch

    def __str__(self) -> str:
        if self.is_held_out:
            return f"{self.evaluation.count:,} held-out batches"
        return f"{self.evaluation.count:,} calibration batches (nothing held out)"


def split_batches(model: ModelSource, data: BatchSource, batch_size: int | None = None) -> Split:
    """Split data into calibration and held-out batches, without reading them.

    Args:
        model: the model whose inputs the data are.
        data: batches, an .npz or .npy file, or a directory of them; see ``qo.quantize``. An iterator cannot be split.
        batch_size: samples of an .npz or .npy file per batch; None for as many as the model fixes, or 1.

    Raises:
        SpecError: the number of batches is not known, or they can be read only once.
        FileFormatError, ShapeError, DtypeError: the data are damaged, or do not fit the model.

    >>> import numpy as np
    >>> from onnx import parser
    >>> model = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] y) { y = Abs(x) }')
    >>> split = split_batches(model, [np.zeros((1, 2), np.float32)] * 30)
    >>> split.calibration.count, list(split.evaluation.numbers), str(split)
    (27, [9, 19, 29], '3 held-out batches')
    """
    batches = open_batches(data, load_model(model).inputs, batch_size)
    if batches.count is None or not batches.is_repeatable:
        raise SpecError(
            "the data cannot be split: their number of batches is not known, or they can be read only once; give a "
            "list, a file or a directory"
        )
    numbers = range(batches.count)
    if batches.count < MIN_BATCHES_TO_HOLD_OUT:
        return Split(batches, batches.first(EVALUATION_BATCHES), is_held_out=False)
    held_out = numbers[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    rest = [number for number in numbers if number not in held_out]
    return Split(batches.subset(rest), batches.subset(held_out), is_held_out=True)


@dataclass(frozen=True)
class Accuracy:
    """How close the outputs of a quantized model are to those of its float model.

    >>> accuracy = Accuracy({"y": 41.0, "z": 30.5}, 1.0, 3)
    >>> accuracy.worst_output, accuracy.sqnr_db
    ('z', 30.5)
    """

    outputs_sqnr_db: Mapping[str, float]  # of each float output, over all batches
    agreement: float | None  # top-1 agreement; None where the first output holds no class scores
    batches: int

    @property
    def worst_output(self) -> str:
        """The float output with the lowest SQNR; "" where there is no float output."""
        return worst_output(self.outputs_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the worst float output."""
        return self.outputs_sqnr_db.get(self.worst_output)


def measure_accuracy(source: ModelSource, artifact: ModelSource, data: BatchSource) -> Accuracy:
    """Run a float model and its quantized model on the same batches, and compare their outputs.

    Raises:
        UnsupportedError: ONNX Runtime does not run one of them.
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
    sessions = make_session(float_model), make_session(quantized)
    names, count = array_outputs(quantized.proto), 0
    comparison = OutputComparison(names)
    for feed in open_batches(data, float_model.inputs):
        with ort_errors():
            outputs = [session.run(names, feed) if names else [] for session in sessions]
        comparison.add(*outputs)
        count += 1
    return Accuracy(comparison.sqnr_db, comparison.agreement, count)


def check_supports_agreement(source: ModelSource, feed: Feed) -> None:
    """Raise now rather than after quantization if top-1 agreement cannot be measured.

    Raises:
        SpecError: the first output does not hold one row of class scores per sample.
    """
    model = load_model(source)
    names = array_outputs(model.proto)[:1]
    session, comparison = make_session(model), OutputComparison(names)
    with ort_errors():
        outputs = session.run(names, feed) if names else []
    comparison.add(outputs, outputs)
    if comparison.agreement is None:
        found = f"the first output has shape {outputs[0].shape}" if outputs else "no output is an array"
        raise SpecError(f"{found}: agreement needs one row of class scores per sample, so set a limit for the SQNR")
