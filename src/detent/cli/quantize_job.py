"""Job: one model that is quantized and judged; the parts of ``detent quantize``.

Verdict: what a quantized file is worth, as far as it was asked for.

Summary: what ``detent quantize`` says at its end, for people and for machines.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import detent.onnx as qo
from detent.cli.screen import Screen
from detent.errors import DetentError
from detent.evaluate.accuracy import Accuracy, Split, check_has_classes, judge, split
from detent.evaluate.dry_run import Rehearsal, rehearse
from detent.evaluate.speed import Timing, made_up_feed, race
from detent.metrics import worst_output
from detent.onnx.pipeline import LayerReport, QuantizeReport
from detent.onnx_model import Provenance, get_target, load
from detent.onnx_model.batches import inputs_of
from detent.onnx_model.targets import faster, has_avx2, has_vnni, mismatch
from detent.recipe import get_recipe
from detent.report.html import skip_argument
from detent.rule import get_observer_spec
from detent.tables import bytes_text
from detent.verification import VerifyReport, verify

__all__ = [
    "Hurting",
    "Job",
    "Verdict",
    "Wish",
    "facts_of",
    "rehearsal_document",
    "result_document",
    "show_rehearsal",
    "show_result",
]


class Wish(NamedTuple):
    """Which parts are wanted.

    >>> Wish(bench=False).verify
    True
    """

    verify: bool = True
    bench: bool = True
    rank: bool = True


class Hurting(NamedTuple):
    """A layer and its share of the noise at the outputs.

    >>> Hurting("fc", 0.4).flag
    '--skip fc'
    """

    name: str
    share: float

    @property
    def flag(self) -> str:
        """What leaves it in float."""
        return f"--skip {skip_argument(self.name)}"


@dataclass(frozen=True)
class Verdict:
    """What the result is worth.

    Attributes:
        accuracy: of the outputs; None without data.
        timing: of both models.
        verification: of a few batches.
        hurting: the layers that cause the most noise, worst first.
        sensitivity: where those come from, a ``detent.sensitivity.Sensitivity``.
        report: the page that was written.
        hints: what may be done better.

    >>> Verdict(Accuracy({"y": 20.0}, 0.9, 3)).missed(30.0, 0.8)
    ['the SQNR of output y is 20.0 dB, below the limit of 30 dB']
    """

    accuracy: Accuracy | None = None
    timing: Timing | None = None
    verification: VerifyReport | None = None
    hurting: tuple[Hurting, ...] = ()
    sensitivity: object = field(default=None, repr=False)
    report: Path | None = None
    hints: tuple[str, ...] = ()

    def missed(self, sqnr_db: float | None, agreement: float | None) -> list[str]:
        """The limits that are not kept, and codes that differ."""
        found, near = [], self.accuracy
        if sqnr_db is not None and (near is None or near.sqnr_db is None or not near.sqnr_db >= sqnr_db):
            known = near is not None and near.sqnr_db is not None
            got = f"of output {near.worst_output} is {near.sqnr_db:.1f} dB" if near and known else "is not known"
            found.append(f"the SQNR {got}, below the limit of {sqnr_db:g} dB")
        if agreement is not None and (near is None or near.agreement is None or near.agreement < agreement):
            got = "not known" if near is None or near.agreement is None else f"{near.agreement:.4g}"
            found.append(f"the agreement is {got}, below the limit of {agreement:g}")
        if self.verification is not None and not self.verification.ok:
            found.append("the file does not compute what its source computes")
        return found


OUTPUTS = 4  # whose noise is shown
NAMED = 3  # layers that are not in integers
STEPS = 6  # that are told


def facts_of(made: QuantizeReport, verdict: Verdict, split: Split | None) -> list[tuple[str, str]]:
    """What there is to say, by label.

    >>> from detent.onnx.graph_plan import GraphPlan
    >>> from detent.onnx_model import get_target
    >>> from detent.recipe import Recipe
    >>> plan = GraphPlan(Recipe([]), get_target("openvino"), (), None)
    >>> facts_of(QuantizeReport(Path("a.onnx"), plan, 8, 2, (), None, {}, 1.0), Verdict(), None)
    [('size', '8 B -> 2 B (25.0 %)'), ('outputs', 'not compared: give --data'), ('layers in integers', '0 of 0')]
    """
    share = 100 * made.nbytes_after / max(1, made.nbytes_before)
    facts = [("size", f"{bytes_text(made.nbytes_before)} -> {bytes_text(made.nbytes_after)} ({share:.1f} %)")]
    if verdict.accuracy is None:
        facts.append(("outputs", "not compared: give --data"))
    else:
        facts += _accuracy_facts(verdict.accuracy, f"on {split}")
    if verdict.timing is not None:
        facts.append(("time", str(verdict.timing)))
    outside = [layer for layer in made.layers if not layer.in_integers]
    facts.append(("layers in integers", f"{len(made.layers) - len(outside):,} of {len(made.layers):,}"))
    if len(outside) <= NAMED:
        facts += [("not in integers", f"{layer.name}: {_why(layer)}") for layer in outside]
    return facts


def _why(layer: LayerReport) -> str:
    """Why a layer is not computed in integers."""
    if layer.reason:
        return layer.reason
    if not layer.input:
        return "its input is float"
    return layer.note or f"ONNX Runtime has it as {layer.kernel or layer.type} on this machine"


def _accuracy_facts(accuracy: Accuracy, where: str) -> list[tuple[str, str]]:
    known = accuracy.outputs_sqnr_db
    ordered = sorted(known, key=lambda name: name != accuracy.worst_output)  # the one that limits look at comes first
    facts = [
        ("SQNR" if len(known) == 1 else f"SQNR of {name}", f"{known[name]:.1f} dB{f', {where}' if i == 0 else ''}")
        for i, name in enumerate(ordered[:OUTPUTS])
    ]
    if len(known) > OUTPUTS:
        facts.append(("SQNR of others", f"{len(known) - OUTPUTS:,} more, which --json lists"))
    if accuracy.agreement is not None:
        facts.append(("agreement", f"{100 * accuracy.agreement:.2f} %, {where}"))
    return facts


def show_result(screen: Screen, made: QuantizeReport, verdict: Verdict, split: Split | None) -> None:
    """Print it.

    >>> from detent.onnx.graph_plan import GraphPlan
    >>> from detent.onnx_model import get_target
    >>> from detent.recipe import Recipe
    >>> plan = GraphPlan(Recipe([]), get_target("openvino"), (), None)
    >>> show_result(Screen(), QuantizeReport(Path("a.onnx"), plan, 8, 2, (), None, {}, 1.0), Verdict(), None)
    a.onnx
      size:                8 B -> 2 B (25.0 %)
      outputs:             not compared: give --data
      layers in integers:  0 of 0
    """
    _note_steps(screen, made.steps)
    for hint in (*made.hints, *verdict.hints):
        screen.note(f"hint: {hint}")
    screen.say(str(made.output), style="bold")
    for name, text in facts_of(made, verdict, split):
        screen.say(f"  {name + ':':<20} {text}")
    proof = verdict.verification
    if proof is not None:
        screen.say(f"codes that differ: {proof.differing_codes} of {proof.compared_codes}")
        if proof.first_difference is not None or proof.saturation is not None:
            screen.say(f"  first: {proof.first_difference or proof.saturation}")
    if verdict.hurting:
        screen.say("layers that hurt most, and what leaves them in float:")
        for each in verdict.hurting:
            screen.say(f"  {_percent(each.share)} of the noise  {each.flag}")
    if verdict.report is not None:
        screen.say(f"report: {verdict.report}")


def _note_steps(screen: Screen, steps: Sequence[str]) -> None:
    # The last ones say which layers stay float.
    for step in steps[-STEPS:]:
        screen.note(step)
    if len(steps) > STEPS:
        screen.note(f"and {len(steps) - STEPS:,} steps before these, which --json lists")


def _percent(share: float) -> str:
    return " <1 %" if share < 0.01 else f"{100 * share:3.0f} %"


def result_document(made: QuantizeReport, verdict: Verdict, split: Split | None) -> dict[str, Any]:
    """The same for machines.

    >>> import tempfile, numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = qo.quantize(model, f"{folder}/small.onnx", [np.float32([[2.0]])])
    ...     result_document(made, Verdict(), None)["layers_in_integers"]
    1
    """
    accuracy, timing, proof = verdict.accuracy, verdict.timing, verdict.verification
    about = Provenance.read(load(made.output))
    document = json.loads(made.to_json())
    before = document.pop("outputs_sqnr_db")
    del document["output_sqnr_db"]  # of the batches that calibrated: sqnr_db is the figure that counts
    return {
        **document,
        "hints": [*made.hints, *verdict.hints],
        "calibration_sqnr_db": before.get(worst_output(before)),
        "calibration_sqnr_db_by_output": before,
        "layers_in_integers": sum(layer.in_integers for layer in made.layers),
        "data_sha256": None if about is None or not about.data else about.data,
        "made_by": None if about is None else about.made_by,
        "calibration_batches": None if split is None else len(split.calibration),
        "judged_batches": None if accuracy is None else accuracy.batches,
        "judged_on_held_back": None if split is None else split.is_held_back,
        "sqnr_db": None if accuracy is None else accuracy.sqnr_db,
        "sqnr_db_output": None if accuracy is None else accuracy.worst_output or None,
        "sqnr_db_by_output": None if accuracy is None else dict(accuracy.outputs_sqnr_db),
        "agreement": None if accuracy is None else accuracy.agreement,
        "ms_float": None if timing is None else timing.first_ms,
        "ms_quantized": None if timing is None else timing.second_ms,
        "compared_codes": None if proof is None else proof.compared_codes,
        "differing_codes": None if proof is None else proof.differing_codes,
        "verified": None if proof is None else proof.ok,
        "hurting": [{"layer": each.name, "share": each.share, "flag": each.flag} for each in verdict.hurting],
        "report": None if verdict.report is None else str(verdict.report),
    }


def show_rehearsal(screen: Screen, found: Rehearsal, output: Path, *, force: bool = False) -> None:
    """Print the plan, and what it would take.

    >>> show_rehearsal(Screen(), Rehearsal(8, 2, 100 << 20, 3.0, 8, 18, 0.5, (), ()), Path("a.onnx"))
    a.onnx (not written)
      size:    8 B -> 2 B
      memory:  at most 151 MB while quantizing
      time:    about 8 s, then judging
    """
    rows = [
        (
            each["name"],
            each["type"],
            each["weight"].partition("/")[0] or "float",
            each["input"].partition("/")[0] or "float",
            bytes_text(each["nbytes_before"]),
            bytes_text(each["nbytes_after"]),
            each["reason"] or each["note"],
        )
        for each in found.layers
    ]
    if rows:
        columns = ("layer", "type", "weight", "input", "before", "after", "why not")
        screen.table(columns, rows, right=(4, 5), fold=(0, 6))
    _note_steps(screen, found.steps)
    bound = found.memory_bound
    screen.say(f"{output} (not written)", style="bold")
    if output.exists() and not force:
        screen.say("  exists already: needs --force")
    screen.say(f"  size:    {bytes_text(found.nbytes_before)} -> {bytes_text(found.nbytes_after)}")
    screen.say(
        f"  memory:  {'not known on this system' if bound is None else f'at most {bytes_text(bound)} while quantizing'}"
    )
    seconds = found.seconds_in_all
    screen.say(f"  time:    about {f'{seconds:,.0f} s' if seconds >= 1 else 'a second or less'}, then judging")


def rehearsal_document(found: Rehearsal, output: Path) -> dict[str, Any]:
    """The same for machines.

    >>> rehearsal_document(Rehearsal(8, 2, 100 << 20, 3.0, 8, 18, 0.5, (), ()), Path("a.onnx"))["nbytes_after"]
    2
    """
    return {
        "dry_run": True,
        "output": str(output),
        "output_exists": output.exists(),
        "nbytes_before": found.nbytes_before,
        "nbytes_after": found.nbytes_after,
        "memory_bytes": found.memory_bound,
        "seconds": found.seconds_in_all,
        "calibration_batches": found.batches_in_all,
        "layers": [dict(each) for each in found.layers],
        "steps": list(found.steps),
    }


VERIFIED, RANKED, REPORTED = 2, 4, 4  # batches
WORST = 3  # layers
PATIENCE = 20.0  # seconds for ranking layers, or as many as quantizing took


class _TooLongError(Exception):
    """Ranking layers would take longer than quantizing."""


class Job:
    """A model and what is to be done with it.

    Args:
        model, output: files.
        data: a file or folder; None for weight-only recipes.
        batch_size: samples of an .npz per batch.
        options: of ``qo.quantize``.
        screen: where progress is shown.

    Raises:
        SpecError: a recipe, a target or an observer that does not exist; nothing is read before.

    >>> import tempfile
    >>> from onnx import parser
    >>> from detent.onnx_model import save
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(made, f"{folder}/a.onnx")
    ...     options = {"recipe": "w8a16", "target": "onnxruntime", "observer": None}
    ...     job = Job(Path(folder, "a.onnx"), Path(folder, "b.onnx"), None, None, options, Screen(quiet=True))
    ...     job.check(agreement=False)
    ...     planned = job.rehearse()
    ...     result = job.run()
    ...     verdict = job.judge(result, Wish(bench=False))
    ...     job.write_report(result, verdict, Path(folder, "report.json"))
    >>> result.layers[0].weight, verdict.accuracy, planned.nbytes_after == result.nbytes_after, job.idle(result)
    ('int8/axis1/symmetric/onnx', None, True, [])
    """

    def __init__(
        self,
        model: Path,
        output: Path,
        data: Path | None,
        batch_size: int | None,
        options: Mapping[str, Any],
        screen: Screen,
    ) -> None:
        self.model, self.output, self.data, self.batch_size = model, output, data, batch_size
        self.options, self.screen = dict(options), screen
        self.split: Split | None = None
        self.warnings: list[str] = []
        get_recipe(options["recipe"])
        get_target(options["target"])
        if options["observer"] is not None:
            get_observer_spec(options["observer"])

    def check(self, *, agreement: bool) -> None:
        """Look at model and data before anything takes long, and warn of a target for another CPU."""
        if self.data is not None:
            self.split = split(self.data, inputs_of(load(self.model)), self.batch_size)
            first = next(iter(self.split.calibration))
            if agreement:
                check_has_classes(self.model, first)
        why = mismatch(self.options["target"], has_vnni())
        if why:
            self._warn(why)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.screen.warn(text)

    def rehearse(self) -> Rehearsal:
        """Find out what it would take, in another process."""
        chosen = () if self.split is None else self.split.calibration.chosen
        self.screen.note("rehearsing with the first batches in another process")
        options = {name: value for name, value in self.options.items() if name != "checkpoint"}
        data = None if self.data is None else str(self.data)
        return rehearse(str(self.model), data, chosen, self.batch_size, options)

    def run(self) -> QuantizeReport:
        """Quantize, with a bar."""
        part = None if self.split is None else self.split.calibration
        self.screen.note(f"quantizing {self.model}" + ("" if part is None else f" with {len(part):,} batches"))
        with self.screen.progress("calibrating") as step:
            return qo.quantize(self.model, self.output, part, progress=step, **self.options)

    @staticmethod
    def idle(made: QuantizeReport) -> list[str]:
        """Why no layer was quantized; nothing where one was."""
        if any(not layer.reason for layer in made.layers):
            return []
        reasons = "; ".join(dict.fromkeys(layer.reason for layer in made.layers)) or "the recipe names none"
        return [f"no layer was quantized ({reasons})"]

    def judge(self, made: QuantizeReport, wish: Wish) -> Verdict:
        """Compare the result with its source: outputs, codes, time, and which layers hurt."""
        accuracy: Accuracy | None = None
        proof: VerifyReport | None = None
        hurting: tuple[Hurting, ...] = ()
        found: object = None
        timing = self._race() if wish.bench else None
        if self.split is not None:
            self.screen.note(f"judging with {self.split}")
            accuracy = judge(self.model, self.output, self.split.judged)
            if wish.verify and not self.idle(made):
                proof = self._verify(self.split)
            if wish.rank and not self.idle(made):
                hurting, found = self._rank(made, self.split)
        return Verdict(accuracy, timing, proof, hurting, found, hints=self._hints(made, timing))

    def _hints(self, made: QuantizeReport, timing: Timing | None) -> tuple[str, ...]:
        """What makes it faster, where it is not: that matters for layers whose inputs are quantized as well."""
        if timing is None or timing.is_faster or not any(layer.input for layer in made.layers):
            return ()
        hint = faster(self.options["target"], has_vnni(), has_avx2())
        return (hint,) if hint else ()

    def _verify(self, divided: Split) -> VerifyReport | None:
        try:
            return verify(self.model, self.output, list(divided.judged.first(VERIFIED)), levels=(1, 3))
        except DetentError as error:  # the result stands, whether it can be verified or not
            self._warn(f"not verified: {error}")
            return None

    def _race(self) -> Timing | None:
        try:
            feeds = [made_up_feed(self.model)] if self.split is None else list(self.split.judged.first(VERIFIED))
            return race(self.model, self.output, feeds)
        except DetentError as error:
            self._warn(f"not timed: {error}")
            return None

    def _rank(self, made: QuantizeReport, divided: Split) -> tuple[tuple[Hurting, ...], object]:
        from detent import sensitivity as qs  # noqa: PLC0415 - not everybody asks for it

        # Asked of the model as it was quantized, equalized and smoothed, without the layers that stayed float.
        left = [layer.name for layer in made.layers if layer.reason]
        patience, why = max(PATIENCE, made.seconds), ""

        def announce(cost: qs.Cost) -> None:
            if cost.seconds_estimate > patience:
                raise _TooLongError(f"{cost}; detent sensitivity does it")

        for samples in (RANKED, 1):
            feeds = list(divided.calibration.first(samples))
            try:
                with self.screen.progress("asking layers") as step:
                    found = qs.measure(
                        made.plan.model,
                        feeds,
                        made.plan.recipe,
                        samples=samples,
                        target=made.plan.target,
                        skip=left,
                        progress=step,
                        announce=announce,
                    )
                break
            except (_TooLongError, DetentError) as error:
                why = str(error)
        else:
            self._warn(f"layers were not ranked: {why}")
            return (), None
        total = sum(layer.worst for layer in found.layers) or 1.0
        worst = [Hurting(layer.name, layer.worst / total) for layer in found.ranked() if layer.worst > 0]
        return tuple(worst[:WORST]), found

    def write_report(self, made: QuantizeReport, verdict: Verdict, path: Path, command: str = "") -> None:
        """Write the page; its figures of the outputs are those of the verdict, as everywhere."""
        from detent import report as qr  # noqa: PLC0415 - not everybody asks for it

        page = qr.build(
            self.output,
            None if self.split is None else list(self.split.judged.first(REPORTED)),
            source=self.model,
            result=made,
            verification=verdict.verification,
            sensitivity=verdict.sensitivity,  # type: ignore[arg-type]  # as measure gave it
            facts={} if verdict.timing is None else {"Time": str(verdict.timing)},
            command=command,
        )
        near = verdict.accuracy
        if near is not None:
            page = replace(
                page,
                output_sqnr_db=dict(near.outputs_sqnr_db),
                output_sqnr_against=f"the float model, on {self.split}",
                agreement=near.agreement,
            )
        page.save(path)
