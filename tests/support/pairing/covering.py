"""Cases that cover all allowed pairs of values. Pure, and the same for the same seed."""

import random
from collections import Counter
from collections.abc import Collection
from itertools import combinations, product

from pairing.dimensions import DIMENSIONS, Case, Choice, Pair, list_pairs

# Candidates for each case. More make fewer cases, and take longer.
CANDIDATES = 12


def pairs_of(case: Case) -> list[Pair]:
    return [frozenset(two) for two in combinations(case.items(), 2)]


def cover(
    excluded: Collection[Pair],
    seed: int,
    times: int = 2,
    three_way: Collection[tuple[str, str, str]] = (),
) -> tuple[list[Case], list[Pair]]:
    """Choose cases in which every pair that is not excluded occurs at least `times` times.

    `excluded` also takes single values and larger combinations. `three_way` has dimensions of which
    every three values occur at least once. Greedy: a case begins with a combination that is still
    missing, and takes for each further dimension, in random order, a value with most missing pairs.

    Returns:
        The cases, and the pairs of which no case can be made.
    """
    rng = random.Random(seed)
    forbidden: dict[Choice, list[Pair]] = {}
    for combination in excluded:
        for choice in combination:
            forbidden.setdefault(choice, []).append(combination)
    missing = Counter({pair: times for pair in list_pairs() if pair not in set(excluded)})
    for names in three_way:
        for values in product(*(DIMENSIONS[name] for name in names)):
            missing[frozenset(zip(names, values, strict=True))] = 1
    cases: list[Case] = []
    impossible: list[Pair] = []
    while missing:
        most = max(missing.values())
        first = rng.choice([pair for pair, count in missing.items() if count == most])
        made = [case for _ in range(CANDIDATES) if (case := _fill(first, missing, forbidden, rng))]
        if not made:
            impossible.append(first)
            del missing[first]
            continue
        best = max(made, key=lambda case: sum(pair in missing for pair in pairs_of(case)))
        cases.append(best)
        missing -= Counter(dict.fromkeys(pairs_of(best), 1))
        for names in three_way:
            missing.pop(frozenset((name, best[name]) for name in names), None)
    rng.shuffle(cases)
    return cases, impossible


def _fill(
    first: Pair, missing: Counter[Pair], forbidden: dict[Choice, list[Pair]], rng: random.Random
) -> Case | None:
    """Complete a case, None if the values that it has exclude all of a dimension."""
    chosen: set[Choice] = set(first)
    if not all(_is_allowed(choice, chosen, forbidden) for choice in chosen):
        return None
    names = [name for name in DIMENSIONS if name not in dict(first)]
    # The dimensions with the most rules are chosen before they are ruled out.
    rng.shuffle(names)
    names.sort(key=lambda name: name not in ("model", "call", "workers", "event"))
    for name in names:
        values = [
            (name, value)
            for value in DIMENSIONS[name]
            if _is_allowed((name, value), chosen | {(name, value)}, forbidden)
        ]
        if not values:
            return None
        rng.shuffle(values)
        chosen.add(
            max(values, key=lambda one: sum(missing[frozenset({one, two})] for two in chosen))
        )
    found = dict(chosen)
    return {name: found[name] for name in DIMENSIONS}


def _is_allowed(choice: Choice, chosen: set[Choice], forbidden: dict[Choice, list[Pair]]) -> bool:
    return not any(combination <= chosen for combination in forbidden.get(choice, ()))
