"""Summary: what ``detent quantize`` says at its end, for people and for machines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detent.cli.holdout import Split
from detent.cli.judging import Accuracy, worst
from detent.cli.rehearsal import Rehearsal
from detent.cli.screen import Screen
from detent.cli.verdict import Verdict
from detent.onnx.pipeline import LayerReport, QuantizeReport
from detent.onnx_model import Provenance, load
from detent.tables import bytes_text

__all__ = ["facts_of", "rehearsal_document", "result_document", "show_rehearsal", "show_result"]

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
        "calibration_sqnr_db": before.get(worst(before)),
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
