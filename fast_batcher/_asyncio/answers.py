"""Reads the workers' answer frames and delivers outcomes to the callers.

Runs in the API process, on the event loop's thread. A worker that has answered gets its next batch
first; then each caller of the answered batch gets its outcome, an output or a `Failure`. Small
outputs are copied out of a worker's outbox at once, large ones on the copier thread. This module
does not decide about retries, which the scheduler does, and does not count outcomes, which the
ledger does.
"""

import functools
from typing import Any, NamedTuple

from fast_batcher._asyncio.ledger import Ledger
from fast_batcher._asyncio.pump import Pump
from fast_batcher._asyncio.reports import Reports
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Batch, Failure, Request
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.sending import BatchSender
from fast_batcher._parent.staging import MOST_AT_ONCE, MemoryService
from fast_batcher._parent.worker_process import WorkerLink
from fast_batcher._process import monotonic
from fast_batcher._shared_memory.outbox import Answer, OutboxReader
from fast_batcher._transport.channels import Frame, Kind
from fast_batcher._transport.pickling import SerializedError, loads, one_line
from fast_batcher.errors import InferenceError, TransportError

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_SHARED_OUTPUTS = Kind.SHARED_OUTPUTS
_OUTPUT_ATOMS = Kind.OUTPUT_ATOMS
# Frames that bring no outcomes of a batch, or not its last ones.
KINDS_WITHOUT_OUTCOMES = frozenset({Kind.OUTPUTS_FRAGMENT, Kind.PONG, Kind.FREED, Kind.SKIPPED})
# Frames after which some of the batch's requests may be tried again.
RAISED_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})
# Frames that are one failure for every request of their batch.
FAILURE_KINDS = RAISED_KINDS | {Kind.FAILED}


class OutcomeReader:
    """Turns what a worker has pickled for one request into its outcome."""

    def read_item(self, item: bytes) -> Any:
        """Return the output in a separate pickle, or the `Failure` of one that cannot be read."""
        try:
            return loads(item)
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code
            return _unreadable(error)

    def read_error(self, error: SerializedError) -> Failure:
        """Return the failure for one request."""
        return Failure(error.to_error())


class Answers:
    """Reads the answers of one session's workers, and settles the requests.

    Args:
        scheduler: Finds the batch that a frame answers.
        ledger: Settles and counts the requests.
        pump: Dispatches the next batch before the present one is settled.
        sender: Frees the shared inputs of batches that no worker views any more.
        pool: Counts answered batches and pings; replaces workers.
        memory: Copies large answers on its thread.
        reports: Writes log lines.
        reader: Reads outputs and errors.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        pump: Pump,
        sender: BatchSender,
        pool: Pool,
        memory: MemoryService,
        reports: Reports,
        reader: OutcomeReader,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._pump = pump
        self._sender = sender
        self._pool = pool
        self._memory = memory
        self._reports = reports
        self._reader = reader
        # The ready workers by id.
        self._links: dict[int, WorkerLink] = {}
        # Outcomes from OUTPUTS_FRAGMENT frames, by worker, until the last frame of their batch:
        # each worker answers one batch at a time.
        self._fragments: dict[int, list[Any]] = {}

    def add_worker(self, link: WorkerLink) -> None:
        """Add a worker that is ready."""
        self._links[link.id] = link

    def remove_worker(self, worker: int) -> None:
        """Remove a lost worker and its incomplete answer."""
        self._links.pop(worker, None)
        self._fragments.pop(worker, None)

    def take(self, worker: int, frame: Frame) -> None:
        """Handle a frame of a ready worker.

        Raises:
            Exception: The frame is invalid. The requests of its batch have failed, and the pool
                replaces the worker.
        """
        kind, has_raised = frame.kind, False
        if kind is not _OUTPUT_ATOMS:
            if kind in KINDS_WITHOUT_OUTCOMES:
                self._take_other(worker, frame)
                return
            has_raised = kind in RAISED_KINDS
        scheduler = self._scheduler
        now = monotonic()
        batch = scheduler.batch_done(now, worker, frame.batch_id, has_raised)
        if batch is None:
            self._reject_answer(frame)
            return
        batch.infer_seconds = frame.seconds
        self._ledger.complete_batch(now, batch)
        if self._pool.recycles:
            self._pool.batch_answered(worker)
        requests = self._after_failure(frame, batch) if has_raised else batch.requests
        # Give the worker its next batch before this one is settled.
        if has_raised or scheduler.is_poll_due:
            self._pump.advance(monotonic())
        try:
            if kind is _SHARED_OUTPUTS:
                self._collect(frame, batch)
            else:
                earlier = self._fragments.pop(worker, None) if self._fragments else None
                outcomes = read_outcomes(frame, earlier, len(requests), self._reader)
                self._ledger.answer(batch, requests, outcomes)
        except Exception as error:
            self._fail(batch, requests, error)
            raise
        self._pump.notice_drained()

    def _take_other(self, worker: int, frame: Frame) -> None:
        """Handle a frame that does not settle requests."""
        if frame.kind is Kind.FREED:
            self._sender.free(worker, frame)
        elif frame.kind is Kind.PONG:
            self._pool.heartbeat.answered(worker)
        elif self._scheduler.workers.find(worker, frame.batch_id) is None:
            self._reject_answer(frame)
        elif frame.kind is Kind.SKIPPED:
            self._take_skipped(worker, frame)
        else:
            self._fragments.setdefault(worker, []).extend(loads(frame.body))

    def _take_skipped(self, worker: int, frame: Frame) -> None:
        """Handle that the worker has not computed a batch for which no caller waits.

        Raises:
            TransportError: A caller waits for it.
        """
        batch = self._scheduler.batch_done(monotonic(), worker, frame.batch_id, has_raised=True)
        assert batch is not None, "the caller has found it"
        if batch.open_count:
            error = TransportError(f"batch {batch.id} was skipped, and callers wait for it")
            self._fail(batch, batch.requests, error)
            raise error
        self._ledger.observers.lose([batch], "skipped")
        self._pump.advance(monotonic())
        self._pump.notice_drained()

    def _reject_answer(self, frame: Frame) -> None:
        """Raise the error for an answer to a batch that the worker does not have."""
        if not self._scheduler.is_closed:  # after `close` such answers are expected
            raise TransportError(f"an answer to batch {frame.batch_id}, which it does not have")

    def _after_failure(self, frame: Frame, batch: Batch) -> list[Request]:
        """Let the scheduler handle an error of `infer`; return the requests that the error ends.

        Those of a batch whose callers have all left are returned, too, although they are settled:
        the ledger notes the error.
        """
        is_fatal = frame.kind is Kind.FATAL
        failed = self._scheduler.batch_raised(
            monotonic(),
            batch,
            out_of_memory=frame.kind is Kind.OUT_OF_MEMORY,
            is_fatal=is_fatal,
        )
        if is_fatal:
            self._reports.log_fatal_error(batch.worker)
            self._scheduler.workers.retire(batch.worker)
            self._pool.kill(batch.worker)
        return failed if batch.open_count else batch.requests

    def _fail(self, batch: Batch, requests: list[Request], error: Exception) -> None:
        """Fail requests whose answer cannot be read; their worker will be replaced."""
        outcomes = [Failure(TransportError(str(error))) for _ in requests]
        self._ledger.answer(batch, requests, outcomes)

    # Large answers.

    def _collect(self, frame: Frame, batch: Batch) -> None:
        """Copy the outputs of a batch out of its worker's outbox, if a caller waits for them."""
        shared = read_shared_outcomes(frame, self._links[batch.worker].outbox)
        if all(request.is_settled for request in batch.requests):
            shared.answer.release()
            failures = shared.read_errors()
            # None stands for an output, which is not read.
            outcomes = [failures.get(position) for position in range(len(batch.requests))]
            self._ledger.answer(batch, batch.requests, outcomes)
        elif shared.answer.size <= MOST_AT_ONCE:
            self._settle_shared(batch, shared)
        else:
            self._scheduler.workers.begin_copy_out(batch)
            self._memory.run_in_thread(
                functools.partial(shared.answer.copy, releases_gil=True),
                functools.partial(self._finish_collecting, batch, shared),
            )

    def _settle_shared(self, batch: Batch, shared: "SharedOutcomes") -> None:
        outcomes = shared.read(len(batch.requests))
        self._ledger.answer(batch, batch.requests, outcomes)

    def _finish_collecting(
        self, batch: Batch, shared: "SharedOutcomes", _: BaseException | None
    ) -> None:
        """Settle a batch after its copy; an error of the copy is raised again by the reading."""
        if not self._scheduler.workers.end_copy_out(batch):
            return
        try:
            self._settle_shared(batch, shared)
        except Exception as error:  # noqa: BLE001  no frame is being handled that could report it
            self._fail(batch, batch.requests, error)
            self._pool.kill_on_protocol_error(batch.worker, error)
        self._pump.notice_drained()


def read_outcomes(
    frame: Frame, earlier: list[Any] | None, count: int, reader: OutcomeReader
) -> list[Any]:
    """Read the outcomes of a batch, by position.

    Args:
        frame: The last frame of the batch's answer.
        earlier: Outcomes from earlier frames, or None.
        count: Number of requests in the batch.
        reader: Reads outputs and errors.

    Raises:
        TransportError: The frame is no answer, or has another number of outcomes.
    """
    outcomes: list[Any]
    if frame.kind is _OUTPUT_ATOMS:
        outcomes = loads(frame.body)
    elif frame.kind is Kind.OUTPUTS:
        outcomes = [
            reader.read_item(item)
            if isinstance(item, bytes)
            else reader.read_error(_read_error(item))
            for item in (earlier or []) + loads(frame.body)
        ]
    elif frame.kind in FAILURE_KINDS:
        error = SerializedError(*loads(frame.body))
        outcomes = [reader.read_error(error) for _ in range(count)]
    else:
        raise TransportError(f"a worker answered with {frame.kind.name}")
    if len(outcomes) != count:
        raise _wrong_count(len(outcomes), count)
    return outcomes


class SharedOutcomes(NamedTuple):
    """Outcomes of a batch that are still in an outbox."""

    # The outputs; ignored at the positions of errors.
    answer: Answer
    # The errors by position.
    errors: dict[int, SerializedError]

    def read(self, count: int) -> list[Any]:
        """Copy the outcomes out, unless that was done before, and free their memory.

        Raises:
            TransportError: The number of outcomes is not `count`, or the failures are invalid.
        """
        outcomes = self.answer.load(_unreadable)
        if len(outcomes) != count:
            raise _wrong_count(len(outcomes), count)
        for position, failure in self.read_errors().items():
            if position >= count:
                raise TransportError(f"an error came back for input {position} of {count}")
            outcomes[position] = failure
        return outcomes

    def read_errors(self) -> dict[int, Failure]:
        """Return the failures by position.

        Raises:
            TransportError: They are invalid.
        """
        try:
            return {
                int(position): Failure(SerializedError(*error).to_error())
                for position, error in self.errors.items()
            }
        except (AttributeError, TypeError, ValueError) as raised:
            text = f"errors came back that are not errors: {one_line(raised)}"
            raise TransportError(text) from raised


def read_shared_outcomes(frame: Frame, outbox: OutboxReader | None) -> SharedOutcomes:
    """Find the outcomes that a worker has left in its outbox.

    Raises:
        TransportError: The worker has no outbox.
        Exception: The frame cannot be read.
    """
    start, sizes, frozen, items, errors = loads(frame.body)
    if outbox is None:
        raise TransportError("a worker without an outbox has left something there")
    return SharedOutcomes(outbox.find(start, sizes, frozen, items), errors)


def _read_error(item: Any) -> SerializedError:
    try:
        return SerializedError(*item)
    except TypeError:
        text = f"the output cannot be unpickled: it is a {type(item).__name__}"
        return SerializedError(text, "", None)


def _wrong_count(found: int, count: int) -> TransportError:
    return TransportError(f"{found} outcomes came back for {count} requests")


def _unreadable(error: BaseException) -> Failure:
    text = f"the output cannot be unpickled: {one_line(error)}"
    return Failure(InferenceError(text))
