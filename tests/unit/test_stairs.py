"""Models that compute some batch sizes only: what is learned, and which batches are formed."""

from collections.abc import Sequence
from functools import cache
from itertools import count, pairwise
from typing import Any

import pytest
from models.base import Echo
from schedulers import make, make_request, poll_batches, submit

from fast_batcher import Collation
from fast_batcher._core.prediction import Method
from fast_batcher._core.queue import PaddedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.service_model import ServiceModel
from fast_batcher._core.values import Batch, Dispatch, Expire, Limits, Release, Request
from fast_batcher.model import find_model_fault

Stairs = dict[int, float]
# Milliseconds of a batch by its allowed size: nearly level, nearly proportional, and with one step
# that is far higher than the one before it.
LEVEL: Stairs = {1: 4.0, 8: 4.5, 32: 5.0, 64: 6.0}
STEEP: Stairs = {1: 1.0, 8: 6.0, 32: 20.0, 64: 38.0}
CLIFF: Stairs = {1: 4.0, 8: 5.0, 32: 6.0, 64: 16.0}
SHAPES = {"level": LEVEL, "steep": STEEP, "cliff": CLIFF}


def service_of(stairs: Stairs) -> ServiceModel:
    service = ServiceModel(tuple(stairs))
    for size, seconds in stairs.items():
        service.observe(size, seconds)
    return service


def open_stairs(stairs: Stairs, *, is_warm: bool = True, **limits: Any) -> Scheduler:
    scheduler = make(workers=0, **{"max_batch_size": 64, **limits})
    times = stairs.items() if is_warm else ()
    scheduler.worker_ready(0.0, 0, times, allowed={"infer": tuple(stairs)})
    return scheduler


# What is learned.


@pytest.mark.parametrize(("size", "filled"), [(1, 1), (2, 8), (8, 8), (33, 64), (64, 64), (65, 65)])
def test_a_batch_is_filled_to_the_next_step(size: int, filled: int) -> None:
    assert service_of(LEVEL).fill(size) == filled
    assert ServiceModel().fill(size) == size


def test_all_sizes_of_a_step_have_one_value() -> None:
    service = service_of(CLIFF)
    found = [service.median(size) for size in (1, 2, 8, 9, 32, 33, 64)]
    assert found == pytest.approx([4, 5, 5, 6, 6, 16, 16], rel=0.01)
    for _ in range(9):
        service.observe(40, 12.0)
    assert service.median(33) == service.median(64) == pytest.approx(12.0, rel=0.02)
    assert service.high(33) >= service.median(64)
    assert [size for size, *_ in service.points()] == [1, 8, 32, 64]


def test_steps_that_share_a_power_of_two_are_told_apart() -> None:
    service = service_of({40: 5.0, 48: 7.0, 64: 9.0})
    found = [service.median(size) for size in (40, 41, 64)]
    assert found == pytest.approx([5, 7, 9], rel=0.01)


def test_other_steps_forget_what_was_learned() -> None:
    method = Method("infer", None, 64)
    method.use_steps(tuple(LEVEL))
    method.service.observe(8, 4.5)
    method.use_steps(tuple(LEVEL))
    assert method.service.is_known
    method.use_steps((4, 16))
    assert not method.service.is_known


def test_the_largest_allowed_size_is_the_largest_batch() -> None:
    method = Method("infer", None, 64)
    sizes = []
    for steps, most in (((4, 16), 64), ((4, 16), 8), ((4, 16), 32), ((), 32), ((4, 128), 32)):
        method.use_steps(steps)
        method.reconfigure(most)
        sizes.append(method.size_cap.size)
    assert sizes == [16, 8, 16, 32, 32]
    scheduler = open_stairs({1: 1.0, 16: 2.0}, max_batch_size=64)
    scheduler.worker_ready(0.0, 1, allowed={"infer": (1, 16)})
    submit(scheduler, 0.0, 40)
    assert [len(batch.requests) for batch in poll_batches(scheduler, 0.0)] == [16, 16]


def test_a_step_that_is_believed_long_is_tried_again() -> None:
    """One slow batch of the warm-up must not keep a step out for ever."""
    service = service_of({**CLIFF, 32: 16.0})
    assert service.best_size(64) == 64
    tries = 0
    for _ in range(1000):
        size = service.best_size(64)
        tries += size == 32
        service.observe(size, CLIFF[size])
    assert tries > 400


# Which batches are formed.


@pytest.mark.parametrize(
    ("stairs", "waiting", "best"),
    [
        (CLIFF, 33, 32),
        (CLIFF, 64, 32),
        (CLIFF, 9, 8),
        (CLIFF, 12, 12),
        (LEVEL, 33, 32),
        (LEVEL, 40, 40),
        (LEVEL, 9, 9),
        (STEEP, 2, 1),
        (STEEP, 8, 8),
        (STEEP, 64, 64),
    ],
)
def test_most_answers_per_second_are_chosen(stairs: Stairs, waiting: int, best: int) -> None:
    assert service_of(stairs).best_size(waiting) == best
    scheduler = open_stairs(stairs)
    requests = submit(scheduler, 0.0, waiting)
    (batch,) = poll_batches(scheduler, 0.0)
    assert batch.requests == requests[:best]
    assert scheduler.waiting == waiting - best


def test_all_go_while_times_are_unknown() -> None:
    scheduler = open_stairs(CLIFF, is_warm=False)
    submit(scheduler, 0.0, 33)
    (batch,) = poll_batches(scheduler, 0.0)
    assert len(batch.requests) == 33


def test_the_rest_goes_to_another_free_worker() -> None:
    scheduler = open_stairs(CLIFF)
    scheduler.worker_ready(0.0, 1, allowed={"infer": tuple(CLIFF)})
    submit(scheduler, 0.0, 33)
    assert [len(batch.requests) for batch in poll_batches(scheduler, 0.0)] == [32, 1]


def test_a_busy_worker_gets_the_best_part_of_a_full_queue() -> None:
    scheduler = open_stairs(CLIFF)
    submit(scheduler, 0.0, 1)
    poll_batches(scheduler, 0.0)
    submit(scheduler, 0.0, 63)
    assert poll_batches(scheduler, 0.0) == []
    submit(scheduler, 0.0, 1)
    (second,) = poll_batches(scheduler, 0.0)
    assert (len(second.requests), second.release) == (32, Release.FULL)


def test_deadlines_are_judged_by_the_step() -> None:
    """33 requests that must be answered in 8 ms: 32 are, and one is dropped when it is late."""
    scheduler = open_stairs(CLIFF, max_latency=8.0)
    submit(scheduler, 0.0, 32)
    (batch,) = poll_batches(scheduler, 0.0)
    assert (len(batch.requests), batch.release) == (32, Release.IDLE)
    # A step of 64 would be late, and 40 of them can be answered as 32 and 8.
    scheduler = open_stairs(CLIFF, max_latency=13.0)
    submit(scheduler, 0.0, 40)
    (batch,) = poll_batches(scheduler, 0.0)
    assert (len(batch.requests), batch.release) == (32, Release.IDLE)


def test_each_method_has_its_own_steps() -> None:
    methods = [Method("infer", None, 64), Method("embed", None, 64)]
    limits = Limits(max_batch_size=64, max_queue_size=100)
    scheduler = Scheduler(make()._policy, limits, methods=methods)
    scheduler.worker_ready(0.0, 0, allowed={"embed": (8, 32)})
    assert [method.service.steps for method in methods] == [(), (8, 32)]
    scheduler.worker_ready(0.0, 1)
    assert [method.service.steps for method in methods] == [(), ()]


def test_a_batch_in_place_of_dropped_requests_has_its_own_method() -> None:
    methods = [Method("infer", None, 2), Method("embed", None, 2)]
    limits = Limits(max_batch_size=2, max_queue_size=100, batches_per_worker=1)
    scheduler = Scheduler(make()._policy, limits, methods=methods)
    scheduler.worker_ready(0.0, 0, [(1, 1.0), (2, 1.0)])
    first, late, other = requests = [make_request("", deadline) for deadline in (30.0, 3.0, 30.0)]
    for request, method in zip(requests, (methods[0], *methods), strict=True):
        request.group = method.group
    assert scheduler.submit(0.0, [first]) == []
    (batch,) = poll_batches(scheduler, 0.0)
    assert scheduler.submit(0.5, [late, other]) == []
    scheduler.batch_done(2.5, 0, batch.id)
    dropped, dispatch = scheduler.poll(2.5)[0]
    assert isinstance(dropped, Expire)
    assert isinstance(dispatch, Dispatch)
    assert (dropped.request, dispatch.batch.requests) == (late, [other])
    assert dispatch.batch.method is methods[1]


@pytest.mark.parametrize(("name", "sizes"), [("infer", [32]), ("embed", [33])])
def test_warm_up_times_are_those_of_infer(name: str, sizes: list[int]) -> None:
    """The times of another method are not known before its batches."""
    methods = {name: Method(name, None, 64) for name in ("infer", "embed")}
    limits = Limits(max_batch_size=64, max_queue_size=100)
    scheduler = Scheduler(make()._policy, limits, methods=[*methods.values()])
    allowed = dict.fromkeys(methods, tuple(CLIFF))
    scheduler.worker_ready(0.0, 0, CLIFF.items(), allowed=allowed)
    requests = [Request(number, None) for number in range(33)]
    for request in requests:
        request.group = methods[name].group
    assert scheduler.submit(0.0, requests) == []
    assert [len(batch.requests) for batch in poll_batches(scheduler, 0.0)] == sizes


def run_for_padding(scheduler: Scheduler, sizes: Sequence[int]) -> float:
    for now, size in enumerate(sizes):
        submit(scheduler, float(now), size)
        (batch,) = poll_batches(scheduler, float(now))
        scheduler.batch_done(now + 0.1, batch.worker, batch.id)
    padding: float = scheduler.figures["padding"]
    return padding


def test_padding_counts_filling() -> None:
    """The first answer of a worker is not learned: 12 + 24 of 32 + 32 rows are requests."""
    scheduler = open_stairs({8: 0.1, 32: 0.11}, max_batch_size=32)
    assert run_for_padding(scheduler, [5, 12, 24]) == pytest.approx(1 - 36 / 64)
    packed = make(workers=0, max_batch_size=32, packer=PaddedPacker(None))
    packed.worker_ready(0.0, 0, allowed={"infer": (8, 32)})
    assert run_for_padding(packed, [5, 12, 24]) == pytest.approx(1 - 36 / 64)


# The exact optimum of small cases.

# Milliseconds by which sums may be off.
ROUNDING = 1e-6
MOST_OVER_LEAST_SUM = {"level": 1.05, "cliff": 1.01, "steep": 1.75}


def most_per_second(stairs: Stairs, clients: int) -> float:
    """Return the most answers per millisecond of clients that ask again at once, by Howard's rule.

    Whatever is sent, the number that wait at the end of a batch is the same: all clients. So the
    optimum sends always the same size.
    """
    service = service_of(stairs)
    return max(size / service.median(size) for size in range(1, min(clients, max(stairs)) + 1))


def measure_closed_loop(stairs: Stairs, clients: int, batches: int = 400) -> float:
    """Return the answers per millisecond of the scheduler with such clients."""
    scheduler = open_stairs(stairs)
    service = service_of(stairs)
    submit(scheduler, 0.0, clients)
    now, answers, running = 0.0, 0, poll_batches(scheduler, 0.0)
    for _ in range(batches):
        batch = running.pop(0)
        now += service.median(len(batch.requests))
        scheduler.batch_done(now, batch.worker, batch.id)
        answers += len(batch.requests)
        submit(scheduler, now, len(batch.requests))
        running += poll_batches(scheduler, now)
    return answers / now


@pytest.mark.parametrize("clients", [1, 2, 7, 9, 12, 31, 33, 36, 48, 63, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_closed_loop_is_near_the_optimum(name: str, clients: int) -> None:
    """The batch that waits behind another is full, so 64 and more wait for no other."""
    stairs = SHAPES[name]
    found = measure_closed_loop(stairs, clients)
    assert found >= 0.97 * most_per_second(stairs, clients)


@cache
def least_sum(waiting: int, name: str) -> float:
    """Return the least sum of the moments of all answers, over all partitions; brute force."""
    service = service_of(SHAPES[name])
    if not waiting:
        return 0.0
    return min(
        waiting * service.median(size) + least_sum(waiting - size, name)
        for size in range(1, waiting + 1)
    )


def sum_of_answers(batches: Sequence[Batch], service: ServiceModel) -> float:
    ends = [0.0]
    for batch in batches:
        ends.append(ends[-1] + service.median(len(batch.requests)))
    return sum(end * len(batch.requests) for end, batch in zip(ends[1:], batches, strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_queue_without_arrivals_is_near_the_best_partition(name: str) -> None:
    """The mean latency of a queue that only empties, which is not the aim; never worse than whole.

    Where time is in proportion to the size, one by one would be best.
    """
    stairs = SHAPES[name]
    service = service_of(stairs)
    for waiting in range(1, 65):
        scheduler = open_stairs(stairs)
        submit(scheduler, 0.0, waiting)
        batches: list[Batch] = []
        for now in count():
            sent = poll_batches(scheduler, float(now))
            if not sent:
                break
            batches += sent
            for batch in sent:
                scheduler.batch_done(now + 0.5, batch.worker, batch.id, has_raised=True)
        found = sum_of_answers(batches, service)
        assert found <= waiting * service.median(waiting) + ROUNDING
        assert found <= MOST_OVER_LEAST_SUM[name] * least_sum(waiting, name)


def test_stairs_of_these_tests_rise() -> None:
    for stairs in SHAPES.values():
        assert all(low < high for low, high in pairwise(stairs.values()))


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"allowed_batch_sizes": (1, 4)}, None),
        ({"allowed_batch_sizes": (0, 4)}, "its allowed_batch_sizes=0"),
        ({"allowed_batch_sizes": 4}, "its allowed_batch_sizes=4: give whole numbers"),
        (
            {"allowed_batch_sizes": (1, 4), "collation": Collation.stack()},
            "it has a collation, which takes allowed_batch_sizes",
        ),
    ],
)
def test_allowed_sizes_of_a_class_are_checked(
    attributes: dict[str, Any], fault: str | None
) -> None:
    found = find_model_fault(type("Model", (Echo,), attributes))
    assert found == fault or (found or "").startswith(fault or "-")
