"""Fuzz ``dt.verify``: edit quantized files at random and count which verification level detects each edit.

::

    python tests/tools/fuzz_verify.py --edits 5000 --seed 0

Half of the edits are those of ``tampering`` at random places, with matching digests in half of the cases. The others
change random fields of the protocol buffer: nodes, attributes, constants, inputs and outputs, versions, or the JSON in
the metadata. Files come from ``small_models`` and random graphs, with several presets and targets.

For each edit the file runs before and after on the same data, without graph optimizations. Then replay alone and
execution alone (level 2) verify it, and all levels together if replay accepts it. Requirements:

- all levels together reject every edit that changes an output bit, unless it is a valid decision: only constants that
  the decisions refer to changed, with matching digests;
- nothing but ``DetentError`` is raised.

Edits run in a separate process, which is restarted if ONNX Runtime crashes it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import ModelProto

sys.path.append(str(Path(__file__).parent))

import tampering
from random_graphs import random_model
from small_models import SKIPPED, cnn, transformer

import detent as dt
import detent.onnx as qo
from detent.errors import DetentError
from detent.onnx_model.provenance import KEY, fields_of, packed
from detent.onnx_model.sessions import make_session
from detent.verification import levels

__all__ = ["Outcome", "fuzz", "try_edit"]

Array = NDArray[Any]
Feed = Mapping[str, Array]
SMALL: tuple[tuple[Any, dict[str, Any]], ...] = (
    (cnn, {"skip": SKIPPED, "keep_float": "none"}),
    (transformer, {}),
    (cnn, {"recipe": "w4a8", "target": "onnxruntime-avx2"}),
    (transformer, {"recipe": "w4a16-g32"}),
)
GRAPHS = 24
RECIPES = ("w8a8", "w4a8", "w8a16")
SUBJECTS = len(SMALL) + GRAPHS
TIMEOUT = 120.0


class Subject(NamedTuple):
    """A source model, its quantized file, data, and the outputs of the file for them."""

    source: ModelProto
    file: ModelProto
    data: list[Feed]
    outputs: list[list[Array]]


class Outcome(NamedTuple):
    """Effect of an edit, and the result of each verification.

    ``effect`` is "same" or "changed" for the outputs, or "does not run"; ``replay``, ``execution`` and ``all_levels``
    are "ok", "caught", or "raw" with the error that should have been a DetentError.
    """

    kind: str
    effect: str
    replay: str
    execution: str
    all_levels: str
    is_decision: bool


@cache
def subject(number: int) -> Subject | None:
    """Quantize one model to edit; None if nothing in it is quantized."""
    if number < len(SMALL):
        make, options = SMALL[number]
        model, batches = make()
    else:
        model, batches = random_model(1000 + number)
        options = {"recipe": RECIPES[number % len(RECIPES)], "keep_float": "none"}
    try:
        file = qo.rewrite(model, qo.decide(model, batches, progress=False, **options))
        assert dt.verify(model, file).ok
    except DetentError:
        return None
    return Subject(model, file, batches[:1], _run(file, batches[:1]))


def _run(model: ModelProto, data: list[Feed]) -> list[list[Array]]:
    session = make_session(model, optimize=False)
    return [session.run(None, dict(feed)) for feed in data]


def _equal(a: list[list[Array]], b: list[list[Array]]) -> bool:
    return all(
        len(ours) == len(theirs)
        and all(
            x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
            for x, y in zip(ours, theirs, strict=True)
        )
        for ours, theirs in zip(a, b, strict=True)
    )


# Random mutations


def mutate(model: ModelProto, rng: np.random.Generator) -> str:
    """Change something at random, in place; return what was changed."""
    graph = model.graph
    weights = {"node": 8, "attribute": 6, "initializer": 6, "end": 2, "model": 1, "metadata": 5}
    names = list(weights)
    kind = str(rng.choice(names, p=np.array(list(weights.values())) / sum(weights.values())))
    attributes = [each for node in graph.node for each in node.attribute]
    messages: dict[str, list[Message]] = {
        "node": list(graph.node),
        "attribute": attributes,
        "initializer": list(graph.initializer),
        "end": [*graph.input, *graph.output],
        "model": [model, graph, *model.opset_import],
    }
    if kind == "metadata" or not messages.get(kind):
        return f"metadata {_mutate_metadata(model, rng)}"
    message = messages[kind][int(rng.integers(len(messages[kind])))]
    tensor_names = [name for node in graph.node for name in (*node.input, *node.output)]
    return f"{kind} {_mutate_message(message, rng, tensor_names)}"


def _mutate_message(message: Message, rng: np.random.Generator, tensor_names: list[str]) -> str:
    """Change a random field of a message, or of a message inside it."""
    fields = [field for field, _ in message.ListFields()]
    field = fields[int(rng.integers(len(fields)))] if fields else None
    if field is None:
        return "empty"
    value = getattr(message, field.name)
    if field.is_repeated:
        i = int(rng.integers(len(value)))
        action = int(rng.integers(4))
        if action == 0:
            del value[i]
        elif field.message_type is not None and action == 1:
            value.add().CopyFrom(value[i])
        elif field.message_type is not None:
            return f"{field.name}.{_mutate_message(value[i], rng, tensor_names)}"
        elif action == 1:
            value.append(value[i])
        elif action == 2 and len(value) > 1:
            value[i], value[i - 1] = value[i - 1], value[i]
        else:
            value[i] = _mutated(value[i], rng, tensor_names)
    elif field.message_type is not None:
        return f"{field.name}.{_mutate_message(value, rng, tensor_names)}"
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _mutated(value, rng, tensor_names))
    return str(field.name)


def _mutated(value: Any, rng: np.random.Generator, tensor_names: list[str]) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(-(2**31), min(2**31 - 1, value + int(rng.choice([-1, 1, 2, -value]))))
    if isinstance(value, float):
        return float(np.float32(value * rng.choice([0.5, 1.001, -1.0]) + rng.choice([0.0, 0.1])))
    if isinstance(value, bytes):
        if not value:
            return b"x"
        i = int(rng.integers(len(value)))
        return value[:i] + bytes([value[i] ^ (1 << int(rng.integers(8)))]) + value[i + 1 :]
    return str(rng.choice(tensor_names)) if tensor_names and rng.random() < 0.7 else f"{value}_x"


def _mutate_metadata(model: ModelProto, rng: np.random.Generator) -> str:
    """Change a random value in the JSON of the metadata, or break the text."""
    entry = next((each for each in model.metadata_props if each.key == KEY), None)
    if entry is None:
        return "missing"
    if rng.random() < 0.1:
        i = int(rng.integers(len(entry.value)))
        entry.value = entry.value[:i] + str(rng.choice(["", "{", "9", '"'])) + entry.value[i + 1 :]
        return "text"
    document = fields_of(entry.value)
    places = list(_places(document))
    holder, key = places[int(rng.integers(len(places)))]
    old = holder[key]
    if rng.random() < 0.15:
        del holder[key]
    elif isinstance(old, int | float | str) or old is None:
        choices = [_mutated(old, rng, []) if old is not None else 1, None, "x", -1, 1e300, [], {}, True]
        holder[key] = choices[int(rng.integers(len(choices))) if rng.random() < 0.5 else 0]
    else:
        holder[key] = [[], {}, None, [old], 3][int(rng.integers(5))]
    if isinstance(document.get("decisions"), dict) and rng.random() < 0.5:
        document["decisions"] = packed(document["decisions"])
    entry.value = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return str(key) if isinstance(key, str) and len(key) < 20 else "item"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


# One edit


def try_edit(seed: int, number: int) -> Outcome:
    """Make an edit and verify the file."""
    rng = np.random.default_rng([31, seed, number])
    base = subject(int(rng.integers(SUBJECTS)) if rng.random() < 0.6 else int(rng.integers(len(SMALL))))
    if base is None:
        return Outcome("nothing quantized", "same", "ok", "ok", "ok", is_decision=False)
    model = tampering.copy_of(base.file)
    if rng.random() < 0.5:
        kind = mutate(model, rng)
    else:
        edit = tampering.EDITS[int(rng.integers(len(tampering.EDITS)))]
        sites = edit.sites(model)
        if not sites:
            return Outcome("no site", "same", "ok", "ok", "ok", is_decision=False)
        edit.apply(model, sites[int(rng.integers(len(sites)))], rng)
        kind = edit.name
    if model == base.file:
        return Outcome("no change", "same", "ok", "ok", "ok", is_decision=False)
    is_forged = bool(rng.random() < 0.5)
    if is_forged:
        try:
            model = tampering.with_matching_digests(model)
        except (ValueError, TypeError, KeyError):  # the metadata or a constant cannot be read
            is_forged = False
    try:
        effect = "same" if _equal(_run(model, base.data), base.outputs) else "changed"
    except Exception:  # noqa: BLE001 - ONNX Runtime and NumPy raise what they like
        effect = "does not run"
    replay = _verdict(base, model)
    execution = _verdict(base, model, data=base.data, levels=(2,))
    needs_all = replay == "ok" or number % 10 == 0
    all_levels = _verdict(base, model, data=base.data) if needs_all else replay
    return Outcome(kind, effect, replay, execution, all_levels, is_forged and _only_decided(base.file, model))


def _only_decided(before: ModelProto, after: ModelProto) -> bool:
    """Whether, besides the metadata, only constants that the decisions refer to differ."""
    entry = next(fields_of(each.value) for each in before.metadata_props if each.key == KEY)
    holders = [holder for holder, key in _places(entry["decisions"]) if key == "initializer"]
    names = {holder["initializer"] for holder in holders}
    parts = []
    for model in (before, after):
        copy = tampering.copy_of(model)
        del copy.metadata_props[:]
        for tensor in copy.graph.initializer:
            if tensor.name in names:
                tensor.ClearField("raw_data")
        parts.append(copy.SerializeToString(deterministic=True))
    return parts[0] == parts[1]


def _verdict(base: Subject, model: ModelProto, **options: Any) -> str:
    try:
        return "ok" if dt.verify(base.source, model, **options).ok else "caught"
    except DetentError:
        return "caught"
    except Exception as error:  # noqa: BLE001 - what is looked for
        place = extract_tb(error.__traceback__)[-1]
        return f"raw {type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {str(error)[:80]}"


# All edits


def _prepare() -> None:
    levels.is_installed = lambda: False  # verify without OpenVINO


def fuzz(edits: int, seed: int) -> Iterator[tuple[int, Outcome]]:
    """Yield the number and outcome of each edit; the kind is "crash" if the process died."""
    number = 0
    while number < edits:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=_prepare) as pool:
            try:
                while number < edits:
                    yield number, pool.submit(try_edit, seed, number).result(TIMEOUT)
                    number += 1
            except (BrokenProcessPool, TimeoutError) as error:
                for process in list((pool._processes or {}).values()):
                    process.kill()
                yield number, Outcome(f"crash ({type(error).__name__})", "does not run", "", "", "", is_decision=False)
                number += 1


def is_wrong(outcome: Outcome) -> bool:
    """Whether verification raised a foreign error, or accepted a changed output."""
    answers = outcome.replay, outcome.execution, outcome.all_levels
    if any(each.startswith("raw") for each in answers):
        return True
    return outcome.effect == "changed" and outcome.all_levels == "ok" and not outcome.is_decision


def main() -> int:
    """Print counts and every wrong result; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[tuple[str, ...]] = Counter()
    accepted: Counter[tuple[str, str]] = Counter()
    wrong = tried = 0
    for number, outcome in fuzz(options.edits, options.seed):
        if outcome.kind in {"no site", "no change", "nothing quantized"}:
            continue
        tried += 1
        if outcome.kind.startswith("crash"):
            print(f"edit {number}: {outcome.kind}", flush=True)
            counts["crash",] += 1
            continue
        if is_wrong(outcome):
            wrong += 1
            print(f"edit {number}: {outcome}", flush=True)
        by = {("caught", "caught"): "both", ("caught", "ok"): "replay", ("ok", "caught"): "execution"}
        who = by.get((outcome.replay, outcome.execution), "neither" if outcome.replay == "ok" else "raw")
        counts[outcome.effect, who, "decision" if outcome.is_decision else ""] += 1
        if outcome.all_levels == "ok":
            accepted[outcome.kind, outcome.effect] += 1
        if not number % 200:
            print(f"{number}: {dict(counts)}", flush=True)
    print(f"{tried} edits")
    for key, count in sorted(counts.items()):
        print(f"{count:6d}  {' '.join(key)}")
    print("accepted by all levels:")
    for (kind, effect), count in sorted(accepted.items(), key=lambda each: -each[1]):
        print(f"{count:6d}  {kind} ({effect})")
    print(f"{wrong} wrong results")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
