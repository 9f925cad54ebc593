"""InputArena: inputs that lie in shared memory before their batch is formed.

First without a worker, then with real ones. In every test the question is the same: does each
reader see what was sent, as long as it probes?
"""

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from desk import LARGE, MEBI, SIZE, SMALL, Desk, desk, filled, free, opened, slabs_of, sums
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from memory import memory_of, refuse_memory
from sample_models import Digests, Stacks, WritesAndDies, WritesAndRaises, digest
from waits import call, outcome, turns

from fast_batcher import Collation, InferenceModel
from fast_batcher._parent.input_arena import FRESH, LEAST, MOST_OPEN, MOST_PER_TURN
from fast_batcher._transport.codec import loads
from fast_batcher._transport.frames import Kind

if TYPE_CHECKING:
    from fast_batcher._core.messages import Request
    from fast_batcher._parent.input_arena import InputArena

__all__ = ["desk"]


def runs(desk: Desk) -> list[tuple[int, int]]:
    """Start and count of each run of the batch that was sent first."""
    return [(start, count) for _, start, count in loads(desk.queue[0][2])]


def close_all(rows: "InputArena") -> None:
    """No more rows in any slab."""
    for slab in [one.slab for one in rows._open.values()]:
        rows.close(slab)


def test_rows_lie_one_behind_the_other(desk: Desk) -> None:
    requests = [desk.arrive(filled(number)) for number in range(5)]
    desk.send_requests(requests)
    assert desk.kinds == [Kind.ROWS]
    assert runs(desk) == [(0, 5)]
    assert sums(desk.read()) == [0, 1, 2, 3, 4]


def test_a_slab_takes_no_more_rows_once_a_batch_has_been_taken_from_it(desk: Desk) -> None:
    first = [desk.arrive(filled(number)) for number in range(3)]
    late = desk.arrive(filled(3))
    desk.send_requests(first)
    desk.send_requests([late, *(desk.arrive(filled(number)) for number in range(4, 6))])
    assert runs(desk)[0][1] == 3
    assert sums(desk.read()) == [0, 1, 2]
    assert [count for _, count in runs(desk)] == [1, 2]
    assert sums(desk.read()) == [3, 4, 5]


def test_a_full_slab_is_followed_by_another(desk: Desk) -> None:
    requests = [desk.arrive(filled(number)) for number in range(20)]
    # 8 is the size of a batch.
    for begin in range(0, 20, 8):
        desk.send_requests(requests[begin : begin + 8])
        assert len(runs(desk)) == 1
        assert sums(desk.read()) == [*range(20)][begin : begin + 8]


def test_requests_may_be_sent_in_any_order(desk: Desk) -> None:
    requests = [desk.arrive(filled(number)) for number in range(6)]
    order = [5, 0, 1, 4, 2, 3]
    desk.send_requests([requests[number] for number in order])
    assert [count for _, count in runs(desk)] == [1, 2, 1, 2]
    assert sums(desk.read()) == order


def test_layouts_may_share_a_batch(desk: Desk) -> None:
    values = [np.full(shape, n, dtype) for n, (shape, dtype) in enumerate(KINDS * 2)]
    desk.send_requests([desk.arrive(value) for value in values])
    assert desk.kinds == [Kind.ROWS]
    for got, value in zip(desk.read(), values, strict=True):
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert np.array_equal(got, value)


KINDS = [((10_000,), "f4"), ((1000, 10), "f4"), ((10_000,), "i4")]


def test_neighbours_of_different_layouts_are_apart(desk: Desk) -> None:
    # A full slab of pages, with the next one right behind it.
    requests = [desk.arrive(np.full(16 * 4096, number, np.uint8)) for number in range(8)]
    other = desk.arrive(np.full(4 * 4096, 8, np.float32))
    assert other.staged.start == requests[-1].staged.end
    desk.send_requests([*requests, other])
    assert [count for _, count in runs(desk)] == [8, 1]
    assert sums(desk.read()) == [*range(9)]


def test_few_layouts_are_open_at_a_time(desk: Desk) -> None:
    size = 50_000
    first = desk.arrive(filled(0, size))
    for number in range(1, MOST_OPEN):
        desk.arrive(filled(number, size + number))
    again = desk.arrive(filled(MOST_OPEN, size))
    # Closes the one that was used least recently, which is not the first.
    desk.arrive(filled(9, size + 9))
    assert len(desk.shared_inputs.rows._open) == MOST_OPEN
    last = desk.arrive(filled(MOST_OPEN + 1, size))
    desk.send_requests([first, again, last])
    assert len(runs(desk)) == 1
    assert sums(desk.read()) == [0, MOST_OPEN, MOST_OPEN + 1]


def test_before_something_large_has_come_nothing_is_looked_at() -> None:
    desk = Desk()
    assert desk.shared_inputs.rows.probes == {}
    desk.send(np.zeros(1000, np.uint8))
    assert desk.shared_inputs.rows.probes == {}
    desk.send(np.zeros(SMALL, np.uint8))
    assert np.ndarray in desk.shared_inputs.rows.probes
    desk.close()


@pytest.mark.parametrize("size", [10, 999, 7 * MEBI + MEBI - 4095])
def test_what_is_small_or_cannot_go_without_has_no_row(desk: Desk, size: int) -> None:
    assert desk.arrive(filled(1, size)).staged is None
    assert desk.slabs.count == 0


def test_a_batch_of_which_one_has_no_row_goes_as_it_did(desk: Desk) -> None:
    for values in ((filled(1), b"text"), (b"text", filled(1))):
        desk.send_requests([desk.arrive(value) for value in values])
        assert desk.kinds == [Kind.SHARED_INPUTS]
        assert sorted(map(len, desk.read())) == [4, SMALL]


def test_a_row_is_sent_once(desk: Desk) -> None:
    """The model may have written into it."""
    requests = [desk.arrive(filled(number)) for number in range(3)]
    desk.send_requests(requests)
    for view in desk.read():
        view[:] = 99
    desk.send_requests(requests)
    assert desk.kinds == [Kind.SHARED_INPUTS]
    assert sums(desk.read()) == [0, 1, 2]


def test_a_slab_is_free_when_the_worker_says_so(desk: Desk) -> None:
    requests = [desk.arrive(filled(number)) for number in range(3)]
    desk.send_requests(requests)
    views = desk.read()
    requests.clear()
    gc.collect()
    desk.free()
    assert desk.slabs.count == 1
    kept = views.pop()[1:]
    views.clear()
    desk.free()
    assert desk.slabs.count == 1
    del kept
    desk.free()
    assert desk.slabs.count == 0


def test_a_slab_of_two_batches_is_free_with_both(desk: Desk) -> None:
    requests = [desk.arrive(filled(number)) for number in range(4)]
    desk.send_requests(requests[:2])
    desk.send_requests(requests[2:])
    first, second = desk.read(), desk.read()
    del second
    desk.free()
    assert desk.slabs.count == 1
    assert sums(first) == [0, 1]
    del first
    desk.free()
    assert desk.slabs.count == 0


def test_a_row_is_given_up_with_its_request(desk: Desk) -> None:
    requests = [desk.arrive(filled(number)) for number in range(8)]
    assert desk.slabs.count == 1
    requests.clear()
    assert desk.slabs.count == 0


def test_a_row_may_be_given_up_by_the_garbage_collector_of_any_thread(desk: Desk) -> None:
    request = desk.arrive(filled(1))
    request.caller = [request]
    del request
    gc.collect()
    # The slab is still open.
    (slab,) = [one.slab for one in desk.shared_inputs.rows._open.values()]
    assert desk.slabs.count == 1
    desk.shared_inputs.rows.close(slab)
    del slab
    assert desk.slabs.count == 0


def test_an_idle_slab_has_no_more_than_its_rows(desk: Desk) -> None:
    request = desk.arrive(filled(1, 4096 * 10))
    desk.send_requests([request])
    assert desk.slabs.taken_bytes == 4096 * 10


def test_what_is_large_is_copied_aside_and_its_batch_keeps_its_place(desk: Desk) -> None:
    requests = [desk.arrive(filled(number, LARGE)) for number in range(3)]
    assert len(desk.jobs) == 3
    desk.send_requests(requests)
    desk.send("between")
    assert desk.kinds == [None, Kind.INPUT_ATOMS]
    for _ in range(2):
        desk.run_job()
        assert desk.kinds == [None, Kind.INPUT_ATOMS]
    desk.run_job()
    assert desk.kinds == [Kind.ROWS, Kind.INPUT_ATOMS]
    assert sums(desk.read()) == [0, 1, 2]


def test_what_was_copied_before_its_batch_is_sent_at_once(desk: Desk) -> None:
    requests = [desk.arrive(filled(number, LARGE)) for number in range(3)]
    while desk.jobs:
        desk.run_job()
    desk.send_requests(requests)
    assert sums(desk.read()) == [0, 1, 2]


def test_the_memory_of_a_row_stays_until_it_has_been_copied(desk: Desk) -> None:
    request = desk.arrive(filled(1, LARGE))
    desk.shared_inputs.rows.close(request.staged.slab)
    request.staged.give_up()
    del request
    assert desk.slabs.count == 1
    desk.run_job()
    desk.done_jobs.clear()
    assert desk.slabs.count == 0


def test_a_row_whose_caller_left_before_is_not_copied(desk: Desk) -> None:
    request = desk.arrive(filled(1, LARGE))
    request.staged.give_up()
    desk.run_job()
    assert memory_of(desk.slabs._fd) == 0
    # It is known that it has no memory.
    assert desk.slabs._committed_end == 0


def test_a_row_that_was_sent_is_copied_whoever_leaves(desk: Desk) -> None:
    request = desk.arrive(filled(1, LARGE))
    desk.send_requests([request])
    request.staged.give_up()
    desk.run_job()
    assert sums(desk.read()) == [1]


def test_a_worker_may_die_while_rows_are_copied(desk: Desk) -> None:
    requests = [desk.arrive(filled(number, LARGE)) for number in range(2)]
    desk.send_requests(requests)
    desk.run_job()
    desk.replace_worker()
    # Another try, with what was sent.
    desk.send_requests(requests)
    desk.run_job()
    desk.run_job()
    assert sums(desk.read()) == [0, 1]
    desk.done_jobs.clear()
    desk.free()
    assert desk.slabs.count == 0


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_where_there_is_no_memory_the_pipe_is_left(
    desk: Desk, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_memory(desk.slabs._fd)
    desk.send_requests([desk.arrive(filled(number, size)) for number in range(2)])
    desk.send("after")
    while desk.jobs:
        desk.run_job()
    assert desk.kinds == [Kind.INPUTS, Kind.INPUT_ATOMS]
    assert sums(desk.read()) == [0, 1]
    assert desk.read() == ["after"]
    # It is known that there is none.
    assert desk.slabs._committed_end == 0
    (record,) = caplog.records
    assert "Bad file descriptor" in record.message


def test_half_of_the_memory_is_left_to_what_has_no_rows(desk: Desk) -> None:
    requests = [desk.arrive(filled(number, 2 * MEBI)) for number in range(10)]
    # Two in a slab: a quarter of the memory.
    assert [request.staged is not None for request in requests] == [True] * 4 + [False] * 6
    assert desk.slabs.taken_bytes == SIZE / 2


def test_idle_slabs_make_room_for_another_layout(desk: Desk) -> None:
    # A quarter of the memory is reserved for the like of each.
    sizes = [MEBI // 2 - number * 4096 for number in range(4)]
    requests = [desk.arrive(filled(number, size)) for number, size in enumerate(sizes)]
    assert all(request.staged is not None for request in requests)
    desk.send_requests(requests)
    assert sums(desk.read()) == [0, 1, 2, 3]


def test_a_turn_of_the_loop_copies_so_much_and_leaves_the_rest_to_the_thread(desk: Desk) -> None:
    rows = desk.shared_inputs.rows
    size = 1_000_000
    for cost in (size * FRESH, size):
        fit = MOST_PER_TURN // cost
        given = [rows.take(filled(number, size)) for number in range(8)]
        assert None not in given
        assert len(desk.jobs) == max(0, 8 - fit)
        while desk.jobs:
            desk.run_job()
        # The memory is there from now on.
        given.clear()
        desk.done_jobs.clear()
        rows.copied = MOST_PER_TURN - 8 * size
        close_all(rows)
        assert desk.slabs.count == 0
    assert rows.take(filled(0, size)) is not None
    assert rows.copied == MOST_PER_TURN - 7 * size


def test_an_array_that_was_resized_meanwhile_has_none(desk: Desk) -> None:
    rows = desk.shared_inputs.rows
    # The memory is there from now on.
    for _ in range(2):
        desk.send_requests([desk.arrive(filled(1))])
        assert desk.kinds == [Kind.ROWS]
        desk.read()
        desk.free()
    # What another thread does between the look and the copy.
    array = filled(2, SMALL)
    look = rows.probes[np.ndarray]
    rows.probes[np.ndarray] = lambda value, least, most: look(
        np.zeros(SMALL + 8, "u1"), least, most
    )
    assert rows.take(array) is None
    rows.probes[np.ndarray] = look
    close_all(rows)
    assert desk.slabs.count == 0


def test_closed_slabs_give_no_rows(desk: Desk) -> None:
    desk.slabs.close()
    assert desk.arrive(filled(1)).staged is None


def test_a_sparse_tensor_has_none(desk: Desk) -> None:
    torch = pytest.importorskip("torch")
    desk.shared_inputs.rows.enable()
    assert desk.arrive(torch.eye(1000).to_sparse()).staged is None


RESIZES = """
import sys
import torch
from desk import Desk

how, where = sys.argv[1:]
desk = Desk()
desk.shared_inputs.rows.enable()
tensor = torch.ones(2**22, dtype=torch.uint8)
if where == "row":
    desk.send_requests([desk.arrive(tensor)])
else:
    desk.send({"tensor": tensor})
if how == "resize":
    tensor.untyped_storage().resize_(0)
elif how == "set":
    tensor.set_(torch.empty(1, dtype=torch.uint8))
else:
    tensor.data = torch.empty(1, dtype=torch.uint8)
desk.run_job()
(kind,) = desk.kinds
if how == "resize":
    print(kind.name)
else:
    (value,) = desk.read()
    print(int((value if where == "row" else value["tensor"]).sum()))
"""


@pytest.mark.parametrize("how", ["resize", "set", "data"])
@pytest.mark.parametrize("where", ["row", "dict"])
def test_a_tensor_may_lose_its_memory_while_it_is_copied(how: str, where: str) -> None:
    """Its caller may have left; and what it frees here goes back to the system at once."""
    pytest.importorskip("torch")
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", RESIZES, how, where],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The only thing that is said: that it could not be shared.
    assert done.stderr.count("\n") == ("was resized while" in done.stderr) == (how == "resize")
    assert done.stdout.strip() == ("INPUTS" if how == "resize" else str(2**22))


def test_tensors_have_rows(desk: Desk) -> None:
    torch = pytest.importorskip("torch")
    desk.shared_inputs.rows.enable()
    values = [torch.full((3, 50_000), float(number)) for number in range(3)]
    desk.send_requests([desk.arrive(value) for value in values])
    assert runs(desk) == [(0, 3)]
    for got, value in zip(desk.read(), values, strict=True):
        assert torch.equal(got, value)


def given(desk: Desk, number: int, size: int = SMALL) -> Any:
    """An array in a row, filled, in a turn of the loop of its own."""
    desk.shared_inputs.rows.copied = 0
    array = desk.shared_inputs.rows.give(np.dtype(np.uint8), (size,))
    array[:] = number
    return array


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_an_array_that_was_given_is_sent_as_it_lies_and_cannot_be_written(
    desk: Desk, size: int
) -> None:
    arrays = [given(desk, number, size) for number in range(3)]
    desk.send_requests([desk.arrive(array) for array in arrays])
    assert desk.jobs == []
    assert runs(desk) == [(0, 3)]
    views = desk.read()
    assert sums(views) == [0, 1, 2]
    arrays[1][:] = 9
    assert sums(views) == [0, 9, 2]
    for view in views:
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_an_array_that_was_given_is_sent_again_and_occupies_its_slab(desk: Desk) -> None:
    array = given(desk, 1)
    requests = [desk.arrive(array)]
    for kind in (Kind.ROWS, Kind.SHARED_INPUTS):  # the second of the same request is another try
        desk.send_requests(requests)
        assert desk.kinds == [kind]
        assert sums(desk.read()) == [1]
    requests = [desk.arrive(array)]
    desk.send_requests(requests)
    assert desk.kinds == [Kind.ROWS]
    assert sums(desk.read()) == [1]
    requests.clear()
    desk.free()
    assert desk.slabs.count == 1
    kept = array[1:]
    del array
    assert desk.slabs.count == 1
    del kept
    assert desk.slabs.count == 0
    assert desk.shared_inputs.rows._given == {}


def test_an_array_that_was_given_may_be_sent_as_another(desk: Desk) -> None:
    array = given(desk, 0)
    array[:4] = [1, 0, 0, 0]
    desk.send_requests([desk.arrive(array.view(np.int32).reshape(3, -1))])
    (got,) = desk.read()
    assert (got.shape, got.dtype, int(got[0, 0])) == ((3, SMALL // 12), np.int32, 1)


def test_a_part_of_an_array_that_was_given_is_copied(desk: Desk) -> None:
    array = given(desk, 1)
    request = desk.arrive(array[:-1])
    array[:] = 2
    desk.send_requests([request])
    assert desk.kinds == [Kind.ROWS]
    (got,) = desk.read()
    assert sums([got]) == [1]
    got[:] = 3


@pytest.mark.parametrize("shape", [(10,), (), (7 * MEBI + MEBI - 4095,)])
def test_no_row_is_given_for_what_would_have_none(desk: Desk, shape: tuple[int, ...]) -> None:
    assert desk.shared_inputs.rows.give(np.dtype(np.uint8), shape) is None
    assert desk.slabs.count == 0


def test_where_there_is_no_memory_no_row_is_given(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_memory(desk.slabs._fd)
    assert desk.shared_inputs.rows.give(np.dtype(np.uint8), (SMALL,)) is None
    close_all(desk.shared_inputs.rows)
    assert desk.slabs.count == 0
    (record,) = caplog.records
    assert "Bad file descriptor" in record.message


# --- at random ------------------------------------------------------------------------------------

# Of rows that are copied at once, aside, and of another layout.
VALUES = [(SMALL, np.uint8), (LARGE, np.uint8), (SMALL // 4, np.float32)]


class AtRandom(RuleBasedStateMachine):
    """Arrivals, departures, batches in any order, second tries, views kept, and deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.desk.shared_inputs.rows.enable()
        self.number = 0
        self.waiting: list[Request] = []
        # Those of the batches that the worker has not read.
        self.sent: list[list[Request]] = []
        # What a worker sees, and what it has to see.
        self.seen: list[tuple[Any, int]] = []

    @rule(kind=st.sampled_from(VALUES), count=st.integers(1, 4))
    def arrive(self, kind: Any, count: int) -> None:
        for _ in range(count):
            self.number = (self.number + 1) % 200
            self.waiting.append(self.desk.arrive(np.full(kind[0], self.number, kind[1])))

    @rule(kind=st.sampled_from(VALUES))
    def arrive_in_place(self, kind: Any) -> None:
        size, dtype = kind
        self.desk.shared_inputs.rows.copied = 0
        array = self.desk.shared_inputs.rows.give(np.dtype(dtype), (size,))
        if array is not None:
            self.number = (self.number + 1) % 200
            array[:] = self.number
            self.waiting.append(self.desk.arrive(array))

    @rule(random=st.randoms(use_true_random=False))
    def leave(self, random: Any) -> None:
        if self.waiting:
            request = self.waiting.pop(random.randrange(len(self.waiting)))
            if request.staged is not None:
                request.staged.give_up()
            if request.value.flags.owndata:
                # From now on the array is the caller's again.
                request.value[:] = 255

    @rule(random=st.randoms(use_true_random=False), count=st.integers(1, 8))
    def send(self, random: Any, count: int) -> None:
        random.shuffle(self.waiting)
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
        if batch:
            self.desk.send_requests(batch)
            self.sent.append(batch)

    @rule(count=st.integers(1, 8))
    def send_in_order(self, count: int) -> None:
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
        if batch:
            self.desk.send_requests(batch)
            self.sent.append(batch)

    @rule()
    def copy(self) -> None:
        if self.desk.jobs:
            self.desk.run_job()
            self.desk.done_jobs.clear()

    @rule(writes=st.booleans(), fails=st.booleans())
    def read(self, writes: bool, fails: bool) -> None:
        if not self.desk.queue or self.desk.kinds[0] is None:
            return
        batch = self.sent.pop(0)
        for request, view in zip(batch, self.desk.read(), strict=True):
            number = int(request.value[0])
            if writes and view.flags.writeable:
                view += 1
                number += 1
            self.seen.append((view, number))
        if fails:
            self.waiting += batch

    @rule(random=st.randoms(use_true_random=False), count=st.integers(0, 10))
    def forget(self, random: Any, count: int) -> None:
        """The model forgets some of what it has kept."""
        random.shuffle(self.seen)
        del self.seen[:count]
        self.desk.free()

    @rule()
    def die(self) -> None:
        self.seen.clear()
        for batch in self.sent:
            self.waiting += batch
        self.sent.clear()
        self.desk.replace_worker()

    @invariant()
    def everybody_sees_what_was_sent(self) -> None:
        for view, number in self.seen:
            assert view.min() == view.max() == number

    def teardown(self) -> None:
        while self.desk.jobs:
            self.desk.run_job()
        self.desk.done_jobs.clear()
        self.waiting.clear()
        self.sent.clear()
        self.die()
        assert self.desk.slabs.count == len(self.desk.shared_inputs.rows._open)
        self.desk.close()


TestAtRandom = AtRandom.TestCase
TestAtRandom.settings = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# --- real workers ---------------------------------------------------------------------------------

anyio = pytest.mark.anyio


def images(count: int, size: int = SMALL) -> list[Any]:
    random = np.random.default_rng(1)
    return [random.integers(0, 255, size, np.uint8) for _ in range(count)]


@pytest.mark.slow
@anyio
async def test_after_the_first_large_batch_rows_are_stacked_without_a_copy() -> None:
    arrays = images(8)
    async with opened(Stacks, max_batch_size=8) as batcher:
        for number in range(4):
            got = await asyncio.gather(*map(batcher.process_batched, arrays))
            assert [one for _, one in got] == [digest(array) for array in arrays]
            # Those of the first batch begin each on a cache line, which the second one's do not.
            if number:
                assert all(is_view for is_view, _ in got)
        await free(batcher)


@pytest.mark.slow
@anyio
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_tensors_are_stacked_without_a_copy(size: int) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array) for array in images(4, size)]
    async with opened(Stacks, max_batch_size=4, has_rows=True) as batcher:
        got = await asyncio.gather(*map(batcher.process_batched, tensors))
        assert got == [(True, digest(tensor.numpy())) for tensor in tensors]
        await free(batcher)


class Collated(InferenceModel[Any, Any]):
    """Takes one array."""

    collation = Collation.stack()

    def infer(self, inputs: Any) -> Any:
        inputs += 1
        return inputs.sum(axis=1, dtype=np.int64)


@pytest.mark.slow
@anyio
async def test_a_model_with_a_collation_is_given_the_rows_as_they_lie() -> None:
    arrays = [filled(number) for number in range(6)]
    async with opened(Collated, max_batch_size=6, has_rows=True) as batcher:
        for _ in range(2):
            got = await asyncio.gather(*map(batcher.process_batched, arrays))
            assert got == [SMALL * (number + 1) for number in range(6)]
        await free(batcher)


class Keeps(Digests):
    """Keeps all of its inputs too."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def infer(self, inputs: list[Any]) -> list[Any]:
        self._kept += inputs
        return super().infer(inputs)


@pytest.mark.slow
@anyio
async def test_who_keeps_the_future_of_an_answer_does_not_keep_the_input() -> None:
    async with opened(Digests, max_batch_size=1, has_rows=True) as batcher:
        array = filled(1)
        expected, watch = digest(array), weakref.ref(array)
        future = batcher.submit(array)
        del array
        assert await asyncio.wrap_future(future) == expected
        # Tasks of the loop may have it for a turn.
        await turns(3)
        assert watch() is None
        assert future.done()


@pytest.mark.slow
@anyio
async def test_every_way_of_calling_has_rows() -> None:
    """What is too little to be shared for itself, and kept, occupies a slab if it has a row."""
    arrays = images(10, LEAST)
    expected = [digest(array) for array in arrays]
    async with opened(Keeps, max_batch_size=1, has_rows=True) as batcher:
        assert await asyncio.gather(*map(batcher.process_batched, arrays)) == expected
        assert slabs_of(batcher).count == 10
        assert await batcher.process_many(arrays) == expected
        assert slabs_of(batcher).count == 20
        assert await batcher.process_rows(np.stack(arrays)) == expected
        assert slabs_of(batcher).count == 30
        futures = [asyncio.wrap_future(batcher.submit(array)) for array in arrays]
        assert await asyncio.gather(*futures) == expected
        assert slabs_of(batcher).count == 40


@pytest.mark.slow
@anyio
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_batch_that_is_divided_is_sent_as_it_came(size: int) -> None:
    arrays = [filled(number, size) for number in range(5)]
    async with opened(WritesAndRaises, max_batch_size=5, has_rows=True) as batcher:
        got = await asyncio.gather(*map(batcher.process_batched, arrays))
        assert sums(got) == [1, 2, 3, 4, 5]
        assert sums(arrays) == [0, 1, 2, 3, 4]
        await free(batcher)


@pytest.mark.slow
@anyio
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_another_worker_is_sent_what_came(size: int, tmp_path: Path) -> None:
    arrays = [filled(number, size) for number in range(4)]
    settings = {"max_batch_size": 4, "restart_backoff": 0.01}
    async with opened(WritesAndDies, str(tmp_path / "died"), has_rows=True, **settings) as batcher:
        got = await asyncio.gather(*map(batcher.process_batched, arrays))
        assert batcher.stats.restarts == 1
        assert sums(got) == [1, 2, 3, 4]
        await free(batcher)


@pytest.mark.slow
@anyio
async def test_callers_may_leave_before_and_after_their_batch() -> None:
    arrays = images(30)
    async with opened(Digests, max_batch_size=4, has_rows=True) as batcher:
        for when in range(4):
            tasks = [call(batcher, array) for array in arrays]
            await turns(when)
            for task in tasks[::3]:
                task.cancel()
            for number, (task, array) in enumerate(zip(tasks, arrays, strict=True)):
                got = await outcome(task)
                if number % 3:
                    assert got == digest(array)
        await free(batcher)


@pytest.mark.slow
@anyio
async def test_rows_of_refused_requests_are_free() -> None:
    arrays = images(30)
    async with opened(Digests, max_batch_size=4, max_queue_size=4, has_rows=True) as batcher:
        tasks = [call(batcher, array) for array in arrays]
        outcomes = [await outcome(task) for task in tasks]
        assert any(isinstance(one, Exception) for one in outcomes)
        tasks.clear()
        outcomes.clear()
        await free(batcher)


@pytest.mark.slow
@anyio
async def test_another_batch_size_is_that_of_the_next_slab() -> None:
    arrays = images(8)
    async with opened(Stacks, max_batch_size=2, has_rows=True) as batcher:
        batcher.reconfigure(max_batch_size=8)
        got = await asyncio.gather(*map(batcher.process_batched, arrays))
        assert got == [(True, digest(array)) for array in arrays]


@pytest.mark.slow
@anyio
async def test_what_was_filled_in_place_is_stacked_without_a_copy() -> None:
    async with opened(Stacks, max_batch_size=4) as batcher:
        assert batcher.allocate_input(10).shape == (10,)  # in ordinary memory
        arrays: list[Any] = []
        expected = []
        for image in images(4, 3 * SMALL):
            arrays.append(batcher.allocate_input((3, SMALL), "u1"))
            arrays[-1][:] = image.reshape(3, SMALL)
            expected.append((True, digest(arrays[-1])))
            await turns(1)  # in one turn no more memory is found than takes a few milliseconds
        for _ in range(2):
            assert await asyncio.gather(*map(batcher.process_batched, arrays)) == expected
        arrays.clear()
        await free(batcher)
    array = batcher.allocate_input((3, SMALL), "u1")  # it is closed
    assert array.flags.owndata


@pytest.mark.slow
@anyio
async def test_what_cannot_be_written_fails_and_is_tried_again_as_a_copy() -> None:
    async with opened(WritesAndRaises, max_batch_size=2) as batcher:
        arrays = [batcher.allocate_input(SMALL) for _ in range(2)]
        for array in arrays:
            array[:] = 1
        got = await asyncio.gather(*map(batcher.process_batched, arrays))
        assert sums(got) == [2, 2]
        assert sums(arrays) == [1, 1]
