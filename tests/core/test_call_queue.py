"""The order of requests of unequal rank, and what a batch of limited length takes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.call_queue import MIN_GONE_ENTRIES, OLDEST_EVERY, CallQueue
from fast_batcher._core.messages import Request


def requests_of(ranks: Sequence[int], lengths: Sequence[int] = (), first: int = 0) -> list[Request]:
    requests = [Request(number, None) for number in range(len(ranks))]
    for number, (request, rank) in enumerate(zip(requests, ranks, strict=True)):
        request.id = first + number
        request.rank = rank
        if lengths:
            request.length = lengths[number]
    return requests


def queue_of(ranks: Sequence[int], lengths: Sequence[int] = (), limit: float = 1e9) -> CallQueue:
    queue = CallQueue(limit)
    queue.extend(requests_of(ranks, lengths), [])
    return queue


def take_ids(queue: CallQueue, count: int) -> list[int]:
    return [request.id for request in queue.take(count)]


def test_lower_ranks_go_first_and_equals_in_order_of_arrival() -> None:
    queue = queue_of([1, 0, 1, 0])
    assert take_ids(queue, 3) == [1, 3, 0]
    assert take_ids(queue, 3) == [2]
    assert (queue.size, take_ids(queue, 3)) == (0, [])


def test_a_request_without_a_rank_has_the_lowest() -> None:
    queue = queue_of([1])
    late = Request("late", None)
    late.id = 7
    queue.extend([late], [])
    assert take_ids(queue, 1) == [7]


def test_every_fourth_batch_takes_the_oldest_along() -> None:
    queue = queue_of([9] + [0] * 10)
    assert [take_ids(queue, 2) for _ in range(4)] == [[1, 2], [3, 4], [5, 6], [0, 7]]
    assert take_ids(queue, 9) == [8, 9, 10]


def test_a_batch_stays_within_its_length_but_for_one_that_is_longer() -> None:
    queue = queue_of([0] * 5, [3, 3, 3, 20, 1], 6)
    assert [take_ids(queue, 4) for _ in range(3)] == [[0, 1], [2], [3]]
    assert take_ids(queue, 4) == [4]


def test_the_oldest_counts_for_the_length_too() -> None:
    queue = queue_of([9, 0, 0, 0, 0, 0], [4, 1, 1, 1, 2, 1], 5)
    for _ in range(OLDEST_EVERY - 1):
        assert len(queue.take(1)) == 1
    assert take_ids(queue, 5) == [0]
    assert take_ids(queue, 5) == [4, 5]


def test_one_that_has_left_is_not_taken_and_nothing_is_kept_of_it() -> None:
    queue = queue_of([0, 1, 2])
    first = queue.oldest()
    assert first is not None
    queue.discard(first)
    assert [request.id for request in queue] == [1, 2]
    assert take_ids(queue, 9) == [1, 2]
    assert queue.oldest() is None


def test_entries_of_those_that_have_left_do_not_pile_up() -> None:
    queue = queue_of([0])
    for number in range(1000):
        (request,) = requests_of([1], first=number + 1)
        queue.extend([request], [])
        queue.discard(request)
        assert len(queue._ranked) <= 2 * queue.size + MIN_GONE_ENTRIES
    assert take_ids(queue, 9) == [0]


def test_nothing_in_it_expires() -> None:
    queue = queue_of([0, 1])
    assert queue.earliest_deadline() == float("inf")
    assert queue.pop_expired(1e9) == []


@given(
    ranks=st.lists(st.integers(0, 3), max_size=60),
    size=st.integers(1, 5),
    gone=st.sets(st.integers(0, 59)),
)
def test_each_leaves_once_and_none_waits_longer_than_the_bound(
    ranks: list[int], size: int, gone: set[int]
) -> None:
    queue = queue_of(ranks)
    requests = list(queue)
    for request in requests:
        if request.id in gone:
            queue.discard(request)
    expected = [request.id for request in requests if request.id not in gone]
    left: list[int] = []
    batches = 0
    while queue.size:
        batch = take_ids(queue, size)
        assert 1 <= len(batch) <= size
        batches += 1
        left += batch
        for older, number in enumerate(expected):
            if number not in left:
                assert batches < OLDEST_EVERY * (older + 1)
    assert sorted(left) == expected
