"""The host's server: accepts API processes, and connects them to the one opening.

    API processes ==> Tenant --accept--> HostOpening (scheduler, pool) ==> workers

Host process, on the event loop's thread. The first API process brings settings and model; all that
come later have the same, because these are part of the key of the host. After a reload of any of
them all have the model of the last `Generation`. Log records and events go to one API process, the
reporter; batches with contexts of callers are followed by the process of one of these.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from fast_batcher._core.host import Reporting, Tenancy
from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Failure, Group, Request, State, settle
from fast_batcher._file_state import FileState, read_state
from fast_batcher._host import messages
from fast_batcher._host.identity import ProcessIdentity, find_youngest_child, identify_process
from fast_batcher._host.messages import (
    Generation,
    Handlers,
    Hello,
    HostState,
    Welcome,
    pack_message,
)
from fast_batcher._host.protocol import FRAME_ROOM, MAX_RANGES, SHARED_PART, pack_error
from fast_batcher._host.rendezvous import check_peer, has_rival
from fast_batcher._host.tenant import (
    CallerContext,
    HostSender,
    OpaquePickler,
    Tenant,
)
from fast_batcher._observers import PickledContexts
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import Changes, CurrentModel, LiveSettings, Status
from fast_batcher._opening.opening import LocalOpening, Parts
from fast_batcher._parent.sending import BatchSender
from fast_batcher._parent.staging import MemoryService
from fast_batcher._parent.worker_handle import Exit, WorkerHandle
from fast_batcher._process import monotonic
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher._shared_memory.ranges import PAGE
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.logs import pack_record
from fast_batcher._transport.pickling import dumps, one_line
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    NotReadyError,
    WorkerStartupError,
)
from fast_batcher.model import ModelSpec
from fast_batcher.observing import (
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    Observer,
    RequestEnded,
    WorkerChanged,
)
from fast_batcher.ray import RayWorkers
from fast_batcher.settings import MAX_FRAME_BYTES, Settings

if TYPE_CHECKING:
    # Most hosts need no Ray.
    from fast_batcher._ray.cluster import Cluster

# Finds an API process, None without one.
Find = Callable[[], Tenant | None]


class LogForwarder(logging.Handler):
    """Handler that passes records on; without an API process they go to stderr."""

    def __init__(self, find_reader: Find, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._find_reader = find_reader
        self._loop = loop
        self._thread = threading.get_ident()
        self._stderr = logging.StreamHandler()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; any thread."""
        if threading.get_ident() == self._thread:
            self._send(record)
        else:
            self._loop.call_soon_threadsafe(self._send, record, context=Context())

    def _send(self, record: logging.LogRecord) -> None:
        reader = self._find_reader()
        if reader is None:
            self._stderr.handle(record)
            return
        try:
            reader.tell_news(messages.Log(pack_record(record)))
        except Exception:  # noqa: BLE001  as handlers of Python do: the text may not fit its values
            self.handleError(record)


class EventForwarder(Observer):
    """Observer that passes events on: batches of followed callers to one caller's process, too."""

    needs_context = True

    def __init__(self, find_reporter: Find) -> None:
        self._find_reporter = find_reporter

    def _report(
        self, event: BatchAnswered | RequestEnded | WorkerChanged, *, follow: bool | None = None
    ) -> None:
        reporter = self._find_reporter()
        if reporter is not None:
            reporter.tell_news(messages.Told(event, follow))

    def worker_changed(self, event: WorkerChanged) -> None:
        """Report a change of a worker."""
        self._report(event)

    def request_ended(self, event: RequestEnded) -> None:
        """Report the end of a request."""
        self._report(replace(event, context=None))

    def batch_dispatched(self, event: BatchDispatched) -> AbstractContextManager[Any] | None:
        """Return the context in which the worker computes the batch."""
        chosen = _choose_context(event)
        return None if chosen is None else PickledContexts(chosen.managers)

    def batch_answered(self, event: BatchAnswered) -> None:
        """Report an answered batch."""
        is_followed = event.dispatched is not None and self._tell_follower(event, event.dispatched)
        requests = [
            request if request.context is None else replace(request, context=None)
            for request in event.requests
        ]
        event = replace(event, requests=requests, dispatched=None)
        self._report(event, follow=False if is_followed else None)

    def batch_lost(self, event: BatchLost) -> None:
        """Tell the process that follows it of a batch without an answer."""
        self._tell_follower(event, event.dispatched)

    def _tell_follower(self, event: BatchAnswered | BatchLost, dispatched: BatchDispatched) -> bool:
        """Tell the process of the first followed caller; return whether there is one."""
        chosen = _choose_context(dispatched)
        if chosen is None or not chosen.is_followed:
            return False
        chosen.tenant.tell_soon(messages.Followed(dispatched, event))
        return True


def _choose_context(event: BatchDispatched) -> CallerContext | None:
    """Return the context of the first followed caller, or else of the first with a context."""
    contexts: Sequence[Any] = event.contexts
    present = [context for context in contexts if context is not None]
    return min(present, key=lambda context: not context.is_followed, default=None)


logger = logging.getLogger("fast_batcher")


class Grant(NamedTuple):
    """A range for an API process."""

    # Begin and length in bytes.
    start: int
    length: int
    # Descriptors for the API process: the memory, and the writing end of the lifeline.
    memory: int
    lifeline: int


class MemoryRanges:
    """The free ranges, and the ranges that processes have.

    A range is granted again only when its API process has left, no process has the range mapped any
    more, and no worker has a view of it. An array of `allocate_input` that outlives its batcher
    keeps its range, in a forked child too.
    """

    def __init__(
        self, slabs: Slabs | None, size: int, loop: asyncio.AbstractEventLoop, name: str
    ) -> None:
        # None without shared memory.
        self._slabs = slabs
        # Bytes of a range.
        self._size = size
        self._loop = loop
        self._name = name
        self._free = [*range(MAX_RANGES)]
        # Range of each API process, by the id of its tenant.
        self._granted: dict[int, int] = {}
        # Ranges that a process may have mapped: the reading end of the lifeline, by range.
        self._lifelines: dict[int, int] = {}
        # Tenants that are gone.
        self._leaving: list[Tenant] = []
        self._has_warned = False

    def grant(self, tenant: Tenant) -> Grant | None:
        """Grant an API process a range; None if none is free, or no descriptor."""
        if self._slabs is None:
            return None
        if not self._free:
            self._warn()
            return None
        try:
            memory = self._slabs.duplicate_fd()
        except OSError:
            return None
        try:
            lifeline, end = os.pipe()
        except OSError:
            os.close(memory)
            return None
        number = self._granted[tenant.id] = self._free.pop(0)
        self._lifelines[number] = lifeline
        Context().run(self._loop.add_reader, lifeline, self._unmapped, number)
        return Grant(number * self._size, self._size, memory, end)

    def leave(self, tenant: Tenant) -> None:
        """Note that an API process is gone."""
        self._leaving.append(tenant)
        self.reuse()

    def reuse(self) -> None:
        """Free the unused ranges of API processes that have exited."""
        for tenant in [*self._leaving]:
            tenant.take_freed()
            number = self._granted.get(tenant.id)
            if tenant.has_rows or number in self._lifelines:
                continue
            self._leaving.remove(tenant)
            if number is not None:
                self._free.append(self._granted.pop(tenant.id))

    def _unmapped(self, number: int) -> None:
        lifeline = self._lifelines.pop(number)
        self._loop.remove_reader(lifeline)
        os.close(lifeline)
        self.reuse()

    def _warn(self) -> None:
        kept = len(self._leaving)
        if kept and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs of a server process go through its socket, which is slower: %d "
                "of %d ranges of the shared memory are kept by arrays of allocate_input() whose "
                "batchers are closed; drop these arrays",
                *(self._name, kept, MAX_RANGES),
            )


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


# Seconds for which a connection is kept that sends no `Hello`, which clients send at once. It is no
# API process yet: the host does not live for it.
HELLO_TIMEOUT = 10.0
# Errors for which a client stays in the backlog: too many open files, or no memory.
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Seconds between two states that are sent without a cause: statistics need not be newer.
STATE_INTERVAL = 1.0


class HostServer:
    """The server of one host process."""

    def __init__(self, listener: socket.socket, release_output: Callable[[], None]) -> None:
        self._listener = listener
        self._release_output = release_output
        listener.setblocking(False)
        loop = self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._tenancy = Tenancy(monotonic())
        self._tenants: dict[int, Tenant] = {}
        # Connections without a `Hello`, by the tenant's id, with the timers that end them.
        self._strangers: dict[int, tuple[Tenant, asyncio.TimerHandle]] = {}
        # API processes that have said goodbye, and wait for the end of the host.
        self._waiting: list[Tenant] = []
        self._next_id = 0
        # The groups, by method and key.
        self._groups: WeakValueDictionary[tuple[str | None, bytes | None], Group]
        self._groups = WeakValueDictionary()
        self._has_welcomed = False
        # Set by the first API process.
        self._begun: HostOpening | None = None
        # Handlers of messages that are not about requests.
        self._handlers: Handlers = {
            Kind.PING: lambda tenant: tenant.send(Kind.PONG, dumps(())),
            messages.StateRead: lambda tenant: self._reporting.state_read(tenant.id),
            messages.Observe: self._observe,
            messages.Reconfigure: self._merge_settings,
            messages.ReloadCall: self._call_reload,
            messages.Goodbye: self._see_off,
        }
        # The reload that runs, None without one; and the last generation that an API process knows.
        self._reload: asyncio.Task[None] | None = None
        self._newest: Generation | None = None
        self._is_push_scheduled = False
        self._supervisor = -1
        # Pid of the parent of all server processes, None if they have various parents; and the
        # moment at which the last of them has joined.
        self._shared_by: int | None = None
        self._joined_at = 0.0
        # A process that the server has started and that has not joined yet, if no other is left.
        self._successor: ProcessIdentity | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._reporting = Reporting()
        # The API process that was told that it reports, None without one.
        self._reporter: Tenant | None = None
        self._logs = LogForwarder(self._find_reader, loop)
        self._events = EventForwarder(self._find_reporter)
        loop.add_reader(listener.fileno(), self._accept)
        self._push_timer = loop.call_later(STATE_INTERVAL, self._tick, context=Context())
        self._check_end()

    # Tenants.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it has gone, or there are too many descriptors
            if error.errno in NO_DESCRIPTOR:
                self._step_down(f"{error}: raise the limit of open files (`ulimit -n`)")
            return
        try:
            check_peer(connection)
        except OSError as error:
            logger.warning("a connection is refused: %s", error)
            connection.close()
            return
        connection.setblocking(False)
        tenant_id, self._next_id = self._next_id, self._next_id + 1
        limit = MAX_FRAME_BYTES if self._begun is None else self._begun.settings.max_frame_bytes
        tenant = Tenant(
            tenant_id,
            connection,
            limit + FRAME_ROOM,
            self._loop,
            on_end=self._tenant_vanished,
            find_group=self._find_group,
            find_room=self._find_room,
        )
        tenant.handle({messages.Hello: self._admit})
        timer = self._loop.call_later(
            HELLO_TIMEOUT, self._drop_stranger, tenant_id, context=Context()
        )
        self._strangers[tenant_id] = tenant, timer

    def _drop_stranger(self, tenant_id: int) -> None:
        tenant, timer = self._strangers.pop(tenant_id)
        timer.cancel()
        tenant.close()

    def _drop_strangers(self) -> None:
        for tenant_id in [*self._strangers]:
            self._drop_stranger(tenant_id)

    def _admit(self, tenant: Tenant, *fields: Any) -> None:
        """Add an API process, unless a file has changed since a worker has loaded it."""
        hello = Hello(*fields)
        self._strangers.pop(tenant.id)[1].cancel()
        changed = None if self._begun is None else self._begun.find_changed_file()
        if changed is not None:
            self._step_down(f"{changed} has changed since a worker of the host process loaded it")
            tenant.close()
            return
        self._tenants[tenant.id] = tenant
        self._tenancy.joined(tenant.id)
        self._joined_at = monotonic()
        self._successor = None
        self._welcome(tenant, hello)

    def _tenant_vanished(self, tenant: Tenant) -> None:
        """Cancel the requests of a process that is dead."""
        if tenant.id in self._strangers:
            self._drop_stranger(tenant.id)
        self._stop_reporting(tenant)
        if self._tenants.pop(tenant.id, None) is not None:
            self._remove(tenant)
            self._tenancy.vanished(monotonic(), tenant.id)
            self._check_end()

    def _remove(self, tenant: Tenant) -> None:
        tenant.leave()
        self._opening.ranges.leave(tenant)

    def _see_off(self, tenant: Tenant) -> None:
        """Let a process go that has closed its batcher."""
        self._tenants.pop(tenant.id, None)
        self._remove(tenant)
        successor, age = (None, inf) if self._tenants else self._find_successor()
        self._successor = successor
        self._tenancy.said_goodbye(monotonic(), tenant.id, age)
        if self._tenancy.ends_at > monotonic() and not self.ended.done():
            self._stop_reporting(tenant)
            tenant.tell(messages.StateSent(self._opening.describe_state()))
            tenant.close()
        else:
            self._waiting.append(tenant)
        self._check_end()

    def _find_successor(self) -> tuple[ProcessIdentity | None, float]:
        """Find a server process that has not joined yet, and its age; infinite without one.

        At SIGHUP gunicorn starts new processes, and the old ones end before the new ones have
        imported the app. The host waits for these, unless they need another model.
        """
        if (
            self._shared_by is None
            or self._opening.status.state is State.BROKEN
            or self._opening.find_changed_file() is not None
            or has_rival(self._listener)
        ):
            return None, inf
        child, age = find_youngest_child(self._shared_by)
        return (child, age) if age < monotonic() - self._joined_at else (None, inf)

    def _welcome(self, tenant: Tenant, hello: Hello) -> None:
        opening = tenant.opening = self._begun or self._begin(hello)
        tenant.handle(self._handlers)
        grant = opening.ranges.grant(tenant)
        start, length, *fds = grant or (0, 0)
        welcome = Welcome(identify_process(os.getpid()), start, length, self._find_room())
        try:
            # The first bytes of the connection, and few: the socket takes them at once.
            socket.send_fds(tenant.connection, [pack_message(welcome)], fds)
        except OSError:  # it is gone, which its channel notices
            return
        finally:
            for fd in fds:
                os.close(fd)
        if not self._has_welcomed:
            self._has_welcomed = True
            self._release_output()
        if hello.observes:
            self._observe(tenant)
        tenant.tell(messages.Reconfigure(opening.live.changes))
        self._merge_settings(tenant, hello.changes)
        self._compare_generations(tenant, hello.generation)
        tenant.tell(messages.StateSent(opening.describe_state()))

    def _find_group(self, method: str | None, key: bytes | None) -> Group:
        """Return the group of the requests of a method that have this packed key."""
        group = self._groups.get((method, key))
        if group is None:
            of = None if method is None else self._opening.methods[method]
            group = self._groups[method, key] = Group(key, of)
        return group

    def _find_room(self) -> int:
        """Requests of one API process for which the queue has room."""
        # Each API process may take its part before it hears of the others.
        return self._opening.queue_room // max(1, len(self._tenants))

    # The opening.

    @property
    def _opening(self) -> HostOpening:
        assert self._begun is not None, "the first `Hello` has begun it"
        return self._begun

    def _begin(self, hello: Hello) -> HostOpening:
        sys.path[:] = hello.sys_path
        logging.getLogger().setLevel(hello.root_level)
        logging.getLogger("fast_batcher").setLevel(hello.library_level)
        logging.captureWarnings(hello.captures_warnings)
        logging.getLogger().addHandler(self._logs)
        opening = self._begun = HostOpening(hello, self.push_soon)
        self._watch_supervisor(hello.supervisor)
        self._shared_by = hello.supervisor if hello.is_shared else None
        opening.begin()
        return opening

    def _merge_settings(self, _: Tenant, changes: Changes) -> None:
        """Use changes that are later than those of before, and tell every process."""
        opening = self._opening
        if opening.live.merge(changes):
            opening.reconfigure(opening.live.current)
            for tenant in self._tenants.values():
                tenant.tell(messages.Reconfigure(opening.live.changes))
            self.push_soon()

    # Reloads. All processes hear of the beginning and the end of a reload between the answers, so
    # that each knows which answers may be of which model.

    def _compare_generations(self, tenant: Tenant, generation: Generation) -> None:
        """Let the workers follow a process with a later model, or let the process follow."""
        present = self._opening.generation
        if self._newest is None or generation.number > self._newest.number:
            self._newest = generation
        if self._reload is not None:
            tenant.tell(messages.ReloadBegun())
        elif self._newest.number > present.number:
            self._begin_reload(self._newest)
        elif generation[:3] != present[:3]:
            tenant.tell(messages.ReloadEnded(present))

    def _call_reload(self, caller: Tenant, call: int, generation: Generation) -> None:
        if self._reload is None:
            self._begin_reload(generation, caller, call)
            return
        name = self._opening.status.name
        error = ConfigurationError(f"{name}: a reload runs; wait for its end")
        caller.tell(messages.Reloaded(call, pack_error(error)))

    def _begin_reload(
        self, generation: Generation, caller: Tenant | None = None, call: int = 0
    ) -> None:
        """Reload for a process that has called it; without one for all that have a later model."""
        for tenant in self._tenants.values():
            tenant.tell(messages.ReloadBegun())
        work = self._run_reload(generation, caller, call)
        self._reload = self._loop.create_task(work, context=Context())

    async def _run_reload(self, generation: Generation, caller: Tenant | None, call: int) -> None:
        opening = self._opening
        error: BatcherError | None = None
        try:
            await opening.load_generation(generation)
        except Exception as raised:  # noqa: BLE001  the caller gets it
            error = raised if isinstance(raised, BatcherError) else BatcherError(one_line(raised))
        self._reload = None
        newest = self._newest
        assert newest is not None, "each process names its generation"
        is_loaded = error is None
        is_called = caller is not None
        # A new model is later than all others; so is the present one if a later cannot be loaded.
        if is_loaded == is_called:
            opening.number_generation(newest.number + 1)
            newest = self._newest = opening.generation
        self._push()
        # The caller last: what it knows of all others know if this process dies now.
        for tenant in sorted(self._tenants.values(), key=lambda tenant: tenant is caller):
            tenant.tell(messages.ReloadEnded(opening.generation))
        if caller is not None:
            caller.tell(messages.Reloaded(call, None if error is None else pack_error(error)))
        if newest.number > opening.generation.number:
            self._begin_reload(newest)

    def _observe(self, tenant: Tenant) -> None:
        self._opening.observe(self._events)
        self._reporting.joined(tenant.id)
        self._choose_reporter()

    def _stop_reporting(self, tenant: Tenant) -> None:
        self._reporting.left(tenant.id)
        self._choose_reporter()

    def _choose_reporter(self) -> None:
        """Tell the API process that reports from now on, and the one before it."""
        before, chosen = self._reporter, self._reporting.choose(monotonic())
        reporter = next((tenant for tenant in self._present() if tenant.id == chosen), None)
        if reporter is before:
            return
        self._reporter = reporter
        # Also if it does not read: it finds this behind the last event that it has to count.
        if before is not None:
            before.tell(messages.ReporterChosen(False))
        if reporter is not None:
            reporter.tell(messages.ReporterChosen(True))

    def _find_reporter(self) -> Tenant | None:
        """Return the API process that gets events."""
        if self._reporter is not None and self._reporter.is_stalled:
            self._reporting.stalled(self._reporter.id)
            self._choose_reporter()
        return self._reporter

    def _find_reader(self) -> Tenant | None:
        """Return the API process that gets logs: the first one that reads them."""
        for tenant in self._present():
            if tenant.opening is not None and not tenant.is_stalled:
                return tenant
        return None

    def _present(self) -> list[Tenant]:
        """Return the API processes, with the ones that wait for the end of the host."""
        return [*self._tenants.values(), *self._waiting]

    def push_soon(self) -> None:
        """Send the state to every API process at the end of this turn of the loop."""
        if not self._is_push_scheduled:
            self._is_push_scheduled = True
            self._loop.call_soon(self._push, context=Context())

    def _tick(self) -> None:
        if self._begun is not None:
            self._begun.ranges.reuse()
        successor = self._successor
        if successor is not None and (not successor.is_running or has_rival(self._listener)):
            # It was no server process, or has other settings: the device may have no room for two
            # models.
            self.asked_to_end()
        self._choose_reporter()
        self._push()
        self._push_timer = self._loop.call_later(STATE_INTERVAL, self._tick, context=Context())

    def _push(self) -> None:
        self._is_push_scheduled = False
        if not self._tenants:
            return
        state = messages.StateSent(self._opening.describe_state())
        for tenant in [*self._tenants.values()]:
            if tenant.opening is not None:
                tenant.report_freed()
                tenant.report_unplaced()
                tenant.tell_news(state)
                self._reporting.state_sent(monotonic(), tenant.id)
        if self._opening.status.start_error is not None:
            self._end()

    # The end.

    def asked_to_end(self) -> None:
        """End with the last API process. Called at SIGTERM."""
        self._tenancy.asked_to_end(monotonic())
        self._check_end()

    def _step_down(self, reason: str) -> None:
        """Take no further API process; end with the present ones.

        The others find or start the next host.
        """
        logger.warning(
            "%s: %s; server processes that open from now on share a new host process, and this one "
            "ends with the present ones",
            *("the host process" if self._begun is None else self._begun.status.name, reason),
        )
        self._loop.remove_reader(self._listener.fileno())
        # A client in the backlog reads an end of file, and replaces the closed socket.
        self._listener.close()
        self._drop_strangers()
        self._tenancy.asked_to_end(monotonic())
        self._check_end()

    def _watch_supervisor(self, pid: int | None) -> None:
        if pid is None or not hasattr(os, "pidfd_open"):
            return
        try:
            self._supervisor = os.pidfd_open(pid)
        except OSError:  # it is dead
            self._supervisor_ended()
        else:
            self._loop.add_reader(self._supervisor, self._supervisor_ended)

    def _supervisor_ended(self) -> None:
        if self._supervisor >= 0:
            self._loop.remove_reader(self._supervisor)
            os.close(self._supervisor)
            self._supervisor = -1
        self._tenancy.supervisor_ended(monotonic())
        self._check_end()

    def _check_end(self) -> None:
        """End now, or set a timer for the moment at which to look again."""
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        seconds = self._tenancy.ends_at - monotonic()
        if seconds <= 0:
            self._end()
        elif seconds != inf:
            self._end_timer = self._loop.call_later(seconds, self._check_end, context=Context())

    def _end(self) -> None:
        if not self.ended.done():
            if self._listener.fileno() >= 0:  # it has not stepped down
                self._loop.remove_reader(self._listener.fileno())
            self.ended.set_result(None)
            self._drop_strangers()  # they join the next host

    async def aclose(self) -> None:
        """End the workers, and tell the last API process."""
        self._push_timer.cancel()
        if self._begun is not None:
            await self._begun.aclose()
            for tenant in self._present():
                tenant.tell(messages.StateSent(self._begun.describe_state(), is_last=True))
        with contextlib.suppress(ValueError):
            logging.getLogger().removeHandler(self._logs)


def _called_before(value: Any) -> Any:
    """Stand for a function that the API processes call."""
    raise AssertionError(value)
