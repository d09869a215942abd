"""Clipped ranges: those that increase the noise at the outputs of the model become min-max ranges.

``choose_clipped`` compares both ranges at the layers that read a tensor. That can be wrong: large values may matter
more in later layers, and some tensors are read by no layer. So the noise at the outputs decides. First all tensors are
switched to their min-max range together, then each half of them, each quarter, and so on. A switch is kept if the noise
drops.
"""

from collections.abc import Collection, Iterable

from detent.onnx.calibration import MAX_REMAINING_NOISE, Calibration, activation_params
from detent.onnx.decisions import QuantizerPlacement
from detent.onnx.float_fallback import NoiseByLayer
from detent.params import QuantParams

__all__ = ["unclip"]

MAX_MEASUREMENTS = 16  # limit on the measurements of the noise at the outputs


def unclip(
    noise: NoiseByLayer,
    placements: Iterable[QuantizerPlacement],
    calibration: Calibration,
    clipped: Collection[str],
) -> dict[str, QuantParams]:
    """Choose the groups of tensors that get their min-max range after all; returns their parameters, by group."""
    ranges: dict[str, QuantParams] = {}
    for each in placements:
        if each.group == each.tensor and each.group in clipped and noise.can_replace(each.group):
            full = activation_params(each, calibration, clipped=False)
            if full != activation_params(each, calibration, clipped=True):
                ranges[each.group] = full
    chosen: set[str] = set()
    pending = [list(ranges)] if ranges else []
    remaining = noise.noise_with({}) if ranges else 0.0
    for _ in range(MAX_MEASUREMENTS):
        if not pending or not remaining:
            break
        groups = pending.pop(0)
        changed = chosen ^ set(groups)
        now = noise.noise_with({}, {group: ranges[group] for group in changed})
        if now < MAX_REMAINING_NOISE * remaining:
            chosen, remaining = changed, now
        if len(groups) > 1:
            half = len(groups) // 2
            pending += [groups[:half], groups[half:]]
    return {group: ranges[group] for group in ranges if group in chosen}
