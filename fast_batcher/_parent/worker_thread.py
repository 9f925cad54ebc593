"""A worker that is a thread of this process: `DynBatcher(Model, workers="threads")`, the test kit.

    loop's thread    hands batches over, and reports what the worker's thread has left
    worker's thread  loads the model, serves it (`_worker/main.py`), and ends

The inputs and outputs are the callers' own objects.

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
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

from fast_batcher._core.values import Batch, Order, Report
from fast_batcher._devices import thread_share
from fast_batcher._parent.sending import decode
from fast_batcher._parent.worker_handle import (
    Exit,
    Outcomes,
    WorkerHandle,
    WorkerState,
    describe_exit,
)
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.main import WorkerSettings, load_and_serve
from fast_batcher._worker.port import PING_ID, BatchJob, Told, describe_errors

# Answers that may wait for the event loop before the thread waits for it: a model with quick steps
# would fill the memory, and then the loop. The loop takes about 3 ms for as many.
MOST_UNREAD = 256

# Held by the thread that loads its model: loaders change what belongs to the whole process, as
# PyTorch's default dtype and default device, and set it back.
_loading = threading.Lock()


class ThreadWorker(WorkerHandle):
    """A worker that is a thread of this process, and the `WorkerPort` of that thread.

    Args:
        arguments: As for `WorkerHandle`.
        latency: Returns the seconds that each batch takes besides the model's.
    """

    # Outputs are not copied on their way, so that they must not be views of an array that the model
    # may fill again.
    copies_outputs = True

    def __init__(self, *arguments: Any, latency: Callable[[], float] = float) -> None:
        super().__init__(*arguments)
        self._latency = latency
        # The thread takes the model, then batches and orders, and None to end.
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        # Reports from the thread that the loop has not made yet.
        self._reports: deque[Callable[[], None]] = deque()
        self._room = threading.Semaphore(MOST_UNREAD)
        self._progress = WorkerProgress(-1)
        self._thread: threading.Thread | None = None
        # Set when it counts as dead, whatever the thread does; and when it is dead.
        self._is_abandoned = threading.Event()
        self._is_dead = threading.Event()
        # One item while this thread holds `_loading`.
        self._turn: list[None] = []
        # The thread ends by itself, because it could not load the model.
        self._has_failed = False
        self._exit_code = 0

    # Start.

    def spawn(self) -> None:
        """Start the thread. Spawner thread."""
        name = f"fast_batcher-worker-{self._name}-{self.index}"
        thread = threading.Thread(target=Context().run, args=(self._run,), name=name, daemon=True)
        thread.start()
        self._thread = thread

    def attach(self, loop: AbstractEventLoop) -> None:
        """Report on this event loop, and give the worker its model."""
        self._loop = loop
        self.is_attached = True
        spec = self.model_spec
        self._tasks.put(spec.pickled or (spec.model, *spec.read_arguments()))
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
        return settings._replace(freeze_gc=False, device=device, copies_outputs=self.copies_outputs)

    # Batches and orders.

    def compute(self, batch: Batch) -> None:
        """Hand a batch over to the thread."""
        job = BatchJob(batch.id)
        job.inputs = self._pass_inputs(batch)
        job.take_note(batch.make_note())
        if job.inputs:
            self._tasks.put(job)

    def order(self, order: Order, batch_id: int = 0) -> None:
        """Hand an order over to the thread."""
        self._tasks.put(BatchJob.make_ping() if order is Order.PING else (order, batch_id))

    def skip(self, batch_id: int) -> None:
        self._progress.skip(batch_id)

    def _pass_inputs(self, batch: Batch) -> list[Any]:
        return [request.value for request in batch.requests]

    def _pass_output(self, output: Any) -> Any:
        return output

    # The worker's thread: see `WorkerPort`.

    def _run(self) -> None:
        settings = self.make_worker_settings(thread_share(self._settings.most_workers))
        code = 1
        try:
            code = load_and_serve(self, self._progress, settings)
        finally:
            self._end_turn()
            if not self._is_abandoned.is_set():
                self._exit_code = code
                self._end()

    def receive_model(self) -> Any:
        """Wait for the model, and then until no other thread of this process loads one."""
        model = self._tasks.get()
        _loading.acquire()
        self._turn.append(None)
        if self._is_abandoned.is_set():
            return None
        self.pid = os.getpid()
        self._report(self._events.worker_placed, self)
        return model

    def _end_turn(self) -> None:
        """Let another thread load its model; may be called again, by any thread."""
        with suppress(IndexError):
            self._turn.pop()
            _loading.release()

    @property
    def start_limit(self) -> float:
        """Seconds for the loading; the wait for other threads has no limit."""
        return super().start_limit if self._turn else inf

    def fail_start(self, error: SerializedError) -> None:
        """Report that the model could not be loaded."""
        self._end_turn()
        self._has_failed = True
        self._report(self._start_failed, error)

    def report_ready(self, *course: Any) -> None:
        """Report readiness."""
        self._end_turn()
        self._report(self._loaded, *course)

    def receive(self) -> BatchJob | Told | None:
        """Wait for the next batch, and then for the latency, or for the next order."""
        task = self._tasks.get()
        if isinstance(task, BatchJob) and task.failed is None:
            if seconds := self._latency():
                self._is_abandoned.wait(seconds)
            self._progress.taken = task.batch_id
            task.take_inputs(task.inputs)
        return None if self._is_abandoned.is_set() else task

    def has_arrived(self) -> bool:
        """Return whether `receive` need not wait."""
        return not self._tasks.empty()

    def answer(self, job: BatchJob) -> None:
        """Report a batch or a step."""
        if job.batch_id == PING_ID:
            self._report(self._events.worker_answers, self)
            return
        report = Report(job.failed, job.elements, job.step)
        answer = self._make_answer(job.spread(job.outputs), job.errors)
        self._report(self.listener.reported, self.id, job.batch_id, job.seconds, answer, report)

    def _make_answer(self, outputs: list[Any], errors: dict[int, SerializedError]) -> Outcomes:
        describe_errors(outputs, errors)
        passed = [
            errors[at] if at in errors else self._pass_output(output)
            for at, output in enumerate(outputs)
        ]
        return lambda: [decode(item) if at in errors else item for at, item in enumerate(passed)]

    def report_freed(self) -> None:
        """Do nothing: there is no shared memory."""

    def _report(self, event: Callable[..., None], *arguments: Any) -> None:
        """Let the loop's thread report an event."""
        self._room.acquire()
        if not self._is_abandoned.is_set():
            self._reports.append(partial(event, *arguments))
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

    def read_all(self) -> bool:
        """Report what the thread has left; later events are left."""
        for _ in range(len(self._reports)):
            if not (self._reports and self.is_alive):  # an event has ended the worker
                break
            self._room.release()
            report = self._reports.popleft()
            if self.state is WorkerState.ENDING:
                continue
            try:
                report()
            except Exception as error:  # noqa: BLE001  as in `LoopChannel`
                self.kill_on_protocol_error(error)
        return False

    # Progress.

    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""
        return self._progress.begun

    # End.

    def disconnect(self) -> None:
        """Let the thread end after its current batch."""
        self.ignore()
        self._room.release(MOST_UNREAD)  # the loop may read no more
        self._tasks.put(None)

    def signal(self, number: signal.Signals) -> None:
        """Count the thread as dead, whatever the signal, unless it ends by itself."""
        if self.is_alive and not self._is_dead.is_set() and not self._has_failed:
            self._exit_code = -number
            self._is_abandoned.set()
            self._end_turn()
            self._reports.clear()
            self._room.release(MOST_UNREAD)
            self._tasks.put(None)
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
