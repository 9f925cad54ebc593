"""Right in every pair: short random schedules of all combinations, with an oracle.

A few cases of a fixed seed run with the other tests. `PAIRS_SEED=7` runs all cases of another seed,
about five minutes, and says of each failure which values matter.
"""

import os
from functools import partial

import pytest
from pairing.covering import cover
from pairing.dimensions import NO_MEANING, REFUSED_LATE, THREE_WAY, Case, find_refused
from pairing.runs import perform
from pairing.shrinking import shrink, values_that_matter

CHOSEN = os.environ.get("PAIRS_SEED")
SEED = int(CHOSEN or 1)
# Cases that run with the other tests: a minute.
FEW = 25


def list_cases() -> list[Case]:
    excluded = {**find_refused(), **NO_MEANING, **REFUSED_LATE}
    cases, _ = cover(excluded, SEED, three_way=THREE_WAY)
    return cases if CHOSEN else cases[:FEW]


@pytest.mark.slow
def test_every_promise_holds_in_every_pair(subtests: pytest.Subtests) -> None:
    for number, case in enumerate(list_cases()):
        seed = SEED * 1000 + number
        with subtests.test(seed=seed):
            report = perform(case, seed)
            for kind in report.kinds:
                if CHOSEN:
                    case = shrink(case, partial(has_fault, kind, seed))
                pytest.fail(f"seed {seed}: {values_that_matter(case)}: {report.faults[:5]}")


def has_fault(kind: str, seed: int, case: Case) -> bool:
    """Whether a case shows a kind of fault."""
    return kind in perform(case, seed).kinds
