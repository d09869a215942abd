"""Searching: mixes that are judged by running them, near those that the sum of noise powers says are good.

The starts are the exact choice for the sum, and every uniform option that fits. From the best of them, moves are tried
in the order of what they should cost by the sum: one layer gets another option, and where that takes too many bytes, a
second layer gives some back. A move that helps is kept. The search ends when no move is left or the runs are used up.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from detent.errors import SpecError
from detent.sensitivity.bench import Bench, Meter, Progress, reporter
from detent.sensitivity.found import Sensitivity
from detent.sensitivity.mix import Mix
from detent.sensitivity.noise import Cost, LayerNoise, sqnr_of

__all__ = ["moves", "search", "starting_points"]

Options = dict[str, str]


def starting_points(found: Sensitivity, budget: int) -> list[Options]:
    """The exact choice for the sum of noise, and all uniform options that fit.

    Raises:
        SpecError: nothing fits.

    >>> layer = LayerNoise("a", "Conv", 1, 4, {"int4/axis0": 0.1, "int8/axis0": 0.01}, {"int4/axis0": 5, \
"int8/axis0": 9})
    >>> starting_points(Sensitivity((layer,), ("int4/axis0", "int8/axis0")), 9)
    [{'a': 'int8/axis0'}, {'a': 'int4/axis0'}]
    """
    starts = [dict(found.choose(budget).options)]
    for option in found.options:
        try:
            mix = found.uniform(option)
        except SpecError:  # a layer cannot have it
            continue
        if mix.nbytes <= budget and dict(mix.options) not in starts:
            starts.append(dict(mix.options))
    return starts


def moves(found: Sensitivity, options: Mapping[str, str], budget: int) -> Iterator[Options]:
    """Changes of one or two layers that fit a budget, those first that should cost least by the sum of noise.

    >>> layer = LayerNoise("a", "Conv", 1, 4, {"int4/axis0": 0.1, "int8/axis0": 0.01}, {"int4/axis0": 5, \
"int8/axis0": 9})
    >>> list(moves(Sensitivity((layer,), ("int4/axis0", "int8/axis0")), {"a": "int4/axis0"}, 9))
    [{'a': 'int8/axis0'}]
    """
    spare = budget - sum(layer.nbytes[options[layer.name]] for layer in found.layers)
    tried: list[tuple[float, Options]] = []
    for layer in found.layers:
        for option, more, cost in _changes(layer, options):
            if more <= spare:
                tried.append((cost, {layer.name: option}))
                continue
            for other in found.layers:
                back = [each for each in _changes(other, options) if more + each[1] <= spare]
                if other is not layer and back:
                    best = min(back, key=lambda each: each[2])
                    tried.append((cost + best[2], {layer.name: option, other.name: best[0]}))
    for _, change in sorted(tried, key=lambda each: each[0]):
        yield change


def _changes(layer: LayerNoise, options: Mapping[str, str]) -> Iterator[tuple[str, int, float]]:
    """The other options of a layer, with the bytes and the noise that they add."""
    now = options[layer.name]
    for option, noise in layer.noise.items():
        if option != now:
            yield option, layer.nbytes[option] - layer.nbytes[now], noise - layer.noise[now]


def search(
    bench: Bench,
    found: Sensitivity,
    starts: list[Options],
    budget: int,
    runs: int,
    announce: Callable[[Cost], object] | None,
    progress: Progress,
) -> Mix:
    """The best mix that so many runs find, with its measured SQNR; all starts are run, whatever the number of runs.

    >>> search.__name__
    'search'
    """
    start = time.perf_counter()
    meter = Meter(bench.names, bench.reference())
    if announce is not None:
        seconds = (time.perf_counter() - start) * runs
        announce(Cost(len(found.layers), len(found.options), runs, bench.samples, seconds))
    report, known = reporter(progress), dict[tuple[str, ...], float]()

    def noise(options: Options) -> float:
        key = tuple(options.values())
        if key not in known:
            known[key] = meter.noise(bench.outputs(options))
            report(len(known), runs)
        return known[key]

    best = min(starts, key=noise)
    is_better = True
    while is_better and len(known) < runs:
        is_better = False
        for change in moves(found, best, budget):
            if len(known) >= runs:
                break
            tried = {**best, **change}
            if tuple(tried.values()) not in known and noise(tried) < noise(best):
                best, is_better = tried, True
                break
    report(runs, runs)
    return found.mixed(best, "refined mix").with_measured(sqnr_of(noise(best)))
