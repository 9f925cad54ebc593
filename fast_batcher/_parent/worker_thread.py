"""A worker that is a thread of this process, for the tests of an app: see `fast_batcher.testing`.

    loop's thread    as for a worker process: the same channel, through pipes
    worker's thread  loads the model, serves it (`_worker/main.py`), and ends

A thread cannot be killed. One that is to die counts as dead at once, its answers are lost, and it
ends when the model's call returns. One that could not load its model is ending anyway.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextvars import Context
from multiprocessing.connection import Connection
from typing import Any

from fast_batcher._parent.worker_process import Child, WorkerProcess
from fast_batcher._shared_memory.outbox import OutboxReader
from fast_batcher._transport.channels import BlockingChannel, Ends, Frame, Kind
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.loop import BATCHES, ReplyEncoder
from fast_batcher._worker.main import load_and_serve


class ThreadChannel(BlockingChannel):
    """A channel of a worker's thread, whose batches come later, as if the model took longer.

    Args:
        ends: As for `BlockingChannel`.
        max_frame_bytes: As for `BlockingChannel`.
        latency: Returns the seconds.
        is_abandoned: Set when the worker counts as dead: nothing comes any more.
        has_failed: To be set before the parent reads that the model was not loaded.
    """

    def __init__(
        self,
        ends: Ends,
        max_frame_bytes: int,
        latency: Callable[[], float],
        is_abandoned: threading.Event,
        has_failed: threading.Event,
    ) -> None:
        super().__init__(ends, max_frame_bytes)
        self._latency = latency
        self._is_abandoned = is_abandoned
        self._has_failed = has_failed

    def receive(self) -> Frame | None:
        """Wait for the next frame, and before a batch for the latency."""
        frame = super().receive()
        if frame is not None and frame.kind in BATCHES:
            self._is_abandoned.wait(self._latency())
        return None if self._is_abandoned.is_set() else frame

    def send(self, kind: int, *arguments: Any, **options: Any) -> None:
        """Send a frame, and note whether it is the last one of a failed start."""
        if kind == Kind.STARTUP_FAILED:
            self._has_failed.set()
        super().send(kind, *arguments, **options)


class WorkerThread:
    """A thread in the place of a process: it has an exit code, and a descriptor that tells of it.

    Args:
        work: Function that runs on the thread, and returns the exit code.
        release: Closes what the thread has open, at its end.
        is_abandoned: To be set when the thread counts as dead, whatever it does.
        has_failed: Set when the model was not loaded: the thread ends by itself.
        name: Name of the thread.
    """

    def __init__(
        self,
        work: Callable[[], int],
        release: Callable[[], None],
        is_abandoned: threading.Event,
        has_failed: threading.Event,
        name: str,
    ) -> None:
        self.pid = os.getpid()
        # The second is shut down at the end of the thread, or when it is abandoned.
        self._death, self._life = socket.socketpair()
        self._work = work
        self._release = release
        self._is_abandoned = is_abandoned
        self._has_failed = has_failed
        self._exit_code: int | None = None
        self._thread = threading.Thread(
            target=Context().run, args=(self._run,), name=name, daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        code = 1
        try:
            code = self._work()
        finally:
            if self._exit_code is None:
                self._exit_code = code
            # First: a worker that closes its pipes before its death is killed.
            self._hang_up()
            self._life.close()
            self._release()

    def _hang_up(self) -> None:
        # `close` alone would not wake the other end while a forked child has a copy.
        with contextlib.suppress(OSError):  # it is closed already
            self._life.shutdown(socket.SHUT_RDWR)

    @property
    def death_fd(self) -> int:
        """Descriptor that becomes readable when the thread ends or is abandoned."""
        return self._death.fileno()

    def abandon(self, number: signal.Signals) -> None:
        """Count the thread as dead, whatever it does, unless it ends by itself."""
        if self._exit_code is None and not self._has_failed.is_set():
            self._exit_code = -number
            self._is_abandoned.set()
            self._hang_up()

    def take_exit_code(self) -> int | None:
        """Return the exit code, negative for a signal."""
        return self._exit_code

    def close(self) -> None:
        """Close the descriptors; a thread that has ended is gone afterwards."""
        self._death.close()
        if not self._is_abandoned.is_set():
            self._thread.join()


class ThreadedWorker(WorkerProcess):
    """A worker that is a thread of this process.

    Args:
        latency: Returns the seconds that each batch takes besides the model's.
        arguments: As for `WorkerHandle`.
    """

    def __init__(self, latency: Callable[[], float], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._latency = latency

    def _start_child(
        self,
        ends: tuple[Connection, Connection],
        progress: WorkerProgress,
        log_socket: socket.socket,
        outbox: OutboxReader | OSError | None,
    ) -> Child:
        """Start the thread; its log records need no socket."""
        source, sink = ends
        own_ends = (
            Connection(os.dup(source.fileno()), writable=False),
            Connection(os.dup(sink.fileno()), readable=False),
        )
        own_progress = progress.duplicate()
        settings = self.make_worker_settings(threads=1)
        is_abandoned = threading.Event()
        has_failed = threading.Event()
        channel = ThreadChannel(
            own_ends, settings.max_frame_bytes, self._latency, is_abandoned, has_failed
        )
        encoder = ReplyEncoder(None, settings.max_frame_bytes)

        def serve() -> int:
            try:
                return load_and_serve(channel, own_progress, None, encoder, settings)
            except BrokenPipeError:  # it was abandoned
                return 0

        def release() -> None:
            channel.close()
            own_progress.close()

        name = f"fast_batcher-worker-{self._name}-{self.index}"
        return WorkerThread(serve, release, is_abandoned, has_failed, name)

    @property
    def rss_bytes(self) -> int:
        """Return 0: the memory is that of the whole process."""
        return 0

    def signal(self, number: signal.Signals) -> None:
        """Count the thread as dead, whatever the signal."""
        if self._live is not None:
            assert isinstance(self._live.child, WorkerThread), "made above"
            self._live.child.abandon(number)
