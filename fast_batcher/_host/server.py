"""The host's server: accepts API processes, and connects them to the one opening.

    API processes ==> Tenant --accept--> HostOpening (scheduler, pool) ==> workers

Host process, on the event loop's thread. The first API process brings settings and model; all that
come later have the same, because these are part of the key of the host. After a reload of any of
them all have the model of the last `Generation`. The server chooses the API process that gets the
events, the reporter, and the one that gets the log records.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextvars import Context
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from fast_batcher._core.host import Reporting, Tenancy
from fast_batcher._core.values import Group, State
from fast_batcher._host import messages
from fast_batcher._host.forwarders import EventForwarder, LogForwarder
from fast_batcher._host.identity import ProcessIdentity, find_youngest_child, identify_process
from fast_batcher._host.messages import Generation, Handlers, Hello, Welcome, pack_message
from fast_batcher._host.opening import HostOpening
from fast_batcher._host.protocol import FRAME_ROOM, pack_error
from fast_batcher._host.rendezvous import check_peer, has_rival
from fast_batcher._host.tenant import Tenant
from fast_batcher._opening.life import Changes
from fast_batcher._process import monotonic
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import dumps, one_line
from fast_batcher.errors import BatcherError, ConfigurationError
from fast_batcher.settings import MAX_FRAME_BYTES

logger = logging.getLogger("fast_batcher")

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
