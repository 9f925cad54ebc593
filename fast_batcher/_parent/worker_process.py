"""The parent's half of one worker process: its pipes, its death, its end.

`spawn` runs on the starter thread; everything else runs on the thread of the event loop, or on the
thread that calls `stop()` after the loop. A handle is for one process; a replacement gets a new
one.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from fast_batcher._descendants import opened_descendants, send
from fast_batcher._parent.child_process import ChildProcess
from fast_batcher._parent.thread_limits import worker_environment
from fast_batcher._shared_memory.outbox_reader import OutboxReader
from fast_batcher._shared_memory.slabs import Slabs
from fast_batcher._transport.channel import LoopChannel, Reservation, drop, open_pipes
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.main import worker_main
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, TimerHandle

logger = logging.getLogger("fast_batcher")

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

# Our own context: the start method of the program around us stays what it is. Spawn, because a
# forked child inherits CUDA state that it cannot use, and our pipe ends.
_context = multiprocessing.get_context("spawn")


class WorkerProcessEvents(Protocol):
    """What a handle tells its pool, on the loop's thread."""

    def frame_arrived(self, handle: "WorkerProcess", frame: Frame) -> None:
        """The worker has said something; an exception means that it talks nonsense."""

    def worker_exited(self, handle: "WorkerProcess") -> None:
        """The process is dead, and everything it had sent has been handed on. Said once."""


class WorkerProcess:
    """One worker process.

    Args:
        id: Of this process among all that the pool starts.
        index: Which of the batcher's workers this is, from 0.
        model: What it loads.
        settings: The batcher's settings.
        slabs: Memory in which large inputs reach it, None if there is none.
        events: Who is told.
    """

    def __init__(
        self,
        id: int,
        index: int,
        model: ModelSpec,
        settings: Settings,
        slabs: Slabs | None,
        events: WorkerProcessEvents,
    ) -> None:
        self.id = id
        self.index = index
        self._model = model
        self._settings = settings
        self._slabs = slabs
        self._events = events
        # None before `spawn` and after `reap`.
        self._child: ChildProcess | None = None
        # The process id, None before `spawn`.
        self.pid: int | None = None
        self._channel: LoopChannel | None = None
        # What the worker is doing; read once it is dead.
        self._progress: WorkerProgress | None = None
        # Where it leaves large answers; None before `spawn`, and if there is to be no such place.
        self.outbox: OutboxReader | OSError | None = None
        # Ids of the batches that it had read and begun last, None before its death or without any.
        self.taken: int | None = None
        self.begun: int | None = None
        # The same of the last batch of which children of it may have views.
        self.inherited: int | None = None
        self._loop: AbstractEventLoop | None = None
        # It has loaded its model.
        self.is_ready = False
        # Batches that it has answered; counted only for `max_batches_per_worker`.
        self.batches = 0
        # What the pool will do about it unless something comes before.
        self._timer: TimerHandle | None = None
        # It finishes what it has, and ends.
        self.was_asked_to_end = False
        # It has closed its end of a pipe, which is what a dying one does first.
        self.has_hung_up = False
        # It is being ended by us.
        self.is_ending = False
        # How the process ended: "exit code 3", "signal 9 (SIGKILL)"; empty while it lives.
        self.exit_text = ""
        # The same as a number, negative for a signal; None while it lives, or if nobody knows.
        self.exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that has not been seen to end."""
        return self._child is not None

    @property
    def is_attached(self) -> bool:
        """Whether a loop watches the process, or did until it was closed."""
        return self._loop is not None

    def spawn(self) -> None:
        """Start the process. Starter thread.

        Raises:
            OSError: The system has no room for another process.
        """
        ours, theirs = open_pipes(_context)
        try:
            self._progress = WorkerProgress()
            self._channel = LoopChannel(
                ours, self._settings.max_frame_bytes, self._on_frame, self._on_channel_end
            )
            self.outbox = self._make_outbox()
            process = _context.Process(
                target=worker_main,
                args=(
                    theirs,
                    self._progress,
                    self._settings.max_frame_bytes,
                    self._settings.max_batch_size,
                    os.getpid(),
                    self._slabs,
                    self.outbox,
                ),
                name=f"fast_batcher-{self._model.name}-{self.index}",
                # Not daemonic: a model may have children of its own (data loaders).
                daemon=False,
            )
            environment = worker_environment(os.environ, self._settings.num_workers)
            child = ChildProcess(process, environment)
        except BaseException:
            if self._channel is not None:
                self._channel.close()
            if self._progress is not None:
                self._progress.close()
            self.close_outbox()
            raise
        finally:
            # The child has its own copies; while ours are open there is never an end of file.
            for end in theirs:
                end.close()
        self._progress.close_fd()
        if isinstance(self.outbox, OutboxReader):
            self.outbox.close_fd()
        self.pid = child.pid
        # Last: from now on it is alive for the loop's thread.
        self._child = child

    def _make_outbox(self) -> OutboxReader | OSError | None:
        if not self._settings.max_shared_bytes:
            return None
        try:
            return OutboxReader(
                self._settings.max_shared_bytes, self._settings.shared_memory_threshold
            )
        except OSError as error:
            # Not its frames, which hold this handle.
            return error.with_traceback(None)

    def close_outbox(self) -> None:
        """Give its memory back, which takes long if much was in it."""
        if isinstance(self.outbox, OutboxReader):
            self.outbox.close()

    def attach(self, loop: "AbstractEventLoop") -> None:
        """Let this loop watch the process; a loop that did so before is closed by now."""
        assert self._channel is not None, "attached after spawn"
        is_first = self._loop is None
        self._loop = loop
        self._channel.attach(loop)
        if is_first:
            self.send(Kind.LOAD, 0, self._model.pickled)
        loop.add_reader(self.death_fd, self._on_death)

    @property
    def send(self) -> Callable[[Kind, int, bytes], None]:
        """Sends a frame (kind, batch id, body) without waiting; one to a dead worker is dropped."""
        assert self._channel is not None, "sent after spawn"
        return self._channel.send

    def reserve(self) -> Reservation:
        """Keep a place for frames that are not ready yet; `fill` has to be called."""
        assert self._channel is not None, "reserved after spawn"
        return self._channel.reserve()

    def fill(self, reservation: Reservation, frames: list[tuple[Kind, int, bytes]]) -> None:
        """Send frames in a place that was reserved."""
        assert self._channel is not None, "reserved after spawn"
        self._channel.fill(reservation, frames)

    def set_timer(self, timer: "TimerHandle | None") -> None:
        """What is to be done about it later; what was to be done before is not."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the process, 0 if it cannot be read. Linux."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * PAGE_SIZE
        except (OSError, IndexError):  # it has just died
            return 0

    def read_all(self) -> bool:
        """Hand on what it has said by now; whether the rest of a frame is coming."""
        assert self._channel is not None, "it is ready"
        return self._channel.drain()

    def is_sending(self) -> bool:
        """Whether it has lately been sent what had to wait, or is still to be sent some of it."""
        assert self._channel is not None, "it is ready"
        return self._channel.is_sending()

    def read_begun(self) -> int | None:
        """The id of the batch that it has begun last, None if there is none."""
        return None if self._progress is None else self._progress.begun

    def ask_to_end(self) -> None:
        """Let it finish what it has and end by itself. Its answers still count."""
        self.was_asked_to_end = True
        self.send(Kind.STOP, 0, b"")

    def deliver_to(self, on_frame: Callable[[Frame], None]) -> None:
        """From now on frames go there at once, not through `events`: it is ready."""
        assert self._channel is not None, "a frame has arrived"
        self._channel.on_frame = on_frame

    def ignore(self) -> None:
        """It is being ended by us: nothing that it says counts any more."""
        self.is_ending = True
        if self._channel is not None:
            self._channel.on_frame = drop

    def disconnect(self) -> None:
        """Close the pipes: the worker ends after the batch it computes; nothing is heard of it."""
        self.ignore()
        if self._channel is not None:
            self._channel.close()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives, and then the processes that its model has started.

        They are looked for before, because they are nobody's children once it is dead. A worker
        ignores every SIGTERM but this one.
        """
        if self.pid is not None and self.is_alive:
            if number == signal.SIGTERM and self._progress is not None:
                self._progress.let_sigterm_end()
            with opened_descendants(self.pid) as pidfds:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
                send(pidfds, number)

    def kill(self) -> None:
        """End it at once; `worker_exited` follows."""
        self.ignore()
        self.signal(signal.SIGKILL)

    def kill_on_protocol_error(self, error: Exception) -> None:
        """It has talked nonsense: end it at once."""
        if not self.is_ending:
            logger.error(
                "worker %d (pid %s) is replaced: %s", self.index, self.pid, error, exc_info=error
            )
        self.kill()

    def reap(self) -> None:
        """The process is dead: take its exit status and release what belonged to it."""
        if self._child is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._child.death_fd)
        self.exit_code = self._child.take_exit_code()
        self.exit_text = describe_exit(self.exit_code)
        self._child.close()
        self._child = None
        if self._channel is not None:
            self._channel.close()
        if self._progress is not None:
            self.taken, self.begun = self._progress.taken, self._progress.begun
            self.inherited = self._progress.inherited
            self._progress.close()
        if isinstance(self.outbox, OutboxReader) and not self.outbox.is_used:
            self.outbox.close()

    @property
    def death_fd(self) -> int:
        """Readable once the process is dead; -1 after `reap`."""
        return -1 if self._child is None else self._child.death_fd

    def _on_frame(self, frame: Frame) -> None:
        self._events.frame_arrived(self, frame)

    def _on_channel_end(self, error: Exception | None) -> None:
        """It has closed its end or talks nonsense. Either way it is of no use any more."""
        self.has_hung_up = error is None and not self.is_ending
        if error is None:
            self.kill()
        else:
            self.kill_on_protocol_error(error)

    def _on_death(self) -> None:
        # A reply may be read after the death of its writer.
        if self._channel is not None:
            self._channel.drain()
        self.reap()
        self._events.worker_exited(self)


def describe_exit(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "unknown exit status"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", possibly out of memory" if -code == signal.SIGKILL else ""
    return f"signal {-code} ({name}{hint})"
