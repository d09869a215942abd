"""Job: one model that is quantized and judged; the parts of ``detent quantize``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import detent.onnx as qo
from detent.cli.holdout import Split, split
from detent.cli.judging import Accuracy, check_has_classes, judge
from detent.cli.rehearsal import Rehearsal, rehearse
from detent.cli.screen import Screen
from detent.cli.timing import Timing, made_up_feed, race
from detent.cli.verdict import Hurting, Verdict, Wish
from detent.errors import DetentError
from detent.onnx.pipeline import QuantizeReport
from detent.onnx_model import get_target, load
from detent.onnx_model.batches import inputs_of
from detent.onnx_model.targets import faster, has_avx2, has_vnni, mismatch
from detent.proof import VerifyReport, verify
from detent.recipe import get_recipe
from detent.rule import get_observer_spec

__all__ = ["Job"]

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
