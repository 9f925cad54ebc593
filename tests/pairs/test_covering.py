"""The cases cover every allowed pair at least twice, the same ones for the same seed."""

from collections import Counter

from pairing.covering import cover, pairs_of
from pairing.dimensions import NO_MEANING, REFUSED_LATE, find_refused, is_in, list_pairs


def test_every_allowed_pair_occurs_twice() -> None:
    excluded = {**find_refused(), **NO_MEANING, **REFUSED_LATE}
    cases, impossible = cover(excluded, 7)
    counts = Counter(pair for case in cases for pair in pairs_of(case))
    wanted = [pair for pair in list_pairs() if pair not in excluded and pair not in impossible]
    assert [pair for pair in wanted if counts[pair] < 2] == []
    assert not any(is_in(pair, case) for pair in excluded for case in cases)
    assert cover(excluded, 7) == (cases, impossible)
