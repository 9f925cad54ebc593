"""Workers that are threads of this process: what differs from workers in processes."""

import asyncio
import os
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from programs import run_program
from waits import LIMIT, outcome

from fast_batcher import Collation, DynBatcher, InferenceModel, SessionModel
from fast_batcher.caching import LRUCache
from fast_batcher.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InferenceError,
    WorkerStartupError,
)
from fast_batcher.testing import BatcherKit, WorkerKind

pytestmark = pytest.mark.anyio

PRETEND_WINDOWS = Path(__file__).parent.parent / "support" / "without_posix.py"


class Echo(InferenceModel[Any, Any]):
    """Returns its inputs; raises exceptions."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        for value in inputs:
            if isinstance(value, BaseException):
                raise value
        return [(os.getpid(), threading.current_thread().name, value) for value in inputs]


class Reuses(InferenceModel[Any, Any]):
    """Returns rows of one array, which it fills again."""

    def __init__(self) -> None:
        self._outputs = np.zeros((8, 2))

    def infer(self, inputs: list[Any]) -> Any:
        self._outputs[: len(inputs)] = inputs
        return self._outputs[: len(inputs)]


class ReusesCollated(Reuses):
    """The same, of a stacked batch."""

    collation = Collation.stack()


class ReusesListed(Reuses):
    """The same rows, as a list of views."""

    def infer(self, inputs: list[Any]) -> Any:
        return [*super().infer(inputs)]


class ReusesTensors(Reuses):
    """The same rows, as a list of views of a tensor."""

    def __init__(self) -> None:
        self._outputs: Any = torch.zeros((8, 2))

    def infer(self, inputs: list[Any]) -> Any:
        for row, value in enumerate(inputs):
            self._outputs[row] = torch.tensor(value)
        return [*self._outputs[: len(inputs)]]


class ReusesInSessions(SessionModel[Any, Any, None]):
    """The same, of a model that remembers."""

    def __init__(self) -> None:
        self._outputs = np.zeros((8, 2))

    def begin(self) -> None:
        return None

    def infer(self, inputs: list[Any], states: list[None]) -> Any:
        self._outputs[: len(inputs)] = inputs
        return self._outputs[: len(inputs)]


class LoadsAlone(InferenceModel[Any, Any]):
    """Says whether another model of this process loads, while this one does."""

    loading: ClassVar[set[int]] = set()

    def __init__(self, gate: threading.Barrier | None = None) -> None:
        self.loading.add(id(self))
        if gate is not None:  # it is broken unless two load at once
            with suppress(threading.BrokenBarrierError):
                gate.wait(0.05)
        self._was_alone = self.loading == {id(self)}
        self.loading.discard(id(self))

    def warmup_inputs(self) -> list[Any]:
        self.loading.add(id(self))
        return [None]

    def infer(self, inputs: list[Any]) -> list[bool]:
        self._was_alone = self._was_alone and self.loading <= {id(self)}
        self.loading.discard(id(self))
        return [self._was_alone] * len(inputs)


class HangsOnce(InferenceModel[Any, Any]):
    """Hangs in its first load."""

    loads: ClassVar[list[threading.Event]] = []

    def __init__(self) -> None:
        self.loads.append(threading.Event())
        if len(self.loads) == 1:
            self.loads[0].wait(LIMIT)

    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class Waits(InferenceModel[Any, Any]):
    """Waits for an event."""

    events: ClassVar[dict[str, threading.Event]] = {}

    def infer(self, inputs: list[str]) -> list[str]:
        for value in inputs:
            if value in self.events:
                self.events[value].wait(LIMIT)
        return inputs


class Staged(InferenceModel[Any, Any]):
    """A model with stages."""

    def prepare(self, value: int) -> int:
        return value + 1

    def infer(self, inputs: list[int]) -> list[int]:
        return [10 * value for value in inputs]

    def finish(self, value: int) -> str:
        return str(value)


async def test_inputs_and_outputs_are_the_callers_objects() -> None:
    value = threading.Lock()  # which no process could get
    async with DynBatcher(Echo, workers="threads", name="echo") as batcher:
        pid, thread, found = await batcher.process_batched(value)
    assert (pid, thread) == (os.getpid(), "fast_batcher-worker-echo-0")
    assert found is value


async def test_an_error_is_made_for_each_caller() -> None:
    async with DynBatcher(Echo, workers="threads", isolate_errors=False) as batcher:
        raised = ValueError("an input")
        calls = [batcher.process_batched(value) for value in (1, raised)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, ValueError)
        assert isinstance(second, InferenceError)
        assert len({id(error) for error in (first, second, raised)}) == 3


@pytest.mark.parametrize(
    "model", [Reuses, ReusesCollated, ReusesListed, ReusesTensors, ReusesInSessions]
)
async def test_an_array_that_is_filled_again_changes_no_output(model: Any) -> None:
    async with DynBatcher(model, workers="threads") as batcher:
        first = await batcher.process_batched(np.array([1.0, 2.0]))
        await batcher.process_batched(np.array([3.0, 4.0]))
        assert first.tolist() == [1.0, 2.0]


async def test_a_thread_that_takes_too_long_is_replaced_and_goes_on() -> None:
    event = Waits.events["slow"] = threading.Event()
    async with DynBatcher(Waits, workers="threads", infer_timeout=2.0) as batcher:
        assert await batcher.process_batched("warm") == "warm"
        assert isinstance(
            await outcome(asyncio.create_task(batcher.process_batched("slow"))),
            DeadlineExceededError,
        )
        assert await batcher.process_batched("next") == "next"
        assert batcher.stats.restarts == 1
        threads = [one for one in threading.enumerate() if "worker-Waits" in one.name]
        assert len(threads) == 2
        event.set()
        for one in threads[:1]:
            await asyncio.to_thread(one.join)


async def test_reload_scaling_stages_and_other_threads() -> None:
    async with DynBatcher(Staged, workers="threads", num_workers=1) as batcher:
        batcher.reconfigure(num_workers=2)
        assert await batcher.process_many(range(3)) == ["10", "20", "30"]
        await batcher.reload()
        assert batcher.stats.generation == 1
        assert await asyncio.wrap_future(batcher.submit(1)) == "20"
    assert not [one for one in threading.enumerate() if "fast_batcher" in one.name]


@pytest.mark.parametrize("kind", [None, "threads", "processes"])
async def test_equal_inputs_share_a_computation(kind: WorkerKind | None) -> None:
    with nullcontext() if kind is None else BatcherKit(kind):
        async with DynBatcher(Echo, workers="threads", cache=LRUCache(9)) as batcher:
            value = [1, 2]
            first, second = await asyncio.gather(*[batcher.process_batched(value) for _ in "ab"])
            assert first == second
            assert len({id(found) for found in (value, first[2], second[2])}) == 3
            (_, _, found) = await asyncio.wrap_future(batcher.submit([1, 2]))
            assert (found, batcher.stats.batches) == ([1, 2], 1)
            # It has no key, and needs none.
            lock = threading.Lock()
            assert (await batcher.process_batched(lock))[2] is lock
            await batcher.reload()
            assert await batcher.process_batched([1, 2]) == first
            stats = batcher.stats
            counts = stats.cache_hits, stats.cache_misses, stats.cache_coalesced, stats.batches
            assert counts == (1, 2, 1, 3)


def test_another_event_loop_has_threads_of_its_own() -> None:
    batcher = DynBatcher(Echo, workers="threads", cache=LRUCache(9))
    begin = threading.active_count()
    asyncio.run(batcher.process_batched("first"))
    asyncio.run(batcher.process_batched("second"))
    asyncio.run(batcher.process_batched("first"))
    assert (batcher.stats.cache_hits, batcher.stats.completed) == (1, 2)
    batcher.stop()
    assert threading.active_count() == begin


@pytest.mark.parametrize("kind", ["threads", "processes"])
async def test_the_kit_passes_values_as_production_does(kind: WorkerKind) -> None:
    value = threading.Lock()
    with BatcherKit(kind) as kit:
        async with DynBatcher(Echo, workers="threads") as batcher:
            *_, found = await batcher.process_batched(value)
        assert (found is value, kit.sizes) == (True, [1])


@pytest.mark.slow  # it may be the first to import torch, which starts a process
@pytest.mark.parametrize(
    ("visible", "options", "warnings"),
    [("0,1", {}, 1), ("0,1", {"devices": "cpu"}, 0), ("", {}, 0), ("-1", {}, 0)],
)
async def test_an_unused_gpu_is_one_warning(
    visible: str,
    options: Any,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    async with DynBatcher(Echo, workers="threads", **options):
        pass
    told = [message for message in caplog.messages if 'give the batcher devices="auto"' in message]
    assert len(told) == warnings
    assert all("cuda:0, cuda:1" in message for message in told)


async def test_a_thread_needs_no_import_of_the_model() -> None:
    class Local(InferenceModel[int, Any]):
        def __init__(self, loaded: Any) -> None:
            self._loaded = loaded

        def infer(self, inputs: list[int]) -> list[Any]:
            return [self._loaded for _ in inputs]

    first, second = threading.Lock(), threading.Lock()  # which cannot be pickled
    async with DynBatcher(Local, workers="threads", model_args=(first,)) as batcher:
        assert await batcher.process_batched(1) is first
        await batcher.reload(model_args=(second,))
        assert await batcher.process_batched(1) is second
    with pytest.raises(ConfigurationError, match='or give workers="threads"'):
        DynBatcher(Local, model_args=(1,))


OPTIONS_OF_PROCESSES: list[dict[str, Any]] = [
    {"devices": "cpu:0"},
    {"devices": ["cpu", "cpu:0"]},
    {"max_frame_bytes": 2**30},
    {"max_rss_bytes": 2**30},
    {"max_shared_bytes": 2**20},
    {"mps": True},
    {"shared": True},
    {"shared_memory_threshold": 2**15},
]


@pytest.mark.parametrize("option", OPTIONS_OF_PROCESSES, ids=str)
def test_options_of_processes_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))}.*threads"):
        DynBatcher(Echo, workers="threads", **option)


@pytest.mark.slow
def test_windows_has_threads_and_says_so() -> None:
    """Without the names that Windows lacks."""
    done = run_program(PRETEND_WINDOWS.read_text())
    assert (done.returncode, done.stdout.splitlines()) == (0, ["False", "[0, 2, 4]", "8 [3, 6]"])
    assert 'on Windows give workers="threads"' in done.stderr


async def test_models_load_one_after_the_other() -> None:
    """Of one batcher and of several: loaders change what belongs to the whole process."""
    gate = threading.Barrier(2)
    batchers = [
        DynBatcher(LoadsAlone, num_workers=2, workers="threads", model_args=(gate,))
        for _ in range(2)
    ]
    async with batchers[0], batchers[1]:
        calls = [batcher.process_batched(None) for batcher in batchers for _ in range(8)]
        assert all(await asyncio.gather(*calls))


async def test_model_that_hangs_while_it_loads_keeps_no_other_from_loading() -> None:
    HangsOnce.loads.clear()
    batcher: DynBatcher[Any, Any] = DynBatcher(HangsOnce, workers="threads", start_timeout=0.1)
    try:
        with pytest.raises(WorkerStartupError, match="start_timeout"):
            await batcher.open()
        await batcher.aclose()
        async with DynBatcher(HangsOnce, workers="threads") as other:
            assert await other.process_batched(1) == 1
    finally:
        HangsOnce.loads[0].set()
        for thread in threading.enumerate():
            if "HangsOnce" in thread.name:
                thread.join(LIMIT)
