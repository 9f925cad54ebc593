"""A worker that is a thread of this process: `DynBatcher(Model, workers="threads")`, the test kit.

    loop's thread    sends frames, and reads what the worker's thread has left
    worker's thread  loads the model, serves it (`_worker/main.py`), and ends

Frames are objects of this process and pass no pipe. The inputs and outputs in them are the callers'
own objects, but for a kit, which pickles them as for a process.

A thread cannot be killed. One that is to die counts as dead at once, its answers are lost, and it
ends when the model's call returns. One that could not load its model is ending anyway.
"""

import os
import signal
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from queue import SimpleQueue
from typing import Any

from fast_batcher._devices import thread_share
from fast_batcher._parent.worker_process import Exit, WorkerHandle, WorkerState, describe_exit
from fast_batcher._transport.channels import Frame, Kind, split_frames
from fast_batcher._transport.pickling import SerializedError, describe
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.loop import BATCHES, Reply, ReplyEncoder
from fast_batcher._worker.main import WorkerSettings, load_and_serve

# Frames that may wait for the event loop before the thread waits for it: a model with quick steps
# would fill the memory, and then the loop. The loop takes about 3 ms for as many.
MOST_UNREAD = 256


class ValueEncoder(ReplyEncoder):
    """Passes the outputs of batches on as they are."""

    def pack(self, outputs: list[Any], errors: dict[int, SerializedError]) -> Reply:
        """Return the frame that answers a batch."""
        for position, output in enumerate(outputs):
            if issubclass(type(output), BaseException):
                errors.setdefault(position, describe(output))
        outcomes = [errors.get(position, output) for position, output in enumerate(outputs)]
        return [(Kind.OUTPUT_VALUES, outcomes)]


class ThreadWorker(WorkerHandle):
    """A worker that is a thread of this process.

    Args:
        arguments: As for `WorkerHandle`.
        latency: Returns the seconds that each batch takes besides the model's.
        takes_values: Whether inputs and outputs are passed on as they are, without pickling.
    """

    def __init__(
        self,
        *arguments: Any,
        latency: Callable[[], float] = float,
        takes_values: bool = True,
    ) -> None:
        super().__init__(*arguments)
        self.takes_values = takes_values
        self._latency = latency
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        # Frames from the thread that the loop has not read yet.
        self._answers: deque[Frame] = deque()
        self._room = threading.Semaphore(MOST_UNREAD)
        self._progress = WorkerProgress(-1)
        self._thread: threading.Thread | None = None
        # Set when it counts as dead, whatever the thread does; and when it is dead.
        self._is_abandoned = threading.Event()
        self._is_dead = threading.Event()
        # The thread ends by itself, because it could not load the model.
        self._has_failed = False
        self._exit_code = 0

    # Start.

    def spawn(self) -> None:
        """Start the thread. Spawner thread."""
        name = f"fast_batcher-worker-{self._name}-{self.index}"
        thread = threading.Thread(target=Context().run, args=(self._run,), name=name, daemon=True)
        thread.start()
        self.pid, self._thread = os.getpid(), thread

    def attach(self, loop: AbstractEventLoop) -> None:
        """Read answers on this event loop, and send the worker its model."""
        self._loop = loop
        self.is_attached = True
        spec = self.model_spec
        self.send(Kind.LOAD, 0, spec.pickled or (spec.model, *spec.read_arguments()))
        self._read_soon()  # it may be dead already

    @property
    def is_alive(self) -> bool:
        """Whether the thread was started and has not been reaped."""
        return self._thread is not None

    def make_worker_settings(self, threads: int) -> WorkerSettings:
        """Make the settings of the worker: it sees all devices of this process by their names."""
        settings, device = super().make_worker_settings(threads), None
        if self._settings.devices is not None:
            name = self._settings.devices[self.index % len(self._settings.devices)]
            device = name if name.startswith("cuda") else "cpu"
        return settings._replace(freeze_gc=False, device=device, copies_outputs=self.takes_values)

    # The worker's thread.

    def _run(self) -> None:
        settings = self.make_worker_settings(thread_share(self._settings.most_workers))
        encoder = (ValueEncoder if self.takes_values else ReplyEncoder)(
            None, settings.max_frame_bytes
        )
        code = 1
        try:
            code = load_and_serve(_Channel(self), self._progress, None, encoder, settings)
        finally:
            if not self._is_abandoned.is_set():
                self._exit_code = code
                self._end()

    def receive(self) -> Frame | None:
        """Wait for the next frame, and before a batch for the latency; None at the end."""
        frame = self._frames.get()
        if frame is not None and frame.kind in BATCHES and (seconds := self._latency()):
            self._is_abandoned.wait(seconds)
        return None if self._is_abandoned.is_set() else frame

    def has_arrived(self) -> bool:
        """Return whether `receive` need not wait."""
        return not self._frames.empty()

    def bring(self, *frames: Frame) -> None:
        """Hand frames over to the loop's thread."""
        self._has_failed |= frames[-1].kind == Kind.STARTUP_FAILED
        for _ in frames:
            self._room.acquire()
        if not self._is_abandoned.is_set():
            self._answers.extend(frames)
            self._read_soon()

    def _end(self) -> None:
        self._is_dead.set()
        self._read_soon()

    def _read_soon(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._read, context=Context())

    def _read(self) -> None:
        if self._is_dead.is_set():
            self._died()
        else:
            self.read_all()

    # Frames, progress and memory.

    def send(self, kind: int, batch_id: int, body: Any) -> None:
        """Hand a frame over to the thread."""
        self._frames.put(Frame(kind, batch_id, 0.0, body))

    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""
        self._progress.skip(batch_id)

    def read_all(self) -> bool:
        """Dispatch the frames that have arrived; none arrives in part, and later ones are left."""
        for _ in range(len(self._answers)):
            if not (self._answers and self.is_alive):  # a frame has ended the worker
                break
            try:
                self._room.release()
                self._dispatch(self._answers.popleft())
            except Exception as error:  # noqa: BLE001  as in `LoopChannel`
                self.kill_on_protocol_error(error)
        return False

    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""
        return self._progress.begun

    # End.

    def disconnect(self) -> None:
        """Let the thread end after its current batch."""
        self.ignore()
        self._room.release(MOST_UNREAD)  # the loop may read no more
        self._frames.put(None)

    def signal(self, number: signal.Signals) -> None:
        """Count the thread as dead, whatever the signal, unless it ends by itself."""
        if self.is_alive and not self._is_dead.is_set() and not self._has_failed:
            self._exit_code = -number
            self._is_abandoned.set()
            self._answers.clear()
            self._room.release(MOST_UNREAD)
            self._frames.put(None)
            self._end()

    def wait_until_dead(self, seconds: float) -> bool:
        """Wait for the death of the worker; return whether it is dead."""
        return self._is_dead.wait(seconds)

    def reap(self) -> Exit | None:
        """Forget the thread; None if that was done before."""
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        if not self._is_abandoned.is_set():
            thread.join()
        is_ours = self.state is WorkerState.ENDING
        return Exit(
            text=describe_exit(self._exit_code),
            by_signal=self._exit_code < 0,
            is_clean=self._exit_code == 0 and self.was_asked_to_end,
            is_ours=is_ours,
            taken=self._progress.taken,
            begun=self._progress.begun,
            may_be_out_of_memory=False,
        )


class _Channel:
    """The frames to a worker's thread and from it: see `WorkerChannel`."""

    def __init__(self, worker: ThreadWorker) -> None:
        self._worker = worker
        self.receive = worker.receive
        self.has_arrived = worker.has_arrived

    def send(
        self,
        kind: int,
        batch_id: int = 0,
        body: Any = b"",
        seconds: float = 0.0,
        ahead: bytes = b"",
    ) -> None:
        """Hand a frame over to the loop's thread, behind the frames `ahead`."""
        self._worker.bring(*split_frames(ahead), Frame(kind, batch_id, seconds, body))

    def send_packed(self, data: bytes) -> None:
        """Send nothing: no shared memory is to be reported."""
