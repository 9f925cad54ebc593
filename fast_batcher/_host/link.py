"""The connection of one API process to its host: introduces it, pings the host, notices its death.

API process. Joining blocks, and runs on a thread of its own; everything else runs on the event
loop's thread.
"""

import asyncio
import contextlib
import functools
import logging
import os
import select
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import Context
from math import inf
from typing import Any, NamedTuple

from fast_batcher._core.supervision import HEARTBEAT_INTERVAL, Heartbeat
from fast_batcher._host import messages
from fast_batcher._host.identity import HostKey, kill_process, make_key
from fast_batcher._host.launch import HostProcess, launch_host
from fast_batcher._host.messages import Generation, Handlers, Hello, Welcome, dispatch, pack_message
from fast_batcher._host.protocol import MAX_DESCRIPTORS
from fast_batcher._host.rendezvous import Joined, connect, replace_silent
from fast_batcher._identity import describe_model, digest, find_module_file, list_paths
from fast_batcher._opening.life import LiveSettings
from fast_batcher._parent.staging import JobThread
from fast_batcher._process import monotonic
from fast_batcher._transport.channels import HEADER_SIZE, Kind, LoopChannel, unpack_header
from fast_batcher._transport.logs import unpack_record
from fast_batcher._transport.pickling import dumps, loads
from fast_batcher.errors import ConfigurationError, NotReadyError, WorkerStartupError
from fast_batcher.model import ModelSpec
from fast_batcher.settings import OPTIONS, Settings, Use


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a host needs."""
    return settings.select(name for name, one in OPTIONS.items() if Use.HERE not in one.uses)


def find_key(model_spec: ModelSpec, settings: Settings, name: str) -> HostKey:
    """Make the key of the host for a batcher of this process."""
    module = model_spec.module
    shared, workers = settings.shared, settings.workers
    asked_by = f"shared={shared!r}" if shared else f"workers={workers!r:.100}"
    if getattr(sys, "frozen", False):
        raise ConfigurationError(
            f"{asked_by}: a frozen program, for example of PyInstaller, cannot start a host "
            "process, because its executable would start the program again; omit the option and "
            "run one server process, which has workers of its own"
        )
    if module == "__main__":
        raise ConfigurationError(
            f"{asked_by}: {model_spec.name} is defined in the main program, which the workers of "
            "a host process cannot import; move it to a module of its own"
        )
    own = _digest_settings(settings) | describe_model(model_spec)
    return make_key(settings.shared, own, find_module_file(module), name)


def _digest_settings(settings: Settings) -> dict[str, str]:
    """Digest each setting, by its name in messages; a function by whether there is one."""
    own = plain_settings(settings)
    own |= {name: getattr(settings, name) is not None for name in ("cost", "group_by")}
    own["shared_version"] = settings.shared_version
    return {name: digest(value) for name, value in own.items()}


def make_generation(number: int, model_spec: ModelSpec) -> Generation:
    """Describe a model to the host."""
    paths = list_paths(model_spec.read_arguments())
    return Generation(number, model_spec.pickled, model_spec.identity, paths)


def make_hello(
    model_spec: ModelSpec,
    generation: int,
    live: LiveSettings,
    key: HostKey,
    *,
    observes: bool,
    was_open: bool,
) -> Hello:
    """Make the first frame of an API process."""
    settings = live.first
    return Hello(
        settings=plain_settings(settings),
        changes=live.changes,
        has_costs=settings.cost is not None,
        has_groups=settings.group_by is not None,
        name=key.name,
        model_name=model_spec.name,
        generation=make_generation(generation, model_spec),
        methods=model_spec.methods,
        kind=model_spec.kind,
        sys_path=list(sys.path),
        root_level=logging.getLogger().level,
        library_level=logging.getLogger("fast_batcher").getEffectiveLevel(),
        captures_warnings=warnings.showwarning.__module__ == "logging",
        observes=observes,
        was_open=was_open,
        supervisor=key.supervisor,
        is_shared=bool(settings.shared),
    )


logger = logging.getLogger("fast_batcher")

# Seconds for which a host that has begun may leave a client without an answer, if the half of
# `start_timeout` is not shorter. A host answers within milliseconds, and its clients kill it after
# two intervals of the heartbeat.
SILENCE = 2 * HEARTBEAT_INTERVAL
# Seconds within which a host has ended that has closed a connection.
END_LIMIT = 1.0
# Hosts that may end, one after the other, while this process joins them: each had been started by
# another process, and ended with its last API process.
MOST_TRIES = 10


class Reached(NamedTuple):
    """A host that has welcomed this process."""

    connection: socket.socket
    welcome: Welcome
    # Descriptors of the host's memory and of the range's lifeline; None without any, or once the
    # opening has them.
    memory: tuple[int, int] | None
    # The host if this process has started it.
    process: HostProcess | None


class HostLink:
    """A connection to the host of a key, on one event loop."""

    def __init__(
        self,
        key: HostKey,
        hello: Callable[[], Hello],
        max_frame_bytes: int,
        start_timeout: float,
        loop: asyncio.AbstractEventLoop,
        name: str,
        *,
        handlers: Handlers,
        joined: Callable[[Welcome, tuple[int, int] | None], None],
        unreachable: Callable[[BaseException], None],
        lost: Callable[[], None],
    ) -> None:
        self._key = key
        self._hello = hello
        self._limits = max_frame_bytes, start_timeout
        # Called on the event loop's thread: with a welcome and `Reached.memory`; with an error of
        # a join; at the end of the connection.
        self._joined, self._unreachable, self._lost = joined, unreachable, lost
        self._loop = loop
        self._name = name
        self._handlers: Handlers = {
            Kind.PONG: lambda: self._heartbeat.answered(0),
            messages.Log: _handle_record,
            **handlers,
        }
        self._thread = JobThread(loop, f"fast_batcher-host-{name}")
        self._reached: Reached | None = None
        # Whether the host has said that it ends, and hangs up when it is dead.
        self.host_ends = False
        # The socket on which the thread waits for a welcome.
        self._waiting: socket.socket | None = None
        self._channel: LoopChannel | None = None
        self._heartbeat = Heartbeat()
        self._timer: asyncio.TimerHandle | None = None
        # Set while the next join is to come.
        self._join_timer: asyncio.TimerHandle | None = None
        # Whether a join starts a missing host.
        self._may_start = True
        # Whether a join runs; and the same for other threads.
        self._is_joining = False
        self._has_joined = threading.Event()
        self._has_joined.set()
        # Set by the goodbye: a wait for the directory's lock ends.
        self._leaving = threading.Event()
        self._is_closed = False
        # The moment at which a join fails. Thread of the link.
        self._deadline = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether there is a host, as far as is known."""
        return self._channel is not None

    @property
    def pid(self) -> int | None:
        """Process id of the host, None without one."""
        return None if self._reached is None else self._reached.welcome.process.pid

    def join(self) -> None:
        """Connect to the host, or start it; `joined` or `unreachable` is called in the end."""
        self._join_timer = None
        self._is_joining = True
        self._has_joined.clear()
        self._thread.run(self._join, self._finish_join)

    def join_later(self, seconds: float, *, may_start: bool = True) -> None:
        """Join after a delay, perhaps without starting a missing host."""
        self._may_start = may_start
        self._join_timer = self._loop.call_later(seconds, self.join, context=Context())

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame without waiting; without a host it is dropped."""
        if self._channel is not None:
            self._channel.send(kind, 0, body)

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message without waiting; without a host it is dropped."""
        self.send(Kind.MESSAGE, dumps(message))

    def read_all(self) -> None:
        """Handle the frames that have arrived. Do not call it while a frame is handled."""
        if self._channel is not None:
            self._channel.drain()

    def begin_goodbye(self) -> bool:
        """Say goodbye, now or after the running join, and join no further host."""
        was_leaving = self._leaving.is_set()
        self._leaving.set()
        if self._join_timer is not None:
            self._join_timer.cancel()
            self._join_timer = None
        if not was_leaving:
            self.tell(messages.Goodbye())
        return self.is_connected or self._is_joining

    def say_goodbye(self, seconds: float) -> None:
        """Say goodbye without an event loop, and block until the host has hung up."""
        until = monotonic() + seconds
        self.begin_goodbye()
        self._has_joined.wait(seconds)
        self._take_reached()
        if self._reached is None:
            return
        poll = select.poll()
        connection = self._reached.connection
        while self._channel is not None:
            is_sending = self._channel.is_sending()
            poll.register(connection, select.POLLIN | (select.POLLOUT if is_sending else 0))
            if not poll.poll(1000 * max(0.0, until - monotonic())):
                return
            self.read_all()

    def close(self) -> None:
        """Say goodbye, close the connection, and join no host any more; may be called again."""
        self.begin_goodbye()
        self._is_closed = True
        waiting = self._waiting
        if waiting is not None:
            with contextlib.suppress(OSError):  # the thread has just closed it
                waiting.shutdown(socket.SHUT_RD)
        self._thread.stop()
        self._take_reached()
        self._hang_up()

    def _take_reached(self) -> None:
        """Say goodbye to a host that was reached, and of which the loop was not told."""
        if self._channel is None and self._reached is not None:
            self._channel = self._open_channel(self._reached)
            self.tell(messages.Goodbye())

    # Joining.

    def _join(self) -> None:
        """Connect to the host, or start it. Thread of the link."""
        self._deadline = monotonic() + self._limits[1]
        try:
            for _ in range(MOST_TRIES):
                if self._leaving.is_set():
                    return
                self._reached = self._try_to_reach()
                if self._reached is not None:
                    return
        finally:
            self._has_joined.set()
        raise NotReadyError(f"{self._name}: {MOST_TRIES} host processes ended before they answered")

    def _try_to_reach(self) -> Reached | None:
        """Connect to the host, or start it; None if the host has ended or was replaced."""
        joined = self._connect()
        connection, process = joined.connection, joined.process
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(connection.close)
            if process is not None:
                on_failure.callback(process.close)
            try:
                welcome, fds = self._shake_hands(joined)
            except (EOFError, ConnectionError):
                if process is not None:
                    self._follow_end(process)
                return None
            except TimeoutError:
                self._end_silent_host(joined)
                return None
            on_failure.pop_all()
        if process is not None:
            process.close()
        return Reached(connection, welcome, (fds[0], fds[1]) if welcome.length else None, process)

    def _connect(self) -> Joined:
        try:
            launch = launch_host if self._may_start else None
            return connect(self._key, launch, self._seconds_left, self._leaving)
        except TimeoutError as error:
            raise self._make_timeout_error(str(error)) from None

    @property
    def _seconds_left(self) -> float:
        """Seconds until the join fails; positive, because a socket's timeout must be."""
        return max(0.001, self._deadline - monotonic())

    def _make_timeout_error(self, reason: str) -> WorkerStartupError:
        return WorkerStartupError(
            f"no host process has answered within start_timeout={self._limits[1]:g} seconds: "
            f"{reason}"
        )

    def _follow_end(self, process: HostProcess) -> None:
        """Handle the end of the connection to a host that this process has started."""
        # It may live: this process has ended the connection, or was too slow to introduce itself.
        if self._is_closed or not process.ends_within(END_LIMIT):
            process.reap_soon()
        elif not process.has_ended_itself:
            raise process.make_startup_error()

    def _end_silent_host(self, joined: Joined) -> None:
        """Kill a host that does not answer."""
        if joined.process is not None:
            joined.process.kill()
            raise self._make_timeout_error("it was killed")
        with contextlib.suppress(TimeoutError):
            replace_silent(self._key, joined, self._seconds_left, self._leaving)
        if monotonic() >= self._deadline:
            raise self._make_timeout_error("the next opening starts another one")

    def _shake_hands(self, joined: Joined) -> tuple[Welcome, list[int]]:
        """Return the welcome, and the descriptors that come with it."""
        connection = self._waiting = joined.connection
        try:
            silence = min(SILENCE, self._limits[1] / 2) if joined.has_begun else inf
            connection.settimeout(min(silence, self._seconds_left))
            return self._exchange(connection)
        except EOFError:
            if self._is_closed:  # otherwise the host would wait for another process
                with contextlib.suppress(OSError):
                    connection.sendall(pack_message(messages.Goodbye()))
            raise
        finally:
            self._waiting = None

    def _exchange(self, connection: socket.socket) -> tuple[Welcome, list[int]]:
        """Send the introduction; return the welcome, and the descriptors that come with it."""
        introduction = pack_message(self._hello())
        # A host that ends closes the connection without reading from it: the end lies there.
        with contextlib.suppress(ConnectionError):
            connection.sendall(introduction)
        if self._is_closed:  # `close` may have seen no socket to shut down
            raise EOFError
        header, fds, _, _ = socket.recv_fds(connection, HEADER_SIZE, MAX_DESCRIPTORS)
        with contextlib.ExitStack() as on_failure:
            for fd in fds:
                on_failure.callback(os.close, fd)
                os.set_inheritable(fd, False)
            header += _receive_exactly(connection, HEADER_SIZE - len(header))
            _, length = unpack_header(header)
            welcome: Welcome = loads(_receive_exactly(connection, length))
            on_failure.pop_all()
        return welcome, fds

    def _finish_join(self, error: BaseException | None) -> None:
        self._is_joining = False
        reached = self._reached
        if error is not None or reached is None:
            self._unreachable(error or NotReadyError("no host"))
            return
        self._channel = self._open_channel(reached)
        self._heartbeat = Heartbeat()
        self._reached = reached._replace(memory=None)
        self._joined(reached.welcome, reached.memory)
        self._channel.attach(self._loop)
        if self._leaving.is_set():
            self.tell(messages.Goodbye())
        self._beat()

    def _open_channel(self, reached: Reached) -> LoopChannel:
        ends = (reached.connection, reached.connection)
        take = functools.partial(dispatch, handlers=self._handlers)
        return LoopChannel(ends, self._limits[0], take, self._hung_up)

    # Death.

    def _beat(self) -> None:
        """Ping the host; kill a host that has not answered the last ping."""
        self.read_all()  # this process may have been stopped
        if not self.is_connected:
            return
        to_ping, silent = self._heartbeat.tick(monotonic(), [0])
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._beat, context=Context())
        if silent and self._reached is not None:
            process = self._reached.welcome.process
            is_killed = kill_process(process)
            logger.error(
                "%s: the host process (pid %d) has not answered for %g seconds and is %s",
                *(self._name, process.pid, HEARTBEAT_INTERVAL),
                "killed" if is_killed else "left: it cannot be killed from this PID namespace",
            )
            if not is_killed:
                self._hung_up(None)
        elif to_ping:
            self.send(Kind.PING, dumps(()))

    def _hung_up(self, error: Exception | None) -> None:
        if error is not None:
            logger.error("%s: the host process broke the protocol", self._name, exc_info=error)
        self._hang_up(is_over=True)
        self._lost()

    def _hang_up(self, *, is_over: bool = False) -> None:
        """Close the connection, whose end has been read if it `is_over`."""
        channel, self._channel = self._channel, None
        reached, self._reached = self._reached, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if channel is not None:
            channel.close()
        if reached is not None:
            reached.connection.close()
            for fd in reached.memory or ():
                os.close(fd)
            if reached.process is not None:
                if is_over and self.host_ends:
                    reached.process.reap()
                else:  # it ends with the last of the other processes, or is stuck
                    reached.process.reap_soon()


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _handle_record(packed: bytes) -> None:
    record = unpack_record(packed)
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        target.handle(record)
