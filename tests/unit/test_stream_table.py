"""The streams of workers: the prediction of the next free place."""

import random
from heapq import heapify, heappop, heappush

import pytest

from fast_batcher._core.stream_scheduler import MOST_LENGTHS, StreamTable
from fast_batcher._core.values import Batch, Limits, Release, Request


class Bench:
    """Workers with some streams."""

    def __init__(self, places: int, workers: int = 1, most_cost: float = 1e9) -> None:
        limits = Limits(1, 99, batches_per_worker=99, places=places, most_stream_cost=most_cost)
        self.table = StreamTable(limits)
        self.count = 0
        for worker in range(workers):
            self.table.add(worker, worker, 1)

    def begin(self, now: float, worker: int = 0) -> Batch:
        """Give a worker a stream."""
        self.count += 1
        call = Request(None, None)
        call.arrival = now
        batch = Batch(self.count, worker, [call], Release.FULL, 1e9, 1, now)
        self.table.give(now, self.table.slots[worker], batch)
        return batch

    def end(self, now: float, batch: Batch) -> None:
        self.table.take_back(now, batch)

    def learn(self, *lengths: float) -> None:
        for length in lengths:
            self.end(length, self.begin(0.0))

    def predict(self, now: float, waiting: int = 0) -> float:
        return self.table.predict(now)(waiting)


def test_a_place_is_free_at_once_before_any_stream_has_ended() -> None:
    bench = Bench(1)
    assert bench.predict(1.0, 5) == 0.0
    assert Bench(1, workers=0).predict(0.0, 5) == 0.0


def test_a_stream_goes_on_as_long_as_it_has_run_before_any_has_ended() -> None:
    bench = Bench(1)
    bench.begin(0.0)
    assert bench.predict(3.0, 5) == 3.0


def test_streams_end_at_the_median_then_at_the_high_quantile_then_later_and_later() -> None:
    bench = Bench(1)
    bench.learn(*[10.0] * 19, 30.0)
    bench.begin(100.0)
    moments = (100.0, 109.0, 110.0, 129.0, 130.0, 500.0)
    assert [bench.predict(now) for now in moments] == [10.0, 1.0, 20.0, 1.0, 30.0, 400.0]


def test_waiting_requests_take_the_places_in_order_for_the_median() -> None:
    bench = Bench(2, workers=2)
    bench.learn(10.0)
    for began, worker in ((100.0, 0), (101.0, 0), (103.0, 1)):
        bench.begin(began, worker)
    found = [bench.predict(104.0, waiting) for waiting in range(6)]
    assert found == [0.0, 6.0, 7.0, 9.0, 10.0, 16.0]


def test_a_stream_that_waits_in_its_worker_is_ahead_and_then_takes_the_place() -> None:
    bench = Bench(1)
    bench.learn(10.0)
    first, second = bench.begin(100.0), bench.begin(100.0)
    assert bench.predict(104.0) == 16.0
    third = bench.begin(104.0)
    bench.end(105.0, third)  # without a place: nothing is learned
    bench.end(110.0, first)
    assert bench.predict(112.0) == 8.0
    bench.end(120.0, second)
    assert bench.predict(120.0) == 0.0
    assert bench.table.predict(120.0)(1) == 10.0


def test_a_worker_whose_streams_cost_the_most_has_no_free_place() -> None:
    bench = Bench(8, most_cost=2.0)
    bench.learn(10.0)
    bench.begin(100.0)
    assert bench.predict(101.0) == 0.0
    bench.begin(100.0)
    assert bench.predict(101.0) == 9.0


def test_the_lengths_of_recent_streams_count() -> None:
    bench = Bench(1)
    bench.learn(*[1.0] * MOST_LENGTHS, *[10.0] * MOST_LENGTHS)
    bench.begin(0.0)
    assert bench.predict(0.0) == 10.0


@pytest.mark.parametrize("seed", range(200))
def test_streams_of_one_length_get_the_places_that_are_predicted(seed: int) -> None:
    """And a place that ends, or a request less ahead, never makes a request wait longer."""
    rng = random.Random(seed)
    length, places = rng.uniform(1, 9), rng.randint(1, 4)
    bench = Bench(places, workers=rng.randint(1, 3))
    bench.learn(length)
    now = 100.0
    free = [now] * (places * len(bench.table.slots))
    for worker in bench.table.slots:
        for _ in range(rng.randint(0, places)):
            began = now - rng.uniform(0, length)
            bench.begin(began, worker)
            free.remove(now)
            free.append(began + length)
    heapify(free)
    before = 0.0
    predict = bench.table.predict(now)
    for waiting in range(3 * len(free)):
        moment = heappop(free)
        heappush(free, moment + length)
        found = predict(waiting)
        assert now + found == pytest.approx(moment)
        assert found >= before
        before = found


def test_a_stream_that_could_not_be_sent_has_no_length() -> None:
    bench = Bench(1)
    stream = bench.begin(0.0)
    assert bench.table.withdraw(5.0, stream, stream.requests) != []
    assert bench.table.pace is None


def test_the_pace_of_a_busy_worker_is_the_median_length_by_its_places() -> None:
    bench = Bench(4)
    assert bench.table.pace is None
    bench.learn(2.0, 8.0, 4.0)
    assert bench.table.pace == (1.0, 1)
