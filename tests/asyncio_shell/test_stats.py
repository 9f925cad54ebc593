"""Counts, the snapshot made of them, and its quantiles."""

import random
from collections import Counter, deque

import pytest

from fast_batcher import BatcherStats
from fast_batcher._asyncio.ledger import Counters
from fast_batcher._core.messages import Release
from fast_batcher.stats import SAMPLED_BATCHES, weighted_quantiles


def samples(*pairs: tuple[float, int]) -> deque[tuple[float, int]]:
    return deque(pairs)


def quantile(pairs: deque[tuple[float, int]], share: float) -> float | None:
    (found,) = weighted_quantiles(pairs, (share,))
    return found


def snapshot(counters: Counters) -> BatcherStats:
    return counters.snapshot(state="open", workers_ready=1, num_workers=2, waiting=3, running=4)


# Quantiles.


@pytest.mark.parametrize("q", [0.0, 0.5, 0.95, 1.0])
def test_nothing_has_no_quantile_and_one_value_is_every_quantile(q: float) -> None:
    assert quantile(samples(), q) is None
    assert quantile(samples((7.5, 3)), q) == 7.5


@pytest.mark.parametrize("seed", range(10))
def test_it_is_that_of_the_written_out_list(seed: int) -> None:
    chance = random.Random(seed)
    waits = samples(*[(chance.choice([0.5, 1.5, chance.random()]), chance.randint(1, 9))] * 3)
    waits.extend((chance.random(), chance.randint(1, 9)) for _ in range(chance.randint(0, 30)))
    before = list(waits)
    written_out = sorted(value for value, weight in waits for _ in range(weight))
    for percent in range(1, 101):
        rank = -(-percent * len(written_out) // 100)  # rounded up
        assert quantile(waits, percent / 100) == written_out[rank - 1]
    assert list(waits) == before


# The snapshot.


def test_every_count_arrives_under_its_own_name() -> None:
    counters = Counters(
        submitted=100,
        outcomes=Counter(completed=41, failed=2, expired=3, cancelled=5, rejected=7),
        restarts=11,
        batch_sizes=Counter({8: 4, 2: 1}),
        releases=Counter({Release.FULL: 4, Release.IDLE: 1}),
        queue_waits=samples(*[(float(number), 1) for number in range(1, 101)]),
        infer_times=samples((0.02, 50), (0.04, 44), (0.06, 1), (0.08, 5)),
    )
    assert snapshot(counters) == BatcherStats(
        state="open",
        workers_ready=1,
        num_workers=2,
        waiting=3,
        running=4,
        submitted=100,
        completed=41,
        failed=2,
        expired=3,
        cancelled=5,
        rejected=7,
        batches=5,
        batch_sizes={2: 1, 8: 4},
        releases={"full": 4, "idle": 1},
        restarts=11,
        queue_wait_p50=50.0,
        queue_wait_p95=95.0,
        infer_p50=0.02,
        infer_p95=0.06,
    )
    # Plain text and plain dicts, for JSON, with the sizes in order.
    stats = snapshot(counters)
    assert {type(reason) for reason in stats.releases} == {str}
    assert list(stats.batch_sizes) == [2, 8]
    assert (type(stats.batch_sizes), type(stats.releases)) == (dict, dict)


@pytest.mark.parametrize(
    ("sizes", "mean"), [({}, 0.0), ({4: 1}, 4.0), ({1: 3, 5: 1}, 2.0), ({1: 1, 2: 1}, 1.5)]
)
def test_the_mean_batch_size(sizes: dict[int, int], mean: float) -> None:
    assert snapshot(Counters(batch_sizes=Counter(sizes))).mean_batch_size == mean


# What is kept.


@pytest.mark.parametrize("name", ["queue_waits", "infer_times"])
def test_only_the_last_batches_are_kept(name: str) -> None:
    kept: deque[tuple[float, int]] = getattr(Counters(), name)
    for number in range(3 * SAMPLED_BATCHES):
        kept.append((float(number), 1))
    assert len(kept) == SAMPLED_BATCHES == 1024
    assert quantile(kept, 0.0) == float(2 * SAMPLED_BATCHES)
