"""Counts, the snapshot made of them, and its quantiles."""

import random
from collections import Counter, deque

import pytest

from fast_batcher import BatcherStats
from fast_batcher._core.explanation import BatchSample
from fast_batcher._core.values import Release
from fast_batcher._opening.ledger import Counters
from fast_batcher.stats import SAMPLED_BATCHES, weighted_quantiles


def samples(*pairs: tuple[float, int]) -> deque[tuple[float, int]]:
    return deque(pairs)


def quantile(pairs: deque[tuple[float, int]], share: float) -> float | None:
    (found,) = weighted_quantiles(pairs, (share,))
    return found


def snapshot(counters: Counters) -> BatcherStats:
    return counters.snapshot("open", 2, (1, 3, 4))


# Quantiles.


@pytest.mark.parametrize("q", [0.0, 0.5, 0.95, 1.0])
def test_quantiles_of_no_and_one_value(q: float) -> None:
    assert quantile(samples(), q) is None
    assert quantile(samples((7.5, 3)), q) == 7.5


@pytest.mark.parametrize("seed", range(10))
def test_weighted_quantile_matches_expanded_list(seed: int) -> None:
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


@pytest.mark.parametrize(
    ("sizes", "mean"), [({}, 0.0), ({4: 1}, 4.0), ({1: 3, 5: 1}, 2.0), ({1: 1, 2: 1}, 1.5)]
)
def test_the_mean_batch_size(sizes: dict[int, int], mean: float) -> None:
    assert snapshot(Counters(batch_sizes=Counter(sizes))).mean_batch_size == mean


# What is kept.


def test_only_the_last_batches_are_kept() -> None:
    kept = Counters().samples
    for number in range(3 * SAMPLED_BATCHES):
        kept.append(BatchSample(0.0, 1.0, 1, Release.IDLE, 0, float(number), 0.0))
    assert (len(kept), kept[0].waited) == (SAMPLED_BATCHES, 2 * SAMPLED_BATCHES)
