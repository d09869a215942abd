"""Evidence: what verification and sensitivity found, as parts of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from detent.errors import SpecError
from detent.proof.report import VerifyReport
from detent.report.distributions import short
from detent.spec import QuantSpec

if TYPE_CHECKING:
    from detent.sensitivity import Mix, Sensitivity

__all__ = [
    "Budget",
    "KernelRow",
    "LayerSensitivity",
    "Run",
    "SensitivityFacts",
    "VerificationFacts",
    "option_of",
    "sensitivity_facts",
    "verification_facts",
]

CURVE_POINTS = 256


@dataclass(frozen=True)
class LayerSensitivity:
    """The noise that one layer causes alone.

    Attributes:
        name, type: of the layer.
        noise: at the outputs, relative to their power, by option.
        nbytes: of its weight, by option.
        chosen: the option of the mix, "" without one.

    >>> LayerSensitivity("fc", "Gemm", {"w8a8": 1e-4}, {"w8a8": 64}).chosen
    ''
    """

    name: str
    type: str
    noise: Mapping[str, float]
    nbytes: Mapping[str, int]
    chosen: str = ""


@dataclass(frozen=True)
class Budget:
    """A choice of bits under a budget.

    >>> Budget(1024, 31.5).measured_sqnr_db is None
    True
    """

    nbytes: int
    predicted_sqnr_db: float
    measured_sqnr_db: float | None = None


@dataclass(frozen=True)
class SensitivityFacts:
    """The noise of layers one by one, and what bytes buy.

    Attributes:
        options: what was tried.
        layers: worst first.
        curve: bytes and predicted SQNR.
        mix: the choice that was made.

    >>> SensitivityFacts(("w8a8",), (), ()).mix is None
    True
    """

    options: tuple[str, ...]
    layers: tuple[LayerSensitivity, ...]
    curve: tuple[tuple[int, float], ...]
    mix: Budget | None = None


@dataclass(frozen=True)
class Run:
    """Level 2: source and file from end to end, in one way to run it.

    >>> Run("optimised", 100, 1, 1, "fc_Q", {"y": 40.0}).agreement is None
    True
    """

    name: str
    compared_codes: int
    differing_codes: int
    max_steps: int
    first_node: str
    output_sqnr_db: Mapping[str, float]
    agreement: float | None = None
    cause: str = ""


@dataclass(frozen=True)
class KernelRow:
    """Level 3: an integer kernel beside exact arithmetic.

    >>> KernelRow("conv1", "QLinearConv", 1568, 0, 0, False).differing
    0
    """

    node: str
    kernel: str
    compared: int
    differing: int
    max_steps: int
    saturated: bool


@dataclass(frozen=True)
class VerificationFacts:
    """What ``dt.verify`` found.

    >>> VerificationFacts(True, (1,), 1, 100, 0).first_difference
    ''
    """

    ok: bool
    levels: tuple[int, ...]
    batches: int
    compared_codes: int
    differing_codes: int
    first_difference: str = ""
    runs: tuple[Run, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    saturation: str = ""
    notes: tuple[str, ...] = ()


def verification_facts(report: VerifyReport) -> VerificationFacts:
    """A verification as a part of a report.

    >>> verification_facts(VerifyReport((1,), 1, 100, 0)).ok
    True
    """
    runs = tuple(
        Run(
            name,
            each.compared_codes,
            each.differing_codes,
            each.max_steps,
            each.first_node or "",
            {output: short(db) for output, db in each.output_sqnr_db.items()},
            each.agreement,
            each.cause,
        )
        for name, each in report.end_to_end.items()
    )
    return VerificationFacts(
        report.ok,
        tuple(report.levels),
        report.batches,
        report.compared_codes,
        report.differing_codes,
        "" if report.first_difference is None else str(report.first_difference),
        runs,
        tuple(KernelRow(*each) for each in report.kernels),
        "" if report.saturation is None else str(report.saturation),
        tuple(report.notes),
    )


def sensitivity_facts(found: "Sensitivity | None", mix: "Mix | None") -> SensitivityFacts | None:
    """A sensitivity, and a mix that was chosen with it, as a part of a report; None without the former.

    >>> sensitivity_facts(None, None) is None
    True
    """
    if found is None:
        return None
    chosen = {} if mix is None else dict(mix.options)
    layers = [
        LayerSensitivity(
            each.name,
            each.type,
            {str(option): short(float(noise)) for option, noise in each.noise.items()},
            {str(option): int(size) for option, size in each.nbytes.items()},
            str(chosen.get(each.name, "")),
        )
        for each in found.layers
    ]
    layers.sort(key=lambda each: -max(each.noise.values(), default=0.0))
    curve = [(int(size), short(float(db))) for size, db in found.curve()]
    budget = None
    if mix is not None:
        measured = None if mix.measured_sqnr_db is None else short(float(mix.measured_sqnr_db))
        budget = Budget(int(mix.nbytes), short(float(mix.predicted_sqnr_db)), measured)
    step = -(-len(curve) // CURVE_POINTS) or 1
    kept = curve[:-1:step] + curve[-1:] if step > 1 else curve
    return SensitivityFacts(tuple(map(str, found.options)), tuple(layers), tuple(kept), budget)


def option_of(spec: str, options: Sequence[str]) -> str:
    """The option that a weight of that spec was measured with, "" where there is none, or no telling which.

    Options are as a user says them, the spec is as the layer has it: its axis is the one of the layer's outputs, and
    it says all that options leave out.

    >>> option_of("int8/axis1/symmetric/onnx", ("int2/axis0", "int8/axis0"))
    'int8/axis0'
    >>> option_of("int4/group32@0/symmetric/onnx", ("int4/group3", "int4/group32"))
    'int4/group32'
    >>> option_of("int3/axis1/symmetric/onnx", ("int2/axis0", "int8/axis0"))
    ''
    """
    wanted = _parsed(spec)
    if wanted is None:
        return ""
    parsed = {option: each for option in options if (each := _parsed(option)) is not None}
    like = [option for option, each in parsed.items() if _key(each) == _key(wanted)]
    if len(like) > 1:  # symmetric and affine ones, say
        like = [option for option in like if replace(parsed[option], granularity=wanted.granularity) == wanted]
    return like[0] if len(like) == 1 else ""


def _parsed(text: str) -> QuantSpec | None:
    try:
        return QuantSpec.parse(text)
    except SpecError:
        return None


def _key(spec: QuantSpec) -> tuple[object, ...]:
    """The format and how many elements share a scale, wherever they lie."""
    about = spec.granularity.to_dict()
    return spec.format.name, about["kind"], about.get("size"), str(about.get("sizes"))
