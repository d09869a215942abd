"""A fixed sample of a product in which every pair of values of two factors occurs at least once."""

from itertools import combinations, product
from random import Random

__all__ = ["pairwise"]


def pairwise(factors, seed=0):
    """Return rows (dicts) that cover all pairs; each row starts with a new pair and is completed greedily."""
    names, rng = list(factors), Random(seed)
    missing = {
        frozenset([(a, u), (b, v)]) for a, b in combinations(names, 2) for u, v in product(factors[a], factors[b])
    }
    ordered, rows = sorted(missing, key=lambda pair: sorted(map(repr, pair))), []
    for pair in ordered:
        if pair not in missing:
            continue
        row = dict(pair)
        for name in rng.sample(names, len(names)):
            if name in row:
                continue
            new = {
                value: sum(frozenset([(name, value), item]) in missing for item in row.items())
                for value in factors[name]
            }
            best = max(new.values())
            row[name] = rng.choice([value for value in factors[name] if new[value] == best])
        missing -= {frozenset(two) for two in combinations(row.items(), 2)}
        rows.append({name: row[name] for name in names})
    return rows
