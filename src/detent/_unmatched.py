"""Why a rule matched no layer: its pattern, its types, or both; and what was probably meant."""

import re
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches

from detent.errors import SpecError
from detent.rule import PLACES, Layer, Rule

SHOWN = 3
_WILD = re.compile(r"[*?]|\[.*?\]")


def explain(rule: Rule, layers: list[Layer]) -> str:
    """What failed, and the closest names or types; the rule matches none of the layers."""
    named = [layer for layer in layers if rule.matches_name(layer)]
    if named:
        seen = {kind for layer in named for kind in layer.types}
        count = f"{len(named)} layer{'' if len(named) == 1 else 's'}"
        return f"{rule.match!r} matches {count}, of which none has a type in {rule.types}{_meant(rule.types, seen)}"
    words = _no_name(rule, layers)
    typed = any(map(rule.matches_types, layers))
    if not layers or typed:
        return words
    seen = {kind for layer in layers for kind in layer.types}
    return f"{words} and no layer has a type in {rule.types}{_meant(rule.types, seen)}"


def _no_name(rule: Rule, layers: list[Layer]) -> str:
    if rule.match in PLACES:
        return f"no layer is the {rule.match[1:]} one with weights"
    words = f"no name matches {rule.match!r}"
    wider = _wider(rule, layers)
    if wider:
        return f"{words}: did you mean {wider!r}?"
    wanted = _WILD.sub("", rule.match.removeprefix("re:"))
    return words + _meant([wanted], {layer.name for layer in layers})


def _wider(rule: Rule, layers: list[Layer]) -> str | None:
    """The same glob with a star before, after or around it, where that matches a layer."""
    if rule.match.startswith("re:"):
        return None
    for match in (f"*.{rule.match}", f"{rule.match}.*", f"*{rule.match}", f"{rule.match}*", f"*{rule.match}*"):
        try:
            if any(map(replace(rule, match=match).matches, layers)):
                return match
        except SpecError:
            continue
    return None


def _meant(given: Iterable[str], known: Iterable[str]) -> str:
    """The words ``: did you mean 'a' or 'b'?`` for what is near, or what there is where nothing is."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    near = dict.fromkeys(
        by_lower[found] for one in given for found in get_close_matches(one.lower(), by_lower, n=SHOWN, cutoff=0.5)
    )
    if near:
        return f": did you mean {' or '.join(map(repr, list(near)[:SHOWN]))}?"
    some = ", ".join(map(repr, names[:SHOWN]))
    return f": there is {some}{', ...' if len(names) > SHOWN else ''}" if names else ""
