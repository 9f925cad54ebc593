"""Stages of a model, which work on several batches at the same time. Worker process.

    reader thread    receive a batch, hand its inputs to `prepare`
    main thread      wait for the prepared inputs, `infer`, hand the outputs to `finish`
    sender thread    wait for the finished outputs, send them

`prepare` and `finish` run in a pool of threads, one call per request. Batches keep their order. The
parent sends no more batches than there are stages and one that waits, so that the queues are short.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._core.values import Failed
from fast_batcher._transport import pickling
from fast_batcher._worker.loop import BatchLoop, breaks_device
from fast_batcher._worker.port import BatchJob, WorkerPort
from fast_batcher.errors import forget_frames, is_kind

Calls = list[Future[Any]]


class Stages:
    """The optional methods `prepare` and `finish` of a model, and the threads that run them."""

    def __init__(self, model: Any, threads: int) -> None:
        self.prepare = _find_method(model, "prepare")
        self.finish = _find_method(model, "finish")
        self.count = 1 + (self.prepare is not None) + (self.finish is not None)
        # It starts a thread when it is first needed.
        self._pool = ThreadPoolExecutor(threads, "fast_batcher-stage")

    def call(self, function: Callable[[Any], Any] | None, values: Sequence[Any]) -> Calls | None:
        """Begin to call a stage for each value; None if the model does not have this stage."""
        if function is None:
            return None
        return [self._pool.submit(function, value) for value in values]

    def close(self) -> None:
        """Cancel the calls that have not begun, and wait for the others."""
        self._pool.shutdown(cancel_futures=True)


def _find_method(model: Any, name: str) -> Callable[[Any], Any] | None:
    """Return an optional method of a model.

    Only its class counts, which was checked: an attribute that the model sets is its own affair.
    """
    return None if getattr(type(model), name, None) is None else getattr(model, name)


class StagesInTurn:
    """A model whose `infer` runs all stages of a batch before it returns."""

    def __init__(self, stages: Stages, infer: Callable[[list[Any]], Any]) -> None:
        self._stages = stages
        self._infer = infer

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Run the stages; raise the first error."""
        stages = self._stages
        count = len(inputs)
        calls = stages.call(stages.prepare, inputs)
        prepared = inputs if calls is None else [call.result() for call in calls]
        outputs = list_outputs(self._infer(prepared), count, "infer returned", copies=True)
        calls = stages.call(_pass_errors(stages.finish), outputs)
        return outputs if calls is None else [call.result() for call in calls]


class StageLoop:
    """Main loop of a worker whose model has more than one stage."""

    def __init__(self, loop: BatchLoop, port: WorkerPort, stages: Stages) -> None:
        self._loop = loop
        self._port = port
        self._stages = stages
        # The reader thread puts batches with the calls of their first stage, and None at the end.
        # An exception of a thread ends the main thread, and so the process.
        self._received: SimpleQueue[tuple[BatchJob | BaseException | None, Calls | None]] = (
            SimpleQueue()
        )
        # The main thread puts batches with the calls of their last stage, and None at the end.
        self._computed: SimpleQueue[tuple[BatchJob | None, Calls | None]] = SimpleQueue()

    def run(self) -> None:
        """Answer batches until the parent says stop or is gone, or until a fatal error.

        After a fatal error of `finish` the parent ends the process.
        """
        # Daemons: the reader may wait for a batch, and the sender for a finish that never ends,
        # when an error ends the process.
        self._start(self._read, "fast_batcher-reader")
        sender = self._start(self._send, "fast_batcher-sender")
        self._compute()
        sender.join()
        self._stages.close()

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._received.put((error, None))

    def _read(self) -> None:
        """Reader thread: receive batches, and begin their first stage."""
        while isinstance(job := self._port.receive(), BatchJob):
            calls = None
            if job.method == "infer":
                calls = self._stages.call(self._stages.prepare, job.inputs)
            self._received.put((job, calls))
            del job, calls
        self._received.put((None, None))

    def _compute(self) -> None:
        """Main thread: compute batches, and begin their last stage."""
        while True:
            job, calls = self._received.get()
            if isinstance(job, BaseException):
                raise job
            if job is None:
                self._computed.put((None, None))
                return
            if calls is not None:
                job.inputs = _collect(job, job.inputs, calls)
            # The calls keep what they returned, and the model alone is to have it.
            calls = None
            self._loop.compute(job)
            if job.method == "infer":
                calls = self._stages.call(_pass_errors(self._stages.finish), job.outputs)
            self._computed.put((job, calls))
            if job.failed is Failed.FATAL:
                self._computed.put((None, None))
                return
            del job, calls

    def _send(self) -> None:
        """Sender thread: answer batches."""
        while True:
            job, calls = self._computed.get()
            if job is None:
                return
            if calls is not None:
                job.outputs = _collect(job, job.outputs, calls)
            self._port.answer(job)
            del job, calls
            self._port.report_freed()


def _collect(job: BatchJob, values: list[Any], calls: Calls) -> list[Any]:
    """Wait for the calls of a stage on these values of a batch, and return what they return."""
    positions = job.list_open(len(values))
    # The list of the batch, too, gives its values up.
    values.clear()
    for position, call in zip(positions, calls, strict=True):
        error = call.exception()
        if error is None:
            values.append(call.result())
            continue
        failure = pickling.describe(error)
        is_fatal = breaks_device(error)
        # The frames keep the input.
        forget_frames(error)
        if is_fatal:
            job.fail(Failed.FATAL, failure)
            return []
        job.errors[position] = failure
    return values


def _pass_errors(finish: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Return a last stage that passes on the errors that `infer` returned."""
    if finish is None:
        return None
    return lambda output: output if is_kind(output, BaseException) else finish(output)
