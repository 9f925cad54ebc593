"""`explain_streams` says whether streams wait for places, and what would help, in virtual time."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from fast_batcher._core.explanation import BatchSample, Setup
from fast_batcher._core.stream_explanation import explain_streams
from fast_batcher.stats import Explanation

PLACES = 8

Seconds = Callable[[int], float]


def level(size: int) -> float:
    """A step that takes little more for more streams."""
    return 0.010 + 0.0005 * size


def proportional(size: int) -> float:
    return 0.002 * size


def steps(sizes: Iterable[int], seconds: Seconds) -> list[BatchSample]:
    """Steps of these sizes, one after the other."""
    now, samples = 100.0, []
    for size in sizes:
        took = seconds(size)
        now += took
        release: Any = "step"
        samples.append(BatchSample(now - took, now, size, release, 0, 0.0, took))
    return samples


def explained(
    sizes: Iterable[int], seconds: Seconds, waits: list[float], *, has_cost: bool = False
) -> Explanation:
    setup = Setup(PLACES, 1, has_cost_limit=has_cost, is_grouped=False)
    # A stream that began before the first of these steps does not count.
    begun = [(99.0, 77.0)] * 99 + [(100.1, waited) for waited in waits]
    return explain_streams(steps(sizes, seconds), setup, begun)


FULL = [8] * 100
MIXED = [*range(1, 9)] * 30 + [8] * 1000

SITUATIONS: list[tuple[list[int], Seconds, list[float], bool, str, str]] = [
    ([4, 5] * 50, level, [0.001], False, "arrivals", "nothing to change: streams find"),
    ([1] * 9, level, [], False, "arrivals", "nothing to change: streams find"),
    (MIXED, level, [0.001], False, "arrivals", "nothing to change: streams find"),
    (MIXED, proportional, [0.001], False, "arrivals", "max_batch_size=4 gives as many"),
    (FULL, level, [0.4], False, "max_batch_size", "max_batch_size=16 or num_workers=2"),
    (MIXED, level, [0.4], False, "max_batch_size", "max_batch_size=16 is predicted to give"),
    (MIXED, proportional, [0.4], False, "max_batch_size", "num_workers=2 if there is a core"),
    ([4] * 50, level, [0.4], True, "cost", "a higher max_batch_cost"),
    (FULL, level, [0.4], True, "max_batch_size", "max_batch_size=16 or"),
]


@pytest.mark.parametrize(("sizes", "seconds", "waits", "has_cost", "cause", "advice"), SITUATIONS)
def test_the_advice_fits_the_situation(
    sizes: list[int], seconds: Seconds, waits: list[float], has_cost: bool, cause: str, advice: str
) -> None:
    found = explained(sizes, seconds, waits, has_cost=has_cost)
    assert found.cause == cause
    assert found.advice.startswith(advice), found.advice
    assert found.load is None


def test_the_text_speaks_of_streams() -> None:
    found = explained(FULL, level, [0.0, 0.4, 0.4, 0.5])
    assert str(found) == (
        "100 steps in 1.4 seconds: 571 chunks per second; the workers were busy for 100% of the "
        "time. On average 8 of the 8 places of a worker have a chunk in a step. Streams waited for "
        "a place for 0.4 s (median). Advice: max_batch_size=16 or num_workers=2: no other steps "
        "than of 8 streams were measured, so which of them gains more is unknown."
    )
    assert (found.place_wait, found.cause_share) == (0.4, 0.75)
    assert [size for size, *_ in found.service_times] == [8]


def test_one_step_explains_nothing() -> None:
    found = explained([3], level, [])
    assert (found.cause, found.places) == ("no data", PLACES)
    assert str(found) == "No explanation: fewer than two steps gave chunks."
