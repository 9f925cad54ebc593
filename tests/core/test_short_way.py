"""`submit_at_once` does what `submit` and `poll` do, or nothing."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import make, poll_batches, run, submit

from fast_batcher._core.adaptive import AdaptivePolicy
from fast_batcher._core.batch_sizes import BatchSizes
from fast_batcher._core.messages import Batch, Dispatch, Request
from fast_batcher._core.policy import Policy, make_policy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.straight_line import Costs
from fast_batcher.stats import Counters

# Its one batch has expired by the time of the arrivals.
STALLED = "stalled"
BUSY = "busy"
FREE = "free"
# The adaptive policy where nothing is gained by a larger batch.
ONE_BY_ONE = "one by one"
ARRIVAL = 5.0

worlds = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["adaptive", "greedy", "fixed", ONE_BY_ONE]),
        "max_batch_size": st.integers(1, 4),
        "max_queue_size": st.integers(1, 5),
        "timeout": st.sampled_from([None, 2.0, 30.0]),
        "infer_timeout": st.sampled_from([None, 3.0, 7.0, 60.0]),
        "workers": st.lists(st.sampled_from([FREE, FREE, BUSY, STALLED]), max_size=3),
        "is_draining": st.sampled_from([False, False, False, True]),
    }
)
arrivals = st.lists(st.sampled_from([None, None, None, None, 6.0, inf]), min_size=1, max_size=5)


def policy_of(name: str) -> Policy:
    if name != ONE_BY_ONE:
        return make_policy(name, 1.0)
    policy = AdaptivePolicy(1.0)
    policy.sizes = BatchSizes(Costs(0.0, 1.0), 0.0)
    return policy


def scheduler_of(world: dict[str, object]) -> tuple[Scheduler, Counters]:
    """A scheduler whose workers are free, busy or stalled at the time of the arrivals."""
    counters = Counters()
    settings = {name: world[name] for name in ("max_batch_size", "max_queue_size")}
    scheduler = Scheduler(
        policy_of(str(world["policy"])),
        counters,
        timeout=world["timeout"],  # type: ignore[arg-type]
        infer_timeout=world["infer_timeout"],  # type: ignore[arg-type]
        idempotent=True,
        isolate_errors=True,
        **settings,  # type: ignore[arg-type]
    )
    workers = world["workers"]
    assert isinstance(workers, list)
    # A free one is ready last, or it would be given what the others are to have.
    for number in sorted(range(len(workers)), key=lambda number: workers[number] == FREE):
        scheduler.worker_ready(0.0, number)
        if workers[number] != FREE:
            deadline = 2.0 if workers[number] == STALLED else inf
            scheduler.submit(0.0, [Request("earlier", None, deadline)])
            scheduler.poll(0.0)
            scheduler.poll(1.0)  # the end of the window of policy="fixed"
    scheduler.poll(ARRIVAL - 1)
    if world["is_draining"]:
        scheduler.begin_drain()
    return scheduler, counters


def plain(batch: Batch) -> tuple[object, ...]:
    ids = [(r.id, r.arrival, r.deadline, r.batch_id, r.is_settled) for r in batch.requests]
    return batch.id, batch.worker, ids, batch.release, batch.deadline, batch.sent_at


@settings(max_examples=500)
@given(world=worlds, deadlines=arrivals)
def test_the_short_way_ends_where_the_long_one_ends(
    world: dict[str, object], deadlines: list[float | None]
) -> None:
    short, short_tally = scheduler_of(world)
    long, long_tally = scheduler_of(world)

    batch = short.submit_at_once(ARRIVAL, [Request(n, None, d) for n, d in enumerate(deadlines)])
    if batch is None:
        # Nothing was done: it is where the other one is that was not asked.
        assert short_tally == long_tally
        assert short.next_expiry == long.next_expiry
        return
    short.count_batch(batch)
    refused = long.submit(ARRIVAL, [Request(n, None, d) for n, d in enumerate(deadlines)])
    actions, wake_at = long.poll(ARRIVAL)

    assert refused == []
    (action,) = actions
    assert isinstance(action, Dispatch)
    assert plain(batch) == plain(action.batch)
    assert short.next_expiry == (inf if wake_at is None else wake_at)
    assert short_tally == long_tally
    assert (short.waiting, short.running) == (long.waiting, long.running)
    # And they go on alike, at the next expiry and when the worker answers.
    assert len(short.poll(100.0)[0]) == len(long.poll(100.0)[0])
    assert short_tally == long_tally
    assert short.batch_done(100.0, batch.worker, batch.id) is batch
    assert long.batch_done(100.0, batch.worker, batch.id) is action.batch


def test_a_free_worker_gets_what_comes_at_once() -> None:
    scheduler, _ = scheduler_of(
        {
            "policy": "adaptive",
            "max_batch_size": 2,
            "max_queue_size": 9,
            "timeout": 30.0,
            "infer_timeout": None,
            "workers": [BUSY, FREE],
            "is_draining": False,
        }
    )
    requests = [Request("one", None), Request("two", None)]
    batch = scheduler.submit_at_once(ARRIVAL, requests)
    assert batch is not None
    assert (batch.worker, batch.requests) == (1, requests)
    assert scheduler.submit_at_once(ARRIVAL, [Request("three", None)]) is None


def test_what_waits_for_another_try_comes_first() -> None:
    """The replacement is ready and requests arrive before anybody has polled."""
    scheduler = make(max_batch_size=2)
    batch = run(scheduler, 0.0)
    scheduler.worker_lost(0, batch.id, batch.id)
    scheduler.worker_ready(1.0, 1)
    assert scheduler.submit_at_once(1.0, [Request("new", None)]) is None
    submit(scheduler, 1.0)
    (first,) = poll_batches(scheduler, 1.0)
    assert first.requests == batch.requests
