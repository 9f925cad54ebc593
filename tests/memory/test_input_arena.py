"""Inputs that lie in shared memory before their batch is formed.

First without a worker, then with real ones. In every test the question is: does each reader see
what was sent, as long as it looks?
"""

import asyncio
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from forks import fork, status_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from marks import long
from memory_files import refuse_memory
from models.large import Digests, Stacks, digest
from programs import run_command
from sender_harness import (
    LARGE,
    MEBI,
    SIZE,
    SMALL,
    SenderHarness,
    filled,
    free,
    harness,
    opened,
    slabs_of,
    sums,
)
from waits import call, outcome, turns

from fast_batcher import Collation, InferenceModel
from fast_batcher._parent.staging import FRESH_COST, LEAST_STAGED, MOST_COPIED_IN_TURN, CopyState
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import loads

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from fast_batcher._core.values import Request

__all__ = ["harness"]

BYTES = np.dtype(np.uint8)
# Bytes of the longest input that is staged, and one more.
TOO_LONG = 8 * MEBI - 4095


def numbered(count: int, size: int = SMALL) -> list[Any]:
    """Arrays that are filled with 0, 1, and so on."""
    return [filled(number, size) for number in range(count)]


def runs(harness: SenderHarness) -> list[tuple[int, int]]:
    """Start and count of each run of the batch that was sent first."""
    return [(start, count) for _, start, count in loads(harness.queue[0][2])[0]]


# --- how inputs lie -------------------------------------------------------------------------------


def test_sent_slab_takes_no_more_inputs(harness: SenderHarness) -> None:
    *first, late = harness.arrive(*numbered(4))
    harness.dispatch(first)
    harness.dispatch([late, *harness.arrive(filled(4), filled(5))])
    assert runs(harness)[0][1] == 3
    assert sums(harness.read()) == [0, 1, 2]
    assert [count for _, count in runs(harness)] == [1, 2]
    assert sums(harness.read()) == [3, 4, 5]


# --- which inputs are staged ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, LEAST_STAGED - 1, TOO_LONG])
def test_small_and_oversized_inputs_are_not_staged(harness: SenderHarness, size: int) -> None:
    assert harness.arrive(filled(1, size))[0].staged is None
    assert harness.arena.allocate(BYTES, (size,)) is None
    assert harness.slabs.count == 0


def test_half_of_memory_stays_for_other_inputs(harness: SenderHarness) -> None:
    requests = harness.arrive(*numbered(10, 2 * MEBI))
    # Two in a slab: a quarter of the memory.
    states = [request.staged.state for request in requests if request.staged is not None]
    assert states == [CopyState.COPYING] * 4 + [CopyState.CROWDED] * 6
    assert harness.slabs.taken_bytes == SIZE / 2


def test_memory_of_one_input_is_used_again(harness: SenderHarness) -> None:
    size = 2 * MEBI
    requests = harness.arrive(*numbered(4, size))
    harness.run_jobs()
    freed = requests[0].staged
    assert freed is not None
    freed.release()
    (again,) = harness.arrive(filled(9, size))
    assert again.staged is not None
    assert again.staged.start == freed.start


# --- copying in the thread ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_pipe_is_used_without_memory(
    harness: SenderHarness, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_memory(harness.slabs._fd)
    assert harness.arena.allocate(BYTES, (size,)) is None
    harness.memory.close_slabs()
    harness.dispatch(harness.arrive(*numbered(2, size)))
    harness.batch("after")
    harness.run_jobs()
    assert harness.kinds == [Kind.PART, Kind.ITEMS, Kind.ATOMS]
    assert sums(harness.read()) == [0, 1]
    assert harness.read() == ["after"]
    # It is known that there is none.
    assert not any(harness.slabs._provided)
    (record,) = caplog.records
    assert "Bad file descriptor" in record.message


def test_loop_turn_copies_a_bounded_part(harness: SenderHarness) -> None:
    size = 1_000_000
    for cost in (size * FRESH_COST, size):
        staged = [harness.arena.stage(filled(number, size)) for number in range(8)]
        assert None not in staged
        assert len(harness.jobs) == max(0, 8 - MOST_COPIED_IN_TURN // cost)
        # The system has provided the memory from now on.
        harness.run_jobs()
        staged.clear()
        harness.arena.end_turn()
        harness.memory.close_slabs()
        assert harness.slabs.count == 0


def test_array_resized_by_thread_is_not_staged(harness: SenderHarness) -> None:
    probe = harness.arena.probes[np.ndarray]
    harness.arena.probes[np.ndarray] = lambda _, least, most: probe(
        filled(0, SMALL + 8), least, most
    )
    assert harness.arena.stage(filled(2)) is None
    harness.memory.close_slabs()
    assert harness.slabs.count == 0


RESIZES = """
import itertools
import torch
from sender_harness import SenderHarness
from fast_batcher._transport.channels import KIND_NAMES


def lose(how, where):
    harness = SenderHarness()
    harness.arena.enable()
    tensor = torch.ones(2**22, dtype=torch.uint8)
    if where == "staged":
        harness.dispatch(harness.arrive(tensor))
    else:
        harness.batch({"tensor": tensor})
    if how == "resize":
        tensor.untyped_storage().resize_(0)
    elif how == "set":
        tensor.set_(torch.empty(1, dtype=torch.uint8))
    else:
        tensor.data = torch.empty(1, dtype=torch.uint8)
    harness.run_jobs()
    if how == "resize":
        return " ".join(KIND_NAMES[kind] for kind in harness.kinds)
    (value,) = harness.read()
    return int((value if where == "staged" else value["tensor"]).sum())


for how, where in itertools.product(["resize", "set", "data"], ["staged", "dict"]):
    print(how, where, lose(how, where))
"""


def test_tensor_may_lose_memory_during_copy() -> None:
    """Its caller may have left; and memory that is freed here goes back to the system at once."""
    pytest.importorskip("torch")
    paths = os.pathsep.join(sys.path)
    done = run_command(
        [sys.executable, "-c", RESIZES],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    # One line for each: that it could not be shared.
    assert done.stderr.count("\n") == done.stderr.count("was resized while") == 2
    whole = [f"{how} {where} {2**22}" for how in ("set", "data") for where in ("staged", "dict")]
    assert done.stdout.splitlines() == [
        "resize staged PART ITEMS",
        "resize dict PART ITEMS",
        *whole,
    ]


# --- arrays that the app fills --------------------------------------------------------------------


def allocated(harness: SenderHarness, number: int, size: int = SMALL) -> Any:
    """An array in shared memory, filled, in a turn of the loop."""
    harness.arena.end_turn()
    array = harness.arena.allocate(BYTES, (size,))
    array[:] = number
    return array


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_allocated_array_is_copied_by_the_worker_alone(harness: SenderHarness, size: int) -> None:
    arrays = [allocated(harness, number, size) for number in range(3)]
    harness.dispatch(harness.arrive(*arrays))
    assert harness.jobs == []
    assert runs(harness) == [(0, 3)]
    views = harness.read()
    # The worker has copied it, and does not use the shared memory any more.
    assert harness.worker.views.freed == [0]
    assert sums(views) == [0, 1, 2]
    arrays[1][:] = 9
    for view in views:
        view += 1
    assert sums(views) == [1, 2, 3]
    assert sums(arrays) == [0, 9, 2]
    # Nor in the views of another batch.
    harness.dispatch(harness.arrive(*arrays))
    assert sums(harness.read()) == [0, 9, 2]
    assert sums(views) == [1, 2, 3]


@pytest.mark.parametrize("forks", [False, True])
def test_memory_of_forked_child_is_not_reused(harness: SenderHarness, forks: bool) -> None:
    array = allocated(harness, 1)
    if forks:
        assert status_of(fork(lambda: 0)) == 0
    harness.dispatch(harness.arrive(array))
    del array
    harness.read()
    harness.free()
    assert harness.slabs.count == forks


def test_loop_turn_maps_little_memory(harness: SenderHarness) -> None:
    kept: list[Any] = []
    found: list[Any] = []
    most = MOST_COPIED_IN_TURN // FRESH_COST // SMALL
    assert most > 2
    for _ in range(2):
        harness.arena.end_turn()
        found = [harness.arena.allocate(BYTES, (SMALL,)) for _ in range(most + 1)]
        kept += [array for array in found if array is not None]
        assert found[most] is None
    assert len(kept) == 2 * most
    # Memory that is there costs nothing.
    kept.clear()
    found.clear()
    harness.arena.end_turn()
    assert harness.arena.allocate(BYTES, (2 * SMALL,)) is not None
    assert harness.arena.allocate(BYTES, (LARGE,)) is not None


# --- at random ------------------------------------------------------------------------------------

# Inputs that the loop copies, that the thread copies, and of another layout.
VALUES = [(SMALL, np.uint8), (LARGE, np.uint8), (SMALL // 4, np.float32)]


class AtRandom(RuleBasedStateMachine):
    """Arrivals, departures, batches in any order, second tries, views that are kept, and deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = SenderHarness()
        self.harness.arena.enable()
        self.number = 0
        self.waiting: list[Request] = []
        # The batches that the worker has not read.
        self.sent: list[list[Request]] = []
        # What a worker sees, and what it has to see.
        self.seen: list[tuple[Any, int]] = []

    @rule(kind=st.sampled_from(VALUES), count=st.integers(1, 4))
    def arrive(self, kind: Any, count: int) -> None:
        for _ in range(count):
            self.number = (self.number + 1) % 200
            self.waiting += self.harness.arrive(np.full(kind[0], self.number, kind[1]))

    @rule(kind=st.sampled_from(VALUES))
    def arrive_in_place(self, kind: Any) -> None:
        size, dtype = kind
        self.harness.arena.end_turn()
        array = self.harness.arena.allocate(np.dtype(dtype), (size,))
        if array is not None:
            self.number = (self.number + 1) % 200
            array[:] = self.number
            self.waiting += self.harness.arrive(array)

    @rule(random=st.randoms(use_true_random=False))
    def leave(self, random: Any) -> None:
        if self.waiting:
            request = self.waiting.pop(random.randrange(len(self.waiting)))
            if request.staged is not None:
                request.staged.release()
            if request.value.flags.owndata:
                # From now on the array is the caller's again.
                request.value[:] = 255

    @rule(random=st.randoms(use_true_random=False), count=st.integers(1, 8), shuffles=st.booleans())
    def send(self, random: Any, count: int, shuffles: bool) -> None:
        if shuffles:
            random.shuffle(self.waiting)
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
        if batch:
            self.harness.dispatch(batch)
            self.sent.append(batch)

    @rule()
    def copy(self) -> None:
        if self.harness.jobs:
            self.harness.run_jobs(1)

    @rule(writes=st.booleans(), fails=st.booleans())
    def read(self, writes: bool, fails: bool) -> None:
        if not self.harness.queue or self.harness.kinds[0] is None:
            return
        batch = self.sent.pop(0)
        for request, view in zip(batch, self.harness.read(), strict=True):
            number = int(request.value[0])
            if writes:
                view += 1
                number += 1
            self.seen.append((view, number))
        if fails:
            self.waiting += batch

    @rule(random=st.randoms(use_true_random=False), count=st.integers(0, 10))
    def forget(self, random: Any, count: int) -> None:
        """The model drops some of the inputs that it has kept."""
        random.shuffle(self.seen)
        del self.seen[:count]
        self.harness.free()

    @rule()
    def die(self) -> None:
        self.seen.clear()
        for batch in self.sent:
            self.waiting += batch
        self.sent.clear()
        self.harness.replace_worker()

    @invariant()
    def each_reader_sees_what_was_sent(self) -> None:
        for view, number in self.seen:
            assert view.min() == view.max() == number

    def teardown(self) -> None:
        self.harness.run_jobs()
        self.waiting.clear()
        self.sent.clear()
        self.die()
        assert self.harness.refused == []
        assert self.harness.slabs.count == len(self.harness.memory.open_slabs)
        self.harness.close()


TestAtRandom = AtRandom.TestCase
TestAtRandom.settings = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# --- real workers ---------------------------------------------------------------------------------

anyio = pytest.mark.anyio


def images(count: int, size: int = SMALL) -> list[Any]:
    random = np.random.default_rng(1)
    return [random.integers(0, 255, size, np.uint8) for _ in range(count)]


@anyio
async def test_later_large_batches_are_stacked_without_copy() -> None:
    arrays = images(8)
    async with opened(Stacks, max_batch_size=8) as batcher:
        for number in range(4):
            got = await asyncio.gather(*map(batcher.process_batched, arrays))
            assert [one for _, one in got] == [digest(array) for array in arrays]
            # Each input of the first batch begins on a cache line, those of the second do not.
            if number:
                assert all(is_view for is_view, _ in got)
        await free(batcher)


@anyio
@pytest.mark.parametrize("size", [LARGE, *long(SMALL)])
async def test_tensors_are_stacked_without_a_copy(size: int) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array) for array in images(4, size)]
    async with opened(Stacks, max_batch_size=4, stages=True) as batcher:
        got = await asyncio.gather(*map(batcher.process_batched, tensors))
        assert got == [(True, digest(tensor.numpy())) for tensor in tensors]
        await free(batcher)


class Collated(InferenceModel[Any, Any]):
    """Takes one array."""

    collation = Collation.stack()

    def infer(self, inputs: Any) -> Any:
        inputs += 1
        return inputs.sum(axis=1, dtype=np.int64)


@anyio
async def test_collated_model_gets_inputs_without_copy() -> None:
    arrays = [filled(number) for number in range(6)]
    async with opened(Collated, max_batch_size=6, stages=True) as batcher:
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


@anyio
async def test_future_does_not_keep_the_input() -> None:
    async with opened(Digests, max_batch_size=1, stages=True) as batcher:
        array = filled(1)
        expected, watch = digest(array), weakref.ref(array)
        future = batcher.submit(array)
        del array
        assert await asyncio.wrap_future(future) == expected
        # Tasks of the loop may have it for a turn.
        await turns(3)
        assert watch() is None
        assert future.done()


@anyio
async def test_every_way_of_calling_stages() -> None:
    """An input too small to be shared for itself occupies a slab, while it is kept, if staged."""
    arrays = images(10, LEAST_STAGED)
    expected = [digest(array) for array in arrays]
    async with opened(Keeps, max_batch_size=1, stages=True) as batcher:
        assert await asyncio.gather(*map(batcher.process_batched, arrays)) == expected
        assert slabs_of(batcher).count == 10
        assert await batcher.process_many(arrays) == expected
        assert slabs_of(batcher).count == 20
        assert await batcher.process_rows(np.stack(arrays)) == expected
        assert slabs_of(batcher).count == 30
        futures = [asyncio.wrap_future(batcher.submit(array)) for array in arrays]
        assert await asyncio.gather(*futures) == expected
        assert slabs_of(batcher).count == 40


@anyio
async def test_callers_may_leave_before_and_after_their_batch() -> None:
    arrays = images(30)
    async with opened(Digests, max_batch_size=4, stages=True) as batcher:
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


@anyio
async def test_allocated_arrays_are_stacked_without_a_copy() -> None:
    async with opened(Stacks, max_batch_size=4) as batcher:
        assert batcher.allocate_input(10).shape == (10,)  # in ordinary memory
        arrays: list[Any] = []
        expected = []
        for image in images(4, 3 * SMALL):
            arrays.append(batcher.allocate_input((3, SMALL), "u1"))
            arrays[-1][:] = image.reshape(3, SMALL)
            expected.append((True, digest(arrays[-1])))
            await turns(1)  # a turn has the system provide little memory
        for _ in range(2):
            assert await asyncio.gather(*map(batcher.process_batched, arrays)) == expected
        arrays.clear()
        await free(batcher)
    array = batcher.allocate_input((3, SMALL), "u1")  # it is closed
    assert array.flags.owndata
