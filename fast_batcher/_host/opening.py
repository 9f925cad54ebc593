"""The opening of the host, which has the scheduler and the workers of all API processes.

Host process, on the event loop's thread.
"""

import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Failure, Request, State, settle
from fast_batcher._file_state import FileState, read_state
from fast_batcher._host.memory_ranges import MemoryRanges
from fast_batcher._host.messages import Generation, Hello, HostState
from fast_batcher._host.protocol import MAX_RANGES, SHARED_PART, pack_error
from fast_batcher._host.tenant import HostSender, OpaquePickler
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import CurrentModel, LiveSettings, Status
from fast_batcher._opening.opening import LocalOpening, Parts
from fast_batcher._parent.sending import BatchSender
from fast_batcher._parent.staging import MemoryService
from fast_batcher._parent.worker_handle import Exit, WorkerHandle
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher._shared_memory.ranges import PAGE
from fast_batcher.errors import NotReadyError, WorkerStartupError
from fast_batcher.model import ModelSpec
from fast_batcher.observing import Observer
from fast_batcher.ray import RayWorkers
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    # Most hosts need no Ray.
    from fast_batcher._ray.cluster import Cluster

logger = logging.getLogger("fast_batcher")


class HostParts(Parts):
    """The parts of an opening that takes inputs and outputs as bytes."""

    def __init__(self, range_size: int) -> None:
        # Bytes of the memory of one API process.
        self.range_size = range_size
        # None without workers on a cluster.
        self.cluster: Cluster | None = None

    def open_memory(self, settings: Settings, loop: AbstractEventLoop, name: str) -> MemoryService:
        """Open memory for all ranges. The host writes nothing there."""
        return MemoryService(loop, MAX_RANGES * self.range_size, name)

    def make_sender(
        self, settings: Settings, memory: MemoryService, workers: Mapping[int, Any], name: str
    ) -> BatchSender:
        """Make the sender of batches, whose inputs are pickled already."""
        return HostSender(settings, memory, workers, name, OpaquePickler(0))

    def make_worker(self, settings: Settings, sender: BatchSender, *arguments: Any) -> WorkerHandle:
        """Make a process, a thread, or an actor of a cluster."""
        workers = settings.workers
        if not isinstance(workers, RayWorkers):
            return super().make_worker(settings, sender, *arguments)
        from fast_batcher._ray.cluster import Cluster
        from fast_batcher._ray.handle import RayWorker

        if self.cluster is None:
            self.cluster = Cluster(workers)
        return RayWorker(self.cluster, sender, *arguments)

    def make_evaluator(self, settings: Settings, name: str, methods: Sequence[Method]) -> None:
        """Make none: the API processes have called the user's functions."""


class HostOpening(LocalOpening):
    """The opening of all API processes: reports each change of its workers.

    It takes inputs and outputs as bytes: the host must not import the types of the app.
    """

    def __init__(self, hello: Hello, on_change: Callable[[], None]) -> None:
        # Large outputs go through the pipe: a host cannot pass them on without a copy.
        settings = Settings(
            **{**hello.settings, "max_shared_bytes": 0},
            cost=_called_before if hello.has_costs else None,
            group_by=_called_before if hello.has_groups else None,
        )
        ledger = Ledger(hello.name)
        # The API processes log the changes that they see.
        status = Status(hello.name, ledger, is_logged=False)
        self._on_change = on_change
        self._was_open = hello.was_open
        range_size = hello.settings["max_shared_bytes"] // SHARED_PART // PAGE * PAGE
        # The model of the workers; and the model of the reload that runs, None without one.
        self.generation = hello.generation
        self._next: Generation | None = None
        # States of the files that the first worker of each of them has loaded.
        self._loaded: dict[str, FileState] = {}
        self._loaded_next: dict[str, FileState] = {}
        _, model, identity, _ = self.generation
        model_spec = ModelSpec(
            hello.model_name,
            model,
            methods=hello.methods,
            identity=identity,
            kind=hello.kind,
        )
        self.live = LiveSettings(settings, hello.changes)
        parts = self._host_parts = HostParts(range_size)
        super().__init__(CurrentModel(model_spec), self.live.current, status, ledger, parts)
        self.number_generation(self.generation.number)
        slabs = self.memory.slabs
        self.ranges = MemoryRanges(
            slabs if isinstance(slabs, Slabs) else None,
            range_size,
            self.binding.loop,
            self._name,
        )

    def accept(self, request: Request) -> None:
        """Add a request to the queue, unless its process has not heard yet that this is broken."""
        error = self.status.broken_error()
        if error is None:
            super().accept(request)
            request.context = None  # the copied context is the host's own
        else:
            settle(request)
            self._ledger.give(request, Failure(error))

    def worker_ready(
        self, worker: WorkerHandle, times: list[tuple[int, float]], *, is_restart: bool
    ) -> None:
        """Give a ready worker batches."""
        super().worker_ready(worker, times, is_restart=is_restart)
        generation, loaded = self.generation, self._loaded
        if self._next is not None and worker.model_spec is not self._model.spec:
            generation, loaded = self._next, self._loaded_next
        named = {path: read_state(path) for path in generation.named_paths}
        for path, state in {**worker.module_files, **named}.items():
            if state is not None:
                # A later worker may have loaded a file that has changed.
                loaded.setdefault(path, state)
        self._on_change()

    async def load_generation(self, generation: Generation) -> None:
        """Replace the workers by workers with the model of a generation."""
        await self.status.wait_while_opening()
        if self.status.start_error is not None:
            raise self.status.start_error
        self._next, self._loaded_next = generation, {}
        try:
            await self.reload(
                replace(self._model.spec, pickled=generation.model, identity=generation.identity)
            )
            self.generation, self._loaded = generation, self._loaded_next
            self.number_generation(generation.number)
        finally:
            self._next = None

    def number_generation(self, number: int) -> None:
        """Set the number of the present generation."""
        self.generation = self.generation._replace(number=number)
        self._ledger.counters.generation = number

    def observe(self, observer: Observer) -> None:
        """Call an observer from now on, once."""
        if observer not in self._observers.active:
            self._observers.add(observer)

    def describe_state(self) -> HostState:
        """Describe the state and the statistics to the API processes."""
        error = self.status.broken_error()
        start_error = given_up = None
        cluster = self._host_parts.cluster
        if isinstance(error, NotReadyError):
            given_up = (self.status.given_up or "", error.retry_after or 0.0)
        elif error is not None:
            start_error = pack_error(error)
        return HostState(
            state=str(self.status.state),
            workers_ready=self.load[0],
            stats=self.read_stats(),
            explanation=self.explain(),
            start_error=start_error,
            given_up=given_up,
            waits_for="" if cluster is None else cluster.describe_wait(),
        )

    async def aclose(self) -> None:
        """Finish the accepted requests, unless it is broken, and end the workers."""
        if self.status.state is not State.BROKEN:
            self.begin_drain()
        await super().aclose()
        self.end(0.0)

    def find_changed_file(self) -> str | None:
        """Return a file or folder that has changed since a worker loaded it, None without any."""
        changed = (path for path, state in self._loaded.items() if read_state(path) != state)
        return next(changed, None)

    def worker_lost(self, worker: int, exit: Exit) -> None:
        """Retry the requests of a dead worker, or fail them."""
        super().worker_lost(worker, exit)
        self._on_change()

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """Break while opening, unless a host before had workers: then this one replaces them."""
        if self._was_open and self.status.state is State.OPENING:
            logger.warning("%s: %s; trying again", self._name, error)
        else:
            super().worker_failed_to_start(worker, error)
        self._on_change()

    def workers_given_up(self, reason: str, seconds: float) -> None:
        """Break."""
        super().workers_given_up(reason, seconds)
        self._on_change()


def _called_before(value: Any) -> Any:
    """Stand for a function that the API processes call."""
    raise AssertionError(value)
