"""From a failing case to the values that matter. The process of the tests."""

from collections.abc import Callable

from pairing.dimensions import DEFAULTS, Case, ask_constructor

# Runs of a simpler case before it counts as one that does not fail.
TRIES = 2


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Set dimensions to their ordinary values as long as the case fails; halves first."""
    names = [name for name, value in case.items() if value != DEFAULTS[name]]
    size = max(len(names) // 2, 1)
    while size and names:
        kept = list(names)
        for at in range(0, len(names), size):
            part = [name for name in names[at : at + size] if name in kept]
            simpler = case | {name: DEFAULTS[name] for name in part}
            if part and not ask_constructor(simpler) and any(fails(simpler) for _ in range(TRIES)):
                case, kept = simpler, [name for name in kept if name not in part]
        if len(kept) == len(names) or size > len(kept):
            size //= 2
        names = kept
    return case


def values_that_matter(case: Case) -> dict[str, str]:
    return {name: value for name, value in case.items() if value != DEFAULTS[name]}
